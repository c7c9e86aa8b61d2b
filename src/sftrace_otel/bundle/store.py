# SPDX-License-Identifier: Apache-2.0
"""Where the files of a bundle are: in a folder, or in one packed file. Both are read the same way, in place.

Decision: a bundle is data from a stranger. In a folder a file is looked at before it is opened (`lstat`), opened
without following links and without waiting (a FIFO must not block), and looked at again through the open handle. A
packed file is opened once; its table of contents is judged as a whole before anything in it is read: plain names only,
each once, no links, no encryption, no overlapping or absurdly large entries; and what is read is counted, since a
table can lie. Rejected: unpacking into a temporary folder (writes for a read, and leaves it behind when killed), and
reading the names that a manifest gives.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import struct
import unicodedata
import weakref
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import IO, BinaryIO, cast

from sftrace_otel.errors import TraceStorageError
from sftrace_otel.formats import canonical
from sftrace_otel.formats.sftrace import REQUIRED_FILES, is_inner_name

MAX_LINE_BYTES = 128 << 20
"""Longest line that is read into memory."""
MAX_DOCUMENT_BYTES = 128 << 20
"""Largest file that is read into memory whole."""
MAX_FILE_BYTES = 4 << 30
"""Largest file of a bundle; a sparse one can say that it is far larger than the disk."""
MAX_PACK_BYTES = 4 << 30
"""Largest sum of the files in a pack."""
MAX_PACK_ENTRIES = 60_000
"""Most entries of a pack; more would need the 64-bit form of the zip format, which is not read."""
MAX_PIECES_BYTES = 64 << 20
"""Largest store of pieces in a pack; it is held in memory while one is read."""
PACK_SUFFIX = ".sftrace.zip"
PIECES = ".pack/pieces"
REFERENCES = ".pack/refs/"

_CHUNK = 1 << 20
_MAX_TABLE = 16 << 20
_MAX_RATIO = 1100  # deflate cannot do better than 1032
_FLAGS = (
    os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
)  # fmt: skip
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_END = struct.Struct("<4s4H2LH")


class Store(ABC):
    """The files of one bundle, by name with `/`. All methods raise TraceStorageError."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def require(self, name: str) -> None:
        """Refuse what is no regular file, before anything opens it."""

    @abstractmethod
    def open(self, name: str) -> AbstractContextManager[BinaryIO]:
        """The file, open for reading, inside a `with`."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is something of this name."""

    @abstractmethod
    def names(self) -> Iterator[str]:
        """Everything that is there, sorted; links and devices too, which `require` refuses."""

    def read(self, name: str) -> bytes:
        """A file as a whole, if it is not too large for that."""
        with self.open(name) as file:
            data = file.read(MAX_DOCUMENT_BYTES + 1)
        if len(data) > MAX_DOCUMENT_BYTES:
            text = f"is larger than {MAX_DOCUMENT_BYTES >> 20} MiB, more than this reads"
            raise self.fault(name, text, code="invalid_json")
        return data

    def lines(self, name: str) -> Iterator[bytes]:
        """The lines of a file, split at `\\n` only, each with its newline if it has one."""
        with self.open(name) as file:
            for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES), b""), start=1):
                if len(line) >= MAX_LINE_BYTES:
                    text = f"line {number} is longer than {MAX_LINE_BYTES >> 20} MiB, more than this reads"
                    raise self.fault(name, text, code="invalid_json")
                yield line

    def chunks(self, name: str) -> Iterator[bytes]:
        """The bytes of a file in pieces of bounded size."""
        with self.open(name) as file:
            while chunk := file.read(_CHUNK):
                yield chunk

    def digest(self, name: str) -> str:
        """SHA-256 of a file."""
        digest = hashlib.sha256()
        for chunk in self.chunks(name):
            digest.update(chunk)
        return digest.hexdigest()

    def where(self, name: str) -> str:
        """How a file is named in messages."""
        return str(self.path / name)

    def fault(self, name: str, text: str, *, code: str = "missing_file") -> TraceStorageError:
        """The error that says `text` of a file."""
        return TraceStorageError(text, where=self.where(name), code=code)

    def missing(self, name: str) -> TraceStorageError:
        """The error that a file is not there."""
        return self.fault(
            name, "the file is missing; without it this is no bundle" if name in REQUIRED_FILES else "is missing"
        )


