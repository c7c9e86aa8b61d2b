# SPDX-License-Identifier: Apache-2.0
"""A chain that a killed process left, made into a `.flight` bundle.

Decision: what is kept is the longest beginning of the record in which every line holds, blobs included; no line of it
is written again. The rest goes by cutting the file there, and its size is said. Where the rest holds whole lines, so
that more than a torn write is wrong, its bytes are put beside the bundle first. Then the manifest is made of what was
read and the folder is renamed, so a recovery that is killed is simply started again. A chain that a living process
writes is refused. A finished bundle is left alone whatever is wrong with it: what changed it was no kill. Rejected:
appending a `run.end` (nobody saw the run end), and keeping lines behind a break (they verify to nobody).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sftrace_otel.bundle.flight import FlightBundle, capabilities_of, finish_flight
from sftrace_otel.bundle.journal import hold
from sftrace_otel.bundle.records import JOURNAL_SUFFIX
from sftrace_otel.bundle.store import FolderStore
from sftrace_otel.bundle.write import publish, reporting, write_file
from sftrace_otel.errors import TraceStorageError
from sftrace_otel.formats import Json, flight
from sftrace_otel.formats.flight import BLOBS_FOLDER, EVENTS_FILE, MANIFEST_FILE, SUFFIX, ChainChecker, FlightManifest

__all__ = ["RecoveredChain", "find_chains", "is_chain", "recover_chain"]

RECOVERED = "x-sftrace.recovered"
"""Member of the manifest that a recovery adds: `{"left_out_bytes": n}`."""
LEFT_SUFFIX = ".left-out"
"""What was left out is beside the bundle under its name and this, where it was more than a torn line."""
_NAME = re.compile(rf"\.(.+{re.escape(SUFFIX)}){re.escape(JOURNAL_SUFFIX)}")
_LARGEST_LEFT = 64 << 20
_END = b'"type":"run.end"'


@dataclass(frozen=True, slots=True)
class RecoveredChain:
    """What became of one chain.

    Attributes:
        journal: The folder it was in.
        path: The bundle; None where nothing had been recorded.
        whole: The run had ended, only its bundle was not in place yet; else it was cut off.
        events: Events in the bundle.
        left_out: Bytes behind the last line that holds.
        why: What is wrong with the first line that was left out; empty where none was.
        aside: The file with what was left out, where that was more than a torn line.
    """

    journal: Path
    path: Path | None
    whole: bool = False
    events: int = 0
    left_out: int = 0
    why: str = ""
    aside: Path | None = None


def find_chains(where: Path) -> list[Path]:
    """The unfinished chains that `where` means: itself, that of the bundle of this name, or those in the folder.

    Raises:
        TraceStorageError: The folder cannot be read.
    """
    if is_chain(where):
        return [where]
    try:
        if where.suffix == SUFFIX:
            pattern = re.compile(rf"\.{re.escape(where.stem)}(\.[0-9a-f]{{8}})?\.flight\.journal")
            beside = sorted(where.parent.iterdir()) if where.parent.is_dir() else []
            return [path for path in beside if pattern.fullmatch(path.name) and is_chain(path)]
        return sorted(path for path in where.iterdir() if is_chain(path))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise TraceStorageError(f"cannot be read: {reason}", where=str(where), code="missing_file") from error


def is_chain(path: Path) -> bool:
    """Whether `path` is a folder with the name of an unfinished chain, or a `.flight` folder without a manifest."""
    if path.is_symlink() or not path.is_dir():
        return False
    if _NAME.fullmatch(path.name) is not None:
        return True
    return path.suffix == SUFFIX and (path / EVENTS_FILE).exists() and not os.path.lexists(path / MANIFEST_FILE)


def recover_chain(journal: Path, *, target: Path | None = None, fsync: bool = True) -> RecoveredChain:
    """Make a bundle of a chain that has no manifest yet.

    Args:
        journal: The folder `.<name>.flight.journal`, or a `.flight` folder without a manifest.
        target: Where the bundle goes, on the same file system; by default under the name it was to have, or that name
            and the run's if there is a bundle already.
        fsync: Whether the bundle is flushed to the disk.

    Raises:
        TraceStorageError: No such folder (code `no_journal`); a living process writes it (`journal_in_use`); or the
            bundle cannot be written, and then the chain is still there.
    """
    if not is_chain(journal):
        raise TraceStorageError("is no unfinished chain", where=str(journal), code="no_journal")
    with reporting(journal), _held(journal) as file:
        bundle = FlightBundle(FolderStore(journal))
        _drop_scratch(journal)
        if (journal / MANIFEST_FILE).is_file() and bundle.verify().valid:
            count = bundle.manifest.event_count
            return RecoveredChain(journal, _put(journal, target, bundle.manifest.run_id), True, count)
        survey = _survey(bundle)
        size = os.fstat(file).st_size
        if not survey.checker.count:
            return _nothing(journal, size, survey.why)
        aside = _set_aside(journal, target, file, survey, size)
        os.ftruncate(file, survey.kept)
        _drop_loose(bundle, survey.checker)
        finish_flight(journal, survey.manifest(size), fsync=fsync)
        path = _put(journal, target, survey.checker.run_id or "")
    whole = survey.last.find(_END) >= 0
    return RecoveredChain(journal, path, whole, survey.checker.count, size - survey.kept, survey.why, aside)


class _Survey:
    """How far a record holds."""

    def __init__(self, bundle: FlightBundle) -> None:
        self.checker = ChainChecker(None, bundle.look_at)
        self.kept = 0
        self.last = b""
        self.why = ""
        self.used: set[str] = set()

    def manifest(self, size: int) -> FlightManifest:
        """The manifest of what is kept."""
        assert self.checker.run_id is not None and self.checker.head is not None
        names: list[Json] = [name for name in flight.CAPABILITIES if name in self.used]
        return FlightManifest(
            run_id=self.checker.run_id,
            head_hash=self.checker.head,
            event_count=self.checker.count,
            capabilities=names,
            extra={RECOVERED: {"left_out_bytes": size - self.kept}},
        )


def _survey(bundle: FlightBundle) -> _Survey:
    survey = _Survey(bundle)
    try:
        for line in bundle.lines():
            before = survey.checker.copy()
            findings = survey.checker.line(line)
            if findings:
                survey.checker, survey.why = before, findings[0].message
                break
            survey.kept += len(line)
            survey.last = line
            survey.used.update(capabilities_of(line))
    except TraceStorageError as error:
        survey.why = error.reason
    return survey


@contextmanager
def _held(folder: Path) -> Iterator[int]:
    """Hold the chain's lock, as its writer would; gives its open file."""
    path = folder / EVENTS_FILE
    try:
        handle = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise TraceStorageError(f"cannot be opened: {reason}", where=str(path), code="no_journal") from error
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise TraceStorageError("is not a regular file", where=str(path), code="no_journal")
        if not hold(handle):
            text = "a living process is writing this run; let it end, it makes the bundle itself"
            raise TraceStorageError(text, where=str(folder), code="journal_in_use")
        yield handle
    finally:
        os.close(handle)


