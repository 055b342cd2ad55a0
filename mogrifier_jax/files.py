"""Reads files and checks their content against a schema; only regular files are opened.

Whatever is wrong with a file becomes one sentence with its name, the mismatch and the remedy. Only
regular files are read, because opening a FIFO blocks until it has a writer, and a device such as
/dev/zero never ends.

A schema describes JSON:

    str, bool, dict, None       a value of this type
    int, float                  a number; a bool is not a number, and an int is also a float
    Number(int, 0, 10)          a finite number between these limits
    (a, b)                      a value that fits one of these schemas
    "word"                      this text
    [a]                         a list of values that fit
    [a, b]                      a list of two values, of which the first fits a, the second b
    {"key": a, "perhaps?": b}   an object with `key`, perhaps with `perhaps`, and other keys
    {str: a}                    an object whose other values all fit this schema
"""

import json
import math
import os
import pathlib
import stat
from collections.abc import Mapping
from typing import IO, Any, NamedTuple

import numpy as np

from mogrifier_jax import errors

# A JSON object, whose keys and types a schema checks when it is read.
JsonObject = dict[str, Any]

COPY = "restore it from a copy or use another workdir"
_DEEPEST = 100  # No file of ours has more levels, and recursion fails at about 1000.


class Number(NamedTuple):
    """A schema: a finite number between two limits, both included."""

    kind: type
    low: float = -math.inf
    high: float = math.inf


class Array(NamedTuple):
    """A schema: an array of a .npz file. `kinds` has NumPy's letters, such as "iu" for integers."""

    kinds: str
    ndim: int


COUNT = Number(int, 0, 2**63 - 1)


CACHE_VARIABLE = "MOGRIFIER_CACHE_DIR"


def cache_folder() -> str:
    """The folder of what can be made again: $MOGRIFIER_CACHE_DIR, or one in ~/.cache."""
    folder = os.path.expanduser(os.environ.get(CACHE_VARIABLE) or "~/.cache/mogrifier_jax")
    if folder.startswith("~"):  # It would become a folder named ~ in the current one.
        raise errors.UsageError(
            f"the cache {folder} has no place, because that home folder is unknown; set "
            f"{CACHE_VARIABLE} to a folder"
        )
    return folder


def open_regular(path: str | os.PathLike, remedy: str = COPY) -> IO[bytes]:
    """Opens a file for reading; refuses one that does not exist or is not a regular file."""
    try:
        # O_NONBLOCK, because opening a FIFO would otherwise wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError):
            raise _refusal(f"{path} does not exist", remedy) from None
        reason = getattr(error, "strerror", None) or error
        raise _refusal(f"{path} cannot be read ({reason})", remedy) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _refusal(f"{path} is not a file", remedy)
    return open(descriptor, "rb")


def find_irregular(folder: pathlib.Path) -> pathlib.Path | None:
    """The first entry below a folder that is neither a regular file nor a folder, or None."""
    seen: set[tuple[int, int]] = set()
    for place, _, names in os.walk(folder, followlinks=True):
        about = os.stat(place)
        if (about.st_dev, about.st_ino) in seen:  # Links may lead in circles.
            return pathlib.Path(place)
        seen.add((about.st_dev, about.st_ino))
        for path in (pathlib.Path(place, name) for name in names):
            if not path.is_file():
                return path
    return None


def open_to_write(path: str | os.PathLike, flags: int = 0) -> IO[bytes]:
    """Opens a file, a device or a FIFO for writing; an OSError if the FIFO has no reader."""
    # O_NONBLOCK, because opening a FIFO would otherwise wait for a reader.
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags, 0o666)
    os.set_blocking(descriptor, True)
    return open(descriptor, "wb")


def read_bytes(path: str | os.PathLike, remedy: str = COPY) -> bytes:
    """The content of a regular file."""
    with open_regular(path, remedy) as file:
        try:
            return file.read()
        except OSError as error:
            raise _refusal(f"{path} cannot be read ({error.strerror})", remedy) from None


def read_text(path: str | os.PathLike, remedy: str = COPY) -> str:
    """The content of a regular file of UTF-8 text."""
    try:
        return read_bytes(path, remedy).decode()
    except UnicodeDecodeError as error:
        raise _refusal(f"{path} is not UTF-8 text ({error})", remedy) from None


def read_json(path: str | os.PathLike, schema: Any = object, remedy: str = COPY) -> Any:
    """Reads JSON that fits a schema."""
    return parse_json(read_bytes(path, remedy), schema, str(path), remedy)


