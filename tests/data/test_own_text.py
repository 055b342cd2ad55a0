"""`experiments/text.py`: the text chooses the settings, the command line overrides them."""

import json
import pathlib

import jax
import pytest

from mogrifier_jax import config_keys, configs, errors
from mogrifier_jax.data import tasks
from mogrifier_jax.training import runs, workdirs

ROOT = pathlib.Path(__file__).parents[2]
EXPERIMENT = configs.load_file(ROOT / "experiments" / "text.py")


def make_text(path, size):
    path.write_bytes(b"some words of text\n" * (size // 19 + 1))
    return str(path)


@pytest.mark.parametrize(
    ("size", "row"),
    [
        (2_000, "100KB"),
        (164_000, "100KB"),
        (310_000, "100KB"),
        (330_000, "1MB"),
        (1_100_000, "1MB"),
        (3_100_000, "1MB"),
        (3_300_000, "10MB"),
        (33_000_000, "100MB"),
    ],
)
def test_the_size_of_the_text_chooses_the_row(tmp_path, size, row):
    config = EXPERIMENT.get_config()
    config.data.path = make_text(tmp_path / "book.txt", size)
    assert config.data.text_size == row
    expected = configs.flatten(EXPERIMENT.CHARACTERS[row])
    actual = configs.flatten(configs.base(config))
    assert {name: actual[name] for name in expected} == expected
    configs.check(configs.base(config))


def test_three_files_and_the_level_choose_as_well(tmp_path):
    config = EXPERIMENT.get_config()
    for name, size in (("train", 5_000_000), ("valid", 400_000), ("test", 400_000)):
        config.data[name] = make_text(tmp_path / name, size)
    assert config.data.text_size == "10MB" and not config.model.tied_embeddings
    config.data.level = "byte"
    assert config.model.num_params == 500_000
    config.data.level = "word"
    assert config.model.tied_embeddings and config.model.num_params == 3_000_000
    # Controls: no text and a text that does not exist.
    assert EXPERIMENT.get_config().data.text_size == EXPERIMENT.DEFAULT
    config.data.train = str(tmp_path / "absent")
    assert config.data.text_size == EXPERIMENT.DEFAULT


def test_what_is_set_takes_precedence_over_the_row(tmp_path):
    config = EXPERIMENT.get_config()
    config.dropout.state = 0.11  # Before the path is known, as flags may come in any order.
    config.data.path = make_text(tmp_path / "book.txt", 100_000)
    config.model.num_params = 123_456
    changed = configs.base(config)
    assert (changed.dropout.state, changed.dropout.input) == (0.11, 0.2)
    assert changed.model.num_params == 123_456 and changed.data.text_size == "100KB"
    config.data.text_size = "1MB"
    changed = configs.base(config)
    assert (changed.dropout.state, changed.dropout.input) == (0.11, 0.0)
    assert changed.schedule.turns == 16


@pytest.mark.parametrize("variant", ["", "lstm"])
@pytest.mark.parametrize("level", ["character", "word"])
@pytest.mark.parametrize("row", EXPERIMENT.BYTES)
def test_every_row_makes_a_model(variant, level, row):
    config = EXPERIMENT.get_config(variant)
    config.data.level, config.data.text_size = level, row
    config = configs.base(config)
    configs.check(config)
    model = runs.make_model(config, 10_000 if level == "word" else 100)
    assert dict(model.cell_options).get("rounds", 0) == (
        0 if variant == "lstm" else config.model.rounds
    )
    assert bool(config.model.rounds) == (variant != "lstm")


def test_the_rows_are_those_of_the_key():
    choices = config_keys.keys()["data.text_size"].choices
    for table in (EXPERIMENT.BYTES, EXPERIMENT.CHARACTERS, EXPERIMENT.WORDS):
        assert tuple(table) == choices


def test_a_workdir_of_the_former_settings_resumes(tmp_path):
    config = EXPERIMENT.get_config("former")
    config.data.path = make_text(tmp_path / "book.txt", 1_000_000)
    saved = json.loads(workdirs.config_to_json(configs.base(config)))
    del saved["data"]["text_size"]  # Earlier versions had no such key.
    (tmp_path / "config.json").write_text(json.dumps(saved))
    workdirs.check_config(tmp_path, config)
    # Control: the new settings are another run.
    new = EXPERIMENT.get_config()
    new.data.path = config.data.path
    with pytest.raises(errors.UsageError, match="holds a run with another config"):
        workdirs.check_config(tmp_path, new)


def test_the_table_at_the_start_names_the_row(tmp_path):
    config = EXPERIMENT.get_config()
    config.data.path = make_text(tmp_path / "book.txt", 20_000)
    config.data.data_dir = str(tmp_path / "prepared")
    task = runs.make_task(configs.base(config), None)
    assert ("settings for a text of", "100KB") in task.summary
    options = dict(configs.base(config).data) | {"text_size": None}
    assert "settings for a text of" not in dict(
        tasks.make_task(jax.random.key(0), None, **options).summary
    )
