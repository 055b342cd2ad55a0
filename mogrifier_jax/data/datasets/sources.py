"""Finds the files of a corpus in the user's folder, or downloads them.

A file may be plain, compressed as .gz or .xz, or in the archive in which it was published. Its
content is checked before it is used. `base.py` stores the content.
"""

import dataclasses
import gzip
import hashlib
import http.client
import io
import lzma
import os
import pathlib
import tarfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Sequence

import tqdm

from mogrifier_jax import errors

_TIMEOUT_SECONDS = 60
_CHUNK = 1 << 18
_DAMAGE = (EOFError, OSError, lzma.LZMAError, zlib.error, zipfile.BadZipFile, tarfile.TarError)


@dataclasses.dataclass(frozen=True)
class File:
    """One file of a corpus, with the size and sha256 of its content where they are known."""

    path: str  # The end of its path in an archive; the last component is its name.
    size: int | None = None
    sha256: str | None = None

    @property
    def name(self) -> str:
        """The name of the file without folders."""
        return self.path.rsplit("/", 1)[-1]


@dataclasses.dataclass(frozen=True)
class Source:
    """The files of a corpus, and where they may be: in a folder or on the network."""

    name: str
    files: tuple[File, ...]
    folders: tuple[str, ...]  # Sub-folders of a source_dir that are searched.
    archives: tuple[str, ...]  # Names of archives that contain all files.
    urls: tuple[str, ...]  # Mirrors in order: of an archive, or with {file} of single files.


class _Unfit(Exception):
    """Why the content of a file, an archive or a download cannot be used."""


def load(source: Source, source_dir: str | os.PathLike | None = None) -> tuple[bytes, ...]:
    """The content of the source's files, from `source_dir` if it has them, else downloaded."""
    local = _load_local(source, source_dir) if source_dir is not None else None
    return local if local is not None else _load_remote(source, source_dir)


def _load_local(source: Source, source_dir: str | os.PathLike) -> tuple[bytes, ...] | None:
    """Reads the files in a user's folder; None if it has no file of the corpus."""
    folders = [pathlib.Path(source_dir, name) for name in (*source.folders, "")]
    paths = [_find(folders, (file.path, file.name)) for file in source.files]
    archive = _find(folders, source.archives)
    if not any(paths) and archive is None:
        return None
    absent = [file.name for file, path in zip(source.files, paths, strict=True) if path is None]
    if absent and archive is None:
        raise errors.UsageError(f"{source_dir} lacks {', '.join(absent)}. {_advise(source)}")
    path = archive
    try:
        if absent and archive is not None:
            return _extract(source, archive.name, archive.read_bytes())
        contents = []
        for file, path in zip(source.files, filter(None, paths), strict=True):
            contents.append(_check(file, _unpack(path.name, path.read_bytes())))
        return tuple(contents)
    except (_Unfit, *_DAMAGE) as error:
        raise errors.UsageError(f"{path}: {_explain(error)}. {_advise(source)}") from error


def _find(folders: Sequence[pathlib.Path], names: Sequence[str]) -> pathlib.Path | None:
    """The first file in these folders that has one of these names, plain or compressed."""
    for folder in folders:
        for name in names:
            for suffix in ("", ".gz", ".xz"):
                if (folder / (name + suffix)).is_file():
                    return folder / (name + suffix)
    return None


def _load_remote(source: Source, source_dir: str | os.PathLike | None) -> tuple[bytes, ...]:
    """Downloads the files from the first mirror that has them whole."""
    failures = []
    for url in source.urls:
        try:
            if "{file}" in url:
                downloads = [(f, _download(url.format(file=f.name))) for f in source.files]
                return tuple(_check(file, content) for file, content in downloads)
            name = urllib.parse.unquote(urllib.parse.urlsplit(url).path).rsplit("/", 1)[-1]
            return _extract(source, name, _download(url))
        except (_Unfit, http.client.HTTPException, *_DAMAGE) as error:
            failures.append(f"{url}: {_explain(error)}")
    where = f"is not in {source_dir} and " if source_dir is not None else ""
    raise errors.UsageError(
        f"{source.name} {where}could not be downloaded:\n  "
        + "\n  ".join(failures)
        + f"\n{_advise(source)}"
    )


def _advise(source: Source) -> str:
    """A sentence that says what to download, from where, and where to put it."""
    names = ", ".join(file.name for file in source.files)
    archives = f", or {' or '.join(source.archives)}," if source.archives else ""
    return (
        f"Fetch {names} (plain, .gz or .xz){archives} from {' or '.join(source.urls)} "
        f"into a folder (or its sub-folder {source.folders[0]}) and name that folder by "
        "--config.data.source_dir=... or MOGRIFIER_DATA_DIR"
    )


def _download(url: str) -> bytes:
    """Downloads a URL, with a progress bar if there is a terminal."""
    request = urllib.request.Request(url, headers={"User-Agent": "mogrifier_jax"})
    buffer = io.BytesIO()
    with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
        size = int(response.headers.get("Content-Length") or 0)
        with tqdm.tqdm(
            desc=url.rsplit("/", 1)[-1], total=size or None, unit="B", unit_scale=True, disable=None
        ) as bar:
            while chunk := response.read(_CHUNK):
                buffer.write(chunk)
                bar.update(len(chunk))
    if size and buffer.tell() != size:
        raise _Unfit(f"the transfer broke off after {buffer.tell()} of {size} bytes")
    return buffer.getvalue()


def _unpack(name: str, content: bytes) -> bytes:
    if name.endswith(".gz"):
        return gzip.decompress(content)
    if name.endswith(".xz"):
        return lzma.decompress(content)
    return content


def _extract(source: Source, name: str, content: bytes) -> tuple[bytes, ...]:
    """Extracts the source's files from an archive; a .gz or .xz is its only file, compressed."""
    if name.endswith(".zip"):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            names = archive.namelist()
            return tuple(_check(f, archive.read(_member(f, names))) for f in source.files)
    if name.endswith((".tgz", ".tar.gz", ".tar.xz", ".tar")):
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            names = [member.name for member in tar.getmembers() if member.isfile()]
            streams = [tar.extractfile(_member(file, names)) for file in source.files]
            return tuple(
                _check(file, stream.read() if stream else b"")
                for file, stream in zip(source.files, streams, strict=True)
            )
    (file,) = source.files
    return (_check(file, _unpack(name, content)),)


def _member(file: File, names: list[str]) -> str:
    for name in names:
        if ("/" + name).endswith("/" + file.path):
            return name
    raise _Unfit(f"holds no {file.path} but {', '.join(sorted(names)[:10]) or 'nothing'}")


def _check(file: File, content: bytes) -> bytes:
    """Refuses content that is empty or differs from what was published."""
    if not content:
        raise _Unfit(f"{file.name} is empty")
    if file.size is not None and len(content) != file.size:
        raise _Unfit(f"{file.name} has {len(content)} bytes, not {file.size}")
    if file.sha256 is not None:
        digest = hashlib.sha256(content).hexdigest()
        if digest != file.sha256:
            raise _Unfit(f"{file.name} has the sha256 {digest}, not {file.sha256}")
    return content


def _explain(error: Exception) -> str:
    if isinstance(error, _Unfit):
        return str(error)
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answered {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return f"no answer ({error.reason})"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return f"truncated or damaged ({error})"
