"""Finds the files of a corpus in a folder of the user, or downloads them.

A file may be plain, a .gz or .xz, or in the archive it was published in. Its content is checked
before it is used. `base.py` stores what is found here.
"""

import dataclasses
import gzip
import hashlib
import http.client
import io
import lzma
import pathlib
import tarfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib

import tqdm

from mogrifier_jax import errors

_TIMEOUT_SECONDS = 60
_CHUNK = 1 << 18
_DAMAGE = (EOFError, OSError, lzma.LZMAError, zlib.error, zipfile.BadZipFile, tarfile.TarError)


@dataclasses.dataclass(frozen=True)
class File:
    """One file of a corpus, with the size and sha256 of its content where they are known."""

    path: str  # The end of its path in an archive; the last part is its name.
    size: int | None = None
    sha256: str | None = None

    @property
    def name(self) -> str:
        """The file's name without folders."""
        return self.path.rsplit("/", 1)[-1]


@dataclasses.dataclass(frozen=True)
class Source:
    """The files of a corpus, where they lie in a folder and where they can be fetched."""

    name: str
    files: tuple[File, ...]
    folders: tuple[str, ...]  # Sub-folders of a source_dir that are searched.
    archives: tuple[str, ...]  # Names of archives that hold all files.
    urls: tuple[str, ...]  # Mirrors in order: an archive, or {file} for each file by itself.


class _Unfit(Exception):
    """The reason why bytes from one place cannot be used."""


def load(source: Source, source_dir=None) -> tuple[bytes, ...]:
    """The content of the source's files, from `source_dir` if it has them, else downloaded."""
    found = _load_local(source, source_dir) if source_dir is not None else None
    return found if found is not None else _load_remote(source, source_dir)


def _load_local(source: Source, source_dir) -> tuple[bytes, ...] | None:
    """Reads a user's folder; returns None if it has no file of the corpus."""
    folders = [pathlib.Path(source_dir, name) for name in (*source.folders, "")]
    places = [_find(folders, (file.path, file.name)) for file in source.files]
    archive = _find(folders, source.archives)
    if not any(places) and archive is None:
        return None
    absent = [f.name for f, place in zip(source.files, places, strict=True) if place is None]
    if absent and archive is None:
        raise errors.UsageError(f"{source_dir} lacks {', '.join(absent)}. {_advise(source)}")
    path = archive
    try:
        if absent and archive is not None:
            return _extract(source, archive.name, archive.read_bytes())
        contents = []
        for file, path in zip(source.files, filter(None, places), strict=True):
            contents.append(_check(file, _unpack(path.name, path.read_bytes())))
        return tuple(contents)
    except (_Unfit, *_DAMAGE) as error:
        raise errors.UsageError(f"{path}: {_explain(error)}. {_advise(source)}") from error


def _find(folders, names) -> pathlib.Path | None:
    for folder in folders:
        for name in names:
            for suffix in ("", ".gz", ".xz"):
                if (folder / (name + suffix)).is_file():
                    return folder / (name + suffix)
    return None


def _load_remote(source: Source, source_dir) -> tuple[bytes, ...]:
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
    where = f"not in {source_dir} and " if source_dir is not None else ""
    raise errors.UsageError(
        f"{source.name} is {where}not to be had from the network:\n  "
        + "\n  ".join(failures)
        + f"\n{_advise(source)}"
    )


def _advise(source: Source) -> str:
    """A sentence that says what to fetch, from where, and where to put it."""
    names = ", ".join(file.name for file in source.files)
    archives = f", or {' or '.join(source.archives)}," if source.archives else ""
    return (
        f"Fetch {names} (plain, .gz or .xz){archives} from {' or '.join(source.urls)} "
        f"into a folder (or its sub-folder {source.folders[0]}) and name that folder by "
        "--config.data.source_dir=... or MOGRIFIER_DATA_DIR"
    )


def _download(url: str) -> bytes:
    """Fetches a URL whole, with a progress bar where there is a terminal."""
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
    """Takes the source's files out of an archive; a .gz or .xz is the only file itself."""
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
    """Refuses content that is empty or not what was published."""
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
