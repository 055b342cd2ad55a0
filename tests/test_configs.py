"""The base config: what is declared of a key is held, and every experiment is within it."""

import json
import math
import pathlib

import pytest

from mogrifier_jax import config_keys, configs, errors, options
from mogrifier_jax.evaluation import eval_options
from tests import resolved_configs

ROOT = pathlib.Path(__file__).parents[1]
RESOLVED = json.loads(resolved_configs.PATH.read_text())
OTHER_TYPE = {bool: 3, int: 0.5, float: "many", str: 3, tuple: 3}


def bad_values(key):
    """Values that a key must refuse, drawn from its declaration."""
    yield OTHER_TYPE[key.kind]
    if key.kind in (int, float):
        step = 1 if key.kind is int else 0.5
        limits = (key.low - step, key.high + step, key.above, key.below)
        yield from (key.kind(x) for x in limits if math.isfinite(x) and abs(x) < 2**52)
        yield True
    if key.kind is float:
        yield from (math.nan, math.inf, -math.inf)
    if key.choices:
        yield key.list_choices()[0] + "s"


@pytest.mark.parametrize(
    "declared", [config_keys.keys(), eval_options.OPTIONS], ids=["config", "eval"]
)
def test_values_beyond_a_declaration_are_refused_by_name(declared):
    count = 0
    for name, key in declared.items():
        if key.default is not None:
            options.check_values({name: key.default}, declared)
        for value in bad_values(key):
            with pytest.raises(errors.UsageError) as refused:
                options.check_values({name: value}, declared)
            assert str(refused.value).startswith(f"{name} {value!r} "), value
            count += 1
    assert count > 2 * len(declared)


@pytest.mark.parametrize("name", RESOLVED)
def test_experiments_are_complete_and_within_the_declarations(name):
    module = configs.load_file(str(ROOT / "experiments" / name))
    for variant in RESOLVED[name]["changes"]:
        config = module.get_config(variant)
        assert config.is_locked and configs.flatten(config).keys() == config_keys.keys().keys()
        configs.check(config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.rounds": 1_000_000}, "model.rounds 1000000 must be at most 100"),
        ({"model.num_layers": 10**9}, "model.num_layers 1000000000 must be at most 100"),
        ({"model.dtype": "float64"}, "model.dtype 'float64' is unknown: choose one of float32, b"),
        ({"optimizer.eps": -1.0}, "optimizer.eps -1.0 must be above 0"),
        ({"optimizer.clip_norm": math.inf}, "optimizer.clip_norm inf must be a finite number"),
        ({"schedule.drop_learning_rate_multiplier": math.nan}, "multiplier nan must be a finite"),
        ({"seed": 2**63}, "seed 9223372036854775808 must be at most 4294967295"),
        ({"model.rounds": "many"}, "model.rounds 'many' must be a whole number"),
        ({"optimizer.nam": "sgd"}, "config.optimizer.nam is read by nothing; did you mean name"),
        (
            {"optimizer.name": "adamm"},
            "is unknown: choose one of adam, radam, sgd, rmsprop (did you mean",
        ),
    ],
)
def test_nonsense_ends_with_one_sentence(changes, words):
    tiny = configs.load_config(str(ROOT / "experiments" / "ptb.py"))
    with pytest.raises(errors.UsageError) as refused:
        configs.check(configs.base(tiny, changes))
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_what_is_left_out_is_the_default_and_what_is_needed_is_asked_for():
    config = configs.base({"data": {"name": "ptb", "batch_size": 2}})
    assert config.data.batch_size == 2 and config.optimizer.momentum == 0.0
    with pytest.raises(errors.UsageError, match=r"config\.data lacks window"):
        configs.check(config)
    assert configs.differences(config, configs.base(config)) == []
    changed = configs.base(config, {"model.rank": 3, "mesh.data": 2})
    assert configs.differences(config, changed, ignore=("mesh",)) == [("model.rank", 0, 3)]


def test_every_switch_of_a_cell_is_a_key():
    cell_fields = {"rounds", "rank", "layer_norm", "tied_gates", "cell_clip", "zigzag"}
    assert {f"model.{name}" for name in cell_fields} <= config_keys.keys().keys()
    # Cells differ in these, so that None is the cell's own.
    assert config_keys.keys()["model.rounds"].default is None
    assert config_keys.keys()["model.zigzag"].default is None


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def get_config():\n    return 1 / 0\n", "line 2: ZeroDivisionError: division by zero"),
        ("def get_config():\n    pass\n", "line 1: get_config returns None"),
        ("x = 1\n", "has no function get_config"),
        ("\n\ndef get_config(:\n", "line 3: SyntaxError"),
        ("open('/no/such/file')\n", "line 1: FileNotFoundError"),
        ("get_config = 5\n", "has no function get_config"),
        ("import sys\nsys.exit(3)\n", "line 2: SystemExit: 3"),
    ],
)
def test_a_broken_experiment_is_blamed_with_its_line(tmp_path, source, words):
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(errors.UsageError) as refused:
        configs.load_config(str(path))
    assert words in str(refused.value) and str(path) in str(refused.value)
    assert "\n" not in str(refused.value)
