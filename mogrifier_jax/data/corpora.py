"""Reads corpora by name and encodes them. The vocabulary turns tokens into ids and back.

Letters: V vocabulary size, N lines. A text is cut into lines at every Unicode line boundary. Each
line ends in one end-of-line token, eos. At level "byte" every byte is read as its CP437 character,
so ids follow the code points of those characters. `streams.py` cuts the ids into windows.

The builders in `datasets/` read the paper's corpora and local files. They are imported when a
corpus is read, because a trained model needs none of their libraries. `pydoc` is a part of this
package.
"""

import dataclasses
import functools
import gzip
import hashlib
import json
import os
import pathlib
import zlib
from typing import NamedTuple

import numpy as np
import tqdm
from etils import epath

from mogrifier_jax import errors, files

SOURCE_VARIABLE = "MOGRIFIER_DATA_DIR"
CACHE_VARIABLE = "MOGRIFIER_CACHE_DIR"

EOS = "▼"
UNKNOWN = "<UNK>"
LEVELS = ("word", "character", "byte")
VOCABULARY = {"level": LEVELS, "tokens": [str]}

_NEWLINE, _RETURN = 10, 13
_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"  # What `str.splitlines` cuts at.
_NUM_CODE_POINTS = 0x110000
_BLOCK = 1 << 22  # Codes that are looked up at once: NumPy makes 8 bytes of each.


