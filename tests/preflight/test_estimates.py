"""The preflight, on programs small enough to count by hand.

Compilers for TPUs and GPUs may be absent: then the chips are stood in for by CPU devices, whose
programs are read in the same way, and by a canned refusal.
"""

import dataclasses
import importlib.util
import json
import math
import pathlib

import jax
import pytest

from mogrifier_jax import errors, partitioning
from mogrifier_jax.data import abstract_tasks, corpora, tasks
from mogrifier_jax.preflight import chips, estimates, report, targets, topologies

ROOT = pathlib.Path(__file__).parents[2]
INSTALLED = {
    "v5e:2x2": importlib.util.find_spec("libtpu") is not None,
    "h100:4": any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)),
}
B, T, V, H, R = 16, 4, 104, 8, 2
FULL = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.00G of 15.75G hbm."
LSTM = 4 * H * (H + H)
GATES = 2 * R * H  # Weights of one round: down to the rank and up again.


def get_config(name, **sections):
    name, _, variant = name.partition(":")
    spec = importlib.util.spec_from_file_location(name, ROOT / "experiments" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(variant)
    config.update(sections)
    return config


def small(rounds, fast=True, **sections):
    model = dict(num_layers=1, hidden_size=H, rounds=rounds, rank=R if rounds else 0)
    sections = dict(data=dict(batch_size=B, window=T), model=model, log_every=2) | sections
    config = get_config("pydoc:tiny", **sections)
    with config.unlocked():
        config.model.fast = fast
    return config


def mesh_of_cpus(target, data, model):
    return partitioning.make_mesh(data, model, devices=jax.devices()[: target.num_chips])


@pytest.fixture
def on_cpu(monkeypatch):
    """Described chips are the CPU devices here."""
    monkeypatch.setattr(topologies, "make_mesh", mesh_of_cpus)


@pytest.fixture(scope="module")
def mogrifier():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topologies, "make_mesh", mesh_of_cpus)
        return estimates.examine(small(rounds=2), targets.parse("h100:4"))


@pytest.fixture
def refusal(on_cpu, monkeypatch):
    """Makes the compiler refuse everything, with this message."""

    def refuse_with(message):
        def refuse(*_, **__):
            raise jax.errors.JaxRuntimeError(message)

        monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)

    return refuse_with


@pytest.mark.slow
def test_parameters_and_flops_counted_by_hand(mogrifier, refusal):
    biases = 4 * H + 2 * H + V
    assert mogrifier.parameters == V * H + LSTM + 2 * GATES + H * V + biases
    # Each weight of a matmul is used three times for each token: forward, for the gradient of the
    # input, for its own. The embedding is looked up, which multiplies nothing.
    thrice = 3 * 2 * B * T
    refusal(FULL)  # FLOPs are counted before it is compiled.
    plain = estimates.examine(small(rounds=2, fast=False), targets.parse("h100:4"))
    assert plain.flops == thrice * (LSTM + 2 * GATES + H * V)
    lstm = estimates.examine(small(rounds=0), targets.parse("h100:4"))
    assert lstm.flops == thrice * (LSTM + H * V)
    # The fast path computes the small matrices of the rounds again instead of storing more.
    assert plain.flops <= mogrifier.flops <= plain.flops + thrice * 2 * GATES
    assert (mogrifier.vocab_size, mogrifier.batch_size, mogrifier.window) == (V, B, T)
    assert mogrifier.steps == 8


@pytest.mark.slow
def test_collectives_counted_by_hand(mogrifier):
    """Gradients are summed over the chips once a step, and the loss with them."""
    assert mogrifier.collectives.keys() == {"all-reduce"}
    count, size = mogrifier.collectives["all-reduce"]
    assert 4 * mogrifier.parameters < size <= 4 * (mogrifier.parameters + 8)
    wire = 2 * size * 3 / 4 / 450e9  # A ring of four: each sends 2 x 3/4 of it.
    assert mogrifier.collective_seconds == pytest.approx(wire + count * 2 * 3 * 2e-6, rel=1e-3)


@pytest.mark.slow
def test_one_chip_that_is_too_small(on_cpu):
    chip = dataclasses.replace(chips.CHIPS["h100"], memory=10_000)
    found = estimates.examine(small(rounds=0), targets.Target(chip, (1, 1)))
    assert found.collectives == {} and found.collective_seconds == 0
    assert not found.fits and found.needed > 10_000


