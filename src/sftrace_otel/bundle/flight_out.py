# SPDX-License-Identifier: Apache-2.0
"""A run as `.flight` events: the records of its journal, one after the other, as they come.

Decision: both formats are projections of one journal, so the same records that make a `.sftrace` bundle make the chain,
live or when a bundle is converted. What crossed the wire is `http.request` and `http.response`, the body as its exact
text or a blob; what has no wire is `tool.call`, `tool.result`, `x-sftrace.llm.request` and so on. The body of an event
is what happened and nothing else, so that equal calls have equal `body_hash`es; ids, places, digests and times are in
the member `x-sftrace` of the envelope, which the format keeps and hashes. A payload that the wire gives already is not
written again: it is derived, and its digest says whether rightly. Numbers that RFC 8785 spells otherwise (1.0, -0.0,
ints beyond 2**53) have the exact JSON text beside them.
Rejected: bookkeeping in the body (no two bodies would be equal); payloads beside the wire (twice the size).

Source: `design.md`, "From calls and spans to events"; the docs page "The .flight format".
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec
import orjson

from sftrace_otel.bundle.build import Closing, timestamp
from sftrace_otel.bundle.flight import SPILL_BYTES, FlightWriter
from sftrace_otel.bundle.records import Begin, End, Head, Single
from sftrace_otel.errors import CanonicalizationError
from sftrace_otel.formats import Json, canonical, flight

__all__ = [
    "EXACT", "EXTRA", "JSON_MEDIA", "Projection", "digest_of", "http_input", "http_output", "json_of",
    "llm_input", "moved_span",
]  # fmt: skip

EXTRA = "x-sftrace"
"""Member of the envelope that holds what is of this call and run alone."""
EXACT = "_json"
"""What a member is called that holds the exact JSON text of another one."""
JSON_MEDIA = "application/json"
"""Media type of a blob that holds the canonical JSON of a payload (profile `stepfork-json-v0.1`)."""

_PARENTS = 65_536
"""Ended calls that are remembered, for what is called below them later."""


class _Open:
    """A call under way: what its result hangs on."""

    __slots__ = ("begin", "kind", "name", "output", "parents", "sent", "seq", "wired")

    def __init__(self, begin: Begin, parents: list[int]) -> None:
        self.begin: Begin | None = begin
        self.kind = begin.kind
        self.name = begin.name
        self.parents = parents
        self.seq: int | None = None
        self.sent: dict[int, int] = {}
        self.wired = False
        self.output: object = None


class Projection:
    """Turns records into events that `sink` appends, and raises what it does. Not thread-safe."""

    def __init__(self, sink: FlightWriter) -> None:
        self._sink = sink
        self._open: dict[int, _Open] = {}
        self._seqs: OrderedDict[str, int] = OrderedDict()
        self._head: Head | None = None
        self._started = False
        self._end: Single | None = None
        self._calls = 0
        self._wall0 = 0

    # -- what the journal is told

    def introduce(self, head: Head) -> None:
        """Whose run it is."""
        self._head = head
        self._wall0 = head.at

    def record(self, record: Begin | End | Single, *, sends: bool = False) -> None:
        """`sends`: what a beginning call sends is told next (`sent`)."""
        if isinstance(record, Begin):
            self._begin(record, sends)
        elif isinstance(record, End):
            self._ended(record)
        else:
            self._single(record)

    def sent(self, call: int, row: Mapping[str, Any]) -> None:
        """An attempt is going out: the row of `wire.jsonl` as far as it is known."""
        known = self._open.get(call)
        attempt = int(row.get("attempt", 0))
        if known is not None and attempt not in known.sent:
            self._request(known, call, attempt, row)

    def row(self, sidecar: str, row: Mapping[str, Any]) -> None:
        """A row of a sidecar."""
        if sidecar == "wire":
            self._wire(row)
        elif sidecar == "nondeterminism":
            self._draw(row)
        elif sidecar == "spans":
            self._span(canonical.loads(orjson.dumps(row)))

    def close(self, closing: Closing) -> None:
        """The run is over: `run.end`, with what only its end tells."""
        record = self._end
        extra: dict[str, Any] = {
            "run": closing.run,
            "provenance": closing.provenance,
            "closing": {
                "duration_ms": closing.duration_ms,
                "created_at": timestamp(closing.created_ns),
                "agent": closing.agent,
                "python": closing.python,
                "os": closing.os,
                "version": closing.version,
                "redactions": [list(pair) for pair in closing.redactions],
                "truncated": closing.truncated,
            },
        }
        if closing.seen is not None:
            extra["spans"] = _scopes(closing, self._calls)
        body: dict[str, Any] = {"status": closing.status}
        if closing.failure is not None:
            body["failure"] = {"type": closing.failure[0], "message": closing.failure[1]}
        mono = (closing.duration_ms or 0) * 1_000_000
        wall = closing.created_ns + mono
        if record is not None:
            mono, wall = record.m, record.w
            extra["event"] = _members(record, {"m", "w", "f", "type"})
            self._payload(body, "output", bytes(record.f["output"]), extra)
        self._put("run.end", body, [0], mono, extra, wall=wall)

    def _draw(self, row: Mapping[str, Any]) -> None:
        """The program read the clock, or drew."""
        kind = "rng.draw" if row.get("kind") == "rng" else "clock.read"
        body = {name: row[name] for name in ("source", "value", "bits") if name in row}
        rest = {name: item for name, item in row.items() if name not in ("kind", "source", "value", "bits", "start_ns")}
        self._put(kind, body, [0], int(row.get("start_ns") or 0), {"draw": rest})

    def _span(self, row: Any) -> None:
        """A span without a call; its times are ns since the epoch, which no double holds: here since the run began."""
        moved = moved_span(row, -self._wall0)
        self._put("x-sftrace.span", moved, [0], int(moved.get("end_ns") or 0), {})

    # -- calls

    def _begin(self, record: Begin, sends: bool) -> None:
        call = self._open[record.n] = _Open(record, [self._seqs.get(record.parent or "", 0)])
        self._calls = max(self._calls, record.n)
        if not sends:
            self._without_wire(call)

    def _without_wire(self, call: _Open) -> None:
        """A call of which no wire is told: its payload is the request."""
        begin = call.begin
        extra: dict[str, Any] = {}
        body: dict[str, Any] = {}
        if begin is None:
            return
        call.begin = None
        extra["call"] = _members(begin, {"m", "w", "p"})
        payload = bytes(begin.p)
        if begin.kind == "tool":
            kind, body = "tool.call", {"name": begin.name}
            self._payload(body, "input", payload, extra)
        elif begin.kind == "llm":
            kind, body = "x-sftrace.llm.request", {"provider": begin.provider, "model": begin.model}
            self._payload(body, "input", payload, extra)
        else:
            kind = "http.request"
            self._members_of(body, payload, ("method", "url", "headers", "body"), "input", extra)
        self._began(call, begin, self._put(kind, body, call.parents, begin.m, extra, wall=begin.w))

    def _began(self, call: _Open, begin: Begin, seq: int) -> None:
        call.seq = seq
        self._seqs[begin.id] = seq
        while len(self._seqs) > _PARENTS:
            self._seqs.popitem(last=False)

    def _request(self, call: _Open, n: int, attempt: int, row: Mapping[str, Any]) -> None:
        """One attempt goes out; the first one is the beginning of its call."""
        sent: Mapping[str, Any] = row.get("request") or {}
        body: dict[str, Any] = {"method": row.get("method"), "url": row.get("url"), "headers": sent.get("headers")}
        text = sent.get("body")
        body["body"] = self._body(text, sent.get("headers"))
        extra: dict[str, Any] = {"wire": {"call": n, "attempt": attempt}}
        if "module" in row:
            extra["wire"]["module"] = row["module"]
        if sent.get("truncated"):
            extra["wire"]["truncated"] = True
        begin, call.begin, call.wired = call.begin, None, True
        parents, mono, wall = call.parents, int(row.get("start_ns", 0)), None
        if begin is not None:
            extra["call"] = _members(begin, {"m", "w", "p"})
            derived = llm_input(begin.name, text) if begin.kind == "llm" else http_input(body, text)
            self._derived(body, "input", bytes(begin.p), begin.h, derived, extra)
            extra["wire"]["start_ns"] = mono
            mono, wall = begin.m, begin.w
        elif call.seq is not None:
            parents = [call.seq]
        seq = self._put("http.request", body, parents, mono, extra, wall=wall)
        call.sent[attempt] = seq
        if begin is not None:
            self._began(call, begin, seq)

    def _wire(self, row: Mapping[str, Any]) -> None:
        """An attempt is over."""
        n, attempt = row.get("call"), int(row.get("attempt", 0))
        call = self._open.get(n) if isinstance(n, int) else None
        if call is None:
            self._put("x-sftrace.wire", dict(row), [0], self._now(row), {})
            return
        if attempt not in call.sent:
            self._request(call, int(n or 0), attempt, row)
        start, end = int(row.get("start_ns") or 0), row.get("end_ns")
        wire = {key: item for key, item in row.items() if key not in _IN_BODY}
        body: dict[str, Any] = {"status": row.get("status"), "reason": row.get("reason")}
        body["headers"] = row.get("headers")
        text = row.get("body")
        body["body"] = self._body(text, row.get("headers"))
        if isinstance(end, int):
            body["latency_ns"] = end - start
        call.output = http_output(row, text) if call.kind == "http" else json_of(text)
        call.seq = self._put("http.response", body, [call.sent[attempt]], self._now(row), {"wire": wire})

    def _ended(self, record: End) -> None:
        call = self._open.pop(record.n, None)
        if call is None:
            return
        self._without_wire(call)  # it was to be sent, and was not
        members = _members(record, {"m", "w", "p"})
        extra: dict[str, Any] = {"end": members}
        parents = [0 if call.seq is None else call.seq]
        kind, body = self._outcome(call, record, extra)
        if kind is not None:
            seq = self._put(kind, body, parents, record.m, extra, wall=record.w)
            parents, extra = [seq], {"of": record.n}
        if record.error is not None:
            error = {"error_type": record.error.get("type"), "message": record.error.get("message")}
            self._put("error", error, parents, record.m, extra, wall=record.w)

    def _outcome(self, call: _Open, record: End, extra: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
        """Type and body of what a call gave; no type where it gave nothing but an error."""
        payload = None if record.id is None else bytes(record.p)
        body: dict[str, Any] = {"status": record.status}
        if call.kind == "tool":
            body["name"] = call.name
            if payload is not None:
                self._payload(body, "output", payload, extra)
            return "tool.result", body
        if call.wired:
            if payload is not None and record.h is not None:
                self._derived(body, "output", payload, record.h, call.output, extra)
            return "x-sftrace.result", body
        if payload is None and record.error is not None:
            return None, body
        if call.kind == "llm":
            body["model"] = record.model
            if payload is not None:
                self._payload(body, "output", payload, extra)
            return "x-sftrace.llm.response", body
        answer: dict[str, Any] = {}
        if payload is not None:
            self._members_of(answer, payload, ("status_code", "headers", "body"), "output", extra)
        if "status_code" in answer:
            answer = {"status": answer.pop("status_code"), **answer}
        return "http.response", answer

    # -- other events

    def _single(self, record: Single) -> None:
        if record.type == "run_end":
            self._end = record
            return
        extra: dict[str, Any] = {"event": _members(record, {"m", "w", "f", "type"})} if record.id else {}
        body: dict[str, Any] = {}
        for name, raw in record.f.items():
            self._payload(body, name, bytes(raw), extra)
        kind = _SINGLES.get(record.type, record.type)
        parents = [] if not self._started else [self._seqs.get(record.parent or "", 0)]
        if record.type == "run_start":
            if self._started:
                kind = "x-sftrace.input"
            elif self._head is not None:
                extra["head"] = {**_members(self._head, {"run", "agent", "at"}), "at": str(self._head.at)}
                body = {"agent": self._head.agent, **body}
        seq = self._put(kind, body, parents, record.m, extra, wall=record.w)
        self._started = True
        self._seqs[record.id] = seq

    # -- values

    def _payload(self, body: dict[str, Any], member: str, raw: bytes, extra: dict[str, Any]) -> None:
        """Put a payload into `body`, with its exact text into `extra` where its value alone would not give it back."""
        if len(raw) > SPILL_BYTES:
            body[member] = self._blob(raw, JSON_MEDIA)
            return
        value = canonical.loads(raw)
        body[member] = value
        if not _is_exact(value, raw):
            extra[member + EXACT] = raw.decode()

    def _derived(
        self, body: dict[str, Any], member: str, raw: bytes, digest: str, derived: object, extra: dict[str, Any]
    ) -> None:
        """Put a payload into `body` unless the wire gives it, by its digest."""
        if derived is None or digest_of(derived) != digest:
            self._payload(body, member, raw, extra)

    def _members_of(
        self, body: dict[str, Any], raw: bytes, names: tuple[str, ...], member: str, extra: dict[str, Any]
    ) -> None:
        """Put the members of an HTTP payload into `body`; one of another shape as a whole."""
        value = canonical.loads(raw) if len(raw) <= SPILL_BYTES else None
        if not isinstance(value, dict) or not set(value) <= set(names):
            self._payload(body, member, raw, extra)
            return
        body.update(value)
        if not _is_exact(value, raw):
            extra[member + EXACT] = raw.decode()

    def _body(self, stored: object, headers: object) -> object:
        """A wire body: exact text, or the blob that it is in already."""
        if isinstance(stored, Mapping):
            return flight.Stored(stored)
        if isinstance(stored, str) and len(stored) > SPILL_BYTES:
            return self._blob(stored.encode(), _media(headers))
        return stored

    def _blob(self, data: bytes, media: str) -> flight.Stored:
        return flight.Stored(self._sink.blob(data, media))

    def _now(self, row: Mapping[str, Any]) -> int:
        end = row.get("end_ns")
        return end if isinstance(end, int) and row.get("start_ns") is not None else int(row.get("start_ns") or 0)

    def _put(
        self,
        kind: str,
        body: dict[str, Any],
        parents: list[int],
        mono: int,
        extra: dict[str, Any],
        *,
        wall: int | None = None,
    ) -> int:
        sink = self._sink
        return sink.append(
            kind,
            body,
            parents=parents,
            t_mono_ns=max(0, mono),
            t_wall=timestamp(wall if wall is not None else self._wall0 + mono),
            extra={EXTRA: flight.encode_value(extra, sink.blob)} if extra else None,
        )


_SINGLES = {
    "run_start": "run.start",
    "state_change": "x-sftrace.state",
    "tool_result": "tool.result",  # without its call
    "llm_response": "x-sftrace.llm.response",
}
_IN_BODY = frozenset({"event_id", "method", "url", "request", "status", "reason", "headers", "body", "module"})
"""Members of a wire row that the events hold elsewhere."""


def _members(record: Head | Begin | End | Single, leave_out: set[str]) -> dict[str, Any]:
    """A record's members as they are in the journal, without those that an event holds elsewhere."""
    form = {name: getattr(record, name) for name in record.__struct_fields__ if name not in leave_out}
    defaults = dict(zip(record.__struct_fields__[::-1], record.__struct_defaults__[::-1], strict=False))
    kept = {name: item for name, item in form.items() if name not in defaults or item != defaults[name]}
    plain: dict[str, Any] = msgspec.to_builtins(kept)
    return plain


