"""Every experiment and variant: builds, is locked, and holds the published numbers."""

import csv
import importlib.util
import itertools
import json
import math
import pathlib
import sys

import pytest
from absl import flags
from ml_collections import config_dict, config_flags

from mogrifier_jax import configs, errors
from mogrifier_jax.data import abstract_tasks
from mogrifier_jax.nn import models
from mogrifier_jax.training import averaging, optimizers, schedule
from tests import resolved_configs

ROOT = pathlib.Path(__file__).parents[1]
TUNED = json.loads((ROOT / "tests" / "tuned_values.json").read_text())["experiments"]
PAPER = configs.paper_numbers()
RESOLVED = json.loads(resolved_configs.PATH.read_text())
CELLS = ("mogrifier", "lstm")
VARIANTS = {
    "pydoc.py": (CELLS, ("", "tiny")),
    "ptb.py": ((*CELLS, "rlstm"), ("", "small", "tiny")),
    "ptb_char.py": ((*CELLS, "rlstm"), ("", "small", "tiny")),
    "wikitext2.py": ((*CELLS, "rlstm"), ("", "small", "tiny")),
    "mwc.py": (CELLS, ("en", "fi"), ("", "tiny")),
    "enwik8.py": ((*CELLS, "rlstm"), ("96m", "48m"), ("", "small", "tiny")),
}
ALL = [
    f"{name}:{','.join(filter(None, choice))}"
    for name, groups in VARIANTS.items()
    for choice in itertools.product(*groups)
]


def load(name):
    path = ROOT / "experiments" / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def get_config(name):
    name, _, variant = name.partition(":")
    return load(name).get_config(variant)


def parse(monkeypatch, *arguments):
    """The config as `main` sees it."""
    monkeypatch.setattr(sys, "argv", ["main", *arguments])
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values)
    values(sys.argv)
    return values.config


def schema(config):
    """All keys with their types, placeholders included."""
    return {
        f"{section}.{key}": config[section].get_type(key)
        for section in config
        if isinstance(config[section], config_dict.ConfigDict)
        for key in config[section]
    }


@pytest.mark.parametrize("name", ALL)
def test_builds_locked_and_complete(name):
    config = get_config(name)
    assert config.is_locked and config.model.is_locked
    expected = schema(get_config("ptb.py"))
    if name.startswith("mwc"):
        expected["data.language"] = str
    assert schema(config) == expected
    optimizer = {k: config.optimizer[k] for k in ("name", "b1", "b2", "eps", "clip_norm")}
    optimizers.make_optimizer(**optimizer)
    averaging.make_averaging(config.averaging.kind)
    rules = schedule.Rules(
        **config.schedule,
        averaging_turns=config.averaging.trigger_turns,
        averaging_at_the_latest=config.averaging.trigger_at_the_latest,
    )
    # The average is on before the end, whatever the curve.
    assert 0 < rules.averaging_at_the_latest < rules.turns
    assert config.data.batch_size % config.optimizer.accumulate == 0
    assert (config.model.rounds == 0) == (":lstm" in name)
    assert (config.model.cell == "rewired_lstm") == ("rlstm" in name)
    if "tiny" in name:
        assert rules.turns * rules.steps_per_turn == 8 and config.model.hidden_size == 16
    else:
        assert config.model.hidden_size is None


def test_every_file_is_listed():
    assert {path.name for path in (ROOT / "experiments").glob("*.py")} >= VARIANTS.keys()


@pytest.mark.parametrize("name", TUNED)
def test_values_are_the_published_ones(name):
    config = get_config(name)
    for key, value in TUNED[name]["values"].items():
        section, key = key.split(".")
        assert config[section][key] == value, key
    common = {
        "data.drop_state_probability": 0.01,
        "model.cap_input_gate": True,
        "model.forget_bias": 1.0,
        "model.output": "sum",
        "dropout.downprojected": None,
        "optimizer.name": "adam",
        "optimizer.b1": 0.0,
        "optimizer.b2": 0.999,
        "optimizer.eps": 1e-8,
        "optimizer.clip_norm": 10.0,
        "optimizer.accumulate_reduce": "sum",
        "averaging.kind": "triggered",
        "evaluation.softmax_temperature": None,
        "evaluation.temperature_tokens": 50_000,
        "evaluation.lines_per_stripe": 100,
        "evaluation.train_windows": 20,
        "schedule.early_stopping_turns": None,
        "schedule.drop_learning_rate_turns": None,
    }
    for key, value in common.items():
        section, key = key.split(".")
        assert config[section][key] == value, key
    assert config.seed == 1


