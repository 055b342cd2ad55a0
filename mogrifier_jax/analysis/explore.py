"""`--mode=explore` and `model.explore(text)`: one HTML file that shows how a model reads a text.

Axes: N tokens of the text, U units of a map, K likeliest tokens. A map has the values of one gate
of one layer, units by tokens. `gating.name_gates` gives the maps their names. The page is
`explore.html` with style, scripts and data put into it. `pack` makes the data small. Surprisals,
probabilities and means are float32. Maps are decimal fixed point, so that the digits of a value
that the page shows are correct.
"""

import base64
import bisect
import html
import json
import math
import os
import pathlib
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from absl import logging

from mogrifier_jax import configs, errors
from mogrifier_jax.analysis import gating, inspection
from mogrifier_jax.data import corpora
from mogrifier_jax.evaluation import pretrained, trained
from mogrifier_jax.nn import layers, models
from mogrifier_jax.training import units, workdirs

TOP = 8  # Tokens that are listed as likely.
MAX_TOKENS = 2_000  # More would make columns of a map too narrow to see.
MAX_RUNS = 4
LIMITS = {"length": configs.Key(int, required=True, low=1, high=MAX_TOKENS)}
MAX_VALUES = 1_700_000  # Of all maps together. At 1.7 bytes or less each, a file is below 3 MB.
DECIMALS = {"factor": 3, "gate": 2, "signed": 2}  # Decimal places of the values in a map.
_FOLDER = pathlib.Path(__file__).parent


class Page:
    """A self-contained HTML file; notebooks show it inline."""

    def __init__(self, document: str, title: str):
        self.html, self._title = document, title

    def __repr__(self) -> str:
        return f"Page({self._title!r}, {len(self.html.encode()) / 1e6:.1f} MB)"

    def _repr_html_(self) -> str:
        # A frame keeps the styles and scripts of the page apart from those of the notebook.
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" title="{html.escape(self._title)}" '
            'style="width: 100%; height: 900px; border: 0"></iframe>'
        )

    def save(self, path: str | os.PathLike) -> pathlib.Path:
        """Writes the page to a file, whole or not at all."""
        path = pathlib.Path(path)
        if not path.parent.is_dir():
            raise errors.UsageError(f"{path.parent} is not a folder; make it first")
        workdirs.replace_text(path, self.html)
        return path


def run(
    folders: Sequence[str],
    *,
    path: str | None = None,
    prompt: str | None = None,
    length: int = 300,
) -> pathlib.Path:
    """`--mode=explore`: writes explore.html into the first workdir.

    Args:
      path: a file with the text.
      prompt: the text itself. Without both, the validation text is read.
    """
    if not folders or not all(folders):
        raise errors.UsageError("--workdir is missing; give that of a run, or two: a,b")
    if path is not None and prompt is not None:
        raise errors.UsageError("--text and --prompt are both given; give one of them")
    check(len(folders), length)
    loaded = [pretrained.load_weights(folder) for folder in folders]
    runs = [trained.TrainedModel(each) for each in loaded]
    if path is not None:
        text, source = pretrained.read_text(runs[0].vocabulary, path), str(path)
    elif prompt is not None:
        text, source = prompt, "a prompt"
    else:
        plan = pretrained.read_splits(loaded[0]).plan("valid", 1, window=length)
        window = plan.batch_at(plan.stream, jnp.int32(0))
        text = runs[0].vocabulary.decode(window.targets[0, : window.lengths[0]])
        source = f"the validation text of {runs[0].config.data.name}"
    page = make_page(runs, text, source=source, length=length)
    saved = page.save(pathlib.Path(folders[0]) / "explore.html")
    logging.info("%s is written; open it in a browser", saved)
    return saved