def moved_span(row: dict[str, Any], by: int) -> dict[str, Any]:
    """The row of a span with its times, and those of its events, moved by so many ns."""
    moved = dict(row)
    for name in ("start_ns", "end_ns"):
        if isinstance(row.get(name), int):
            moved[name] = row[name] + by
    if isinstance(row.get("events"), list):
        moved["events"] = [_moved_event(one, by) for one in row["events"]]
    return moved


def _moved_event(event: Any, by: int) -> Any:
    timed = isinstance(event, dict) and isinstance(event.get("time_ns"), int)
    return {**event, "time_ns": event["time_ns"] + by} if timed else event


def _scopes(closing: Closing, calls: int) -> dict[str, Any]:
    """Which calls' spans reached us, by the number of the call: a list of scopes, and an index into it for each."""
    assert closing.seen is not None
    scopes: dict[str, int] = {}
    codes = []
    for number in range(1, calls + 1):
        scope = closing.seen(number)
        codes.append(0 if scope is None else scopes.setdefault(scope, len(scopes) + 1))
    return {"scopes": list(scopes), "calls": codes}


def _media(headers: object) -> str:
    if isinstance(headers, list):
        for pair in headers:
            if isinstance(pair, list) and len(pair) == 2 and pair[0] == "content-type":
                return str(pair[1])
    return "application/octet-stream"