def open_store(path: Path | str) -> Store:
    """The store at `path`.

    Raises:
        TraceStorageError: There is neither a folder nor a pack that can be read (code `missing_file`).
    """
    place = Path(path).expanduser()
    try:
        mode = place.stat().st_mode
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError | FileNotFoundError | NotADirectoryError):
            raise TraceStorageError("there is no such bundle", where=str(place), code="missing_file") from None
        raise unreadable(error, place) from error
    if stat.S_ISDIR(mode):
        return FolderStore(place)
    if stat.S_ISREG(mode) and place.name.endswith(".zip"):
        return PackStore(place)
    text = f"is neither a folder nor a {PACK_SUFFIX} file; a bundle is one of them"
    raise TraceStorageError(text, where=str(place), code="missing_file")


def unreadable(error: Exception, path: Path) -> TraceStorageError:
    """The error that says why the system did not let `path` be read."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return TraceStorageError(f"cannot be read: {reason}", where=str(path), code="missing_file")


class FolderStore(Store):
    """A folder."""

    def require(self, name: str) -> None:
        path = self.path
        parts = name.split("/")
        for depth, part in enumerate(parts, start=1):
            path = path / part
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:
                raise self.missing(name) from None
            except (OSError, ValueError) as error:
                raise unreadable(error, path) from error
            if stat.S_ISLNK(mode):
                text = "is a symlink; links in bundles are not followed"
                raise TraceStorageError(text, where=str(path), code="missing_file")
            if not (stat.S_ISREG(mode) if depth == len(parts) else stat.S_ISDIR(mode)):
                raise TraceStorageError("is not a regular file", where=str(path), code="missing_file")

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        self.require(name)
        path = self.path / name
        try:
            handle = os.open(path, _FLAGS | _NO_FOLLOW)
            with os.fdopen(handle, "rb", buffering=_CHUNK) as file:
                status = os.fstat(handle)
                if not stat.S_ISREG(status.st_mode):
                    raise TraceStorageError("is not a regular file", where=str(path), code="missing_file")
                if status.st_size > MAX_FILE_BYTES:
                    text = f"is larger than {MAX_FILE_BYTES >> 20} MiB, more than this reads"
                    raise TraceStorageError(text, where=str(path), code="invalid_json")
                yield file
        except OSError as error:
            raise unreadable(error, path) from error

    def has(self, name: str) -> bool:
        try:
            (self.path / name).lstat()
        except (OSError, ValueError):
            return False
        return True

    def names(self) -> Iterator[str]:
        return _walk(self.path)


def _walk(folder: Path, prefix: str = "", depth: int = 0) -> Iterator[str]:
    """Everything below `folder` but folders, as names with `/`. Links are named, not followed."""
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        raise unreadable(error, folder) from error
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and depth < 8:
            yield from _walk(Path(entry.path), f"{prefix}{entry.name}/", depth + 1)
        else:
            yield f"{prefix}{entry.name}"


# Packs

_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, struct.error, ValueError)


class PackStore(Store):
    """A `.sftrace.zip`: each file an entry of its own, or a list of references into a store of pieces."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._zip = self._opened(path)
        self._entries = self._judged()

    def _opened(self, path: Path) -> zipfile.ZipFile:
        try:
            file = os.fdopen(os.open(path, _FLAGS), "rb")
        except OSError as error:
            raise unreadable(error, path) from error
        try:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise TraceStorageError("is not a regular file", where=str(path), code="missing_file")
            self._size = _check_end(file, path)
            opened = zipfile.ZipFile(file)
        except (*_BROKEN, OSError, UnicodeError) as error:
            file.close()
            if isinstance(error, TraceStorageError):
                raise
            raise self._no_zip(str(error)) from None
        weakref.finalize(self, file.close)
        return opened

    def _no_zip(self, reason: str) -> TraceStorageError:
        text = f"is not a zip file that can be read: {canonical.printable(reason, quote=False)}"
        return TraceStorageError(text, where=str(self.path), code="missing_file")

    def _judged(self) -> dict[str, zipfile.ZipInfo]:
        """The entries by the name of the file they stand for."""
        entries: dict[str, zipfile.ZipInfo] = {}
        folded: set[str] = set()
        total = 0
        for info in self._zip.infolist():
            self._judge(info)
            name = info.filename.removeprefix(REFERENCES)
            key = unicodedata.normalize("NFC", name).casefold()
            if key in folded:
                raise self._refused(name, "is there twice")
            folded.add(key)
            entries[name] = info
            total += info.file_size
        if total > MAX_PACK_BYTES:
            text = f"its files take {total >> 20} MiB, more than the {MAX_PACK_BYTES >> 20} MiB that this reads"
            raise TraceStorageError(text, where=str(self.path), code="missing_file")
        self._check_places()
        pieces = entries.get(PIECES)
        if pieces is not None and pieces.file_size > MAX_PIECES_BYTES:
            raise self._refused(PIECES, "is larger than this reads")
        return entries

    def _judge(self, info: zipfile.ZipInfo) -> None:
        name = info.filename
        if info.orig_filename != name or not is_inner_name(name) or info.is_dir():
            raise self._refused(info.orig_filename, "is not a path inside a bundle")
        if name.startswith(".pack/") and name != PIECES and not is_inner_name(name.removeprefix(REFERENCES)):
            raise self._refused(name, "is not a path inside a bundle")
        if name.endswith(".zip"):
            raise self._refused(name, "is a zip file inside a zip file")
        kind = stat.S_IFMT(info.external_attr >> 16)
        if kind == stat.S_IFLNK:
            raise self._refused(name, "is a symlink; links in bundles are not followed")
        if kind not in (0, stat.S_IFREG):
            raise self._refused(name, "is not a regular file")
        if info.flag_bits & 0x41:
            raise self._refused(name, "is encrypted")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise self._refused(name, "is compressed in another way than deflate")
        if info.file_size > _MAX_RATIO * info.compress_size + 1024:
            raise self._refused(name, "says that it is larger than it can be")

    def _check_places(self) -> None:
        """Entries that share bytes make a small file mean a huge one."""
        end = 0
        for info in sorted(self._zip.infolist(), key=lambda one: one.header_offset):
            if info.header_offset < end:
                raise self._refused(info.filename, "overlaps another entry")
            end = info.header_offset + 30 + len(info.filename) + info.compress_size
        if end > self._size:
            raise self._no_zip("an entry ends after the file")

    def _refused(self, name: str, text: str) -> TraceStorageError:
        shown = canonical.printable(name, quote=False)
        return TraceStorageError(text, where=f"{self.path}/{shown}", code="missing_file")

    def require(self, name: str) -> None:
        if not self.has(name):
            raise self.missing(name)

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        self.require(name)
        info = self._entries[name]
        try:
            entry = self._zip.open(info)
            raw = cast(io.RawIOBase, entry) if info.filename == name else _Pieced(self, name, entry)
            with raw, io.BufferedReader(raw, _CHUNK) as file:
                yield cast(BinaryIO, file)
        except (*_BROKEN, OSError) as error:
            if isinstance(error, TraceStorageError):
                raise
            raise self.fault(name, f"cannot be read: {canonical.printable(str(error), quote=False)}") from None

    def has(self, name: str) -> bool:
        return name in self._entries and name != PIECES

    def names(self) -> Iterator[str]:
        return (name for name in sorted(self._entries) if name != PIECES)

    @cached_property
    def pieces(self) -> bytes:
        """The store of pieces that references point into."""
        info = self._entries.get(PIECES)
        if info is None:
            raise self._no_zip("it has references and no pieces")
        with self._zip.open(info) as file:
            return file.read(MAX_PIECES_BYTES)


