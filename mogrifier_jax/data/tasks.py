"""The three tasks: a stream of text, independent lines of a text, and reverse copy.

A task has a vocabulary, makes the batch of every training step, and makes the plans by which its
splits are evaluated. The code that trains and evaluates is the same for all three.
`abstract_tasks.py` has tasks with shapes instead of data.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from mogrifier_jax import errors
from mogrifier_jax.data import (
    corpora,
    line_examples,
    placement,
    reverse_copy,
    streams,
    vocabularies,
)

# The unit in which the cross-entropy of each kind of token is usually given.
SCORE_UNITS = {"word": "ppl", "character": "bpc", "byte": "bpb"}
# Keys of `config.data` that are not options of the corpus.
READING = ("name", "batch_size", "window", "drop_state_probability", "episodic", "text_size")
LONG_WINDOW = 10_000  # Tokens. A window up to this size may be longer than the text.

Batch = streams.Window | reverse_copy.CopyBatch
Stream: TypeAlias = PyTree[jax.Array]  # The arrays from which `batch_at` cuts batches.
BatchAt = Callable[[Stream, jax.Array | int], Batch]  # The arguments are the stream and an index.


class Kind(NamedTuple):
    """The properties of a task that follow from `config.data` before anything is read."""

    encoder_decoder: bool  # Whether the model reads a source before it predicts.
    carries: bool  # Whether the state is carried from window to window.


class Plan(NamedTuple):
    """How evaluation reads a split."""

    stream: Stream
    batch_at: BatchAt
    num_windows: int
    batch_size: int
    carries: bool  # Whether the state is carried from window to window.
    mesh: Mesh | None = None  # The devices of stream and batches; None is a single device.


class Task(NamedTuple):
    """A vocabulary, the batches of training, and plans for evaluation."""

    vocabulary: vocabularies.Vocabulary
    unit: str  # What a token is: "word", "character" or "byte".
    carries: bool  # Whether the state is carried from window to window.
    stream: Stream
    batch_at: BatchAt
    plan: Callable[..., Plan]  # plan(split, num_stripes, window=..., mesh=...)
    # The number of lines of a split, which limits how many stripes it is divided into. Independent
    # examples have no stripes, so by default there is practically no limit.
    num_lines: Callable[[str], int] = lambda split: 1 << 30
    summary: tuple[tuple[str, object], ...] = ()  # Rows of the table at the start of a run.
    digests: Mapping[str, str] = {}  # SHA-256 of each split; empty if there is no corpus.
    splits: tuple[str, ...] = corpora.SPLITS  # The names that `plan` and `num_lines` accept.

    @property
    def score_unit(self) -> str:
        """The unit in which scores are shown: perplexity, or bits per character or byte."""
        return SCORE_UNITS[self.unit]

    def check_split(self, name: str) -> None:
        """Raises a UsageError for the name of a split that the task does not have."""
        if name not in self.splits:
            known = ", ".join(self.splits)
            raise errors.UsageError(f"split {name!r} is unknown; use any of {known}")


def kind_of(section: Mapping[str, Any]) -> Kind:
    """The kind of the task that `config.data` describes."""
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
    text_size: str | None = None,
    prepared_dir: str | None = None,
    **options: Any,
) -> Task:
    """The task that `config.data` describes.

    Args:
      key: draws the bases and the jitter of stripes, and the order of independent lines.
      mesh: the devices; None is a single device.
      text_size: the size of text for which the experiment has chosen its settings, to be shown.
      prepared_dir: see `corpora.load_corpus`.
    """
    del drop_state_probability  # The train step reads it.
    if name in GENERATED:
        return GENERATED[name](mesh, batch_size, **options)
    corpus = corpora.load_corpus(name, prepared_dir=prepared_dir, **options)
    make = _make_line_task if episodic else _make_stream_task
    task = make(corpus, key, mesh, batch_size, window)
    if text_size:
        task = task._replace(summary=(*task.summary, ("settings for a text of", text_size)))
    return task


def make_scored_text(
    encoded: vocabularies.EncodedSplit, vocabulary: vocabularies.Vocabulary, unit: str
) -> Task:
    """Any text as a task whose only split is "text"; it can be scored but not trained on."""

    def batch_at(stream: Stream, index: jax.Array | int) -> Batch:
        raise errors.UsageError("a text that is scored has no training batches")

    def plan(
        split: str, num_stripes: int, window: int = LONG_WINDOW, mesh: Mesh | None = None
    ) -> Plan:
        del split
        return plan_text(encoded, vocabulary.eos_id, num_stripes, window, mesh)

    return Task(
        vocabulary,
        unit,
        carries=True,
        stream=(),
        batch_at=batch_at,
        plan=plan,
        num_lines=lambda split: len(encoded.line_starts),
        splits=("text",),
        digests={"text": hashlib.sha256(encoded.tokens.tobytes()).hexdigest()},
    )


def plan_text(
    encoded: vocabularies.EncodedSplit,
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
    """Refuses a window longer than any text, because padding would cost time and memory."""
    if window > max(longest, LONG_WINDOW):
        raise errors.UsageError(
            f"a window of {window:,} tokens is longer than {what} of {longest:,}; take at most "
            "that for data.window, eval.window or eval.dyneval.window"
        )


def _make_stream_task(
    corpus: corpora.Corpus, key: jax.Array, mesh: Mesh | None, batch_size: int, window: int
) -> Task:
    eos = corpus.vocabulary.eos_id
    check_window(window, len(corpus.train.tokens), "a training text")

    def plan(split: str, num_stripes: int, window: int = window, mesh: Mesh | None = mesh) -> Plan:
        return plan_text(corpus.split(split), eos, num_stripes, window, mesh)

    return Task(
        corpus.vocabulary,
        corpus.unit,
        carries=True,
        stream=streams.make_train_stream(corpus.train, batch_size, key, eos, mesh),
        batch_at=functools.partial(streams.train_window, window=window),
        plan=plan,
        num_lines=lambda split: len(corpus.split(split).line_starts),
        summary=_summarise(corpus),
        digests=corpus.digests(),
    )


def _make_line_task(
    corpus: corpora.Corpus, key: jax.Array, mesh: Mesh | None, batch_size: int, window: int
) -> Task:
    eos = corpus.vocabulary.eos_id
    longest = max(
        line_examples.limit_window(corpus.split(split), window) for split in corpora.SPLITS
    )

    def plan(split: str, num_stripes: int, window: int = longest, mesh: Mesh | None = mesh) -> Plan:
        encoded, size = corpus.split(split), placement.round_up_batch(num_stripes, mesh)
        check_window(window, line_examples.limit_window(encoded, window), "the longest line")
        eval_lines = functools.partial(line_examples.eval_lines, batch_size=size, window=window)
        return Plan(
            line_examples.make_line_stream(encoded, key, eos, mesh),
            placement.split_batch(eval_lines, mesh),
            -(-len(encoded.line_starts) // size),
            size,
            carries=False,
            mesh=mesh,
        )

    train_lines = functools.partial(
        line_examples.train_lines, batch_size=batch_size, window=longest
    )

    return Task(
        corpus.vocabulary,
        corpus.unit,
        carries=False,
        stream=line_examples.make_line_stream(corpus.train, key, eos, mesh),
        batch_at=placement.split_batch(train_lines, mesh),
        plan=plan,
        summary=_summarise(corpus),
        digests=corpus.digests(),
    )


def _make_copy_task(
    mesh: Mesh | None,
    batch_size: int,
    source_dir: str | None = None,
    data_dir: str | None = None,
    **options: Any,
) -> Task:
    del source_dir, data_dir  # The examples are generated.
    known = [field.name for field in dataclasses.fields(reverse_copy.ReverseCopy)]
    options = {key: value for key, value in options.items() if value is not None}
    for key in options:
        if key not in known:
            raise errors.UsageError(
                f"data.{key} is no option of reverse_copy; it has {', '.join(known)}"
            )
    if "length" not in options:
        raise errors.UsageError("data.length is missing: say how long the sequences to copy are")
    task = reverse_copy.ReverseCopy(**options)

    def plan(
        split: str, num_stripes: int, window: int | None = None, mesh: Mesh | None = mesh
    ) -> Plan:
        del window
        size = placement.round_up_batch(num_stripes, mesh)
        return Plan(
            (),
            placement.split_batch(
                lambda _, index: reverse_copy.eval_copies(task, split, index, batch_size=size), mesh
            ),
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
        batch_at=placement.split_batch(
            lambda _, index: reverse_copy.train_copies(task, index, batch_size=batch_size), mesh
        ),
        plan=plan,
        summary=(("task", "reverse copy"), ("length", task.length), ("examples", task.num_train)),
    )


# Tasks without a corpus, by name: functions of the mesh, the batch size and the options.
GENERATED: dict[str, Callable[..., Task]] = {"reverse_copy": _make_copy_task}


def _summarise(corpus: corpora.Corpus) -> tuple[tuple[str, object], ...]:
    """The rows about a corpus in the table at the start of a run."""
    tokens = " / ".join(f"{len(corpus.split(split).tokens):,}" for split in corpora.SPLITS)
    return (
        ("corpus", corpus.name),
        ("vocabulary", f"{len(corpus.vocabulary):,} {corpus.unit}s"),
        ("tokens, train / valid / test", tokens),
    )
