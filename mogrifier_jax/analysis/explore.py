"""`--mode=explore` and `model.explore(text)`: an HTML page that shows how models read a text.

The page is `explore.html`, into which the style, the scripts and the data are inserted, so it is
one file that needs no network. `explore_data.py` makes the data.
"""

import bisect
import html
import json
import os
import pathlib
import re
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from absl import logging

from mogrifier_jax import buckets, errors, files, options
from mogrifier_jax.analysis import explore_data, inspection
from mogrifier_jax.data import tasks, vocabularies
from mogrifier_jax.evaluation import loading, scored_texts, trained_model
from mogrifier_jax.training import atomic_files, workdirs

MAX_TOKENS = 2_000  # With more, the columns of a map would be too narrow to see.
MAX_RUNS = 4
LIMITS = {"length": options.Option(int, required=True, low=1, high=MAX_TOKENS)}
_FOLDER = pathlib.Path(__file__).parent


class Page:
    """A self-contained HTML page, which notebooks show inline."""

    def __init__(self, document: str, title: str):
        self.html, self._title = document, title

    def __repr__(self) -> str:
        return f"Page({self._title!r}, {len(self.html.encode()) / 1e6:.1f} MB)"

    def _repr_html_(self) -> str:
        # The frame isolates the styles and scripts of the page from those of the notebook.
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" title="{html.escape(self._title)}" '
            'style="width: 100%; height: 900px; border: 0"></iframe>'
        )

    def save(self, path: str | os.PathLike) -> pathlib.Path:
        """Writes the page to a file, completely or not at all; it may be in a bucket."""
        with buckets.output(path) as name:
            place = pathlib.Path(name)
            if not place.parent.is_dir():
                raise errors.UsageError(f"{place.parent} is not a folder; create it first")
            atomic_files.write_output(place, self.html)
        return pathlib.Path(path)


def write_page(
    folders: Sequence[str],
    *,
    path: str | None = None,
    prompt: str | None = None,
    length: int = 300,
) -> pathlib.Path:
    """`--mode=explore`: writes explore.html into the first workdir, and returns its path.

    Without `path` and `prompt` the page shows the beginning of the validation text.

    Args:
      folders: the workdirs of the runs.
      path: a file with the text.
      prompt: the text itself.
      length: how many tokens of the text are shown.
    """
    if not folders or not all(folders):
        raise errors.UsageError("--workdir is missing; give the workdir of a run, or two: a,b")
    workdirs.check_results(folders[0], "explore.html")
    if path is not None and prompt is not None:
        raise errors.UsageError("--text and --prompt are both given; give one of them")
    check(len(folders), length)
    loaded = [loading.load_run(folder) for folder in folders]
    runs = [trained_model.TrainedModel(each) for each in loaded]
    if path is not None:
        text, source = scored_texts.read_text(runs[0].vocabulary, path), str(path)
    elif prompt is not None:
        text, source = prompt, "a prompt"
    else:
        plan = scored_texts.read_splits(loaded[0]).task.plan("valid", 1, window=length)
        window = plan.batch_at(plan.stream, jnp.int32(0))
        assert window.lengths is not None  # The windows of evaluation have them.
        text = runs[0].vocabulary.decode(window.targets[0, : window.lengths[0]])
        source = f"the validation text of {runs[0].config.data.name}"
    page = make_page(runs, text, source=source, length=length)
    saved = page.save(pathlib.Path(folders[0]) / "explore.html")
    logging.info("wrote %s; open it in a browser", saved)
    return saved


def make_page(
    runs: Sequence[trained_model.TrainedModel],
    text: str | bytes,
    *,
    source: str = "a text",
    length: int = 300,
) -> Page:
    """The page of the first `length` tokens of a text, as one or more models read it."""
    check(len(runs), length)
    vocab = runs[0].vocabulary
    for other in runs[1:]:
        if other.vocabulary != vocab:
            raise errors.UsageError(
                f"the runs in {runs[0].info['workdir']} and {other.info['workdir']} have different "
                f"vocabularies ({len(vocab):,} and {len(other.vocabulary):,} tokens); give runs of "
                "the same corpus"
            )
    total = len(vocab.encode(text))
    if total > length:
        logging.info("showing the first %d of %d tokens", length, total)
        text = first_tokens(vocab, text, length)
        source = f"{source}, the first {length} of {total:,} tokens"
    readings = [explore_data.read(each, text) for each in runs]
    gates = [layer for each in readings for layer in each.layers]
    max_units = explore_data.limit_units(gates, explore_data.MAX_VALUES)
    names = name_runs(runs)
    ids = vocab.encode(text)
    expected = {int(i) for each in readings for i in each.arrays["ids"].flat}
    words = sorted(expected | {*ids.tolist()})
    title = f"{' against '.join(names)}: {source}"
    data = {
        "source": source,
        "level": vocab.level,
        "unit": tasks.SCORE_UNITS[scored_texts.token_unit(runs[0].config.data.name, vocab.level)],
        "words": [vocab.tokens[i] for i in words],
        "tokens": np.searchsorted(words, ids).tolist(),
        "eos": vocabularies.EOS,
        "unknown": vocabularies.UNKNOWN,
        "spelling": spell_unknown(vocab, text, ids),
        "top": explore_data.TOP,
        "runs": [
            explore_data.pack_run(model, reading, name, words, max_units)
            for model, reading, name in zip(runs, readings, names, strict=True)
        ],
    }
    return Page(fill(data, title), title)


def check(num_runs: int, length: int) -> None:
    """Refuses too many runs or tokens before anything is loaded."""
    if num_runs > MAX_RUNS:
        raise errors.UsageError(f"{num_runs} runs are too many for a page; give {MAX_RUNS} or less")
    options.check_values({"length": length}, LIMITS)


def first_tokens(vocab: vocabularies.Vocabulary, text: str | bytes, length: int) -> str | bytes:
    """The beginning of a text, as far as its first `length` tokens."""

    def count(end: int) -> int:
        return len(vocab.encode(text[:end]))

    return text[: bisect.bisect_right(range(len(text) + 1), length, key=count) - 1]


def spell_unknown(
    vocab: vocabularies.Vocabulary, text: str | bytes, ids: np.ndarray
) -> dict[int, str]:
    """The spelling of each unknown token of a text, by its index."""
    indices = np.flatnonzero(ids == vocab.unknown_id).tolist()
    return dict(zip(indices, vocab.spell_unknown(text), strict=False))


def name_runs(runs: Sequence[trained_model.TrainedModel]) -> list[str]:
    """Names such as LSTM and Mogrifier, with the name of the folder if models occur twice."""
    names = [inspection.name_model(run.config) for run in runs]
    folders = [os.path.basename(os.path.normpath(run.info["workdir"])) for run in runs]
    full = [f"{name} {folder}" for name, folder in zip(names, folders, strict=True)]
    if len(set(names)) == len(names):
        return names
    if len(set(full)) == len(full):
        return full
    return [f"{name} {number}" for number, name in enumerate(full, start=1)]


def fill(data: files.JsonObject, title: str) -> str:
    """The HTML of the page, with title, style, scripts and data inserted."""
    files = ("explore.html", "explore.css", "explore.js", "explore_plots.js")
    document, style, *scripts = ((_FOLDER / name).read_text(encoding="utf-8") for name in files)
    # A "<" in the text must not end the script element that contains it.
    content = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "title": html.escape(title),
        "style": style,
        "script": "".join(scripts),
        "data": content,
    }
    return re.sub("{{(.*?)}}", lambda match: parts[match[1]], document)
