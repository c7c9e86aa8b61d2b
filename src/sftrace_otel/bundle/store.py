# SPDX-License-Identifier: Apache-2.0
"""Where the files of a bundle are: in a folder, or in one packed file. Both are read the same way, in place.

Decision: a bundle is data from a stranger. In a folder a file is looked at before it is opened (`lstat`), opened
without following links and without waiting (a FIFO must not block), and looked at again through the open handle.
Packed files are `bundle.packed`, imported for one only: the zip library is a fifth of the start of a verb. Rejected:
reading the names that a manifest gives.
"""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from sftrace_otel.errors import TraceStorageError
from sftrace_otel.formats.sftrace import REQUIRED_FILES

MAX_LINE_BYTES = 128 << 20
"""Longest line that is read into memory."""
MAX_DOCUMENT_BYTES = 128 << 20
"""Largest file that is read into memory whole."""
MAX_FILE_BYTES = 4 << 30
"""Largest file of a bundle; a sparse one can say that it is far larger than the disk."""
PACK_SUFFIX = ".sftrace.zip"
CHUNK = 1 << 20
READING = (
    os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
)  # fmt: skip
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


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
        data = b""
        with self.open(name) as file:
            while len(data) <= MAX_DOCUMENT_BYTES and (
                chunk := file.read(CHUNK)
            ):  # asked for all, it would set it aside
                data = data + chunk if data else chunk
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
            while chunk := file.read(CHUNK):
                yield chunk

    def digest(self, name: str) -> str:
        """SHA-256 of a file."""
        import hashlib

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
            text = f"there is no such bundle{unfinished(place)}"
            raise TraceStorageError(text, where=str(place), code="missing_file") from None
        raise unreadable(error, place) from error
    if stat.S_ISDIR(mode):
        return FolderStore(place)
    if stat.S_ISREG(mode) and place.name.endswith(".zip"):
        from sftrace_otel.bundle.packed import PackStore

        return PackStore(place)
    text = f"is neither a folder nor a {PACK_SUFFIX} file; a bundle is one of them"
    raise TraceStorageError(text, where=str(place), code="missing_file")


def unfinished(path: Path) -> str:
    """What to add to "no such bundle" where a recording of it is still open, or was cut off; else nothing."""
    try:
        there = path.with_name(f".{path.name}.journal").is_dir()
    except (OSError, ValueError):
        return ""
    text = ", but an unfinished recording of it; if its process is gone, make it one with: sftrace recover PATH"
    return text if there else ""


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
            handle = os.open(path, READING | _NO_FOLLOW)
            with os.fdopen(handle, "rb", buffering=CHUNK) as file:
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