def parse_json(text: str | bytes, schema: Any, name: str, remedy: str = COPY) -> Any:
    """Parses JSON that fits a schema; `name` says in messages where it comes from."""
    try:
        value = json.loads(text, object_pairs_hook=_make_object)
    except (TypeError, ValueError, RecursionError) as error:
        raise _refusal(f"{name} is not valid JSON ({error})", remedy) from None
    deep = isinstance(value, dict | list) and _is_deep(value)
    reason = "it is nested too deeply" if deep else mismatch(value, schema)
    if reason:
        raise _refusal(f"{name} is not as it was written: {reason}", remedy)
    return value


def read_arrays(
    path: str | os.PathLike, schema: Mapping[str, Array], remedy: str = COPY
) -> dict[str, np.ndarray]:
    """Reads all arrays of a .npz file, which must include those of the schema."""
    with open_regular(path, remedy) as file:
        try:
            # np.load would leave a damaged file open if it opened the file itself.
            with np.load(file, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
        # A damaged file may raise anything, depending on which decoder meets the damage.
        except Exception as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise _refusal(f"{path} is not a .npz file ({reason})", remedy) from None
    for name, (kinds, ndim) in schema.items():
        array = arrays.get(name)
        if array is None or array.dtype.kind not in kinds or array.ndim != ndim:
            what = "lacks" if array is None else f"has {array.dtype}{list(array.shape)} as"
            raise _refusal(f"{path} {what} the array {name!r}", remedy)
    return arrays


def mismatch(value: Any, schema: Any, name: str = "") -> str | None:
    """Why a value does not fit a schema, or None if it does."""
    if type(value) is schema:
        return None
    if isinstance(schema, Mapping):
        if not isinstance(value, dict):
            return _wrong(name, value, "an object")
        return _mismatch_of_object(value, schema, name)
    if isinstance(schema, list):
        if not isinstance(value, list):
            return _wrong(name, value, "a list")
        if len(schema) > 1 and len(value) != len(schema):
            return f"{name or 'it'} has {len(value)} values instead of {len(schema)}"
        inner = schema if len(schema) > 1 else schema * len(value)
        pairs = enumerate(zip(value, inner, strict=True))
        reasons = (mismatch(v, s, f"{name}[{index}]") for index, (v, s) in pairs)
        return next((reason for reason in reasons if reason), None)
    if isinstance(schema, tuple) and not isinstance(schema, Number):
        if any(mismatch(value, each, name) is None for each in schema):
            return None
        return mismatch(value, schema[0], name)
    if isinstance(schema, Number):
        if reason := mismatch(value, schema.kind, name):
            return reason
        if not (math.isfinite(value) and schema.low <= value <= schema.high):
            return f"{name or 'it'} is {value!r:.40}, which is out of range"
        return None
    if isinstance(schema, str):
        return None if value == schema else _wrong(name, value, repr(schema))
    if schema is None:
        return None if value is None else _wrong(name, value, "null")
    kinds = (int, float) if schema is float else schema
    fits = isinstance(value, kinds) and (not isinstance(value, bool) or schema in (bool, object))
    return None if fits else _wrong(name, value, f"a {schema.__name__}")


def _mismatch_of_object(value: dict, schema: Mapping[Any, Any], name: str) -> str | None:
    declared = set()
    for key, inner in schema.items():
        if key is str:
            continue
        plain = key.removesuffix("?")
        declared.add(plain)
        if plain not in value:
            if plain == key:
                return f"{name or 'it'} lacks {key!r}"
        elif reason := mismatch(value[plain], inner, f"{name}.{plain}".lstrip(".")):
            return reason
    for key in value.keys() - declared if str in schema else ():
        if reason := mismatch(value[key], schema[str], f"{name}.{key}".lstrip(".")):
            return reason
    return None


def _refusal(sentence: str, remedy: str) -> errors.UsageError:
    return errors.UsageError(f"{sentence}; {remedy}" if remedy else sentence)


def _wrong(name: str, value: object, expected: str) -> str:
    kind = "null" if value is None else f"a {type(value).__name__}"
    return f"{name or 'it'} is {kind} instead of {expected}"


def _make_object(pairs: list[tuple[str, Any]]) -> JsonObject:
    """A JSON object; refuses repeated keys, of which Python would take the last value."""
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r:.40} is there twice")
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_DEEPEST):
        parts = (each.values() if type(each) is dict else each for each in level)
        level = [inner for part in parts for inner in part if type(inner) in (dict, list)]
        if not level:
            return False
    return True