def hidden_size(config, vocab_size):
    return models.make_model(vocab_size, **config.model).hidden_size


@pytest.mark.parametrize("name", TUNED)
def test_hidden_sizes_are_the_published_ones(name):
    config = get_config(name)
    for vocab_size, expected, _ in TUNED[name]["sizes"]:
        assert hidden_size(config, vocab_size) == expected


def test_all_published_files_are_covered():
    assert len(TUNED) == 13
    ours = ("tiny", "small", "rlstm")
    without_tiny = {name.rstrip(":") for name in ALL if not any(word in name for word in ours)}
    assert len(without_tiny) == 13 + 1 + 2  # PTB characters' LSTM, and pydoc.


@pytest.mark.parametrize(
    "name, expected",
    [("ptb_char.py:lstm", 1221), ("ptb.py:small", 84), ("ptb.py:rlstm,small", 86)],
)
def test_sizes_without_a_published_file(name, expected):
    assert hidden_size(get_config(name), {"ptb_char.py:lstm": 51}.get(name, 10_001)) == expected


@pytest.mark.parametrize(
    ("name", "study", "tuned"),
    [
        ("ptb.py:small", "tune_ptb_small", 7),
        ("ptb.py:lstm,small", "tune_ptb_small_lstm", 5),
        ("ptb_char.py:small", "tune_ptb_char_small", 3),
        ("ptb_char.py:lstm,small", "tune_ptb_char_small_lstm", 1),
        ("ptb_char.py:rlstm,small", "tune_ptb_char_small_rlstm", 3),
        ("wikitext2.py:small", "tune_wikitext2_small", 3),
        ("wikitext2.py:lstm,small", "tune_wikitext2_small_lstm", 1),
        ("wikitext2.py:rlstm,small", "tune_wikitext2_small_rlstm", 3),
        ("enwik8.py:small", "tune_enwik8_small", 3),
        ("enwik8.py:lstm,small", "tune_enwik8_small_lstm", 1),
        ("enwik8.py:rlstm,small", "tune_enwik8_small_rlstm", 3),
        ("pydoc.py", "tune_pydoc", 3),
        ("pydoc.py:lstm", "tune_pydoc_lstm", 1),
    ],
)
def test_small_experiments_have_the_best_trial_of_their_study(name, study, tuned):
    with open(ROOT / "docs" / "results" / f"{study}.csv", newline="") as file:
        best = min(csv.DictReader(file), key=lambda trial: float(trial["valid_nats"]))
    values = configs.flatten(get_config(name))
    settings = {key: float(text) for key, text in best.items() if key in values}
    assert settings == {key: values[key] for key in settings} and len(settings) == tuned


def test_models_of_a_comparison_differ_only_in_what_was_tuned():
    """The same rate and dropouts were best for both models on the words of Penn Treebank."""
    mogrifier, lstm = get_config("ptb.py:small"), get_config("ptb.py:lstm,small")
    gates = ("model.rounds", "model.rank")
    assert not configs.differences(mogrifier, lstm, ignore=gates)
    assert (lstm.model.rounds, lstm.model.rank) == (0, 0)
    rewired = get_config("ptb.py:rlstm,small")
    assert not configs.differences(mogrifier, rewired, ignore=("model.cell",))
    tokens = mogrifier.data.batch_size * mogrifier.data.window * mogrifier.schedule.steps_per_turn
    assert tokens == pytest.approx(929_589, rel=0.001)  # A turn is one pass.
    mogrifier, lstm = get_config("pydoc.py"), get_config("pydoc.py:lstm")
    assert not configs.differences(mogrifier, lstm, ignore=(*gates, "optimizer.learning_rate"))


def test_configs_do_not_share_placeholders():
    """A placeholder made once at import would tie all configs of a process together."""
    one, two = (get_config("ptb.py") for _ in range(2))
    one.schedule.early_stopping_turns = 3
    assert two.schedule.early_stopping_turns is None


