"""Trials from a Vizier service, for which objects stand in that take the calls of its client."""

import collections
import hashlib
import importlib.util
import json
import math
import socket
import sys
import types

import pytest

from mogrifier_jax import errors
from mogrifier_jax.tuning import queues, studies, vizier_queue, worker

STORAGE = "vizier://here:1234"
RANGES = {
    "rate": studies.Range(1e-3, 1e-1, "log"),
    "drop": studies.Range(0.0, 0.9),
    "n": studies.Range(1, 6, "integer"),
}


class Trial:
    """What the client has for a trial, and what the service keeps of it."""

    def __init__(self, number, parameters, owner):
        self.id, self.parameters, self.assigned_worker = number, parameters, owner
        self.measurements, self.metadata, self.stopping = [], {}, False
        self.final_measurement = self.infeasible_reason = self.duration = None
        self.is_completed = False

    def add_measurement(self, measurement):
        self.measurements.append(measurement)

    def check_early_stopping(self):
        return self.stopping

    def update_metadata(self, delta):
        self.metadata |= delta

    def complete(self, measurement=None, *, infeasible_reason=None):
        assert not self.is_completed and (measurement or infeasible_reason)
        self.is_completed = True
        self.final_measurement, self.infeasible_reason = measurement, infeasible_reason
        self.duration = types.SimpleNamespace(total_seconds=lambda: 5.0)

    def materialize(self):
        found = types.SimpleNamespace(**vars(self))
        found.parameters = types.SimpleNamespace(get_value=self.parameters.__getitem__)
        return found