def make_page(
    runs: Sequence[trained.TrainedModel],
    text: str | bytes,
    *,
    source: str = "a text",
    length: int = 300,
) -> Page:
    """The page of the first `length` tokens of a text, as read by one or more models."""
    check(len(runs), length)
    vocab = runs[0].vocabulary
    for other in runs[1:]:
        if other.vocabulary != vocab:
            raise errors.UsageError(
                f"the runs in {runs[0].info['workdir']} and {other.info['workdir']} have different "
                f"vocabularies ({len(vocab):,} and {len(other.vocabulary):,} tokens); give runs of "
                "the same corpus"
            )
    whole = len(vocab.encode(text))
    if whole > length:
        logging.info("the first %d of %d tokens are shown", length, whole)
        text = first_tokens(vocab, text, length)
        source = f"{source}, the first {length} of {whole:,} tokens"
    found = [read(each, text) for each in runs]
    widest = limit_units([layer for one in found for layer in one["layers"]], MAX_VALUES)
    names = name_runs(runs)
    ids = vocab.encode(text)
    words = sorted({int(i) for one in found for i in one["arrays"]["ids"].flat} | {*ids.tolist()})
    title = f"{' against '.join(names)}: {source}"
    data = {
        "source": source,
        "level": vocab.level,
        "unit": pretrained.unit_of(runs[0].config.data.name, vocab.level),
        "words": [vocab.tokens[i] for i in words],
        "tokens": np.searchsorted(words, ids).tolist(),
        "eos": corpora.EOS,
        "unknown": corpora.UNKNOWN,
        "spelling": spell_unknown(vocab, text, ids),
        "top": TOP,
        "runs": [
            describe(model, one, name, words, widest)
            for model, one, name in zip(runs, found, names, strict=True)
        ],
    }
    return Page(fill(data, title), title)


def check(num_runs: int, length: int) -> None:
    """Refuses too many runs or tokens before anything is loaded."""
    if num_runs > MAX_RUNS:
        raise errors.UsageError(f"{num_runs} runs are too many for a page; give {MAX_RUNS} or less")
    configs.check_values({"length": length}, LIMITS)


def first_tokens(vocab: corpora.Vocabulary, text: str | bytes, length: int) -> str | bytes:
    """The beginning of a text that has `length` tokens."""

    def count(end: int) -> int:
        return len(vocab.encode(text[:end]))

    return text[: bisect.bisect_right(range(len(text) + 1), length, key=count) - 1]


def spell_unknown(vocab: corpora.Vocabulary, text: str | bytes, ids: np.ndarray) -> dict[int, str]:
    """The spelling of each unknown token of a text, by its place."""
    places = np.flatnonzero(ids == vocab.unknown_id).tolist()
    return dict(zip(places, vocab.spell_unknown(text), strict=False))


def read(model: trained.TrainedModel, text: str | bytes) -> dict[str, Any]:
    """Everything that the page shows of one run, as arrays."""
    score = model.score(text)
    if not np.isfinite(score.nats).all():
        raise errors.UsageError(
            f"the run in {model.info['workdir']} gives no finite scores: it has diverged; give "
            "another one"
        )
    expected = model.predict(text, top=TOP)
    named = [gating.name_gates(layer) for layer in model.gates(text).layers]
    found = [{name: np.asarray(values) for name, values in layer.items()} for layer in named]
    arrays = {
        "bits": score.nats / math.log(2),
        "ids": expected.ids,
        "probabilities": expected.probabilities,
        "entropy": expected.entropy_nats / math.log(2),
        "ranks": expected.ranks,
    }
    return {"arrays": arrays, "bits_per_token": score.bits_per_token, "layers": found}


