"""Builds the vocabulary of a training text, and converts text to token ids and back.

Letters: V vocabulary size, N lines. A text is split into lines at every Unicode line boundary, and
each line is followed by one end-of-line token, eos. At level "byte" a token is the CP437 character
of a byte, so that every token is one printable character; ids are sorted by code point.
`corpora.py` encodes whole corpora, and `streams.py` cuts the ids into windows.
"""

import dataclasses
import functools
import json
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from mogrifier_jax import errors, files

EOS = "▼"
UNKNOWN = "<UNK>"
LEVELS = ("word", "character", "byte")
JSON_SCHEMA = {"level": LEVELS, "tokens": [str]}  # What `Vocabulary.to_json` writes.

_NEWLINE, _RETURN = 10, 13
_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"  # Where `str.splitlines` splits.
_NUM_CODE_POINTS = 0x110000
_BLOCK = 1 << 22  # Codes per table lookup, because NumPy makes an 8-byte index of each code.


class EncodedSplit(NamedTuple):
    """The ids of one split; every line ends with eos."""

    tokens: np.ndarray  # [total] uint8, uint16 or int32, whichever is the smallest that holds V.
    line_starts: np.ndarray  # [N] int64: the index in `tokens` at which each line begins.


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The distinct tokens of a training text, with eos and `<UNK>`, sorted by code point."""

    tokens: tuple[str, ...]
    level: str

    def __post_init__(self):
        check_level(self.level)
        if len(self.ids) < len(self):
            raise errors.UsageError(
                f"a vocabulary of {len(self)} tokens has only {len(self.ids)} distinct ones; make "
                "it with Vocabulary.from_text or Vocabulary.from_tokens"
            )
        for special in (EOS, UNKNOWN):
            if special not in self.ids:
                raise errors.UsageError(
                    f"a vocabulary of {len(self)} tokens lacks {special!r}; "
                    "make it with Vocabulary.from_text or Vocabulary.from_tokens"
                )

    @classmethod
    def from_tokens(cls, tokens: Iterable[str], level: str) -> "Vocabulary":
        """The vocabulary of these tokens, to which eos and `<UNK>` are added."""
        return cls(tuple(sorted({*tokens, EOS, UNKNOWN})), level)

    @classmethod
    def from_text(cls, text: str | bytes | memoryview, level: str) -> "Vocabulary":
        """The vocabulary of a training text."""
        if level == "word":
            words: set[str] = set()
            for line in _as_text(text).splitlines():
                words.update(line.split())
            return cls.from_tokens(words, level)
        codes = _codes(text, level)
        seen = np.zeros(256 if level == "byte" else _NUM_CODE_POINTS, bool)
        for start in range(0, len(codes), _BLOCK):
            seen[codes[start : start + _BLOCK]] = True
        seen[_NEWLINE] = False  # It is encoded as eos.
        return cls.from_tokens(
            (_character(int(code), level) for code in np.flatnonzero(seen)), level
        )

    @classmethod
    def from_json(cls, text: str) -> "Vocabulary":
        """The vocabulary that `to_json` wrote."""
        remedy = "give the JSON text of Vocabulary.to_json"
        fields = files.parse_json(text, JSON_SCHEMA, "the vocabulary", remedy)
        return cls(tuple(fields["tokens"]), fields["level"])

    def to_json(self) -> str:
        """The vocabulary as JSON, from which `from_json` makes an equal one."""
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
        """The id that stands for every token not in the training text."""
        return self.ids[UNKNOWN]

    @property
    def dtype(self) -> np.dtype:
        """The smallest dtype that holds every id."""
        return smallest_dtype(len(self))

    def encode_split(self, text: str | bytes | memoryview) -> EncodedSplit:
        """Encodes a whole text; a last line without a line break is followed by eos as well."""
        if self.level == "word":
            return self._encode_words(_as_text(text))
        return self._encode_codes(_codes(text, self.level))

    def encode(self, text: str | bytes | memoryview) -> np.ndarray:
        """Encodes the beginning of a text; no eos is added to a last line without a line break."""
        tokens = self.encode_split(text).tokens
        if self.level == "byte":
            last = _as_bytes(text)[-1:].decode("cp437")
        else:
            last = _as_text(text)[-1:]
        return tokens if not last or last in _BREAKS else tokens[:-1]

    def decode(self, ids: ArrayLike) -> str:
        """Decodes ids; eos becomes a newline, and bytes that are not UTF-8 become U+FFFD."""
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

    def find_unknown(self, text: str | bytes | memoryview) -> list[str]:
        """The distinct tokens of a text that are not in the vocabulary, in order of appearance."""
        return [token for token in dict.fromkeys(self.spell_unknown(text)) if token not in self]

    def spell_unknown(self, text: str | bytes | memoryview) -> list[str]:
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
        """Maps each code (a byte or a code point) to its id, and a newline to eos."""
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
        # In CP437 the bytes from 128 on are letters, so 0x85 is not the line break U+0085.
        is_break[[ord(c) for c in _BREAKS if self.level != "byte" or ord(c) < 128]] = True
        breaks_per_block = [np.empty(0, np.int64)]
        for start in range(0, len(codes), _BLOCK):
            block = codes[start : start + _BLOCK]
            tokens[start : start + _BLOCK] = self._table[block]
            breaks_per_block.append(np.flatnonzero(is_break[block]) + start)
        breaks = np.concatenate(breaks_per_block)
        # "\r\n" is a single line break, at its newline.
        following = codes[np.minimum(breaks + 1, len(codes) - 1)] if len(breaks) else breaks
        breaks = breaks[~((codes[breaks] == _RETURN) & (following == _NEWLINE))]
        # A newline is replaced by eos. Any other line break remains a token, followed by eos.
        is_token = codes[breaks] != _NEWLINE
        if is_token.any():
            tokens = np.insert(tokens, breaks[is_token] + 1, self.dtype.type(self.eos_id))
        ends = breaks + np.cumsum(is_token)
        if len(tokens) and (not len(ends) or ends[-1] != len(tokens) - 1):
            ends = np.append(ends, len(tokens))
            tokens = np.append(tokens, self.dtype.type(self.eos_id))
        starts = np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1]) if len(ends) else ends
        return EncodedSplit(tokens, starts)


def smallest_dtype(vocab_size: int) -> np.dtype:
    """The smallest dtype that holds every id below V."""
    fits = [dtype for dtype in (np.uint8, np.uint16) if vocab_size <= np.iinfo(dtype).max + 1]
    return np.dtype(fits[0] if fits else np.int32)


def check_level(level: str) -> None:
    """Raises a UsageError for a level that is not in LEVELS."""
    if level not in LEVELS:
        raise errors.UsageError(f"level {level!r} is unknown; use one of {', '.join(LEVELS)}")


def _as_text(text: str | bytes | memoryview) -> str:
    try:
        return text if isinstance(text, str) else _as_bytes(text).decode("utf-8")
    except UnicodeDecodeError as error:
        raise errors.UsageError(
            f"the text is not UTF-8 ({error.reason} at byte {error.start}); convert it first"
        ) from None


def _as_bytes(text: str | bytes | memoryview) -> bytes:
    if isinstance(text, str):
        return text.encode("utf-8", "surrogateescape")
    if not isinstance(text, bytes | bytearray | memoryview):
        raise errors.UsageError(f"{errors.show(text)} is not a text; give a str, or bytes")
    return bytes(text)


def _codes(text: str | bytes | memoryview, level: str) -> np.ndarray:
    """The bytes (uint8) or the code points (uint32) of a text."""
    if level == "byte":
        # A memoryview is used as it is, so that a large corpus is not copied.
        return np.frombuffer(text if isinstance(text, memoryview) else _as_bytes(text), np.uint8)
    return np.frombuffer(_as_text(text).encode("utf-32-le", "surrogatepass"), np.uint32)


def _character(code: int, level: str) -> str:
    return bytes([code]).decode("cp437") if level == "byte" else chr(code)