class Study:
    """One of the service: it suggests the middle of every range, a little further each time."""

    def __init__(self, config):
        self._config, self._trials = config, []

    def materialize_study_config(self):
        return self._config

    def suggest(self, *, count=None, client_id="default_client_id"):
        """First those that this client has and has not finished."""
        mine = [t for t in self._trials if not t.is_completed and t.assigned_worker == client_id]
        while len(mine) < count:
            number = len(self._trials) + 1
            space = self._config.search_space.root.parameters.items()
            # The service keeps floats alone.
            values = {k: float((low + high) // 2 + number / 100) for k, (low, high, _) in space}
            mine.append(Trial(number, values, client_id))
            self._trials.append(mine[-1])
        return mine[:count]

    def trials(self):
        return iter(self._trials)


class Root:
    """The search space."""

    def __init__(self):
        self.parameters = {}

    def add_int_param(self, name, low, high):
        self.parameters[name] = low, high, int

    def add_float_param(self, name, low, high, *, scale_type):
        self.parameters[name] = low, high, scale_type


class StudyConfig:
    def __init__(self, algorithm):
        self.search_space = types.SimpleNamespace(root=Root())
        self.algorithm, self.metric_information, self.metadata = algorithm, [], {}


class Measurement:
    def __init__(self, metrics, steps):
        self.metrics = {k: types.SimpleNamespace(value=v) for k, v in metrics.items()}
        self.steps = steps


@pytest.fixture
def service(monkeypatch):
    """The studies of the service by owner and name; the modules of its client are stand-ins."""
    kept = {}

    class Client(Study):
        @classmethod
        def from_study_config(cls, config, *, owner, study_id):
            if clients.environment_variables.server_endpoint != "here:1234":
                raise ConnectionError("failed to connect\nto all addresses")
            return kept.setdefault((owner, study_id), Study(config))

    clients = types.ModuleType("clients")
    clients.Study, clients.environment_variables = Client, types.SimpleNamespace()
    vz = types.ModuleType("pyvizier")
    vz.StudyConfig, vz.Measurement, vz.Metadata = StudyConfig, Measurement, dict
    vz.MetricInformation = collections.namedtuple("MetricInformation", "name goal")
    vz.ScaleType = types.SimpleNamespace(LOG="log", LINEAR="linear")
    vz.ObjectiveMetricGoal = types.SimpleNamespace(MINIMIZE="minimize")
    package = types.ModuleType("vizier.service")
    package.clients, package.pyvizier = clients, vz
    monkeypatch.setitem(sys.modules, "vizier", types.ModuleType("vizier"))
    for name, module in {"": package, ".clients": clients, ".pyvizier": vz}.items():
        monkeypatch.setitem(sys.modules, f"vizier.service{name}", module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "vizier")
    claim, claimed = vizier_queue._claim_name, []
    monkeypatch.setattr(
        vizier_queue, "_claim_name", lambda workdir: claimed.append(claim(workdir)) or claimed[-1]
    )
    yield kept
    for _, lock in claimed:  # Which workers have until they end.
        lock.close()


def open_queue(workdir, target=3, storage=STORAGE, about=None, **options):
    return vizier_queue.Queue(
        storage, "test", RANGES, target, workdir=str(workdir), about=about or {"a": 1}, **options
    )


def test_the_service_is_asked_for_what_the_study_says(service, tmp_path):
    open_queue(tmp_path)
    config = service["mogrifier_jax", "test"].materialize_study_config()
    assert config.search_space.root.parameters == {
        "rate": (1e-3, 1e-1, "log"),
        "drop": (0.0, 0.9, "linear"),
        "n": (1, 6, int),
    }
    assert config.metric_information == [("valid_nats", "minimize")]


def test_trials_go_to_their_ends_and_are_told(service, tmp_path):
    queue = open_queue(tmp_path, target=4)
    done, pruned, bad = queue.ask(3)
    assert [trial.folder for trial in (done, bad)] == ["trials/0001", "trials/0003"]
    assert done.params["n"] == 3 and isinstance(done.params["n"], int)
    assert done.params["drop"] != pruned.params["drop"]
    done.report(1, 2.5)
    done.note(hidden_size=7)
    done.finish(2.0)
    pruned.fail("pruned", "above the median")
    bad.fail("diverged", "the loss is not finite")
    there = list(service["mogrifier_jax", "test"].trials())
    assert [(m.steps, m.metrics["valid_nats"].value) for m in there[0].measurements] == [(1, 2.5)]
    assert there[1].infeasible_reason == "above the median" and there[1].final_measurement is None
    records = queue.records()
    assert [r.outcome for r in records] == ["complete", "pruned", "diverged"]
    assert records[0].nats == 2.0 and all(math.isnan(r.nats) for r in records[1:])
    assert records[0].params == there[0].parameters and records[0].seconds == 5.0
    assert records[0].notes["hidden_size"] == 7 and records[0].notes["folder"] == done.folder
    assert records[2].notes["reason"] == "the loss is not finite"
    assert len(queue.ask(3)) == 1  # No more than are wanted.


def test_a_trial_stops_when_the_service_says_so_and_pruning_is_on(service, tmp_path):
    for prune in (False, True):
        queue = open_queue(tmp_path / str(prune), prune=prune)
        (trial,) = queue.ask(1)
        assert trial.report(1, 1.0) is None
        (*_, there) = service["mogrifier_jax", "test"].trials()
        there.stopping = True
        stop = ("pruned", "stopped by the service at turn 2")
        assert trial.report(2, 1.0) == (stop if prune else None)
        trial.finish(1.0)


def test_a_worker_gets_back_what_it_had_and_another_does_not(service, tmp_path):
    first = open_queue(tmp_path, target=2)
    (trial,) = first.ask(1)
    other = open_queue(tmp_path, target=2)  # While the first has its name.
    (new,) = other.ask(2)
    assert new.number == 2
    place = hashlib.sha256(str(tmp_path).encode()).hexdigest()[:8]
    assert {r.notes["worker"] for r in first.records()} == {
        f"{socket.gethostname()}-{place}-{number}" for number in (0, 1)
    }
    first._worker[1].close()  # As the end of its process does.
    (again,) = open_queue(tmp_path, target=2).ask(2)
    assert again.number == trial.number and again.params == trial.params
    assert not open_queue(tmp_path, target=2).ask(1)


def test_workers_of_one_host_with_workdirs_of_their_own_are_two(service, tmp_path):
    first, other = (open_queue(tmp_path / name, target=2) for name in "ab")
    (mine,), (theirs,) = first.ask(1), other.ask(1)
    assert mine.number != theirs.number
    (same,) = first.ask(1)  # Control: it keeps what it has.
    assert same.number == mine.number


def test_a_service_that_forgot_the_trials_of_a_workdir_is_refused(service, tmp_path):
    study = studies.Study("middle", RANGES)
    given = dict(name="x-middle", num_trials=2, storage=STORAGE, sampler="gp", seed=0)
    folder = tmp_path / "trials" / "0001"
    queues.open_queue(study, str(tmp_path), **given).ask(1)
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    queues.open_queue(study, str(tmp_path), **given)  # Control.
    service.clear()
    with pytest.raises(errors.UsageError, match=r"here:1234 knows nothing about trials/0001 of"):
        queues.open_queue(study, str(tmp_path), **given)


def test_another_study_and_a_service_that_is_not_there_are_refused(service, tmp_path):
    open_queue(tmp_path)
    open_queue(tmp_path)
    with pytest.raises(
        errors.UsageError, match=r"'test' with other settings:\s+a: 1 \(there\) vs 2"
    ):
        open_queue(tmp_path, about={"a": 2})
    with pytest.raises(errors.UsageError) as refused:
        open_queue(tmp_path, storage="vizier://nowhere:1")
    assert "cannot be reached: failed to connect; start a Vizier" in str(refused.value)


def test_a_worker_works_until_the_service_has_all_trials(service, tmp_path):
    """As `tune` does; the executor scores trials without training."""

    class Executor:
        unit, at_once, shared = "ppl", 2, ()

        def run(self, asked):
            for trial in asked:
                trial.finish(trial.params["rate"])

    study = studies.Study("middle", RANGES)
    queue = queues.open_queue(
        study,
        str(tmp_path),
        **dict(name="x-middle", num_trials=5, storage=STORAGE, sampler="gp", seed=0),
    )
    worker.work(queue, Executor(), study, str(tmp_path))
    records = queue.records()
    assert [r.number for r in records] == [1, 2, 3, 4, 5]
    assert {r.outcome for r in records} == {"complete"}
    assert [r.nats for r in records] == [r.params["rate"] for r in records]
    assert len({r.nats for r in records}) == 5
    assert json.loads((tmp_path / "study.json").read_text()) == {"name": "x-middle"}
