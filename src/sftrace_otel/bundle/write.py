# SPDX-License-Identifier: Apache-2.0
"""Writing bundles: a folder is filled under a hidden name beside its target and appears there by one rename.

Decision: `integrity.json` is written last, over the bytes that are on disk, so its presence means that the rest is
complete; then the folder is renamed. A bundle is replaced only if it is one, by an exchange of the two names where the
system has that (Linux), so that at every moment one of them is there; elsewhere the old one is moved aside first.
Rejected: temp file and rename for each file (a reader could see files of two bundles), and hashing while writing (would
trust the writer's memory, not the disk).

Folders get mode 0700 and files 0600. Nothing is written through a symbolic link.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from sftrace_otel.errors import FormatError, TraceStorageError
from sftrace_otel.formats import sftrace
from sftrace_otel.formats.sftrace import EventBase, Manifest, RedactionEntry, Redactions

SUFFIX = ".sftrace"
_CHUNK = 1 << 20
_HERE, _EXCHANGE = -100, 2
"""AT_FDCWD and RENAME_EXCHANGE of Linux."""
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _NO_FOLLOW | getattr(os, "O_CLOEXEC", 0)


class Writable(Protocol):
    """What `save` needs of a trace; `formats.sftrace.TraceData` and `trace.Trace` have it."""

    @property
    def manifest(self) -> Manifest: ...
    @property
    def events(self) -> Sequence[EventBase]: ...
    @property
    def redactions(self) -> Sequence[RedactionEntry]: ...


def finish_folder(
    folder: Path,
    *,
    manifest: Manifest,
    redactions: Sequence[RedactionEntry],
    fsync: bool = True,
    leave_out: Set[str] = frozenset(),
) -> None:
    """Turn a folder that holds `events.jsonl`, and maybe sidecars and blobs, into a complete bundle.

    Writes the manifest and the redactions, then `integrity.json` over every file that is there.

    Args:
        folder: The folder; still under its hidden name.
        manifest: What `manifest.json` says.
        redactions: The entries of `redactions.json`.
        fsync: Whether files and folders are flushed to the disk.
        leave_out: Names of files that are there but no part of the bundle.

    Raises:
        TraceStorageError: The folder cannot be written, or holds something that is neither file nor folder.
    """
    with reporting(folder):
        write_file(folder / sftrace.MANIFEST_FILE, [sftrace.dump_manifest(manifest)])
        entries = sftrace.dump_redactions(Redactions(entries=tuple(redactions)))
        write_file(folder / sftrace.REDACTIONS_FILE, [entries])
        (folder / sftrace.INTEGRITY_FILE).unlink(missing_ok=True)
        digests = {name: _seal(path, fsync=fsync) for name, path in _files(folder) if name not in leave_out}
        write_file(folder / sftrace.INTEGRITY_FILE, [sftrace.dump_integrity(digests)], fsync=fsync)
        for inner, _, _ in os.walk(folder):
            Path(inner).chmod(0o700)
            if fsync:
                sync_folder(Path(inner))


def publish(folder: Path, target: Path, *, overwrite: bool = False, suffix: str = SUFFIX) -> Path:
    """Rename a complete folder to `target`.

    Args:
        folder: A folder that `finish_folder` or `finish_flight` completed, on the same file system.
        target: Where the bundle goes; its parent is made if need be.
        overwrite: Replace a bundle that is there. Anything else there is never replaced.
        suffix: What its name must end in: `.sftrace` or `.flight`.

    Returns:
        `target`.

    Raises:
        TraceStorageError: Something is at `target`, or the rename failed; then nothing there has changed.
    """
    with reporting(target):
        require_free(target, overwrite=overwrite, suffix=suffix)
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if target.exists() and any(target.iterdir()):
            _swap(folder, target)
        else:
            folder.rename(target)
        sync_folder(target.parent)
    return target


def save(
    trace: Writable,
    target: Path,
    *,
    overwrite: bool = False,
    sidecars: Mapping[str, bytes | Iterable[bytes]] | None = None,
    blobs: Mapping[str, Iterable[bytes]] | None = None,
    fsync: bool = True,
) -> Path:
    """Write a trace as a bundle at `target`.

    Args:
        trace: Manifest, events and redactions. The counts of the manifest are made to fit the events.
        target: A path that ends in `.sftrace`.
        overwrite: As in `publish`.
        sidecars: File name to content, as bytes or as pieces of them.
        blobs: Name inside the bundle to the pieces of a body.
        fsync: As in `finish_folder`.

    Raises:
        TraceStorageError: `target` is no place for a bundle, or writing failed; then nothing is left behind.
    """
    manifest = trace.manifest.replace(totals=sftrace.totals(trace.events, known=trace.manifest.totals))
    lines = (sftrace.dump_event(event) + b"\n" for event in trace.events)
    return save_lines(
        lines,
        lambda: (manifest, trace.redactions),
        target,
        overwrite=overwrite,
        sidecars=sidecars,
        blobs=blobs,
        fsync=fsync,
    )


def save_lines(
    lines: Iterable[bytes],
    rest: Callable[[], tuple[Manifest, Sequence[RedactionEntry]]],
    target: Path,
    *,
    overwrite: bool = False,
    sidecars: Mapping[str, bytes | Iterable[bytes]] | None = None,
    blobs: Mapping[str, Iterable[bytes]] | None = None,
    fsync: bool = True,
) -> Path:
    """As `save`, for events that come one after the other: `lines` of `events.jsonl`, then `rest()` of them.

    Raises:
        TraceStorageError: As `save`. What the iterators raise passes through; nothing is left behind then either.
    """
    require_free(target, overwrite=overwrite)
    with reporting(target), _scratch_folder(target) as folder:
        write_file(folder / sftrace.EVENTS_FILE, lines)
        for name, content in {**(sidecars or {}), **(blobs or {})}.items():
            write_file(_inside(folder, name), [content] if isinstance(content, bytes) else content)
        manifest, redactions = rest()
        finish_folder(folder, manifest=manifest, redactions=redactions, fsync=fsync)
        return publish(folder, target, overwrite=overwrite)


@contextmanager
def filled(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """A folder to fill with a complete bundle; it is put at `target` when the block ends well, else it is gone.

    Raises:
        TraceStorageError: As `publish`; or what the block filled in is no bundle.
    """
    with reporting(target), _scratch_folder(target) as folder:
        yield folder
        if not is_bundle(folder):
            raise TraceStorageError("there is no bundle in it", where=str(target), code="missing_file")
        for inner, _, _ in os.walk(folder):
            Path(inner).chmod(0o700)
            sync_folder(Path(inner))
        publish(folder, target, overwrite=overwrite)


def require_free(target: Path, *, overwrite: bool, suffix: str = SUFFIX) -> None:
    """Refuse a target that a bundle cannot go to, before any work is done.

    Raises:
        TraceStorageError: The name does not end in `suffix`, or something is there that may not be replaced.
    """
    with reporting(target):
        _require_free(target, overwrite=overwrite, suffix=suffix)


def _require_free(target: Path, *, overwrite: bool, suffix: str) -> None:
    if target.suffix != suffix:
        raise TraceStorageError(f"the name of a bundle ends in {suffix}", where=str(target), code="bad_target")
    if target.is_symlink():
        raise TraceStorageError("is a symlink; bundles are not written through links", where=str(target), code="exists")
    if not target.exists():
        return
    if not target.is_dir():
        raise TraceStorageError("exists and is not a folder", where=str(target), code="exists")
    if not any(target.iterdir()):
        return
    if not overwrite:
        text = "already exists; choose another name, or ask to overwrite it"
        raise TraceStorageError(text, where=str(target), code="exists")
    if not (is_bundle(target) if suffix == SUFFIX else is_flight(target)):
        text = "exists and is not a bundle, so it is not overwritten"
        raise TraceStorageError(text, where=str(target), code="exists")


def is_bundle(folder: Path) -> bool:
    """Whether `folder` holds the required files, the manifest being one."""
    files = [folder / name for name in sftrace.REQUIRED_FILES]
    if folder.is_symlink() or not all(path.is_file() and not path.is_symlink() for path in files):
        return False
    try:
        sftrace.parse_manifest(files[0].read_bytes())
    except (OSError, FormatError):
        return False
    return True


def is_flight(folder: Path) -> bool:
    """Whether `folder` holds a chain and the manifest of one."""
    from sftrace_otel.formats import flight

    files = (folder / flight.MANIFEST_FILE, folder / flight.EVENTS_FILE)
    if folder.is_symlink() or not all(path.is_file() and not path.is_symlink() for path in files):
        return False
    try:
        flight.parse_manifest(files[0].read_bytes())
    except (OSError, FormatError):
        return False
    return True


def write_file(path: Path, pieces: Iterable[bytes], *, fsync: bool = False) -> None:
    """Write a file of mode 0600 from pieces, through one buffer. Raises OSError."""
    with new_file(path) as file:
        for piece in pieces:
            file.write(piece)
        if fsync:
            file.flush()
            os.fsync(file.fileno())


def new_file(path: Path) -> BinaryIO:
    """A file of mode 0600, empty, open for writing, never through a link. Raises OSError."""
    return os.fdopen(os.open(path, _NEW_FILE, 0o600), "wb", buffering=_CHUNK)


def _inside(folder: Path, name: str) -> Path:
    if not sftrace.is_inner_name(name):
        raise TraceStorageError(f"{name!r} is not a path inside a bundle", code="bad_target")
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def _files(folder: Path, prefix: str = "") -> Iterator[tuple[str, Path]]:
    """Every file below `folder` as (name with `/`, path). Refuses links, devices and the like."""
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path), f"{prefix}{entry.name}/")
        elif entry.is_file(follow_symlinks=False):
            yield f"{prefix}{entry.name}", Path(entry.path)
        else:
            raise TraceStorageError("is neither a file nor a folder", where=entry.path, code="bad_target")


def _seal(path: Path, *, fsync: bool) -> str:
    """Give a file its mode, flush it if asked, and return its SHA-256."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
        if hasattr(os, "fchmod"):
            os.fchmod(file.fileno(), 0o600)
        if fsync:
            os.fsync(file.fileno())
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, where the system can."""
    flags = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
    try:
        handle = os.open(folder, flags)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def _swap(folder: Path, target: Path) -> None:
    """Put `folder` where the bundle `target` is; the old one comes back if that fails."""
    aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.old")
    if _exchange(folder, target):
        try:
            folder.rename(aside)  # a name that nobody takes for a journal
        except OSError:
            aside = folder
    else:
        target.rename(aside)
        try:
            folder.rename(target)
        except OSError:
            aside.rename(target)
            raise
    shutil.rmtree(aside, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Let two names change places at once; False where the system or the file system cannot (renameat2(2))."""
    if not sys.platform.startswith("linux"):
        return False
    import ctypes

    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    rename.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return bool(rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0)


@contextmanager
def _scratch_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target`, under a hidden name of its own; gone afterwards unless it was renamed."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def reporting(path: Path) -> Iterator[None]:
    """Turn an OSError into one line that says what could not be written, and why."""
    try:
        yield
    except OSError as error:
        raise not_writable(error, path) from error


def not_writable(error: OSError, path: Path) -> TraceStorageError:
    """The error that says why the system did not let `path` be written."""
    reason = error.strerror or type(error).__name__
    return TraceStorageError(f"cannot be written: {reason}", where=str(path), code="not_writable")