def _nothing(folder: Path, size: int, why: str) -> RecoveredChain:
    """The process died before anything was recorded. The folder goes if it holds nothing else."""
    if size and why and (folder / EVENTS_FILE).read_bytes().count(b"\n"):
        text = f"no line of it holds ({why}); nothing was changed"
        raise TraceStorageError(text, where=str(folder / EVENTS_FILE), code="no_journal")
    if {path.name for path in folder.iterdir()} <= {EVENTS_FILE, MANIFEST_FILE}:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    return RecoveredChain(folder, None, left_out=size)


def _set_aside(folder: Path, target: Path | None, file: int, survey: _Survey, size: int) -> Path | None:
    """Put what is left out beside the bundle where it holds whole lines."""
    os.lseek(file, survey.kept, os.SEEK_SET)
    left = os.read(file, min(size - survey.kept, _LARGEST_LEFT))
    if b"\n" not in left:
        return None
    place = _target(folder, target, survey.checker.run_id or "")
    aside = place.with_name(place.name + LEFT_SUFFIX)
    write_file(aside, [left], fsync=True)
    return aside


def _drop_scratch(folder: Path) -> None:
    """Remove what was being written; no line names it yet."""
    for path in [*folder.glob(f"{BLOBS_FOLDER}/*/*/*.part"), *folder.glob(".*.part")]:
        if path.is_file() and not path.is_symlink():
            path.unlink()


def _drop_loose(bundle: FlightBundle, checker: ChainChecker) -> None:
    """Remove blobs that no kept line names: their line was never written, or left out."""
    if not checker.has_seen_all:
        return
    for path in bundle.path.glob(f"{BLOBS_FOLDER}/*/*/*"):
        if path.is_file() and not path.is_symlink() and not checker.has_seen(f"sha256:{path.name}"):
            path.unlink()


def _put(folder: Path, target: Path | None, run_id: str) -> Path:
    place = _target(folder, target, run_id)
    return folder if place == folder else publish(folder, place, suffix=SUFFIX)


def _target(folder: Path, target: Path | None, run_id: str) -> Path:
    """Where the bundle goes: where it was to be, if that is free."""
    if target is not None:
        return target
    found = _NAME.fullmatch(folder.name)
    if found is None:
        return folder
    place = folder.with_name(found[1])
    if os.path.lexists(place):
        run = re.sub(r"[^A-Za-z0-9]", "", run_id.removeprefix("run_"))[:8]
        place = place.with_name(f"{place.stem}-{run}{SUFFIX}")
    return place
