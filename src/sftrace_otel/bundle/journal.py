# SPDX-License-Identifier: Apache-2.0
"""The journal of an open run: append-only, one write per record, turned into a bundle when the run ends.

Decision: the journal is a folder beside the bundle-to-be, `.<bundle name>.journal/`. Its `journal.jsonl` takes a head,
then one record when a call begins and one when it ends; blobs and wire rows go straight to the files that the bundle
will have. Closing writes `events.jsonl` and `calls.jsonl` from the records and renames the folder, so a body is written
once and a bundle is never half there. Every append is one `write` to a file opened for appending: what was appended
survives the death of the process at any moment (a power cut only with `fsync`). `journal.jsonl` stays until
`integrity.json` stands, so that `recover` can always make the bundle, and the writer holds a lock on it until the
rename, so that nobody takes a living run for a dead one.
Rejected: events kept in memory until exit (lost with the process, memory grows with the run); a writer thread (a queue
to lose, and 5 ms convoys on the interpreter lock, `facts/performance.md` §0); a pid file (pids are used again).

Records hold payloads already redacted and already canonical, so closing copies bytes and never re-encodes a payload.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

import orjson

from sftrace_otel.bundle.build import (
    Closing,
    Counts,
    begun_with,
    build,
    manifest_of,
    read_records,
    sorted_records,
    timestamp,
)
from sftrace_otel.bundle.records import JOURNAL_FILE, JOURNAL_SUFFIX, NOTHING, Begin, End, Head, Single, encode
from sftrace_otel.bundle.write import finish_folder, is_bundle, publish
from sftrace_otel.errors import TraceStorageError
from sftrace_otel.formats import canonical, sidecars

__all__ = ["NOTHING", "Begin", "Closing", "Counts", "End", "Head", "Journal", "Single", "hold", "timestamp"]

_NEW = os.O_WRONLY | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class Journal:
    """Writes one run's records. Not thread-safe: the run that owns it holds a lock. Raises OSError.

    Attributes:
        target: Where the bundle will be.
        folder: Where the journal is.
        earlier: An unfinished journal for the same target, left by a process that died; None if there is none.
        size: Bytes appended so far, sidecars and blobs included.
    """

    takes_requests = False
    """Whether it is told of a request before its answer (`bundle.chains`)."""

    def __init__(self, target: Path, *, fsync: str, head: Head | None = None) -> None:
        self.target = target
        self.folder = target.with_name(f".{target.name}{JOURNAL_SUFFIX}")
        self.earlier: Path | None = None
        self.size = 0
        self._sync = fsync == "event"
        self._fsync = fsync
        self._files: dict[str, int] = {}
        self._last = -1
        self._in_order = True
        self._start: Single | None = None
        self.folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._make_folder()
        self._main = self._open(JOURNAL_FILE)
        hold(self._main)
        if head is not None:
            self.introduce(head)

    def _make_folder(self) -> None:
        """Never into what another process left: a folder that is there stays, for `recover`."""
        try:
            self.folder.mkdir(mode=0o700)
        except FileExistsError:
            self.earlier = self.folder
            name = f".{self.target.stem}.{secrets.token_hex(4)}{self.target.suffix}{JOURNAL_SUFFIX}"
            self.folder = self.target.with_name(name)
            self.folder.mkdir(mode=0o700)

    def _open(self, name: str) -> int:
        return os.open(self.folder / name, _NEW | os.O_APPEND, 0o600)

    def append(self, line: bytes) -> None:
        """Append one record; `line` ends with a newline."""
        size = len(line)
        done = os.write(self._main, line)
        if done != size:
            _write_rest(self._main, line, done)
        self.size += size
        if self._sync:
            os.fsync(self._main)

    def introduce(self, head: Head) -> None:
        """Say whose run it is, before anything else."""
        self.append(encode(head) + b"\n")

    def record(self, record: Begin | End | Single, *, sends: bool = False) -> None:
        """Append one record and remember whether they still come in order of time. `sends` is for other journals."""
        if record.m >= self._last:
            self._last = record.m
        elif record.m > 0:
            self._in_order = False
        else:
            self._start_again(record)
        self.append(encode(record) + b"\n")

    def _start_again(self, record: Begin | End | Single) -> None:
        """Only a run_start has the time 0 after others: its input is known better now."""
        if isinstance(record, Single) and record.type == "run_start":
            self._start = record
        else:
            self._in_order = False

    def row(self, sidecar: str, row: Mapping[str, object]) -> None:
        """Append a row to `<sidecar>.jsonl`, with the header first."""
        file = self._files.get(sidecar)
        try:
            line = orjson.dumps(row) + b"\n"
        except TypeError:  # an int beyond 64 bits
            line = canonical.dumps(dict(row)) + b"\n"  # type: ignore[arg-type]
        if file is None:
            file = self._files[sidecar] = self._open(f"{sidecar}.jsonl")
            line = sidecars.header(sidecar) + b"\n" + line
        self.size += append_to(file, line)

    def sent(self, call: int, row: Mapping[str, object]) -> None:
        """A request goes out; it is in the row that its exchange will have."""

    def blob(self, data: bytes) -> str:
        """Store `data` (already redacted) by its digest, before the row that names it; give `sha256:<hex>`."""
        name = hashlib.sha256(data).hexdigest()
        path = self.folder / "blobs" / name[:2] / name[2:4] / name
        if not path.exists():
            for folder in (path.parents[2], path.parents[1], path.parent):
                folder.mkdir(exist_ok=True, mode=0o700)
            scratch = path.with_suffix(".part")
            file = os.open(scratch, _NEW | os.O_TRUNC, 0o600)
            try:
                self.size += append_to(file, data)
                if self._sync:
                    os.fsync(file)
            finally:
                os.close(file)
            scratch.replace(path)
        return f"sha256:{name}"

    def abandon(self) -> None:
        """Close the files and leave the folder (a forked child must not touch its parent's journal)."""
        for file in (self._main, *self._files.values()):
            _close(file)
        self._files.clear()
        self._main = -1

    def close(self, closing: Closing, *, overwrite: bool = False) -> tuple[Path, Counts]:
        """Build the bundle and put it in place. Raises OSError or TraceStorageError; the journal then stays."""
        counts = Counts()
        path = self.folder / JOURNAL_FILE
        try:
            records = read_records(path, counts) if self._in_order else sorted_records(path, counts)
            if self._start is not None:
                records = begun_with(self._start, records)
            build(self.folder, records, closing, counts)
            finish_folder(
                self.folder,
                manifest=manifest_of(closing, counts),
                redactions=counts.entries,
                fsync=self._fsync != "never",
                leave_out={JOURNAL_FILE},
            )
            if os.name == "nt":  # there an open file cannot be removed
                self.abandon()
            path.unlink()
            return self._publish(overwrite), counts
        finally:
            self.abandon()

    def _publish(self, overwrite: bool) -> Path:
        try:
            return publish(self.folder, self.target, overwrite=overwrite)
        except TraceStorageError:
            if not self.folder.exists() and is_bundle(self.target):  # a `recover` found the complete folder first
                return self.target
            raise

    def discard(self) -> None:
        """Remove the journal and everything in it."""
        self.abandon()
        shutil.rmtree(self.folder, ignore_errors=True)


def hold(file: int) -> bool:
    """Take the lock of an open journal for this process, without waiting; False if another one has it.

    True where the system or the file system has no such lock: then the process id in the head must do.
    """
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _close(file: int) -> None:
    if file >= 0:
        try:
            os.close(file)
        except OSError:
            pass


def append_to(file: int, data: bytes) -> int:
    """Write all of `data` and give its length. Raises OSError; of a line that does not fit nothing stays."""
    done = os.write(file, data)
    if done != len(data):
        _write_rest(file, data, done)
    return len(data)


def _write_rest(file: int, data: bytes, done: int) -> None:
    """Write what is left of `data`. What a full disk lets in of a line is taken back, so none stays torn."""
    try:
        while done < len(data):
            done += os.write(file, data[done:])
    except OSError:
        os.ftruncate(file, os.lseek(file, 0, os.SEEK_END) - done)
        raise