class EncodedSplit(NamedTuple):
    """The ids of one split; every line ends with eos."""

    tokens: np.ndarray  # [total] uint8, uint16 or int32: the smallest that holds V.
    line_starts: np.ndarray  # [N] int64: where each line begins in `tokens`.


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The distinct tokens of a training text, eos and `<UNK>`; ids in code-point order."""

    tokens: tuple[str, ...]
    level: str

    def __post_init__(self):
        check_level(self.level)
        if len(self.ids) < len(self):
            raise errors.UsageError(
                f"a vocabulary of {len(self)} tokens has only {len(self.ids)} different ones; make "
                "it with Vocabulary.from_text or Vocabulary.from_tokens"
            )
        for special in (EOS, UNKNOWN):
            if special not in self.ids:
                raise errors.UsageError(
                    f"a vocabulary of {len(self)} tokens lacks {special!r}; "
                    "make it with Vocabulary.from_text or Vocabulary.from_tokens"
                )

    @classmethod
    def from_tokens(cls, tokens, level: str) -> "Vocabulary":
        """Makes a vocabulary of these tokens with eos and `<UNK>` added."""
        return cls(tuple(sorted({*tokens, EOS, UNKNOWN})), level)

    @classmethod
    def from_text(cls, text: str | bytes, level: str) -> "Vocabulary":
        """Makes the vocabulary of a training text."""
        if level == "word":
            words: set[str] = set()
            for line in _as_text(text).splitlines():
                words.update(line.split())
            return cls.from_tokens(words, level)
        codes = _codes(text, level)
        seen = np.zeros(256 if level == "byte" else _NUM_CODE_POINTS, bool)
        for start in range(0, len(codes), _BLOCK):
            seen[codes[start : start + _BLOCK]] = True
        seen[_NEWLINE] = False  # It ends lines and so becomes eos.
        return cls.from_tokens(
            (_character(int(code), level) for code in np.flatnonzero(seen)), level
        )

    @classmethod
    def from_json(cls, text: str) -> "Vocabulary":
        """Reads what `to_json` wrote."""
        remedy = "give the JSON text of Vocabulary.to_json"
        fields = files.parse_json(text, VOCABULARY, "the vocabulary", remedy)
        return cls(tuple(fields["tokens"]), fields["level"])

    def to_json(self) -> str:
        """A text with all that encoding and decoding need."""
        return json.dumps({"level": self.level, "tokens": self.tokens})

    def __len__(self) -> int:
        return len(self.tokens)

    @functools.cached_property
    def ids(self) -> dict[str, int]:
        """The id of each token."""
        return {token: i for i, token in enumerate(self.tokens)}

    @property
    def eos_id(self) -> int:
        """The id of the end-of-line token."""
        return self.ids[EOS]

    @property
    def unknown_id(self) -> int:
        """The id of every token that the training text lacks."""
        return self.ids[UNKNOWN]

    @property
    def dtype(self) -> np.dtype:
        """The dtype of ids in memory."""
        return smallest_dtype(len(self))

    def encode_split(self, text: str | bytes) -> EncodedSplit:
        """Encodes whole lines; a last line without a line break also gets its eos."""
        if self.level == "word":
            return self._encode_words(_as_text(text))
        return self._encode_codes(_codes(text, self.level))

    def encode(self, text: str | bytes) -> np.ndarray:
        """Encodes the beginning of a text; a last line without a line break gets no eos."""
        tokens = self.encode_split(text).tokens
        if self.level == "byte":
            last = _as_bytes(text)[-1:].decode("cp437")
        else:
            last = _as_text(text)[-1:]
        return tokens if not last or last in _BREAKS else tokens[:-1]

    def decode(self, ids) -> str:
        """The text of these ids; eos becomes a newline, and bytes that are not UTF-8 U+FFFD."""
        tokens = [self.tokens[int(i)] for i in np.asarray(ids).reshape(-1)]
        if self.level == "word":
            lines: list[list[str]] = [[]]
            for token in tokens:
                if token == EOS:
                    lines.append([])
                else:
                    lines[-1].append(token)
            return "\n".join(" ".join(line) for line in lines)
        if self.level == "character":
            return "".join({EOS: "\n", UNKNOWN: "\ufffd"}.get(token, token) for token in tokens)
        special = {EOS: b"\n", UNKNOWN: "\ufffd".encode()}
        data = b"".join(special.get(token) or token.encode("cp437") for token in tokens)
        return data.decode("utf-8", "replace")

    def find_unknown(self, text: str | bytes) -> list[str]:
        """The distinct tokens of a text that the vocabulary lacks, in order of first appearance."""
        return [token for token in dict.fromkeys(self.spell_unknown(text)) if token not in self]

    def spell_unknown(self, text: str | bytes) -> list[str]:
        """The spelling of every token of a text that maps to `<UNK>`, in the order of the text."""
        if self.level == "byte":
            data = _as_bytes(text).replace(b"\n", b"")
            return [f"0x{b:02x}" for b in data if _character(b, "byte") not in self]
        text = _as_text(text)
        tokens = text.split() if self.level == "word" else text.replace("\n", "")
        return [token for token in tokens if token == UNKNOWN or token not in self]

    def __contains__(self, token: str) -> bool:
        return token in self.ids

    def _encode_words(self, text: str) -> EncodedSplit:
        tokens: list[int] = []
        starts: list[int] = []
        ids, eos, unknown = self.ids, self.eos_id, self.unknown_id
        for line in text.splitlines():
            starts.append(len(tokens))
            tokens.extend(ids.get(word, unknown) for word in line.split())
            tokens.append(eos)
        return EncodedSplit(np.array(tokens, self.dtype), np.array(starts, np.int64))

    @functools.cached_property
    def _table(self) -> np.ndarray:
        """The id of each code, which is a byte or a code point; a newline is eos."""
        table = np.full(
            256 if self.level == "byte" else _NUM_CODE_POINTS, self.unknown_id, self.dtype
        )
        for token, i in self.ids.items():
            if len(token) == 1 and not (self.level == "byte" and token == EOS):
                table[token.encode("cp437")[0] if self.level == "byte" else ord(token)] = i
        table[_NEWLINE] = self.eos_id
        return table

    def _encode_codes(self, codes: np.ndarray) -> EncodedSplit:
        tokens = np.empty(len(codes), self.dtype)
        is_break = np.zeros(len(self._table), bool)
        # Bytes from 128 are letters in CP437, so 0x85 is not the line break U+0085.
        is_break[[ord(c) for c in _BREAKS if self.level != "byte" or ord(c) < 128]] = True
        found = [np.empty(0, np.int64)]
        for start in range(0, len(codes), _BLOCK):
            block = codes[start : start + _BLOCK]
            tokens[start : start + _BLOCK] = self._table[block]
            found.append(np.flatnonzero(is_break[block]) + start)
        breaks = np.concatenate(found)
        # "\r\n" is one line break, at its newline.
        following = codes[np.minimum(breaks + 1, len(codes) - 1)] if len(breaks) else breaks
        breaks = breaks[~((codes[breaks] == _RETURN) & (following == _NEWLINE))]
        # A newline becomes eos. Any other line break stays a token, and eos follows it.
        stays = codes[breaks] != _NEWLINE
        if stays.any():
            tokens = np.insert(tokens, breaks[stays] + 1, self.dtype.type(self.eos_id))
        ends = breaks + np.cumsum(stays)
        if len(tokens) and (not len(ends) or ends[-1] != len(tokens) - 1):
            ends = np.append(ends, len(tokens))
            tokens = np.append(tokens, self.dtype.type(self.eos_id))
        starts = np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1]) if len(ends) else ends
        return EncodedSplit(tokens, starts)


def smallest_dtype(vocab_size: int) -> np.dtype:
    """The smallest dtype that holds every id."""
    fits = [dtype for dtype in (np.uint8, np.uint16) if vocab_size <= np.iinfo(dtype).max + 1]
    return np.dtype(fits[0] if fits else np.int32)


def check_level(level: str) -> None:
    """Refuses a level that is none of LEVELS."""
    if level not in LEVELS:
        raise errors.UsageError(f"level {level!r} is unknown; use one of {', '.join(LEVELS)}")


def _as_text(text: str | bytes) -> str:
    try:
        return text if isinstance(text, str) else _as_bytes(text).decode("utf-8")
    except UnicodeDecodeError as error:
        raise errors.UsageError(
            f"the text is not UTF-8 ({error.reason} at byte {error.start}); convert it first"
        ) from None


def _as_bytes(text: str | bytes) -> bytes:
    if isinstance(text, str):
        return text.encode("utf-8", "surrogateescape")
    if not isinstance(text, bytes | bytearray | memoryview):
        raise errors.UsageError(f"{errors.show(text)} is not a text; give a str, or bytes")
    return bytes(text)


def _codes(text: str | bytes, level: str) -> np.ndarray:
    """The bytes (uint8) or the code points (uint32) of a text."""
    if level == "byte":
        # A large corpus is not copied.
        return np.frombuffer(text if isinstance(text, memoryview) else _as_bytes(text), np.uint8)
    return np.frombuffer(_as_text(text).encode("utf-32-le", "surrogatepass"), np.uint32)


def _character(code: int, level: str) -> str:
    return bytes([code]).decode("cp437") if level == "byte" else chr(code)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Three encoded splits and the vocabulary of the first."""

    name: str
    unit: str  # What a token is: "word", "character" or "byte".
    vocabulary: Vocabulary
    train: EncodedSplit
    valid: EncodedSplit
    test: EncodedSplit

    def digests(self) -> dict[str, str]:
        """SHA-256 of the token ids of each split: what a run was trained on and scored with."""
        found = {}
        for split in ("train", "valid", "test"):
            tokens = getattr(self, split).tokens
            digest = hashlib.sha256(f"{tokens.dtype.str} {len(tokens)}".encode())
            digest.update(np.ascontiguousarray(tokens).data)
            found[split] = digest.hexdigest()
        return found