@pytest.mark.parametrize("table", PAPER["tables"])
def test_docstrings_quote_the_paper(table):
    """Rows of the docstrings' tables are the rounded numbers of the paper."""
    rows = [row for row in PAPER["tables"][table]["rows"] if "nats" in row]
    assert rows
    show = {
        "ppl": lambda nats: f"{math.exp(nats):.1f}",
        "bpc": lambda nats: f"{nats / math.log(2):.3f}",
    }[PAPER["tables"][table]["unit"]]
    for row in rows:
        name, _, variant = row["experiment"].partition(":")
        groups = VARIANTS[name]
        chosen = configs.choose(variant, *groups)
        label = {"mogrifier": "Mogrifier", "lstm": "LSTM"}[chosen[0]]
        if len(groups) == 3:
            label = f"{chosen[1].replace('m', 'M')} {label}"
        lines = [line.strip() for line in load(name).__doc__.splitlines()]
        (line,) = [line for line in lines if line.startswith(f"{label} ") and " / " in line]
        cells = ["diverged" if x is None else show(x) for x in row["nats"]]
        pairs = [" / ".join(cells[:2]), " / ".join(cells[2:])]
        expected = "   ".join(pair for pair in pairs if pair != "diverged / diverged")
        normal = "   ".join(part.strip() for part in line.split("  ") if part.strip())
        assert expected in normal
        assert {"deterministic": 1, "mc": 0}[row["evaluation"]] == normal.startswith(
            f"{label}   {expected}"
        )


# ml_collections still loads files the old way.
@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
def test_overrides_reach_every_kind_of_key(monkeypatch):
    path = ROOT / "experiments" / "enwik8.py"
    config = parse(
        monkeypatch,
        f"--config={path}:lstm,48m",
        "--config.model.rounds=3",
        "--config.model.hidden_size=8",
        "--config.dropout.downprojected=0.5",
        "--config.data.source_dir=/corpora",
        "--config.schedule.early_stopping_worst_xe_target=1",
    )
    assert (config.model.rounds, config.model.hidden_size) == (3, 8)
    assert (config.dropout.downprojected, config.data.source_dir) == (0.5, "/corpora")
    assert config.schedule.early_stopping_worst_xe_target == 1.0
    assert config.optimizer.learning_rate == 0.002516709293528533
    with pytest.raises(AttributeError, match="rounds"):
        parse(monkeypatch, f"--config={path}", "--config.model.round=3")


@pytest.mark.parametrize(
    "variant, message",
    [
        ("49m", "variant '49m' is unknown: this experiment has mogrifier, lstm, rlstm, 96m, "),
        ("lstm,mogrifier", "mogrifier and lstm exclude each other"),
        ("tiny,96m,48m", "96m and 48m exclude each other"),
    ],
)
def test_bad_variants_are_refused(variant, message):
    with pytest.raises(errors.UsageError, match=message):
        get_config(f"enwik8.py:{variant}")


def test_variants_come_in_any_order():
    groups = (CELLS, ("96m", "48m"), ("", "tiny"))
    assert configs.choose("", *groups) == ("mogrifier", "96m", "")
    assert configs.choose("48m, lstm", *groups) == ("lstm", "48m", "")
    assert get_config("enwik8.py:tiny,48m,lstm") == get_config("enwik8.py:lstm,48m,tiny")
    assert get_config("enwik8.py:48m") != get_config("enwik8.py:96m") == get_config("enwik8.py")


@pytest.mark.parametrize("name", RESOLVED)
def test_every_recorded_key_keeps_its_value_and_type(name):
    module, recorded = load(name), RESOLVED[name]
    for variant in recorded["changes"]:
        config = module.get_config(variant)
        assert not resolved_configs.differences(config, recorded, variant), (
            f"{name}:{variant} is not what it was. If CHANGELOG.md names this change, record it "
            "with: python -m tests.resolved_configs"
        )


def test_only_added_keys_go_unnoticed_beside_recorded_ones():
    recorded, config = RESOLVED["ptb.py"], get_config("ptb.py:lstm").unlock()
    config.model.new_option, config.new_section = 3, config_dict.ConfigDict({"key": 1})
    assert not resolved_configs.differences(config, recorded, "lstm")
    assert "model.rounds" in resolved_configs.differences(config, recorded, "mogrifier")
    config.model.output = "last"
    del config.model["rank"], config.dropout["downprojected"]
    config.model.rank, config.dropout.downprojected = 0.0, config_dict.placeholder(int)
    del config.data["window"]
    assert resolved_configs.differences(config, recorded, "lstm") == {
        "model.output": ("str", "last"),
        "model.rank": ("float", 0.0),
        "dropout.downprojected": ("int", None),
        "data.window": None,
    }


