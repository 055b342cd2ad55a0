"""The three tasks: a stream of text, lines that stand alone, and the reverse copy task.

A task has a vocabulary, gives the batch of every training step, and makes plans to evaluate its
splits. The code that trains and evaluates is the same for all three. An abstract task has shapes
instead of data; preflight compiles with it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mogrifier_jax import errors
from mogrifier_jax.data import corpora, streams

# The unit in which people read the cross-entropy of each kind of token.
SCORE_UNITS = {"word": "ppl", "character": "bpc", "byte": "bpb"}
# Keys of `config.data` that are not options of the corpus.
READING = ("name", "batch_size", "window", "drop_state_probability", "episodic")
LONG_WINDOW = 10_000  # Tokens. A window up to this size may be longer than the text.


class Kind(NamedTuple):
    """The properties of a task that `config.data` decides before anything is read."""

    encoder_decoder: bool  # Whether the model reads a source before it predicts.
    carries: bool  # Whether the state goes on from window to window.


class Plan(NamedTuple):
    """How evaluation reads a split."""

    stream: Any  # The tree of arrays that `batch_at` reads.
    batch_at: Callable[[Any, jax.Array], Any]  # (stream, index) to the batch of that window.
    num_windows: int
    batch_size: int
    carries: bool  # Whether the state goes on from window to window.
    mesh: Mesh | None = None  # The devices that have stream and batches; None means one device.


class Task(NamedTuple):
    """A vocabulary, the batches of training, and plans for evaluation."""

    vocabulary: corpora.Vocabulary
    unit: str  # What a token is: "word", "character" or "byte".
    carries: bool
    stream: Any
    batch_at: Callable[[Any, jax.Array], Any]
    plan: Callable[..., Plan]  # plan(split, num_stripes, window=..., mesh=...)
    # Of a split that is cut into stripes. Lines that stand alone do not limit the batch.
    num_lines: Callable[[str], int] = lambda split: 1 << 30
    summary: tuple[tuple[str, Any], ...] = ()  # Rows for the table at the start.
    digests: Mapping[str, str] = {}  # SHA-256 of each split; empty if there is no corpus.

    @property
    def score_unit(self) -> str:
        """The unit in which people read the cross-entropy: perplexity or bits per token."""
        return SCORE_UNITS[self.unit]


def kind_of(section: Mapping[str, Any]) -> Kind:
    """The kind of the task of `config.data`."""
    generated = section["name"] in GENERATED
    return Kind(encoder_decoder=generated, carries=not (generated or section.get("episodic")))


def make_task(
    key: jax.Array,
    mesh: Mesh | None,
    *,
    name: str,
    batch_size: int,
    window: int,
    episodic: bool = False,
    drop_state_probability: float = 0.0,
    prepared_dir: str | None = None,
    **options: Any,
) -> Task:
    """The task of `config.data`; `key` draws the offsets and the jitter of the stripes.

    `prepared_dir` is that of `corpora.load_corpus`.
    """
    del drop_state_probability  # The train step reads it.
    if name in GENERATED:
        return GENERATED[name](mesh, batch_size, **options)
    corpus = corpora.load_corpus(name, prepared_dir=prepared_dir, **options)
    make = _line_task if episodic else _stream_task
    return make(corpus, key, mesh, batch_size, window)


def plan_text(
    encoded: corpora.EncodedSplit,
    eos_id: int,
    num_stripes: int,
    window: int,
    mesh: Mesh | None = None,
) -> Plan:
    """The plan of any encoded text; empty stripes fill up the mesh."""
    check_window(window, len(encoded.tokens), "a text")
    stream = streams.make_eval_stream(encoded, num_stripes, eos_id, mesh)
    return Plan(
        stream,
        functools.partial(streams.eval_window, window=window),
        streams.num_windows(encoded, num_stripes, window=window),
        stream.begins.shape[0],
        carries=True,
        mesh=mesh,
    )


def check_window(window: int, longest: int, what: str) -> None:
    """Refuses a window that no text fills, since padding would cost time and memory."""
    if window > max(longest, LONG_WINDOW):
        raise errors.UsageError(
            f"a window of {window:,} tokens is longer than {what} of {longest:,}; take at most "
            "that for data.window, eval.window or eval.dyneval.window"
        )


def _stream_task(corpus, key, mesh, batch_size, window) -> Task:
    eos = corpus.vocabulary.eos_id
    check_window(window, len(corpus.train.tokens), "a training text")

    def plan(split, num_stripes, window=window, mesh=mesh):
        return plan_text(getattr(corpus, split), eos, num_stripes, window, mesh)

    return Task(
        corpus.vocabulary,
        corpus.unit,
        carries=True,
        stream=streams.make_train_stream(corpus.train, batch_size, key, eos, mesh),
        batch_at=functools.partial(streams.train_window, window=window),
        plan=plan,
        num_lines=lambda split: len(getattr(corpus, split).line_starts),
        summary=_describe(corpus),
        digests=corpus.digests(),
    )


def spread(batch_at: Callable[[Any, jax.Array], Any], mesh: Mesh | None) -> Any:
    """Splits examples over the mesh axis "data"; the sharding of their state splits stripes."""
    if mesh is None or mesh.shape["data"] == 1:
        return batch_at
    over_data = NamedSharding(mesh, PartitionSpec("data"))
    return lambda stream, index: jax.lax.with_sharding_constraint(
        batch_at(stream, index), over_data
    )


def fill(batch_size: int, mesh: Mesh | None) -> int:
    """The batch size, rounded up to a multiple of the mesh axis "data"."""
    devices = mesh.shape["data"] if mesh else 1
    return -(-batch_size // devices) * devices


def _line_task(corpus, key, mesh, batch_size, window) -> Task:
    eos = corpus.vocabulary.eos_id
    longest = max(streams.limit_window(getattr(corpus, s), window) for s in streams.SPLITS)

    def plan(split, num_stripes, window=longest, mesh=mesh):
        encoded, size = getattr(corpus, split), fill(num_stripes, mesh)
        check_window(window, streams.limit_window(encoded, window), "the longest line")
        return Plan(
            streams.make_line_stream(encoded, key, eos, mesh),
            spread(functools.partial(streams.eval_lines, batch_size=size, window=window), mesh),
            -(-len(encoded.line_starts) // size),
            size,
            carries=False,
            mesh=mesh,
        )

    train_lines = functools.partial(streams.train_lines, batch_size=batch_size, window=longest)

    return Task(
        corpus.vocabulary,
        corpus.unit,
        carries=False,
        stream=streams.make_line_stream(corpus.train, key, eos, mesh),
        batch_at=spread(train_lines, mesh),
        plan=plan,
        summary=_describe(corpus),
        digests=corpus.digests(),
    )


def _copy_task(mesh, batch_size, source_dir=None, data_dir=None, **options) -> Task:
    del source_dir, data_dir  # The examples are generated.
    known = [field.name for field in dataclasses.fields(streams.ReverseCopy)]
    options = {key: value for key, value in options.items() if value is not None}
    for key in options:
        if key not in known:
            raise errors.UsageError(
                f"data.{key} is no option of reverse_copy; it has {', '.join(known)}"
            )
    if "length" not in options:
        raise errors.UsageError("data.length is missing: say how long the sequences to copy are")
    task = streams.ReverseCopy(**options)

    def plan(split, num_stripes, window=None, mesh=mesh):
        del window
        size = fill(num_stripes, mesh)
        return Plan(
            (),
            spread(lambda _, i: streams.eval_copies(task, split, i, batch_size=size), mesh),
            -(-task.num_examples(split) // size),
            size,
            carries=False,
            mesh=mesh,
        )

    return Task(
        task.make_vocabulary(),
        "word",
        carries=False,
        stream=(),
        batch_at=spread(
            lambda _, index: streams.train_copies(task, index, batch_size=batch_size), mesh
        ),
        plan=plan,
        summary=(("task", "reverse copy"), ("length", task.length), ("examples", task.num_train)),
    )


# Tasks without a corpus, by name: functions of the batch size and the options.
GENERATED: dict[str, Callable[..., Task]] = {"reverse_copy": _copy_task}


def _describe(corpus) -> tuple[tuple[str, Any], ...]:
    tokens = " / ".join(f"{len(getattr(corpus, split).tokens):,}" for split in streams.SPLITS)
    return (
        ("corpus", corpus.name),
        ("vocabulary", f"{len(corpus.vocabulary):,} {corpus.unit}s"),
        ("tokens, train / valid / test", tokens),
    )


class Size(NamedTuple):
    """The sizes of a corpus, which decide the shapes of its streams."""

    vocabulary: int
    unit: str
    train: tuple[int, int]  # Tokens and lines.
    valid: tuple[int, int]


SIZES = {
    "ptb": Size(10_001, "word", (929_589, 42_068), (73_760, 3_370)),
    "ptb_char": Size(51, "character", (5_017_483, 42_069), (393_043, 3_371)),
    "wikitext2": Size(33_279, "word", (2_088_628, 36_718), (217_646, 3_760)),
    "enwik8": Size(206, "byte", (90_000_001, 1_017_183), (5_000_001, 54_258)),
    "text8": Size(29, "byte", (90_000_900, 900), (5_000_050, 50)),
    "mwc": Size(300, "character", (10_000_000, 100_000), (500_000, 5_000)),
}
ASSUMED = {"mwc": "the size of the corpus is assumed: 10M characters of 300 kinds"}


def make_abstract_task(section: Mapping[str, Any], mesh: Mesh) -> Task:
    """The task of `config.data` on chips that are not here; it can be traced, but not run.

    Its stream has only shapes and shardings, so a corpus whose size is known is not read.
    """
    if section["name"] in GENERATED:  # On the device: there is no stream.
        return make_task(jax.random.key(0), mesh, **section)
    size = _find_size(section)
    batch_size, window = section["batch_size"], section["window"]
    words: Any = range(size.vocabulary)  # Only its length is asked for.

    def leaf(*shape, dtype=jnp.int32, axes=()):
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    key, eos = leaf(dtype=jax.eval_shape(jax.random.key, 0).dtype), leaf()

    def read(split):
        tokens, lines = size.valid if split == "valid" else size.train
        return leaf(tokens, dtype=corpora.smallest_dtype(size.vocabulary)), lines

    def read_lines(split):
        tokens, lines = read(split)
        return streams.LineStream(tokens, leaf(lines + 1), key, eos)

    def plan_lines(split, num_stripes):
        stream = read_lines(split)
        cut = functools.partial(streams.eval_lines, batch_size=num_stripes, window=window)
        count = -(-(stream.bounds.shape[0] - 1) // num_stripes)
        return Plan(stream, cut, count, num_stripes, carries=False, mesh=mesh)

    def plan_stripes(split, num_stripes):
        tokens, _ = read(split)
        ends = leaf(fill(num_stripes, mesh), axes=["data"])
        stream = streams.EvalStream(tokens, begins=ends, ends=ends, eos=eos)
        cut = functools.partial(streams.eval_window, window=window)
        # Stripes are taken to be equally long; real ones end with a line.
        count = -(-tokens.shape[0] // num_stripes // window)
        return Plan(stream, cut, count, ends.shape[0], carries=True, mesh=mesh)

    if section.get("episodic", False):
        cut = functools.partial(streams.train_lines, batch_size=batch_size, window=window)
        stream = read_lines("train")
        return Task(words, size.unit, False, stream, spread(cut, mesh), plan_lines)
    (tokens, lines), stripes = read("train"), leaf(batch_size, axes=["data"])
    stream = streams.TrainStream(tokens, leaf(lines), stripes, stripes, key, eos)
    cut = functools.partial(streams.train_window, window=window)
    return Task(words, size.unit, True, stream, cut, plan_stripes, lambda split: size.valid[1])


def _find_size(section: Mapping[str, Any]) -> Size:
    """The size from the table, or from the corpus itself, which is then read."""
    if section["name"] in SIZES:
        return SIZES[section["name"]]
    options = {key: value for key, value in section.items() if key not in READING}
    corpus = corpora.load_corpus(section["name"], **options)
    train, valid = ((len(s.tokens), len(s.line_starts)) for s in (corpus.train, corpus.valid))
    return Size(len(corpus.vocabulary), corpus.unit, train, valid)