def load_corpus(
    name: str, *, data_dir=None, source_dir=None, prepared_dir=None, **options
) -> Corpus:
    """Loads a corpus, preparing it first if need be.

    Args:
      name: the name of a builder in `datasets/`, or "pydoc".
      data_dir: the folder for prepared data; by default $MOGRIFIER_CACHE_DIR, or a folder in
        ~/.cache.
      source_dir: a folder with files that were already downloaded; by default
        $MOGRIFIER_DATA_DIR, if set.
      prepared_dir: another folder that may have prepared data. Nothing is written to it.
      **options: the OPTIONS of the builder. None stands for the default.
    """
    from mogrifier_jax.data import datasets

    if name not in (known := [*datasets.BUILDERS, "pydoc"]):
        raise errors.UsageError(f"corpus {name!r} is unknown; use one of {', '.join(known)}")
    accepted = () if name == "pydoc" else datasets.BUILDERS[name].OPTIONS
    options = {key: value for key, value in options.items() if value is not None}
    for key in options:
        if key not in accepted:
            has = f"its options are {', '.join(accepted)}" if accepted else "it has none"
            raise errors.UsageError(f"corpus {name!r} has no option {key!r}; {has}")
    data_dir, source_dir = _default_data_dir(data_dir), _default_source_dir(source_dir)
    if name == "pydoc":
        return _read_pydoc()
    return _read_prepared(name, data_dir, source_dir, prepared_dir, options)


