# SPDX-License-Identifier: Apache-2.0
"""What a killed process left, made into a bundle.

Decision: the journal's own folder becomes the bundle, by the same builder that closes a run, and the journal goes only
when `integrity.json` stands; so a recovery that is killed itself is simply started again, and no byte is needed twice
but for the events. Everything that had ended is there; calls in flight are requests without a result. What cannot be
read (a line that was torn) is left out, counted and said. A journal that a living process holds is refused.
Rejected: appending to a torn journal (the next line would be lost with the torn one), and guessing results.

A journal is read like a bundle: data from a stranger, no link followed, nothing in it decides where files go.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from sftrace_otel.bundle.build import Closing, Counts, begun_with, build, manifest_of, read_records, sorted_records
from sftrace_otel.bundle.journal import hold
from sftrace_otel.bundle.read import open_bundle, validate_bundle
from sftrace_otel.bundle.records import JOURNAL_FILE, JOURNAL_SUFFIX, Begin, End, Head, Record, Single
from sftrace_otel.bundle.write import SUFFIX, finish_folder, new_file, publish
from sftrace_otel.errors import TraceStorageError
from sftrace_otel.formats import sftrace, sidecars
from sftrace_otel.formats.sftrace import INTEGRITY_FILE, Issue
from sftrace_otel.version import __version__

_NAME = re.compile(rf"\.(.+{re.escape(SUFFIX)}){re.escape(JOURNAL_SUFFIX)}")
_LAST_MOMENT = 253_402_300_799_000_000_000  # the end of the year 9999, in ns since the epoch
_KINDS = frozenset({"llm", "tool", "http"})
_POLICIES = frozenset(sftrace.ReplayPolicy)
_STATUSES = frozenset(sftrace.EventStatus)
_SINGLES = frozenset({"run_start", "state_change", "error", "run_end"})
_ROWS = (sidecars.WIRE_FILE, sidecars.SPANS_FILE, sidecars.NONDETERMINISM_FILE)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What became of one journal.

    Attributes:
        journal: The folder it was in.
        path: The bundle; None where nothing had been recorded.
        whole: The run had ended, only its bundle was not in place yet; else it was cut off.
        llm_calls, tool_calls, open_calls: How many calls; those that were in flight.
        damaged: Lines that could not be read and were left out.
        issues: What `validate --partial` says of the bundle; nothing, unless the journal was damaged.
    """

    journal: Path
    path: Path | None
    whole: bool = False
    llm_calls: int = 0
    tool_calls: int = 0
    open_calls: int = 0
    damaged: int = 0
    issues: tuple[Issue, ...] = ()


def find_journals(where: Path) -> list[Path]:
    """The journals that `where` means: itself, that of the bundle of this name, or those in the folder, by name.

    Raises:
        TraceStorageError: The folder cannot be read.
    """
    if is_journal(where):
        return [where]
    if where.suffix == SUFFIX:
        pattern = re.compile(rf"\.{re.escape(where.stem)}(\.[0-9a-f]{{8}})?\.sftrace\.journal")
        beside = _scan(where.parent) if where.parent.is_dir() else []
        return [path for path in beside if pattern.fullmatch(path.name) and is_journal(path)]
    return [path for path in _scan(where) if is_journal(path)]


def is_journal(path: Path) -> bool:
    """Whether `path` is a folder with the name of a journal; a link to one is none."""
    return _NAME.fullmatch(path.name) is not None and path.is_dir() and not path.is_symlink()


def head_of(journal: Path) -> Head | None:
    """What a journal says of its run; None where it cannot be read."""
    try:
        first = next(iter(read_records(journal / JOURNAL_FILE, Counts())), None)
    except OSError:
        return None
    return first if isinstance(first, Head) else None


