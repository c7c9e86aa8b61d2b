# SPDX-License-Identifier: Apache-2.0
"""A bundle in one packed file, read in place.

Decision: the file is opened once; its table of contents is judged as a whole before anything in it is read: plain names
only, each once, no links, no encryption, no overlapping or absurdly large entries; and what is read is counted, since a
table can lie. Rejected: unpacking into a temporary folder (writes for a read, and leaves it behind when killed).
"""

from __future__ import annotations

import io
import os
import stat
import struct
import unicodedata
import weakref
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import IO, BinaryIO, cast

from sftrace_otel.bundle.store import CHUNK, MAX_DOCUMENT_BYTES, READING, Store, unreadable
from sftrace_otel.errors import TraceStorageError
from sftrace_otel.formats import canonical
from sftrace_otel.formats.sftrace import is_inner_name

MAX_PACK_BYTES = 4 << 30
"""Largest sum of the files in a pack."""
MAX_PACK_ENTRIES = 60_000
"""Most entries of a pack; more would need the 64-bit form of the zip format, which is not read."""
MAX_PIECES_BYTES = 64 << 20
"""Largest store of pieces in a pack; it is held in memory while one is read."""
PIECES = ".pack/pieces"
REFERENCES = ".pack/refs/"

_MAX_TABLE = 16 << 20
_MAX_RATIO = 1100  # deflate cannot do better than 1032
_END = struct.Struct("<4s4H2LH")
_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, struct.error, ValueError)


class PackStore(Store):
    """A `.sftrace.zip`: each file an entry of its own, or a list of references into a store of pieces."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._zip = self._opened(path)
        self._entries = self._judged()

    def _opened(self, path: Path) -> zipfile.ZipFile:
        try:
            file = os.fdopen(os.open(path, READING), "rb")
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
            with raw, io.BufferedReader(raw, CHUNK) as file:
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