def _read_pydoc() -> Corpus:
    """The language reference that `help()` shows in Python 3.11: English, part of this package."""
    from mogrifier_jax.data.datasets import text

    path = pathlib.Path(__file__).with_name("pydoc") / "topics.txt.gz"
    try:
        whole = gzip.decompress(path.read_bytes()).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise errors.UsageError(
            f"{path}, the corpus 'pydoc', is missing or damaged ({error}); install mogrifier_jax "
            "again"
        ) from error
    texts = text.cut(whole, (0.9, 0.05, 0.05), str(path))
    return _encode("pydoc", "character", "character", iter(texts))


def _read_prepared(name, data_dir, source_dir, prepared_dir, options) -> Corpus:
    from mogrifier_jax.data import datasets
    from mogrifier_jax.data.datasets import base

    kind = datasets.BUILDERS[name]
    config = kind.configure(**options)
    make_builder = functools.partial(kind, data_dir=epath.Path(data_dir), config=config)
    if prepared_dir:
        there = epath.Path(os.path.expanduser(prepared_dir))
        elsewhere = functools.partial(make_builder, data_dir=there)
        make_builder = elsewhere if base.is_prepared(elsewhere) else make_builder
    builder = base.prepare(make_builder, source_dir)
    level = builder.level

    def read(split):
        content = base.read(builder, split)
        if level == "byte":
            return content.data
        try:
            return content.tobytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise errors.UsageError(
                f"the {split} text of {name} is not utf-8: {error.reason} at byte "
                f"{error.start}; fetch it again and delete {builder.data_path}"
            ) from error

    return _encode(name, level, kind.UNIT or level, map(read, base.SPLITS))


def _encode(name, level, unit, texts) -> Corpus:
    """Encodes train, valid and test in turn, with one text in memory at a time."""
    splits: list[EncodedSplit] = []
    with tqdm.tqdm(total=3, desc=f"encoding {name}", unit="split", disable=None) as bar:
        for text in texts:
            if not splits:
                vocab = Vocabulary.from_text(text, level)
            splits.append(vocab.encode_split(text))
            bar.update()
    return Corpus(name, unit, vocab, *splits)


def _default_data_dir(data_dir):
    default = os.environ.get(CACHE_VARIABLE) or "~/.cache/mogrifier_jax"
    return os.path.expanduser(data_dir or default)


def _default_source_dir(source_dir) -> pathlib.Path | None:
    source_dir = source_dir or os.environ.get(SOURCE_VARIABLE)
    if not source_dir:
        return None
    path = pathlib.Path(source_dir).expanduser()
    if not path.is_dir():
        raise errors.UsageError(
            f"source_dir {source_dir} is not a folder; name the folder that holds the files, or "
            f"unset {SOURCE_VARIABLE}"
        )
    return path