def _is_exact(value: Json, raw: bytes) -> bool:
    """Whether `value`, written by RFC 8785 and read again, is `raw` again."""
    try:
        return canonical.rfc8785(value) == raw
    except CanonicalizationError:
        return False


def digest_of(value: object) -> str | None:
    """The payload hash of a derived value; None where it has none."""
    try:
        return canonical.digest(value)  # type: ignore[arg-type]
    except CanonicalizationError:
        return None


def json_of(text: object) -> object:
    """The value of a wire body that is JSON text; None for any other."""
    if not isinstance(text, str) or not text:
        return None
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _value_of(text: object, headers: object) -> object:
    """A body as the value that an HTTP payload holds (`instrumentation.exchange.body_value`)."""
    if not isinstance(text, str) or not text:
        return None
    if not _media(headers).startswith("text/event-stream"):
        try:
            return msgspec.json.decode(text)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            pass
    return text


def llm_input(method: str, text: object) -> object:
    """The payload of an LLM request with the body `text`; None where the body is not here as JSON."""
    value = json_of(text)
    return None if value is None else {"method": method, "request": value}


def http_input(body: Mapping[str, Any], text: object) -> object:
    """The payload of an HTTP request; None where its body is in a blob."""
    if text is not None and not isinstance(text, str):
        return None
    names = ("method", "url", "headers")
    return {**{name: body.get(name) for name in names}, "body": _value_of(text, body.get("headers"))}


def http_output(row: Mapping[str, Any], text: object) -> dict[str, Any] | None:
    """The payload of an HTTP answer; None where its body is in a blob, or where there was none."""
    if (text is not None and not isinstance(text, str)) or row.get("status") is None:
        return None
    headers = row.get("headers")
    return {"status_code": row["status"], "headers": headers, "body": _value_of(text, headers)}