def _scan(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise TraceStorageError(f"cannot be read: {reason}", where=str(folder), code="missing_file") from error


def recover(journal: Path, *, target: Path | None = None, fsync: bool = True) -> Recovered:
    """Make a bundle of a journal, and remove the journal.

    Args:
        journal: The folder `.<name>.journal`.
        target: Where the bundle goes, on the same file system; by default beside the journal, under the name the run
            was to have, or that name and the run's if there is a bundle already.
        fsync: Whether the bundle is flushed to the disk.

    Raises:
        TraceStorageError: No journal (code `no_journal`); a living process writes it (`journal_in_use`); or the bundle
            cannot be written, and then the journal is still there.
    """
    if not is_journal(journal):
        raise TraceStorageError("is not the journal of a run", where=str(journal), code="no_journal")
    with _held(journal) as there, _reporting(journal):
        if _is_complete(journal):
            return _publish_whole(journal, target)
        if not there and not any(journal.iterdir()):
            journal.rmdir()
            return Recovered(journal, None)
        if not there:
            raise TraceStorageError(f"holds no {JOURNAL_FILE}", where=str(journal), code="no_journal")
        survey = _survey(journal / JOURNAL_FILE)
        if not survey.records:
            return _nothing(journal, survey.damaged)
        return _rebuild(journal, survey, survey.head or _unknown_head(journal, survey), target, fsync)


# Looking at the journal


@dataclass(slots=True)
class _Survey:
    head: Head | None = None
    records: int = 0
    first: str = ""
    began: int = 0
    last: int = 0
    in_order: bool = True
    open: dict[int, None] = field(default_factory=dict)
    traces: dict[str, None] = field(default_factory=dict)
    error: tuple[str, str] | None = None
    ended: str | None = None
    starts: int = 0
    start: Single | None = None
    damaged: int = 0


def _survey(path: Path) -> _Survey:
    """One pass over the journal: whose it is, how far it came, what was in flight."""
    survey, counts = _Survey(), Counts()
    for record in _sane(read_records(path, counts), counts):
        if isinstance(record, Head):
            survey.head = survey.head or record
            continue
        if not survey.records:
            survey.first, survey.began = getattr(record, "id", None) or "", max(0, record.w - record.m)
        survey.records += 1
        if isinstance(record, Single) and record.type == "run_start":
            survey.start, survey.starts = record, survey.starts + 1
            survey.in_order &= record.m >= survey.last or survey.starts > 1
        else:
            survey.in_order &= record.m >= survey.last
        survey.last = max(survey.last, record.m)
        if isinstance(record, Begin):
            survey.open[record.n] = None
            if record.trace:
                survey.traces[record.trace] = None
        elif isinstance(record, End):
            survey.open.pop(record.n, None)
        elif record.type == "error":
            survey.error = (_text(record, "error_type"), _text(record, "message"))
        elif record.type == "run_end":
            survey.ended = _text(record, "run_status")
    survey.damaged = counts.damaged
    return survey


def _sane(records: Iterable[Record], counts: Counts) -> Iterator[Record]:
    """The records that events can be made of; damage may have left JSON that no recorder writes, which is counted."""
    for record in records:
        if isinstance(record, Head) or is_sane(record):
            yield record
        else:
            counts.damaged += 1


def is_sane(record: Begin | End | Single) -> bool:
    """Whether a line can be made of a record: its words stand in lines as they are."""
    if not (0 <= record.m < 2**62 and 0 <= record.w < _LAST_MOMENT and getattr(record, "status", "ok") in _STATUSES):
        return False
    if isinstance(record, Begin):
        words = (record.id, record.parent, record.h, record.policy)
        if record.kind == "llm" and not record.model:
            return False
        return record.kind in _KINDS and record.policy in _POLICIES and bool(record.name) and all(map(_is_word, words))
    if isinstance(record, End):
        return all(map(_is_word, (record.id, record.h, record.error_id))) and _is_error(record.error)
    return record.type in _SINGLES and all(map(_is_word, (record.id, record.parent, record.ih, record.oh, *record.f)))


def _is_word(text: object) -> bool:
    """Whether a text can stand between quotes as it is."""
    return text is None or (
        isinstance(text, str) and text.isascii() and text.isprintable() and not set(text) & {'"', "\\"} and text != ""
    )


def _is_error(error: Mapping[str, object] | None) -> bool:
    return error is None or all(isinstance(error.get(name), str) and error[name] for name in ("type", "message"))


def _text(record: Single, name: str) -> str:
    try:
        value = msgspec.json.decode(record.f.get(name, msgspec.Raw(b'""')))
    except msgspec.MsgspecError:
        value = ""
    return value if isinstance(value, str) and value else "unknown"


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Hold the journal's lock, as its writer would; gives whether there is a `journal.jsonl`."""
    path = folder / JOURNAL_FILE
    try:
        handle = os.open(path, os.O_RDWR | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        yield False
        return
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise TraceStorageError(f"cannot be opened: {reason}", where=str(path), code="no_journal") from error
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise TraceStorageError("is not a regular file", where=str(path), code="no_journal")
        if not hold(handle) or _lives(path):
            text = "a living process is writing this run; let it end, it makes the bundle itself"
            raise TraceStorageError(text, where=str(folder), code="journal_in_use")
        yield True
    finally:
        os.close(handle)


def _lives(path: Path) -> bool:
    """Whether the writer of a journal is alive, where no lock tells: by its process id."""
    try:
        import fcntl  # noqa: F401
    except ImportError:
        head = next(iter(read_records(path, Counts())), None)
        return isinstance(head, Head) and head.pid != os.getpid() and _runs(head.pid)
    return False


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


# Making the bundle


def _is_complete(folder: Path) -> bool:
    """Whether the bundle is whole and only its rename is missing: `integrity.json` was written last."""
    if not (folder / INTEGRITY_FILE).exists():
        return False
    result = validate_bundle(folder, strict=False, verify_integrity=True)
    return result.integrity == "verified"


def _publish_whole(folder: Path, target: Path | None) -> Recovered:
    (folder / JOURNAL_FILE).unlink(missing_ok=True)
    bundle = open_bundle(folder)
    counts = bundle.manifest.totals
    open_calls = sum(1 for row in bundle.calls if row.get("end") == "open")
    whole = bundle.provenance.get("origin") != "recovered" or bundle.manifest.status != "running"
    place = target or _target(folder, bundle.manifest.run_id)
    path = publish(folder, place)
    return Recovered(folder, path, whole, counts.llm_calls, counts.tool_calls, open_calls)


def _nothing(folder: Path, damaged: int) -> Recovered:
    """The process died before anything was recorded. The folder goes if it holds nothing else."""
    if damaged > 1:
        text = f"none of its {damaged} lines can be read; nothing was changed"
        raise TraceStorageError(text, where=str(folder / JOURNAL_FILE), code="no_journal")
    if {path.name for path in folder.iterdir()} == {JOURNAL_FILE}:
        (folder / JOURNAL_FILE).unlink()
        folder.rmdir()
    return Recovered(folder, None, damaged=damaged)


def _unknown_head(folder: Path, survey: _Survey) -> Head:
    """A head for a journal whose own cannot be read: a run id that is the same each time, times from the records."""
    name = _target(folder, "").stem
    run = hashlib.sha256(survey.first.encode()).hexdigest()[:32]
    return Head(run=f"run_{run}", agent=name, at=survey.began, target="", pid=0, python="", os="", version="unknown")


def _rebuild(folder: Path, survey: _Survey, head: Head, target: Path | None, fsync: bool) -> Recovered:
    damaged = sum(_mend(folder / name) for name in _ROWS)
    _drop_scratch(folder)
    counts = Counts(damaged=damaged)
    journal = folder / JOURNAL_FILE
    records = read_records(journal, counts) if survey.in_order else sorted_records(journal, counts)
    closing = _closing(survey, head)
    sane = _sane(records, counts)
    build(folder, begun_with(survey.start, sane) if survey.start is not None else sane, closing, counts)
    finish_folder(
        folder,
        manifest=manifest_of(closing, counts),
        redactions=counts.entries,
        fsync=fsync,
        leave_out={JOURNAL_FILE},
    )
    result = validate_bundle(folder, strict=False, verify_integrity=True)
    journal.unlink()
    path = publish(folder, target or _target(folder, head.run, head.target))
    return Recovered(
        folder, path, not closing.truncated, counts.llm, counts.tool, counts.open, counts.damaged, result.issues
    )


def _closing(survey: _Survey, head: Head) -> Closing:
    failure = survey.error if survey.ended == "failed" else None
    status = "failed" if failure else "completed" if survey.ended == "completed" else "running"
    return Closing(
        run_id=head.run,
        agent=head.agent,
        created_ns=head.at,
        status=status,  # type: ignore[arg-type]
        failure=failure,
        duration_ms=survey.last // 1_000_000,
        python=head.python,
        os=head.os,
        version=head.version,
        run=_run_json(survey, head),
        provenance={"schema_version": sidecars.VERSION, "origin": "recovered", "tool": f"sftrace-otel {__version__}"},
        seen=None,
        redactions=head.found,
        truncated=survey.ended is None,
    )


def _run_json(survey: _Survey, head: Head) -> Mapping[str, object]:
    obstacles = list(_obstacles(survey, head))
    return {
        "schema_version": sidecars.VERSION,
        "agent": head.agent,
        "kind": head.kind,
        "origin": head.origin,
        "trace_ids": list(survey.traces),
        "losses": {},
        "verdict": {"offline": not obstacles, "obstacles": obstacles},
        "connections": [],
        "policy": head.policy,
        "settings": head.settings,
        "command": head.command,
    }


def _obstacles(survey: _Survey, head: Head) -> Iterator[dict[str, str]]:
    if survey.ended is None:
        what = "the process ended before the run did; the recording was recovered from its journal"
        yield {"kind": "truncated", "what": what, "do": "expect replay to stop where the recording does"}
    if survey.open:
        what = f"{len(survey.open)} calls had no result when the process ended"
        yield {"kind": "open_calls", "what": what, "do": "expect replay to stop at them"}
    if head.settings.get("capture", "full") != "full":
        yield {
            "kind": "no_content",
            "what": "payloads were not captured",
            "do": "record with OTEL_SFTRACE_CAPTURE=full",
        }


def _target(folder: Path, run_id: str, name: str = "") -> Path:
    """Where the bundle goes: beside the journal, under the name it was to have if that is one and free."""
    if not (sftrace.is_inner_name(name) and "/" not in name and name.endswith(SUFFIX)):
        found = _NAME.fullmatch(folder.name)
        assert found is not None
        name = found[1]
    target = folder.with_name(name)
    if os.path.lexists(target):
        run = re.sub(r"[^A-Za-z0-9]", "", run_id.removeprefix("run_"))[:8]
        target = target.with_name(f"{target.stem}-{run}{SUFFIX}")
    return target


def _mend(path: Path) -> int:
    """Rewrite a sidecar of rows without the lines that cannot be read; how many these were."""
    if not os.path.lexists(path):
        return 0
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise TraceStorageError("is not a regular file", where=str(path), code="no_journal")
        damaged = sum(not _is_row(line) for line in file)
        if not damaged:
            return 0
        file.seek(0)
        scratch = path.with_suffix(".part")
        with new_file(scratch) as mended:
            mended.writelines(line for line in file if _is_row(line))
    scratch.replace(path)
    return damaged


def _is_row(line: bytes) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    return True


def _drop_scratch(folder: Path) -> None:
    """Remove bodies that were being written; no row names them yet."""
    for path in [*folder.glob("blobs/*/*/*.part"), *folder.glob("*.part")]:
        if path.is_file() and not path.is_symlink():
            path.unlink()


@contextmanager
def _reporting(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        text = f"cannot be made into a bundle: {reason}; the journal is kept"
        raise TraceStorageError(text, where=str(folder), code="not_writable") from error