def _check_end(file: BinaryIO, path: Path) -> int:
    """Look at the end record before the table of contents is read into memory; gives the size of the file."""
    size = file.seek(0, os.SEEK_END)
    tail_at = file.seek(max(0, size - (1 << 16) - _END.size))
    tail = file.read()
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) - at < _END.size:
        raise TraceStorageError("is not a zip file", where=str(path), code="missing_file")
    _, _, _, _, entries, table, start, _ = _END.unpack_from(tail, at)
    if entries > MAX_PACK_ENTRIES or table > _MAX_TABLE or start + table > tail_at + at:
        text = f"its table of contents is larger than this reads ({MAX_PACK_ENTRIES} entries)"
        raise TraceStorageError(text, where=str(path), code="missing_file")
    file.seek(0)
    return size


class _Pieced(io.RawIOBase):
    """A file put together from pieces: lines of `offset length` after a line with the size of the whole."""

    def __init__(self, store: PackStore, name: str, references: IO[bytes]) -> None:
        self._pieces = memoryview(store.pieces)
        with references:
            data = references.read(MAX_DOCUMENT_BYTES)
        try:
            head, _, rest = data.partition(b"\n")
            self._left = int(head)
            numbers = list(map(int, rest.split()))
        except ValueError:
            raise store.fault(name, "its references cannot be read") from None
        self._spans = iter(zip(numbers[::2], numbers[1::2], strict=True) if len(numbers) % 2 == 0 else ())
        self._fault = store.fault(name, "its references do not fit its pieces")
        if not 0 <= self._left <= MAX_PACK_BYTES:
            raise self._fault
        self._now = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._now:
            span = next(self._spans, None)
            if span is None:
                if self._left:
                    raise self._fault
                return 0
            offset, length = span
            if offset < 0 or not 0 < length <= len(self._pieces) - offset or length > self._left:
                raise self._fault
            self._now = self._pieces[offset : offset + length]
            self._left -= length
        count = min(len(buffer), len(self._now))
        buffer[:count] = self._now[:count]
        self._now = self._now[count:]
        return count
