# SPDX-License-Identifier: Apache-2.0
"""The journal of an open run: append-only, one write per record, turned into a bundle when the run ends.

Decision: the journal is a folder beside the bundle-to-be, `.<bundle name>.journal/`. Its `journal.jsonl` takes one
record when a call begins and one when it ends; blobs and wire rows go straight to the files that the bundle will have.
Closing writes `events.jsonl` and `calls.jsonl` from the records and renames the folder, so a body is written once and a
bundle is never half there. Every append is one `write` to a file opened for appending: what was appended survives the
death of the process at any moment (a power cut only with `fsync`).
Rejected: events kept in memory until exit (lost with the process, memory grows with the run); a writer thread (a queue
to lose, and 5 ms convoys on the interpreter lock, `facts/performance.md` §0).

Records hold payloads already redacted and already canonical, so closing copies bytes and never re-encodes a payload.
"""

from __future__ import annotations

import datetime as _dt
import functools
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import orjson

from sftrace_otel.bundle.write import finish_folder, publish
from sftrace_otel.formats.sftrace import Environment, Failure, Manifest, RedactionEntry, Totals

__all__ = ["NOTHING", "Begin", "Closing", "Counts", "End", "Journal", "Single", "timestamp"]

JOURNAL_FILE = "journal.jsonl"
_HEADER = b'{"schema_version":"1","sidecar":"%s"}\n'
_EPOCH = _dt.datetime(1970, 1, 1, tzinfo=_dt.UTC)


def timestamp(unix_ns: int) -> str:
    """RFC 3339 in UTC with microseconds, from ns since the epoch."""
    micros = unix_ns // 1000
    return f"{_second(micros // 1_000_000)}.{micros % 1_000_000:06d}Z"


@functools.lru_cache(maxsize=64)
def _second(unix: int) -> str:
    return (_EPOCH + _dt.timedelta(seconds=unix)).strftime("%Y-%m-%dT%H:%M:%S")


NOTHING = msgspec.Raw(b"")
"""No payload. One object, so that an encoder that leaves defaults out leaves it out."""


class Begin(msgspec.Struct, tag_field="k", tag="b", gc=False, omit_defaults=True):
    """A call began: `n` its number in the run, `m` ns since run start, `w` ns since the epoch, `p` its payload."""

    n: int
    id: str
    m: int
    w: int
    kind: str
    name: str
    p: msgspec.Raw
    h: str
    parent: str | None = None
    provider: str | None = None
    model: str | None = None
    policy: str = "frozen"
    lineage: str | None = None
    trace: str | None = None
    span: str | None = None
    r: list[tuple[str, str]] = []
    tags: dict[str, str] = {}
    cut: bool = False


class End(msgspec.Struct, tag_field="k", tag="e", gc=False, omit_defaults=True):
    """A call ended: with an output `p`, or with an error, or both (a failed tool)."""

    n: int
    m: int
    w: int
    end: str
    id: str | None = None
    p: msgspec.Raw = NOTHING
    h: str | None = None
    status: str = "ok"
    model: str | None = None
    tokens: tuple[int | None, int | None, int | None] = (None, None, None)
    error: dict[str, Any] | None = None
    error_id: str | None = None
    r: list[tuple[str, str]] = []
    tags: dict[str, str] = {}
    extra: dict[str, Any] = {}
    cut: bool = False


class Single(msgspec.Struct, tag_field="k", tag="v", gc=False, omit_defaults=True):
    """An event that is no call: run_start, state_change, error, run_end. `f` holds its own fields."""

    id: str
    m: int
    w: int
    type: str
    f: dict[str, msgspec.Raw]
    parent: str | None = None
    status: str = "ok"
    ih: str | None = None
    oh: str | None = None
    r: list[tuple[str, str]] = []


Record = Begin | End | Single
_decode = msgspec.json.Decoder(Record).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, kw_only=True, slots=True)
class Closing:
    """How a run ended; everything the bundle says that the journal does not.

    `seen(n)` is the name of the instrumentation scope of call n's span, None if its span never reached us.
    """

    run_id: str
    agent: str
    created_ns: int
    status: Literal["completed", "failed", "running"]
    failure: tuple[str, str] | None
    duration_ms: int
    python: str
    os: str
    version: str
    run: Mapping[str, object]
    provenance: Mapping[str, object]
    seen: Callable[[int], str | None]
    redactions: Sequence[tuple[str, str]] = ()


