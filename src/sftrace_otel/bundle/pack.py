# SPDX-License-Identifier: Apache-2.0
"""One file of a bundle, and back: the same bundle gives the same bytes, and every file comes back byte for byte.

Decision: a zip file, since every system can look into it: deflate, the four files of the format first, then by name,
all with one fixed time and mode. An agent that resends its history stores each message once a turn, farther apart than
deflate looks back; where that repetition is large, the rows and bodies become references into one store of pieces
(`.pack/pieces`, `.pack/refs/<name>`). Texts are cut at places that depend on the text alone, so that equal messages
give equal pieces wherever they stand. Small bundles, and those with little repetition, have plain entries only.
Rejected: zstd or LZMA (another library, or a form that few tools open), and pieces by message (would parse payloads).

Only files that `integrity.json` lists go in; foreign files stay behind and are named.
"""

from __future__ import annotations

import re
import stat
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import IO

from sftrace_otel.bundle.packed import (
    MAX_PACK_BYTES,
    MAX_PACK_ENTRIES,
    MAX_PIECES_BYTES,
    PIECES,
    REFERENCES,
    PackStore,
)
from sftrace_otel.bundle.read import Bundle, open_bundle
from sftrace_otel.bundle.store import PACK_SUFFIX
from sftrace_otel.bundle.write import filled, new_file, require_free, write_file
from sftrace_otel.errors import TraceStorageError
from sftrace_otel.formats.sftrace import INTEGRITY_FILE, REQUIRED_FILES, SIGNATURE_FILE
from sftrace_otel.formats.sidecars import PROVENANCE_FILE, RUN_FILE

_FIRST = (*REQUIRED_FILES, INTEGRITY_FILE)
_WHOLE = {REQUIRED_FILES[0], REQUIRED_FILES[2], INTEGRITY_FILE, RUN_FILE, PROVENANCE_FILE, SIGNATURE_FILE}
_TIME = (1980, 1, 1, 0, 0, 0)
_WORTH = 1 << 20
"""Bytes that references must save, at least, and the factor by which."""
_FACTOR = 1.5
_BLOCK = 1 << 22
_PIECE = re.compile(rb"(?s).{48,4096}?(?:\"\}|\}\]|\\n|\n|e t| a |\. )|.{1,4096}")