@pytest.mark.slow
def test_bytes_by_kind(mogrifier):
    kinds = mogrifier.bytes
    assert sum(kinds.values()) == mogrifier.needed
    assert kinds["weights"] == 4 * mogrifier.parameters
    # One second moment and the step; one mean, its count and its switch.
    assert kinds["optimizer"] == kinds["weights"] + 4
    assert kinds["averages"] == kinds["weights"] + 5
    assert kinds["carry"] == 2 * 4 * (B // 4) * H
    tokens = len(corpora.load_corpus("pydoc").train.tokens)
    assert kinds["tokens"] > tokens  # One byte each, and the starts of lines.
    assert mogrifier.fits


@pytest.mark.slow
def test_times_follow_from_seconds(mogrifier):
    assert mogrifier.seconds == mogrifier.compute_seconds + mogrifier.collective_seconds
    assert mogrifier.tokens_per_second == pytest.approx(B * T / mogrifier.seconds)
    steps, between = 8 * mogrifier.seconds, mogrifier.evaluation_seconds + mogrifier.saving_seconds
    assert mogrifier.turns == 2
    # Each kernel is started, in 2 microseconds.
    assert 0 < mogrifier.kernels <= mogrifier.compute_seconds / 2e-6
    assert mogrifier.days == pytest.approx((steps + 2 * between) / 86_400)
    assert min(mogrifier.evaluation_seconds, mogrifier.saving_seconds) > 0
    peak = mogrifier.flops / 4 / mogrifier.seconds / 989e12
    assert mogrifier.peak_share == pytest.approx(peak)


@pytest.mark.slow
def test_hidden_size_split_over_chips(mogrifier, on_cpu):
    """Half of every wide weight on each chip, and small collectives at every step of the loop."""
    config = small(rounds=2, mesh=dict(data=2, model=2))
    split = estimates.examine(config, targets.parse("h100:4"))
    assert split.flops == mogrifier.flops
    assert split.bytes["weights"] < 0.6 * mogrifier.bytes["weights"]
    few, many = (sum(n for n, _ in r.collectives.values()) for r in (mogrifier, split))
    assert many >= few + 2 * T


@pytest.mark.slow
def test_numbers_are_of_one_step_of_a_dispatch(mogrifier, on_cpu):
    one = estimates.examine(small(rounds=2, log_every=1), targets.parse("h100:4"))
    assert one.collectives == mogrifier.collectives and one.flops == mogrifier.flops
    assert one.seconds == pytest.approx(mogrifier.seconds, rel=0.3)


@pytest.mark.slow
def test_search_ranks_splits_and_names_refusals(on_cpu, capsys, tmp_path):
    config = small(rounds=0, data=dict(batch_size=2))
    found = report.preflight(
        config, "h100:4", search=True, json_path=str(tmp_path / "a" / "b.json")
    )
    assert {(r.data, r.model) for r in found} == {(2, 2), (1, 4)}  # 4 x 1 cannot split 2 stripes.
    assert found[0].seconds <= found[1].seconds
    said = capsys.readouterr().out
    assert "memory of each chip: fits" in said and "best first" in said
    written = json.loads((tmp_path / "a" / "b.json").read_text())
    assert written["versions"]["jax"] == jax.__version__ and len(written["reports"]) == 2
    assert written["reports"][0]["tokens_per_second"] == found[0].tokens_per_second
    with pytest.raises(errors.UsageError, match=r"no split of h100:4 works.*batch_size 1 is"):
        report.preflight(
            small(rounds=0, data=dict(batch_size=1), model=dict(hidden_size=7)),
            "h100:4",
            search=True,
        )


@pytest.mark.slow
def test_a_compiler_that_refuses(refusal):
    refusal(FULL)
    found = estimates.examine(small(rounds=0), targets.parse("h100:1"))
    assert not found.fits and found.needed == 20 * 2**30 and math.isnan(found.seconds)
    assert found.to_dict()["seconds"] is None
    assert "DOES NOT FIT" in report.to_table(found)
    refusal("INTERNAL: a bug")
    with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
        estimates.examine(small(rounds=0), targets.parse("h100:1"))


def test_abstract_stream_is_the_real_one_without_text():
    section = small(rounds=0).data
    mesh = partitioning.make_mesh()
    options = {k: v for k, v in section.items() if k != "drop_state_probability"}
    real = tasks.make_task(jax.random.key(0), mesh, **options)
    made = abstract_tasks.make_abstract_task(section, mesh)
    jax.tree.map(
        lambda a, b: (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding) or 1 / 0,
        made.stream,
        real.stream,
    )
    assert len(made.vocabulary) == len(real.vocabulary) and made.carries == real.carries
    lines = abstract_tasks.make_abstract_task(dict(section) | {"episodic": True}, mesh)
    batch = jax.eval_shape(lines.batch_at, lines.stream, 0)
    assert batch.inputs.shape == (B, T) and not lines.carries


@pytest.mark.parametrize(
    ("name", "vocab_size"), [("ptb", 10_001), ("enwik8", 206), ("wikitext2", 33_279)]
)
def test_known_corpora_need_not_be_here(name, vocab_size, monkeypatch):
    monkeypatch.setattr(corpora, "load_corpus", None)
    task = abstract_tasks.make_abstract_task(get_config(name).data, partitioning.make_mesh())
    assert len(task.vocabulary) == vocab_size


@pytest.mark.slow
@pytest.mark.parametrize("topology", INSTALLED)
def test_with_the_real_compiler(topology):
    if not INSTALLED[topology]:
        pytest.skip(f"the compiler for {topology} is not installed")
    found = estimates.examine(small(rounds=2), targets.parse(topology))
    assert found.fits and not found.notes
    _, size = found.collectives["all-reduce"]
    assert 4 * found.parameters < size <= 4 * (found.parameters + 8)
    assert 0 < found.peak_share < 1 and found.compute_seconds > 1e-6


@pytest.mark.slow
def test_a_run_fits_only_if_its_evaluation_does(on_cpu, monkeypatch):
    target = targets.parse("h100:4")
    config = small(rounds=2)
    found = estimates.examine(config, target)
    assert found.fits and found.evaluation_needed > 0
    # The same text in more windows takes longer.
    longer = small(rounds=2, evaluation=dict(train_windows=100))
    assert estimates.examine(longer, target).evaluation_seconds > found.evaluation_seconds
    large = estimates._Evaluation(target.chip.memory + 1, 1.0)
    monkeypatch.setattr(estimates, "_evaluation", lambda *_, **__: large)
    assert not estimates.examine(config, target).fits