@dataclass(slots=True)
class Counts:
    """What closing wrote."""

    events: int = 0
    llm: int = 0
    tool: int = 0
    open: int = 0
    absent: int = 0
    failure_step: int = 0
    entries: list[RedactionEntry] = field(default_factory=list)


class Journal:
    """Writes one run's records. Not thread-safe: the run that owns it holds a lock. Raises OSError."""

    def __init__(self, target: Path, *, fsync: str) -> None:
        self.target = target
        self.folder = target.with_name(f".{target.name}.journal")
        self._sync = fsync == "event"
        self._fsync = fsync
        self._files: dict[str, int] = {}
        self._last = -1
        self._in_order = True
        self.folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder.mkdir(mode=0o700)
        self._main = self._open(JOURNAL_FILE)

    def _open(self, name: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return os.open(self.folder / name, flags, 0o600)

    def append(self, line: bytes) -> None:
        """Append one record; `line` ends with a newline."""
        _write(self._main, line)
        if self._sync:
            os.fsync(self._main)

    def record(self, record: Record) -> None:
        """Append one record and remember whether they still come in order of time."""
        if record.m < self._last:
            self._in_order = False
        else:
            self._last = record.m
        self.append(_encode(record) + b"\n")

    def row(self, sidecar: str, row: Mapping[str, object]) -> None:
        """Append a row to `<sidecar>.jsonl`, with the header first."""
        file = self._files.get(sidecar)
        line = orjson.dumps(row) + b"\n"
        if file is None:
            file = self._files[sidecar] = self._open(f"{sidecar}.jsonl")
            line = _HEADER % sidecar.encode() + line
        _write(file, line)

    def blob(self, data: bytes) -> str:
        """Store `data` (already redacted) by its digest, before the row that names it; give `sha256:<hex>`."""
        name = hashlib.sha256(data).hexdigest()
        path = self.folder / "blobs" / name[:2] / name[2:4] / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            scratch = path.with_suffix(".part")
            file = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                _write(file, data)
                if self._fsync != "never":
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
        self.abandon()
        counts = _build(self.folder, closing, in_order=self._in_order)
        finish_folder(
            self.folder, manifest=_manifest(closing, counts), redactions=counts.entries, fsync=self._fsync != "never"
        )
        return publish(self.folder, self.target, overwrite=overwrite), counts

    def discard(self) -> None:
        """Remove the journal and everything in it."""
        self.abandon()
        shutil.rmtree(self.folder, ignore_errors=True)


def _close(file: int) -> None:
    if file >= 0:
        try:
            os.close(file)
        except OSError:
            pass


def _write(file: int, data: bytes) -> None:
    """Write all of `data`: one `write` in the ordinary case, after a short one the rest, so no line stays torn."""
    done = os.write(file, data)
    while done < len(data):
        done += os.write(file, data[done:])


def _manifest(closing: Closing, counts: Counts) -> Manifest:
    failure = closing.failure
    return Manifest(
        run_id=closing.run_id,
        agent_name=closing.agent,
        created_at=timestamp(closing.created_ns),
        status=closing.status,
        failure=None if failure is None else Failure(type=failure[0], message=failure[1], step=counts.failure_step),
        environment=Environment(python=closing.python, os=closing.os, stepfork_version=closing.version),
        totals=Totals(
            events=counts.events,
            llm_calls=counts.llm,
            tool_calls=counts.tool,
            cost_usd=None,
            duration_ms=closing.duration_ms,
        ),
    )


def _records(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield _decode(line)


def _sorted(path: Path) -> Iterator[Record]:
    """Records by time: calls known only from spans come late and are sorted in. Holds an index, not the records."""
    index = [(_key(record), number) for number, record in enumerate(_records(path))]
    offsets = _offsets(path)
    with path.open("rb") as file:
        for _, number in sorted(index):
            file.seek(offsets[number])
            yield _decode(file.readline())


def _key(record: Record) -> tuple[int, int]:
    """Sort key: run_start first, run_end last, else by time; at one moment beginnings come before ends."""
    if isinstance(record, Single):
        edge = {"run_start": -1, "run_end": 2**62}.get(record.type)
        return (record.m if edge is None else edge, 1)
    return (record.m, 0 if isinstance(record, Begin) else 2)


def _offsets(path: Path) -> list[int]:
    offsets, at = [], 0
    with path.open("rb") as file:
        for line in file:
            offsets.append(at)
            at += len(line)
    return offsets


def _build(folder: Path, closing: Closing, *, in_order: bool) -> Counts:
    """Write the files of a bundle from the journal, then remove the journal."""
    path = folder / JOURNAL_FILE
    counts = Counts()
    counts.entries.extend(
        RedactionEntry(event_id="__manifest__", path=pointer, reason=reason) for pointer, reason in closing.redactions
    )
    writer = _Events(closing.run_id, counts)
    opened: dict[int, Begin] = {}
    with (folder / "events.jsonl").open("wb") as events, (folder / "calls.jsonl").open("wb") as calls:
        calls.write(_HEADER % b"calls")
        for record in _records(path) if in_order else _sorted(path):
            if isinstance(record, Begin):
                opened[record.n] = msgspec.structs.replace(record, p=msgspec.Raw(b"null"))
                events.write(writer.request(record))
            elif isinstance(record, End):
                begin = opened.pop(record.n, None)
                if begin is None:
                    continue
                events.writelines(writer.result(begin, record))
                calls.write(_call_row(begin, record, closing.seen(record.n), counts))
            elif isinstance(record, Single):
                events.write(writer.single(record))
        for begin in opened.values():
            counts.open += 1
            calls.write(_call_row(begin, None, closing.seen(begin.n), counts))
    if counts.tool == counts.llm == 0:
        (folder / "calls.jsonl").unlink()
    _write_json(folder / "run.json", _with_losses(closing.run, counts))
    _write_json(folder / "provenance.json", closing.provenance)
    for name in ("events.jsonl", "calls.jsonl", "run.json", "provenance.json"):
        if (folder / name).exists():
            (folder / name).chmod(0o600)
    path.unlink()
    return counts


def _with_losses(run: Mapping[str, object], counts: Counts) -> dict[str, object]:
    losses = run.get("losses")
    known = dict(losses) if isinstance(losses, Mapping) else {}
    return {**run, "losses": {**known, "open_calls": counts.open, "spans_absent": counts.absent}}


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n")


def _call_row(begin: Begin, end: End | None, scope: str | None, counts: Counts) -> bytes:
    counts.absent += scope is None
    row: dict[str, object] = {
        "call": begin.n,
        "kind": begin.kind,
        "request": begin.id,
        "response": end.id if end else None,
        "error": end.error_id if end else None,
        "trace_id": begin.trace,
        "span_id": begin.span,
        "span": "absent" if scope is None else "recorded",
        "lineage": begin.lineage,
        "start_ns": begin.m,
        "end_ns": end.m if end else None,
        "end": end.end if end else "open",
    }
    tags = {f"/input{pointer}": tag for pointer, tag in begin.tags.items()}
    if end is not None:
        tags.update({f"/output{pointer}": tag for pointer, tag in end.tags.items()})
        row.update(end.extra)
        if end.error is not None:
            row["exception"] = {key: end.error[key] for key in ("module", "qualname", "args") if key in end.error}
    if tags:
        row["tags"] = tags
    if scope is not None:
        row["scope"] = scope
    if begin.cut or (end is not None and end.cut):
        row["truncated"] = True
    return orjson.dumps(row) + b"\n"


_REQUEST_TYPE = {"llm": b"llm_request", "tool": b"tool_call", "http": b"tool_call"}


class _Events:
    """Makes event lines in the field order of `.sftrace` v0.1 and numbers the steps."""

    def __init__(self, run_id: str, counts: Counts) -> None:
        self._run = orjson.dumps(run_id)
        self._counts = counts

    def request(self, record: Begin) -> bytes:
        own = [(b"name", orjson.dumps(record.name)), (b"input", bytes(record.p))]
        if record.kind == "llm":
            self._counts.llm += 1
            own = [(b"provider", orjson.dumps(record.provider)), (b"model", orjson.dumps(record.model)), own[1]]
        else:
            self._counts.tool += 1
        return self._line(
            record.id, record.parent, _REQUEST_TYPE[record.kind], record.w, own,
            policy=record.policy, ih=record.h, redactions=_under(record.r, "input"),
        )  # fmt: skip

    def result(self, begin: Begin, end: End) -> list[bytes]:
        lines = []
        duration = max(0, (end.m - begin.m) // 1_000_000)
        parent = begin.id
        if end.id is not None:
            lines.append(self._answer(begin, end, duration))
            parent = end.id
        if end.error is not None and end.error_id is not None:
            own = [(b"error_type", orjson.dumps(end.error["type"])), (b"message", orjson.dumps(end.error["message"]))]
            own.append((b"details", b"null"))
            pointers = [("/message", reason) for reason in end.error.get("findings", ())]
            lines.append(
                self._line(
                    end.error_id, parent, b"error", end.w, own, status="error",
                    oh=_NULL_HASH, redactions=pointers,
                )
            )  # fmt: skip
        return lines

    def _answer(self, begin: Begin, end: End, duration: int) -> bytes:
        assert end.id is not None
        redactions = _under(end.r, "output")
        if begin.kind == "llm":
            prompt, completion, total = end.tokens
            own = [
                (b"model", orjson.dumps(end.model or begin.model)),
                (b"output", bytes(end.p)),
                (b"prompt_tokens", orjson.dumps(prompt)),
                (b"completion_tokens", orjson.dumps(completion)),
                (b"total_tokens", orjson.dumps(total)),
                (b"cost_usd", b"null"),
            ]
            kind = b"llm_response"
        else:
            own = [(b"name", orjson.dumps(begin.name)), (b"output", bytes(end.p))]
            kind = b"tool_result"
        return self._line(
            end.id, begin.id, kind, end.w, own, duration=duration, status=end.status, oh=end.h, redactions=redactions
        )

    def single(self, record: Single) -> bytes:
        own = [(key.encode(), bytes(value)) for key, value in record.f.items()]
        if record.type == "error":
            self._counts.failure_step = self._counts.events
        return self._line(
            record.id, record.parent, record.type.encode(), record.w, own,
            status=record.status, ih=record.ih, oh=record.oh, redactions=record.r,
        )  # fmt: skip

    def _line(
        self,
        event_id: str,
        parent: str | None,
        kind: bytes,
        wall: int,
        own: Sequence[tuple[bytes, bytes]],
        *,
        duration: int | None = None,
        status: str = "ok",
        policy: str = "frozen",
        ih: str | None = None,
        oh: str | None = None,
        redactions: Sequence[tuple[str, str]] = (),
    ) -> bytes:
        step = self._counts.events
        self._counts.events += 1
        pointers = b"[]"
        if redactions:
            pointers = orjson.dumps([pointer for pointer, _ in redactions])
            self._counts.entries.extend(
                RedactionEntry(event_id=event_id, path=pointer, reason=reason) for pointer, reason in redactions
            )
        head = _HEAD % (
            event_id.encode(),
            self._run,
            b"null" if parent is None else b'"%s"' % parent.encode(),
            step,
            kind,
            timestamp(wall).encode(),
            b"null" if duration is None else b"%d" % duration,
            status.encode(),
            policy.encode(),
            b"null" if ih is None else b'"%s"' % ih.encode(),
            b"null" if oh is None else b'"%s"' % oh.encode(),
            pointers,
        )
        return b"".join([head, *[b',"%s":%s' % member for member in own], b"}\n"])


_HEAD = (
    b'{"id":"%s","run_id":%s,"parent_id":%s,"step":%d,"type":"%s","timestamp":"%s","duration_ms":%s,"status":"%s",'
    b'"replay_policy":"%s","input_hash":%s,"output_hash":%s,"redactions":%s'
)
_NULL_HASH = hashlib.sha256(b"null").hexdigest()


def _under(findings: Sequence[tuple[str, str]], member: str) -> list[tuple[str, str]]:
    """Findings of the payload as pointers into the event; a finding that starts with `#` is about another member."""
    if not findings:
        return []
    return [(p[1:] if p.startswith("#") else f"/{member}{p}", reason) for p, reason in findings]