@dataclass(frozen=True, slots=True)
class Packed:
    """A pack that was written: where, its size in bytes, that of the files in it, and what was left out."""

    path: Path
    size: int
    unpacked: int
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A bundle that was unpacked, and whether its files have their checksums (`verified`, `mismatch`, …)."""

    path: Path
    integrity: str


def pack(path: Path | str, target: Path | None = None, *, overwrite: bool = False) -> Packed:
    """Put a bundle into one file.

    Args:
        path: The bundle's folder.
        target: A name that ends in `.sftrace.zip`; by default the folder's with `.zip` added.
        overwrite: Replace a pack that is there.

    Raises:
        TraceStorageError: It cannot be read, is packed already, or `target` cannot be written; nothing is left then.
    """
    bundle = open_bundle(path)
    if isinstance(bundle.store, PackStore):
        raise TraceStorageError("is packed already", where=str(path), code="bad_target")
    place = target or bundle.path.with_name(f"{bundle.path.name}.zip")
    _require_free_file(place, overwrite=overwrite)
    names = _names(bundle)
    left_out = tuple(name for name in bundle.store.names() if name not in names)
    sizes = {name: sum(map(len, bundle.store.chunks(name))) for name in names}
    if sum(sizes.values()) > MAX_PACK_BYTES or len(names) > MAX_PACK_ENTRIES - 1:
        raise TraceStorageError("is larger than a pack holds", where=str(path), code="bad_target")
    with _appearing(place) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, allowZip64=False) as packed:
        _fill(packed, bundle, names, sizes)
    return Packed(place, place.stat().st_size, sum(sizes.values()), left_out)


def unpack(path: Path | str, target: Path | None = None, *, overwrite: bool = False) -> Unpacked:
    """Put the files of a pack into a folder, as they were.

    Args:
        path: The pack.
        target: A name that ends in `.sftrace`; by default the pack's without `.zip`.
        overwrite: Replace a bundle that is there.

    Raises:
        TraceStorageError: It is no pack, something in it is refused, or `target` cannot be written; nothing is left
            then.
    """
    bundle = open_bundle(path)
    if not isinstance(bundle.store, PackStore):
        raise TraceStorageError("is a folder already", where=str(path), code="bad_target")
    place = target or bundle.path.with_name(bundle.path.name.removesuffix(".zip"))
    require_free(place, overwrite=overwrite)
    with filled(place, overwrite=overwrite) as folder:
        for name in bundle.store.names():
            inner = folder / name
            inner.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_file(inner, bundle.store.chunks(name), fsync=True)
    return Unpacked(place, open_bundle(place).integrity().state)


def _names(bundle: Bundle) -> list[str]:
    """The files of a pack, in their order: those of the format, then by name."""
    listed = [name for name in bundle.listed() if name != INTEGRITY_FILE and bundle.has(name)]
    there = [*listed, *(name for name in (INTEGRITY_FILE, SIGNATURE_FILE) if name not in listed and bundle.has(name))]
    for name in there:
        if name.startswith(".pack/") or name.endswith(".zip"):
            raise TraceStorageError("cannot be in a pack", where=bundle.store.where(name), code="bad_target")
        bundle.store.require(name)
    return sorted(there, key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name))


def _fill(packed: zipfile.ZipFile, bundle: Bundle, names: list[str], sizes: dict[str, int]) -> None:
    references = _referred(bundle, [name for name in names if name not in _WHOLE], sizes)
    for name in names:
        if references is not None and name in references.of:
            _add(packed, REFERENCES + name, [references.of[name]])
        else:
            _add(packed, name, bundle.store.chunks(name))
    if references is not None:
        _add(packed, PIECES, references.pieces)


def _add(packed: zipfile.ZipFile, name: str, pieces: Iterable[bytes]) -> None:
    entry = zipfile.ZipInfo(name, _TIME)
    entry.create_system = 3
    entry.external_attr = (stat.S_IFREG | 0o600) << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    with packed.open(entry, "w") as file:
        for piece in pieces:
            file.write(piece)


# Pieces


@dataclass(slots=True)
class _References:
    """Files as references into pieces: each piece once, in the order of its first use."""

    of: dict[str, bytes] = field(default_factory=dict)
    pieces: dict[bytes, int] = field(default_factory=dict)
    size: int = 0

    def add(self, name: str, chunks: Iterable[bytes]) -> bool:
        """Cut a file; False where the pieces of all files have become too many to be held."""
        spans: list[tuple[int, int]] = []
        total = start = end = 0
        for piece in _cut(chunks):
            total += len(piece)
            at = self.pieces.get(piece)
            if at is None:
                at = self.pieces[piece] = self.size
                self.size += len(piece)
                if self.size > MAX_PIECES_BYTES:
                    return False
            if at != end:
                spans.append((start, end - start))
                start = at
            end = at + len(piece)
        spans.append((start, end - start))
        lines = [b"%d" % total, *(b"%d %d" % span for span in spans if span[1])]
        self.of[name] = b"\n".join(lines) + b"\n"
        return True


def _referred(bundle: Bundle, names: list[str], sizes: dict[str, int]) -> _References | None:
    """The files as references, where that saves enough; else None."""
    total = sum(sizes[name] for name in names)
    if total < _WORTH:
        return None
    references = _References()
    for name in names:
        if not references.add(name, bundle.store.chunks(name)):
            return None
    stored = references.size + sum(map(len, references.of.values()))
    return references if total - stored > _WORTH and total > _FACTOR * stored else None


def _cut(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The pieces of a file: cut after ends of messages, lines and common words, whatever stands before."""
    rest = b""
    for chunk in _blocks(chunks):
        data = rest + chunk
        end = 0
        for found in _PIECE.finditer(data):
            if found.end() > len(data) - 4200:
                break
            end = found.end()
            yield found[0]
        rest = data[end:]
    yield from (found[0] for found in _PIECE.finditer(rest))


def _blocks(chunks: Iterable[bytes]) -> Iterator[bytes]:
    waiting: list[bytes] = []
    size = 0
    for chunk in chunks:
        waiting.append(chunk)
        size += len(chunk)
        if size >= _BLOCK:
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)


# One file in place


def _require_free_file(target: Path, *, overwrite: bool) -> None:
    where = str(target)
    if not target.name.endswith(PACK_SUFFIX):
        raise TraceStorageError(f"the name of a pack ends in {PACK_SUFFIX}", where=where, code="bad_target")
    if target.is_symlink() or (target.exists() and not target.is_file()):
        raise TraceStorageError("exists and is no file, so it is not overwritten", where=where, code="exists")
    if target.exists():
        if not overwrite:
            text = "already exists; choose another name, or ask to overwrite it"
            raise TraceStorageError(text, where=where, code="exists")
        open_bundle(target)


@contextmanager
def _appearing(target: Path) -> Iterator[IO[bytes]]:
    """A file that appears at `target` by a rename when the block ends well, and leaves nothing when it does not."""
    scratch = target.with_name(f".{target.name}.{token_hex(4)}.part")
    try:
        with new_file(scratch) as file:
            yield file
        scratch.replace(target)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise TraceStorageError(f"cannot be written: {reason}", where=str(target), code="not_writable") from error
    finally:
        scratch.unlink(missing_ok=True)
