# SPDX-License-Identifier: Apache-2.0
"""From the records of a journal to the files of a bundle; used when a run closes and when a killed one is recovered.

Decision: payloads are copied, never decoded and encoded again, and one pass in constant memory does it where the
records are in order of time; else an index of their places is sorted. Nothing is removed: a bundle half made is made
again from the journal, which goes only when `integrity.json` stands.
"""

from __future__ import annotations

import datetime as _dt
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Context, Decimal
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec
import orjson
from msgspec import UNSET, UnsetType

from sftrace_otel.bundle.records import NOTHING, Begin, End, Record, Single, decode, encode
from sftrace_otel.bundle.write import new_file, write_file
from sftrace_otel.formats import sidecars
from sftrace_otel.formats.sftrace import EVENTS_FILE, Environment, Failure, Manifest, RedactionEntry, Totals

_EPOCH = _dt.datetime(1970, 1, 1, tzinfo=_dt.UTC)
_BUFFER = 1 << 20
MAX_RECORD_BYTES = 128 << 20
"""Longest record that is read; longer ones count as damaged."""


def timestamp(unix_ns: int) -> str:
    """RFC 3339 in UTC with microseconds, from ns since the epoch."""
    second, rest = divmod(unix_ns, 1_000_000_000)
    return "%s%06dZ" % (_second(second), rest // 1000)  # noqa: UP031 (made for each event, and this is the fastest)


@lru_cache(maxsize=64)
def _second(unix: int) -> str:
    return (_EPOCH + _dt.timedelta(seconds=unix)).strftime("%Y-%m-%dT%H:%M:%S.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Closing:
    """How a run ended; everything the bundle says that the journal does not.

    `seen(n)` is the name of the instrumentation scope of call n's span, None if its span never reached us; `seen`
    itself is None where nobody knows any more. `truncated`: the process ended before the run did.
    """

    run_id: str
    agent: str
    created_ns: int
    status: Literal["completed", "failed", "running"]
    failure: tuple[str, str] | None
    duration_ms: int | None
    python: str
    os: str
    version: str
    run: Mapping[str, object]
    provenance: Mapping[str, object]
    seen: Callable[[int], str | None] | None
    redactions: Sequence[tuple[str, str]] = ()
    truncated: bool = False


@dataclass(slots=True)
class Counts:
    """What closing wrote; `damaged` records could not be read and were left out."""

    events: int = 0
    llm: int = 0
    tool: int = 0
    open: int = 0
    absent: int = 0
    failure_step: int = 0
    damaged: int = 0
    cost: Decimal | None = None
    entries: list[RedactionEntry] = field(default_factory=list)


def manifest_of(closing: Closing, counts: Counts) -> Manifest:
    """What `manifest.json` says."""
    failure = closing.failure
    return Manifest(
        run_id=closing.run_id,
        agent_name=closing.agent,
        created_at=timestamp(closing.created_ns),
        status=closing.status,
        failure=None if failure is None else Failure(type=failure[0], message=failure[1], step=counts.failure_step),
        environment=Environment(
            python=closing.python or None, os=closing.os or None, stepfork_version=closing.version or None
        ),
        totals=Totals(
            events=counts.events,
            llm_calls=counts.llm,
            tool_calls=counts.tool,
            cost_usd=None if counts.cost is None else float(counts.cost),
            duration_ms=closing.duration_ms,
        ),
    )


def read_records(path: Path, counts: Counts) -> Iterator[Record]:
    """The records of a journal, as they were appended; what cannot be read is left out and counted. Raises OSError."""
    with _opened(path) as file:
        for line in iter(partial(file.readline, MAX_RECORD_BYTES), b""):
            try:
                yield decode(line) if line[-1] == _NEWLINE else _torn()
            except _UNREADABLE:
                counts.damaged += 1


def sorted_records(path: Path, counts: Counts) -> Iterator[Record]:
    """Records by time: calls known only from spans come late and are sorted in. Holds an index, not the records."""
    index = [(*_key(record), offset) for offset, record in _placed(path, counts)]
    index.sort()
    with _opened(path) as file:
        for *_, offset in index:
            file.seek(offset)
            yield decode(file.readline(MAX_RECORD_BYTES))


def _placed(path: Path, counts: Counts) -> Iterator[tuple[int, Record]]:
    """Each record with its offset."""
    at = 0
    with _opened(path) as file:
        for line in iter(partial(file.readline, MAX_RECORD_BYTES), b""):
            try:
                yield at, decode(line) if line[-1] == _NEWLINE else _torn()
            except _UNREADABLE:
                counts.damaged += 1
            at += len(line)


_NEWLINE = 0x0A
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)


def _torn() -> Record:
    """A line without its newline was torn; it is no record, however it reads."""
    raise ValueError


def _opened(path: Path) -> BinaryIO:
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    return os.fdopen(os.open(path, flags), "rb", buffering=_BUFFER)


def _key(record: Record) -> tuple[int, int]:
    """Sort key: run_start first, run_end last, else by time; at one moment beginnings come before ends."""
    if isinstance(record, Single):
        edge = {"run_start": -1, "run_end": 2**62}.get(record.type)
        return (record.m if edge is None else edge, 1)
    if isinstance(record, Begin):
        return (record.m, 0)
    return (record.m, 2) if isinstance(record, End) else (-2, 0)


def build(folder: Path, records: Iterable[Record], closing: Closing, counts: Counts) -> None:
    """Write `events.jsonl` and the sidecars of a bundle into `folder`. Raises OSError."""
    counts.entries.extend(
        RedactionEntry(event_id="__manifest__", path=pointer, reason=reason) for pointer, reason in closing.redactions
    )
    writer = _Events(closing.run_id, counts)
    opened: dict[int, Begin] = {}
    with new_file(folder / EVENTS_FILE) as events, new_file(folder / sidecars.CALLS_FILE) as calls:
        calls.write(sidecars.header("calls") + b"\n")
        for record in records:
            if isinstance(record, Begin):
                events.write(writer.request(record))
                record.p = NOTHING  # only its request is needed for the result
                opened[record.n] = record
            elif isinstance(record, End):
                begin = opened.pop(record.n, None)
                if begin is not None:
                    events.writelines(writer.result(begin, record))
                    calls.write(_call_row(begin, record, closing, counts))
            elif isinstance(record, Single):
                events.write(writer.single(record))
        for begin in opened.values():
            counts.open += 1
            calls.write(_call_row(begin, None, closing, counts))
    if counts.tool == counts.llm == 0:
        (folder / sidecars.CALLS_FILE).unlink()
    _write_json(folder / sidecars.RUN_FILE, _with_losses(closing, counts))
    _write_json(folder / sidecars.PROVENANCE_FILE, closing.provenance)


def begun_with(start: Single, records: Iterable[Record]) -> Iterator[Record]:
    """The records with `start` for the run_start: the last one said counts, since the input may be known late."""
    wanted = True
    for record in records:
        if isinstance(record, Single) and record.type == "run_start":
            if wanted:
                yield start
            wanted = False
        else:
            yield record


def _with_losses(closing: Closing, counts: Counts) -> dict[str, object]:
    losses = closing.run.get("losses")
    known: dict[str, object] = dict(losses) if isinstance(losses, Mapping) else {}
    known["open_calls"] = counts.open
    if closing.seen is not None:
        known["spans_absent"] = counts.absent
    if counts.damaged:
        known["damaged_records"] = counts.damaged
    if closing.truncated:
        known["truncated"] = True
    return {**closing.run, "losses": known}


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    write_file(path, [orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n"])


def _call_row(begin: Begin, end: End | None, closing: Closing, counts: Counts) -> bytes:
    scope = None if closing.seen is None else closing.seen(begin.n)
    counts.absent += scope is None
    row = CallRow(
        call=begin.n,
        kind=begin.kind,
        request=begin.id,
        response=end.id if end is not None else None,
        error=end.error_id if end is not None else None,
        trace_id=begin.trace,
        span_id=begin.span,
        lineage=begin.lineage,
        start_ns=begin.m,
        end_ns=end.m if end is not None else None,
        end=end.end if end is not None else "open",
    )
    if closing.seen is not None:
        row.span = "absent" if scope is None else "recorded"
    if scope is not None:
        row.scope = scope
    extra = end.extra if end is not None else {}
    if (begin.cut or (end is not None and end.cut)) and "truncated" not in extra:
        row.truncated = True
    if begin.tags or (end is not None and end.tags):
        row.tags = _tags(begin, end)
    if end is not None and end.error is not None:
        row.exception = {key: end.error[key] for key in _EXCEPTION if key in end.error}
    line = encode(row)
    if extra:
        line = line[:-1] + b"," + encode(extra)[1:]
    return line + b"\n"


_EXCEPTION = ("module", "qualname", "args", "state", "tags")


def _tags(begin: Begin, end: End | None) -> dict[str, str]:
    tags = {f"/input{pointer}": tag for pointer, tag in begin.tags.items()}
    if end is not None:
        tags.update({f"/output{pointer}": tag for pointer, tag in end.tags.items()})
    return tags


class CallRow(msgspec.Struct, gc=False, omit_defaults=True):
    """A row of `calls.jsonl` as it is written; what is left out is not known. `sidecars.CallRow` says what it means."""

    call: int
    kind: str
    request: str
    response: str | None
    error: str | None
    trace_id: str | None
    span_id: str | None
    lineage: str | None
    start_ns: int
    end_ns: int | None
    end: str
    span: str | UnsetType = UNSET
    tags: dict[str, str] | UnsetType = UNSET
    exception: dict[str, Any] | UnsetType = UNSET
    scope: str | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET


_REQUEST_TYPE = {"llm": b"llm_request", "tool": b"tool_call", "http": b"tool_call"}


class _Events:
    """Makes event lines in the field order of `.sftrace` v0.1 and numbers the steps."""

    def __init__(self, run_id: str, counts: Counts) -> None:
        self._run = orjson.dumps(run_id)
        self._counts = counts
        self._texts: dict[str | None, bytes] = {}

    def _text(self, text: str | None) -> bytes:
        """A name as JSON; the same few come again and again."""
        known = self._texts.get(text)
        if known is None:
            known = orjson.dumps(text)
            if len(self._texts) < 1024:
                self._texts[text] = known
        return known

    def request(self, record: Begin) -> bytes:
        if record.kind == "llm":
            self._counts.llm += 1
            members = (self._text(record.provider), self._text(record.model), record.p)
            own = b',"provider":%s,"model":%s,"input":%s' % members
        else:
            self._counts.tool += 1
            own = b',"name":%s,"input":%s' % (self._text(record.name), record.p)
        return self._line(
            record.id, record.parent, _REQUEST_TYPE[record.kind], record.w, own,
            policy=record.policy, ih=record.h, redactions=_under(record.r, "input"),
        )  # fmt: skip

    def result(self, begin: Begin, end: End) -> list[bytes]:
        lines = []
        parent = begin.id
        if end.id is not None:
            lines.append(self._answer(begin, end, end.id))
            parent = end.id
        if end.error is not None and end.error_id is not None:
            own = b',"error_type":%s,"message":%s,"details":null' % (
                orjson.dumps(end.error["type"]),
                orjson.dumps(end.error["message"]),
            )
            pointers = [("/message", reason) for reason in end.error.get("findings", ())]
            lines.append(
                self._line(
                    end.error_id, parent, b"error", end.w, own, status="error",
                    oh=_NULL_HASH, redactions=pointers,
                )
            )  # fmt: skip
        return lines

    def _answer(self, begin: Begin, end: End, event_id: str) -> bytes:
        if begin.kind == "llm":
            prompt, completion, total = map(orjson.dumps, end.tokens)
            cost = b"null"
            if end.cost is not None:
                self._counts.cost = _EXACT.add(self._counts.cost or 0, end.cost)
                cost = orjson.dumps(float(end.cost))
            own = (
                b',"model":%s,"output":%s,"prompt_tokens":%s,"completion_tokens":%s,"total_tokens":%s,"cost_usd":%s'
                % (self._text(end.model or begin.model), end.p, prompt, completion, total, cost)
            )
            kind = b"llm_response"
        else:
            own = b',"name":%s,"output":%s' % (self._text(begin.name), end.p)
            kind = b"tool_result"
        duration = max(0, (end.m - begin.m) // 1_000_000)
        return self._line(
            event_id, begin.id, kind, end.w, own,
            duration=duration, status=end.status, oh=end.h, redactions=_under(end.r, "output"),
        )  # fmt: skip

    def single(self, record: Single) -> bytes:
        own = b"".join([b',"%s":%s' % (key.encode(), value) for key, value in record.f.items()])
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
        own: bytes,
        *,
        duration: int | None = None,
        status: str = "ok",
        policy: str = "frozen",
        ih: str | None = None,
        oh: str | None = None,
        redactions: Sequence[tuple[str, str]] = (),
    ) -> bytes:
        step = self._counts.events
        self._counts.events = step + 1
        pointers = b"[]"
        if redactions:
            pointers = orjson.dumps([pointer for pointer, _ in redactions])
            self._counts.entries.extend(
                RedactionEntry(event_id=event_id, path=pointer, reason=reason) for pointer, reason in redactions
            )
        return _LINE % (
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
            own,
        )


_LINE = (
    b'{"id":"%s","run_id":%s,"parent_id":%s,"step":%d,"type":"%s","timestamp":"%s","duration_ms":%s,"status":"%s",'
    b'"replay_policy":"%s","input_hash":%s,"output_hash":%s,"redactions":%s%s}\n'
)
_EXACT = Context(prec=100)
_NULL_HASH = hashlib.sha256(b"null").hexdigest()


def _under(findings: Sequence[tuple[str, str]], member: str) -> list[tuple[str, str]]:
    """Findings of the payload as pointers into the event; a finding that starts with `#` is about another member."""
    if not findings:
        return []
    return [(p[1:] if p.startswith("#") else f"/{member}{p}", reason) for p, reason in findings]