def limit_units(found: Sequence[Mapping[str, np.ndarray]], most: int) -> int:
    """The largest number of units of a map such that all maps have at most `most` values."""
    shapes = [values.shape for layer in found for values in layer.values()]
    if sum(tokens * units for tokens, units in shapes) <= most:
        return max(units for _, units in shapes)
    return max(1, most // sum(tokens for tokens, _ in shapes))


def name_runs(runs: Sequence[trained.TrainedModel]) -> list[str]:
    """Names such as LSTM and Mogrifier; runs of the same model also get their folder's name."""
    names = [inspection.name_model(run.config) for run in runs]
    folders = [os.path.basename(os.path.normpath(run.info["workdir"])) for run in runs]
    full = [f"{name} {folder}" for name, folder in zip(names, folders, strict=True)]
    if len(set(names)) == len(names):
        return names
    if len(set(full)) == len(full):
        return full
    return [f"{name} {number}" for number, name in enumerate(full, start=1)]


def describe(
    model: trained.TrainedModel,
    found: Mapping[str, Any],
    name: str,
    words: Sequence[int],
    widest: int,
) -> dict[str, Any]:
    """One run as the page needs it: its sizes and options, its maps, and its packed arrays."""
    module = model.model
    cell = layers.find_cell(module.cell)(module.hidden_size, **dict(module.cell_options))
    arrays = dict(found["arrays"])
    arrays["ids"] = np.searchsorted(words, arrays["ids"])
    maps = []
    for number, layer in enumerate(found["layers"]):
        listed = []
        for key, values in layer.items():
            about, parts = make_map(key, values, cell.rounds, widest)
            listed.append(about)
            arrays |= {f"{number}/{key}/{part}": array for part, array in parts.items()}
            if key in ("x_scale", "h_scale"):
                arrays[f"{number}/{key}/strength"] = np.asarray(gating.strength(values))
        maps.append(listed)
    index, data = pack(arrays)
    return {
        "name": name,
        "folder": os.path.basename(os.path.normpath(model.info["workdir"])),
        "step": model.info["step"],
        "parameters": sum(models.count_parameters(module).values()),
        "hidden": module.hidden_size,
        "cell": module.cell,
        **{key: getattr(cell, key) for key in ("rounds", "rank", "zigzag")},
        "capped": bool(getattr(cell, "cap_input_gate", False)),
        "tied": bool(getattr(cell, "tied_gates", False)),
        "bits_per_token": found["bits_per_token"],
        "perplexity": units.perplexity(found["bits_per_token"] * math.log(2)),
        "layers": maps,
        "index": index,
        "data": data,
    }


def make_map(
    name: str, values: np.ndarray, rounds: int, widest: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The description of a map and its arrays, from the values [N, U] of a gate.

    If there are more than `widest` units, those that vary most are kept.
    """
    low, high = gating.limits(name, rounds)
    factor = name.startswith("round") or name.endswith("_scale")
    kind = "gate" if low == 0 else "signed"
    if factor:
        kind = "factor"
    kept = np.arange(values.shape[1])
    if len(kept) > widest:
        moving = np.log2(np.maximum(values, 2.0**-20)) if factor else values
        kept = np.sort(np.argsort(-moving.var(0), kind="stable")[:widest])
    reach = max(float(np.abs(values).max()), high)
    fitting = math.floor(math.log10(np.iinfo(np.int16).max / reach))
    decimals = max(0, min(DECIMALS[kind], fitting))
    about = {
        "name": name,
        "kind": kind,
        "reach": reach,
        "decimals": decimals,
        "units": values.shape[1],
    }
    fixed = np.rint(values[:, kept].T.astype(np.float64) * 10**decimals)
    return about, {
        "values": fixed.astype(np.int16),  # [U, N]
        "kept": kept,
        "mean": values.mean(1, dtype=np.float64),
    }


def pack(arrays: Mapping[str, np.ndarray]) -> tuple[list[list[Any]], str]:
    """The names, types and sizes of arrays, and all their bytes, deflated and in base64.

    The first bytes of all numbers of an array come first, then all second bytes, and so on. That
    deflates better. Floats become float32. Integers become int16 if they fit, else int32.
    """
    index, parts = [], []
    for name, array in arrays.items():
        if array.dtype.kind == "f":
            array = array.astype("<f4")
        else:
            small = np.abs(array).max(initial=0) <= np.iinfo(np.int16).max
            array = array.astype("<i2" if small else "<i4")
        index.append([name, array.dtype.str[1:], array.size])
        parts.append(array.reshape(-1, 1).view(np.uint8).T.tobytes())
    return index, base64.b64encode(zlib.compress(b"".join(parts), 9)).decode()


def fill(data: Mapping[str, Any], title: str) -> str:
    """The HTML of the page, with title, style, scripts and data put in."""
    files = ("explore.html", "explore.css", "explore.js", "explore_plots.js")
    document, style, *scripts = ((_FOLDER / name).read_text(encoding="utf-8") for name in files)
    # A "<" of the text must not end the script that holds it.
    content = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "title": html.escape(title),
        "style": style,
        "script": "".join(scripts),
        "data": content,
    }
    return re.sub("{{(.*?)}}", lambda found: parts[found[1]], document)