CIRCLING_BACK = {  # Published: layers, parameters, epochs, batch, window, dropout samples.
    "ptb": (2, 24_000_000, 400, 128, 70, 8),
    "wikitext2": (2, 35_000_000, 250, 128, 70, 4),
    "ptb_char": (2, 24_000_000, 100, 128, 200, 4),
    "enwik8": (6, 96_000_000, 200, 128, 256, 1),
    "enwik8,48m": (6, 48_000_000, 200, 128, 256, 1),
    "text8": (6, 96_000_000, 200, 128, 256, 1),
    "text8,48m": (6, 48_000_000, 200, 128, 256, 1),
}


@pytest.mark.parametrize("cell", ["rlstm", "mogrifier", "lstm"])
@pytest.mark.parametrize("corpus", CIRCLING_BACK)
def test_circling_back_has_the_published_settings(corpus, cell):
    config = get_config(f"circling_back.py:{corpus},{cell}")
    layers, parameters, epochs, batch, window, samples = CIRCLING_BACK[corpus]
    assert (config.model.num_layers, config.model.num_params) == (layers, parameters)
    assert (config.data.batch_size, config.data.window) == (batch, window)
    assert config.optimizer.training_samples == samples
    size = abstract_tasks.SIZES[config.data.name]
    read = batch * window * config.schedule.turns * config.schedule.steps_per_turn
    assert read / size.train[0] == pytest.approx(epochs, rel=0.005)
    model = config.model
    assert (model.output, model.embedding_ratio, model.mixture_components) == ("residual", 1, 0)
    assert model.tied_embeddings == (size.unit == "word")
    assert (config.optimizer.name, config.optimizer.b1) == ("radam", 0.0)
    assert config.averaging.kind == "two_tailed" and model.chrono_max > 2
    assert (model.cell == "rewired_lstm") == (cell == "rlstm")
    assert (model.rounds == 0) == (cell == "lstm")
    assert config.dropout.inter_layer == 0.0 < config.dropout.cell_output
    made = models.make_model(size.vocabulary, **model)
    assert made.embedding_size == made.hidden_size
    count = sum(models.count_parameters(made).values())
    assert 0.99 * parameters < count <= parameters


def test_circling_back_begins_with_the_values_of_2019():
    new, old = get_config("circling_back.py:enwik8,48m"), get_config("enwik8.py:48m")
    for name in ("input", "state", "output"):
        assert new.dropout[name] == old.dropout[name]
    assert new.dropout.cell_output == old.dropout.inter_layer
    assert new.optimizer.learning_rate == old.optimizer.learning_rate
    assert (new.model.rounds, new.model.rank) == (old.model.rounds, old.model.rank)
    assert get_config("circling_back.py:text8,48m").model.rank == old.model.rank
    with pytest.raises(errors.UsageError, match="48m is a size of enwik8 and text8, not of ptb"):
        get_config("circling_back.py:48m")


def test_circling_back_quotes_the_paper():
    lines = load("circling_back.py").__doc__.splitlines()
    (line,) = [line for line in lines if line.strip().startswith("Penn Treebank, 24M")]
    assert line.endswith("48.87 / 47.91    42.87 / 42.86")


@pytest.mark.parametrize(
    "variant, changed",
    [
        ("rlstm", {"model.cell"}),
        ("mogrifier,samples", {"optimizer.training_samples"}),
        ("mogrifier,chrono", {"model.chrono_max"}),
        ("mogrifier,cell_output", {"model.output", "dropout.cell_output", "dropout.inter_layer"}),
        ("mogrifier,radam", {"optimizer.name"}),
        ("mogrifier,two_tailed", {"averaging.kind", "averaging.stagnating_evaluations"}),
    ],
)
def test_each_change_of_circling_back_is_made_alone(variant, changed):
    assert variant in {row.variant for row in load("ablation.py").SETS["circling_back"].rows}
    plain = get_config("ablation.py:mogrifier,small")
    found = configs.differences(plain, get_config(f"ablation.py:{variant},small"))
    assert {name for name, *_ in found} == changed
