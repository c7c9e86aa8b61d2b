# SPDX-License-Identifier: Apache-2.0
"""A `.flight` chain as the records of a journal, from which a `.sftrace` bundle is built.

Decision: reading a chain and writing a `.sftrace` of it is what closing a run does, with the chain in the place of the
program. What our own writer put into `x-sftrace` comes back as it was: ids, order of keys, lineage, chunks. A chain of
another writer has none of that: its exchanges and tools become calls by their types and `parents`, its LLM calls are
recognised by path and body as those of bare clients are, its payloads pass the redaction policy, and its ids are made
of its own `run_id/seq`. What `.sftrace` has no room for is counted by type and told. Rejected: one reader a writer.

Sources: the seed `004`, §2 to §4; `design.md`, "From calls and spans to events".
"""

from __future__ import annotations

import datetime as _dt
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import msgspec

from sftrace_otel.bundle.build import Closing
from sftrace_otel.bundle.flight_out import (
    EXACT,
    EXTRA,
    JSON_MEDIA,
    digest_of,
    http_input,
    http_output,
    json_of,
    llm_input,
    moved_span,
)
from sftrace_otel.bundle.records import NOTHING, Begin, End, Head, Single, record_of
from sftrace_otel.bundle.recover import is_sane
from sftrace_otel.core.mapping import dialects
from sftrace_otel.core.mapping.http import http_name
from sftrace_otel.core.prepare import Prepared, prepare
from sftrace_otel.core.redact import MARK, RedactionPolicy
from sftrace_otel.errors import FormatError, TraceStorageError
from sftrace_otel.formats import Json, canonical, flight
from sftrace_otel.version import __version__

__all__ = ["Loaded", "Taker", "Unchained"]

_EPOCH = _dt.datetime(1970, 1, 1, tzinfo=_dt.UTC)


class Taker(Protocol):
    """What takes the records: a journal."""

    def introduce(self, head: Head) -> None:
        """Whose run it is."""

    def record(self, record: Begin | End | Single) -> None:
        """Something happened."""

    def row(self, sidecar: str, row: Mapping[str, object]) -> None:
        """A row of a sidecar."""

    def blob(self, data: bytes) -> str:
        """Bytes of a body; gives `sha256:<hex>`."""


class Loaded(msgspec.Struct):
    """What a chain amounts to beside its records: how its run ended, and how many events of which types were left."""

    closing: Closing
    left: dict[str, int]


class _Call(msgspec.Struct):
    n: int
    begin: Begin
    ours: bool
    status: int | None = None
    text: object = None
    headers: object = None
    output: Any = None
    tool_output: Prepared | None = None
    module: str | None = None
    sent: Mapping[str, Any] = {}
    sent_cut: bool = False
    endpoint: Any = None
    answered: bool = False
    failure: tuple[str, str] | None = None
    end_mono: int = 0
    end_wall: int = 0
    failed: bool = False


class Unchained:
    """Reads events and tells a journal of them.

    `blob` gives the bytes of a blob by its `sha256:<hex>`, checked. `policy` redacts what another writer recorded.
    """

    def __init__(self, taker: Taker, blob: Callable[[str], bytes], policy: RedactionPolicy) -> None:
        self._to = taker
        self._blob = blob
        self._policy = policy
        self._calls: dict[int, _Call] = {}
        self._at: dict[int, int] = {}
        self._left: Counter[str] = Counter()
        self._next = 0
        self._run_id = ""
        self._head: Head | None = None
        self._wall0 = 0
        self._last = 0
        self._start_id: str | None = None
        self._closing: Closing | None = None
        self._failure: tuple[str, str] | None = None

    def read(self, events: Iterable[flight.FlightEvent], name: str) -> Loaded:
        """Tell of all events; `name` is what the run is called where the chain does not say it.

        Raises:
            TraceStorageError: An event that is of no use (code `invalid_event`). OSError where the journal does.
        """
        for event in events:
            try:
                self._event(event, name)
            except (FormatError, KeyError, TypeError, ValueError, msgspec.MsgspecError) as error:
                text = f"event {event.seq} ({canonical.printable(event.type)}) cannot be read: {_reason(error)}"
                raise TraceStorageError(text, where=flight.EVENTS_FILE, code="invalid_event") from None
        if self._head is None:
            self._introduce(name, {}, 0)
        self._end_foreign()
        closing = self._closing or self._cut_off()
        return Loaded(closing, dict(sorted(self._left.items())))

    # -- one event

    def _event(self, event: flight.FlightEvent, name: str) -> None:
        extra = flight.decode_value(event.extra.get(EXTRA, {}), self._blob)
        extra = extra if isinstance(extra, dict) else {}
        self._run_id = event.run_id
        self._last = max(self._last, event.t_mono_ns)
        if self._head is None:
            at = _unix_ns(event.t_wall) - event.t_mono_ns
            body: Mapping[str, Any] = event.body if event.type == "run.start" else {}
            head = extra.get("head")
            self._introduce(str(body.get("agent") or name), head if isinstance(head, dict) else {}, at)
        handler = _HANDLERS.get(event.type)
        if handler is not None:
            handler(self, event, extra)
        elif event.type == "x-sftrace.span":
            self._to.row("spans", moved_span(self._plain(event.body), self._wall0))
        elif event.type == "x-sftrace.wire":
            self._to.row("wire", self._plain(event.body))
        else:
            self._left[event.type] += 1

    def _introduce(self, agent: str, members: Mapping[str, Any], at: int) -> None:
        told = {key: item for key, item in members.items() if key in Head.__struct_fields__}
        form = {"target": "", "pid": 0, "python": "", "os": "", "version": "", **told}
        form["at"] = int(told["at"]) if str(told.get("at", "")).isdecimal() else max(0, at)
        self._head = msgspec.convert({**form, "run": self._run_id or "run_unknown", "agent": agent or "unknown"}, Head)
        self._wall0 = self._head.at
        self._to.introduce(self._head)

    def _take(self, record: Begin | End | Single) -> None:
        """Pass a record on. Its words go into lines as they are, so those of a stranger are looked at first."""
        if not is_sane(record):
            raise FormatError("an id, a digest, a status or a name is none", code="invalid_event")
        self._to.record(record)

    # -- the run

    def _run_start(self, event: flight.FlightEvent, extra: Mapping[str, Any]) -> None:
        told = extra.get("event")
        if told is None and "head" in extra:  # the recording had none
            self._at[event.seq] = 0
            return
        raw, digest = self._input(event, extra, ours=isinstance(told, dict))
        record = self._single(event, "run_start", told, {"input": raw})
        if record.ih is None:
            record.ih = digest
        self._start_id = record.id
        self._take(record)
        self._at[event.seq] = 0

    def _input(self, event: flight.FlightEvent, extra: Mapping[str, Any], *, ours: bool) -> tuple[bytes, str]:
        if ours:
            raw = self._raw(event.body, "input", extra)
            return raw, hashlib.sha256(raw).hexdigest()
        prepared = self._prepared(event.body.get("input"))
        return prepared.data, prepared.digest

    def _single(self, event: flight.FlightEvent, kind: str, told: object, members: Mapping[str, bytes]) -> Single:
        if isinstance(told, dict):
            form: dict[str, Any] = {"parent": None, **told}
        else:
            form = {"id": self._id(event), "parent": None if kind in ("run_start", "run_end") else self._start_id}
        record = Single(
            id=str(form.pop("id")),
            m=event.t_mono_ns,
            w=_unix_ns(event.t_wall),
            type=kind,
            f={name: msgspec.Raw(raw) for name, raw in members.items()},
        )
        for key, item in form.items():
            if key in ("parent", "status", "ih", "oh"):
                setattr(record, key, item)
            elif key == "r":
                record.r = [(str(pair[0]), str(pair[1])) for pair in item]
        return record

    def _state(self, event: flight.FlightEvent, extra: Mapping[str, Any]) -> None:
        members = {name: self._raw(event.body, name, extra) for name in event.body}
        self._take(self._single(event, "state_change", extra.get("event"), members))

    def _run_end(self, event: flight.FlightEvent, extra: Mapping[str, Any]) -> None:
        self._end_foreign()
        told = extra.get("event")
        status = event.body.get("status")
        failed = self._failure is not None or status in ("failed", "error")
        word = str(status) if status in ("completed", "failed", "running") else "failed" if failed else "completed"
        failure = event.body.get("failure")
        if isinstance(failure, dict):
            self._failure = (str(failure.get("type")), str(failure.get("message")))
        elif word == "failed" and self._failure is None:
            self._failure = ("RuntimeError", "the run failed")
        closing = extra.get("closing")
        closing = closing if isinstance(closing, dict) else {}
        if told is not None or not closing:
            if isinstance(told, dict):
                raw = self._raw(event.body, "output", extra)
                digest = None
            else:
                prepared = self._prepared(event.body.get("output"))
                raw, digest = prepared.data, prepared.digest
            if not isinstance(told, dict) and word == "failed":
                self._fail_run(event)
            record = self._single(event, "run_end", told, {"run_status": b'"%s"' % word.encode(), "output": raw})
            record.oh = record.oh or digest
            self._take(record)
        self._closing = self._closed(word, closing, extra, event.t_mono_ns)

    def _fail_run(self, event: flight.FlightEvent) -> None:
        assert self._failure is not None
        kind, message = (msgspec.Raw(msgspec.json.encode(text)) for text in self._failure)
        record = Single(
            id=f"{self._id(event)}f",
            m=event.t_mono_ns,
            w=_unix_ns(event.t_wall),
            type="error",
            f={"error_type": kind, "message": message, "details": msgspec.Raw(b"null")},
            parent=self._start_id,
            status="error",
            oh=hashlib.sha256(b"null").hexdigest(),
        )
        self._take(record)

    def _closed(self, word: str, told: Mapping[str, Any], extra: Mapping[str, Any], mono: int) -> Closing:
        assert self._head is not None
        run, provenance, spans = extra.get("run"), extra.get("provenance"), extra.get("spans")
        return Closing(
            run_id=self._run_id,
            agent=str(told.get("agent") or self._head.agent),
            created_ns=_unix_ns(str(told["created_at"])) if "created_at" in told else self._head.at,
            status=word,  # type: ignore[arg-type]
            failure=self._failure if word == "failed" else None,
            duration_ms=told.get("duration_ms", mono // 1_000_000),
            python=str(told.get("python", self._head.python)),
            os=str(told.get("os", self._head.os)),
            version=str(told.get("version", self._head.version)) or f"sftrace-otel {__version__}",
            run={"schema_version": "1", **run} if isinstance(run, dict) and run else self._run_json(),
            provenance={"schema_version": "1", **provenance} if isinstance(provenance, dict) else _converted(),
            seen=_seen(spans) if isinstance(spans, dict) else None,
            redactions=[(str(one), str(other)) for one, other in told.get("redactions", [])],
            truncated=bool(told.get("truncated")),
        )

    def _cut_off(self) -> Closing:
        """The chain ends before its run did."""
        self._failure = None
        return self._closed("running", {"truncated": True}, {}, self._last)

    def _run_json(self) -> dict[str, Any]:
        assert self._head is not None
        head = self._head
        obstacles: list[dict[str, str]] = []
        if self._closing is None and self._calls:
            what = f"{len(self._calls)} calls have no result in the chain"
            obstacles.append({"kind": "open_calls", "what": what, "do": "expect replay to stop at them"})
        return {
            "schema_version": "1",
            "agent": head.agent,
            "kind": head.kind,
            "origin": head.origin,
            "trace_ids": [],
            "losses": {},
            "verdict": {"offline": not obstacles, "obstacles": obstacles},
            "connections": [],
            "policy": head.policy or self._policy.describe(),
            "settings": head.settings,
            "command": head.command,
        }

    def _draw(self, event: flight.FlightEvent, extra: Mapping[str, Any]) -> None:
        told = extra.get("draw")
        if not isinstance(told, dict):  # of another writer: nobody knows where in the program it was
            self._left[event.type] += 1
            return
        kind = "rng" if event.type == "rng.draw" else "clock"
        row = {"kind": kind, **self._plain(event.body), **told, "start_ns": event.t_mono_ns}
        self._to.row("nondeterminism", row)

    # -- calls of our own writer, and of others

    def _request(self, event: flight.FlightEvent, extra: Mapping[str, Any]) -> None:
        told, wire = extra.get("call"), extra.get("wire")
        if isinstance(told, dict):
            self._our_request(event, extra, told)
        elif isinstance(wire, dict) and wire.get("call") in self._calls:
            call = self._calls[int(wire["call"])]
            self._goes_out(call, event, wire)
            self._at[event.seq] = call.n
        else:
            self._their_request(event)

    def _our_request(self, event: flight.FlightEvent, extra: Mapping[str, Any], told: dict[str, Any]) -> None:
        kind = str(told.get("kind"))
        wired = "wire" in extra
        text = self._wire_body(event.body.get("body")) if wired else None
        raw = self._given(event.body, "input", extra)
        if raw is None:
            if wired:
                value = llm_input(str(told.get("name")), text) if kind == "llm" else http_input(self._http(event), text)
            else:
                value = self._plain(event.body)
            raw = _text_of(value, str(told.get("h")))
        begin = record_of("b", self._timed(told, event), raw)
        assert isinstance(begin, Begin)
        call = self._calls[begin.n] = _Call(begin.n, begin, True)
        self._next = max(self._next, begin.n)
        self._goes_out(call, event, extra.get("wire"))
        self._at[event.seq] = begin.n
        self._take(begin)

    def _timed(self, told: Mapping[str, Any], event: flight.FlightEvent) -> dict[str, Any]:
        return {**told, "m": event.t_mono_ns, "w": _unix_ns(event.t_wall)}

    def _goes_out(self, call: _Call, event: flight.FlightEvent, wire: object) -> None:
        """The request of an attempt, kept for the row that its answer makes."""
        call.sent = event.body
        told = wire if isinstance(wire, dict) else {}
        call.module = told.get("module") if isinstance(told.get("module"), str) else None
        call.sent_cut = told.get("truncated") is True

    def _http(self, event: flight.FlightEvent) -> dict[str, Any]:
        plain = {name: event.body.get(name) for name in ("method", "url", "headers")}
        decoded = flight.decode_value(plain, self._blob)
        assert isinstance(decoded, dict)
        return decoded

    def _response(self, event: flight.FlightEvent, extra: Mapping[str, Any]) -> None:
        wire, end = extra.get("wire"), extra.get("end")
        number = self._above(event)
        call = None if number is None else self._calls.get(number)
        if isinstance(wire, dict) and call is not None:
            self._wire_row(event, wire, call)
            self._at[event.seq] = call.n
        elif isinstance(end, dict) and call is not None:
            answer = self._plain(event.body)
            if "status" in answer:
                answer = {"status_code": answer.pop("status"), **answer}
            self._our_end(event, extra, end, answer)
        elif call is not None:
            self._their_response(event, call)
        else:
            self._left[event.type] += 1

    def _wire_row(self, event: flight.FlightEvent, wire: Mapping[str, Any], call: _Call) -> None:
        asked = call.sent
        decoded = self._plain({**event.body, "body": None})
        sent: dict[str, Any] = {"headers": flight.decode_value(asked.get("headers"), self._blob)}
        sent["body"] = self._stored_body(asked.get("body"))
        if call.sent_cut:
            sent["truncated"] = True
        told = {key: item for key, item in wire.items() if key not in ("call", "attempt")}
        row: dict[str, Any] = {
            "event_id": call.begin.id,
            "call": call.n,
            "attempt": wire.get("attempt", 0),
            **({} if call.module is None else {"module": call.module}),
            "method": flight.decode_value(asked.get("method"), self._blob),
            "url": flight.decode_value(asked.get("url"), self._blob),
            "request": sent,
        }
        if decoded.get("status") is None and event.body.get("body") is not None:
            row["body"] = self._stored_body(event.body.get("body"))
        elif decoded.get("status") is not None:
            row.update(status=decoded["status"], reason=decoded.get("reason"), headers=decoded.get("headers"))
            row["body"] = self._stored_body(event.body.get("body"))
        row.update(told)
        self._to.row("wire", row)
        text = self._wire_body(event.body.get("body"))
        call.output = http_output(row, text) if call.begin.kind == "http" else json_of(text)

    def _tool_call(self, event: flight.FlightEvent, extra: Mapping[str, Any]) -> None:
        told = extra.get("call")
        if isinstance(told, dict):
            self._our_request(event, extra, told)
            return
        body = self._plain(event.body)
        given = next((body[name] for name in ("input", "args", "arguments") if name in body), None)
        name = str(body.get("name") or "tool")
        self._begin_theirs(event, "tool", name, self._prepared(given), {})

    def _result(self, event: flight.FlightEvent, extra: Mapping[str, Any]) -> None:
        end, number, told = extra.get("end"), self._above(event), extra.get("event")
        call = None if number is None else self._calls.get(number)
        if isinstance(told, dict):
            members = {name: self._raw(event.body, name, extra) for name in event.body}
            kind = "tool_result" if event.type == "tool.result" else "llm_response"
            self._take(self._single(event, kind, told, members))
        elif isinstance(end, dict):
            self._our_end(event, extra, end, call.output if call is not None else None)
        elif call is not None:
            body = self._plain(event.body)
            given = next((body[name] for name in ("output", "result", "value") if name in body), None)
            call.tool_output = self._prepared(given)
            call.failed = body.get("status") == "error" or body.get("is_error") is True
            call.answered, call.end_mono, call.end_wall = True, event.t_mono_ns, _unix_ns(event.t_wall)
            self._at[event.seq] = call.n
        else:
            self._left[event.type] += 1

    def _our_end(self, event: flight.FlightEvent, extra: Mapping[str, Any], told: dict[str, Any], derived: Any) -> None:
        raw = b""
        if told.get("id") is not None:
            given = self._given(event.body, "output", extra)
            raw = given if given is not None else _text_of(derived, str(told.get("h")))
        end = record_of("e", self._timed(told, event), raw)
        assert isinstance(end, End)
        self._at[event.seq] = end.n
        self._calls.pop(end.n, None)
        self._take(end)

    def _error(self, event: flight.FlightEvent, extra: Mapping[str, Any]) -> None:
        end, told = extra.get("end"), extra.get("event")
        if isinstance(end, dict):
            self._our_end(event, extra, end, None)
        elif "of" in extra:
            pass  # what it tells is in the result before it
        elif isinstance(told, dict):
            members = {name: self._raw(event.body, name, extra) for name in event.body}
            self._take(self._single(event, "error", told, members))
        else:
            self._their_error(event)

    # -- calls of other writers

    def _their_request(self, event: flight.FlightEvent) -> None:
        body = self._plain({**event.body, "body": None})
        text = self._their_text(event.body.get("body"))
        headers = _pairs(body.get("headers"))
        method, url = str(body.get("method") or "GET"), str(body.get("url") or "")
        data = text.encode() if isinstance(text, str) else b""
        found = dialects.recognised(method, url, headers, data)
        clean = self._policy.redact_url(url)
        if found is not None:
            asked, provider = found
            prepared = self._prepared(asked.payload)
            more = {"provider": provider, "model": asked.model}
            call = self._begin_theirs(event, "llm", asked.endpoint.method, prepared, more)
            call.endpoint = asked.endpoint
        else:
            given = http_input({"method": method, "url": clean, "headers": headers}, text)
            call = self._begin_theirs(event, "http", http_name(method, clean), self._prepared(given), {})
        shown, _ = self._policy.redact_document(text) if isinstance(text, str) else (None, False)
        call.sent = {"method": method, "url": clean, "headers": self._headers(headers), "body": shown}

    def _headers(self, pairs: list[list[str]]) -> list[list[str]]:
        return [list(pair) for pair in self._policy.redact_headers([(name, value) for name, value in pairs])]

    def _begin_theirs(
        self, event: flight.FlightEvent, kind: str, name: str, prepared: Prepared, more: Mapping[str, str]
    ) -> _Call:
        self._next += 1
        above = next((self._at[seq] for seq in event.parents if self._at.get(seq)), None)
        parent = self._calls[above].begin.id if above in self._calls else self._start_id
        begin = Begin(
            n=self._next,
            id=self._id(event),
            m=event.t_mono_ns,
            w=_unix_ns(event.t_wall),
            kind=kind,
            name=self._policy.redact_text(name)[0] or kind,
            p=msgspec.Raw(prepared.data),
            h=prepared.digest,
            parent=parent,
            r=[(found.pointer, found.reason) for found in prepared.findings],
            tags=prepared.tags,
            cut=prepared.truncated,
            **more,
        )
        call = self._calls[begin.n] = _Call(begin.n, begin, False)
        self._at[event.seq] = begin.n
        self._take(begin)
        return call

    def _their_response(self, event: flight.FlightEvent, call: _Call) -> None:
        body = self._plain({**event.body, "body": None})
        text = self._their_text(event.body.get("body"))
        headers = _pairs(body.get("headers"))
        status = body.get("status", body.get("status_code"))
        call.status = status if isinstance(status, int) and not isinstance(status, bool) else None
        if (
            isinstance(text, str)
            and not any(name == "content-type" for name, _ in headers)
            and json_of(text) is not None
        ):
            headers = [*headers, ["content-type", "application/json"]]
        call.text, call.headers = text, headers
        call.answered, call.end_mono, call.end_wall = True, event.t_mono_ns, _unix_ns(event.t_wall)
        self._at[event.seq] = call.n

    def _their_error(self, event: flight.FlightEvent) -> None:
        body = self._plain(event.body)
        kind = str(body.get("error_type") or body.get("type") or "Error")
        message = self._policy.redact_text(str(body.get("message") or kind))[0] or kind
        number = self._above(event)
        call = None if number is None else self._calls.get(number)
        if call is not None and not call.ours:
            call.failure = (kind, message)
            call.answered, call.end_mono, call.end_wall = True, event.t_mono_ns, _unix_ns(event.t_wall)
            return
        self._failure = (kind, message)

    def _end_foreign(self) -> None:
        """End the calls of another writer that have an answer; the others stay open."""
        for call in [one for one in self._calls.values() if not one.ours and one.answered]:
            self._end_theirs(call)
            del self._calls[call.n]

    def _end_theirs(self, call: _Call) -> None:
        prepared, model = call.tool_output, None
        tokens: tuple[int | None, int | None, int | None] = (None, None, None)
        status = "error" if call.failure or call.failed else "ok"
        if call.begin.kind == "tool":
            if prepared is None and call.failure is not None:
                prepared = self._prepared({"error_type": call.failure[0], "message": call.failure[1]})
        elif call.status is not None:
            row = {"status": call.status, "headers": call.headers}
            value: Any = http_output(row, call.text)
            if call.begin.kind == "llm":
                media = next((item for name, item in call.headers or [] if name == "content-type"), "")  # type: ignore[attr-defined]
                data = call.text.encode() if isinstance(call.text, str) else b""
                framing = dialects.framing_of(call.endpoint, media, data)
                value = (
                    dialects.assemble(call.endpoint, data, framing) if framing else (json_of(call.text) or call.text)
                )
                answered = dialects.answered(call.endpoint, value)
                model, tokens = answered.model, answered.tokens
                status = "error" if call.status >= 400 else status
            prepared = self._prepared(value)
            self._their_wire(call)
        elif call.begin.kind == "http" and call.failure is not None:
            prepared = self._prepared({"error_type": call.failure[0], "message": call.failure[1]})
        error = None
        if call.failure is not None:
            error = {"type": call.failure[0], "message": call.failure[1]}
        end_id = f"{call.begin.id}r" if prepared is not None else None
        self._take(
            End(
                n=call.n,
                m=max(call.end_mono, call.begin.m),
                w=call.end_wall,
                end="failed" if error else "finished",
                id=end_id,
                p=msgspec.Raw(prepared.data) if prepared is not None else NOTHING,
                h=prepared.digest if prepared is not None else None,
                status=status,
                model=model,
                tokens=tokens,
                error=error,
                error_id=f"{call.begin.id}e" if error else None,
                r=[(found.pointer, found.reason) for found in prepared.findings] if prepared is not None else [],
                tags=prepared.tags if prepared is not None else {},
            )
        )

    def _their_wire(self, call: _Call) -> None:
        asked = call.sent
        shown, _ = self._policy.redact_document(call.text) if isinstance(call.text, str) else (None, False)
        headers = self._headers(call.headers)  # type: ignore[arg-type]
        self._to.row(
            "wire",
            {
                "event_id": call.begin.id,
                "call": call.n,
                "attempt": 0,
                "method": asked["method"],
                "url": asked["url"],
                "request": {"headers": asked["headers"], "body": asked["body"]},
                "start_ns": call.begin.m,
                "end_ns": max(call.end_mono, call.begin.m),
                "end": "finished",
                "status": call.status,
                "headers": headers,
                "body": shown,
            },
        )

    # -- values

    def _above(self, event: flight.FlightEvent) -> int | None:
        """The call that an answer or an error belongs to, by its parents; else the last one without an answer."""
        for seq in event.parents:
            number = self._at.get(seq)
            if number:
                return number
        if event.parents and event.type == "error":
            return None
        waiting = [call.n for call in self._calls.values() if not call.ours and not call.answered]
        return waiting[-1] if waiting and event.type in ("http.response", "tool.result") else None

    def _id(self, event: flight.FlightEvent) -> str:
        digest = hashlib.sha256(event.id.encode()).hexdigest()
        return f"evt_{digest[:32]}"

    def _prepared(self, value: object) -> Prepared:
        return prepare(_marked(value), self._policy)

    def _plain(self, body: Mapping[str, Json]) -> dict[str, Any]:
        decoded = flight.decode_value(dict(body), self._blob)
        return decoded if isinstance(decoded, dict) else {}

    def _given(self, body: Mapping[str, Json], member: str, extra: Mapping[str, Any]) -> bytes | None:
        """The exact JSON text of a payload that an event holds; None where it holds none."""
        exact = extra.get(member + EXACT)
        if isinstance(exact, str):
            return exact.encode()
        if member not in body:
            return None
        return self._raw(body, member, extra)

    def _raw(self, body: Mapping[str, Json], member: str, extra: Mapping[str, Any]) -> bytes:
        exact = extra.get(member + EXACT)
        if isinstance(exact, str):
            return exact.encode()
        stored = body.get(member)
        if isinstance(stored, dict) and stored.get("media_type") == JSON_MEDIA and "$blob" in stored:
            data = self._blob(str(stored["$blob"]))
            canonical.loads(data)
            return data
        return canonical.dumps(flight.decode_value(stored, self._blob))

    def _wire_body(self, stored: object) -> object:
        """The text of a wire body that is short text; None where it is in a blob, or none."""
        if isinstance(stored, dict) and stored.get("media_type") == flight.TEXT_MEDIA:  # the line had no room for it
            stored = flight.decode_value(stored, self._blob)
        return stored if isinstance(stored, str) else None

    def _their_text(self, stored: Json) -> str | None:
        """The body of another writer's exchange as text: as it is, from a blob that is UTF-8, or a value's JSON."""
        if stored is None or isinstance(stored, str):
            return stored
        if isinstance(stored, dict) and "$blob" in stored:
            try:
                return self._blob(str(stored["$blob"])).decode()
            except UnicodeDecodeError:
                return None
        return msgspec.json.encode(_marked(flight.decode_value(stored, self._blob))).decode()

    def _stored_body(self, stored: object) -> object:
        """A wire body as `wire.jsonl` holds it: text, or the reference of a blob that is copied."""
        text = self._wire_body(stored)
        if text is None and isinstance(stored, dict) and "$blob" in stored:
            self._to.blob(self._blob(str(stored["$blob"])))
            return dict(stored)
        return text


_HANDLERS: dict[str, Callable[[Unchained, flight.FlightEvent, Mapping[str, Any]], None]] = {
    "run.start": Unchained._run_start,
    "run.end": Unchained._run_end,
    "x-sftrace.input": Unchained._run_start,
    "x-sftrace.state": Unchained._state,
    "http.request": Unchained._request,
    "http.response": Unchained._response,
    "tool.call": Unchained._tool_call,
    "tool.result": Unchained._result,
    "x-sftrace.llm.request": Unchained._tool_call,
    "x-sftrace.llm.response": Unchained._result,
    "x-sftrace.result": Unchained._result,
    "error": Unchained._error,
    "clock.read": Unchained._draw,
    "rng.draw": Unchained._draw,
}


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, FormatError) else type(error).__name__


def _text_of(value: object, digest: str) -> bytes:
    """The JSON text of a derived payload, in the order of its keys. Raises FormatError where its digest is another."""
    if digest_of(value) != digest:
        raise FormatError("its payload is not in the chain", code="invalid_event")
    return msgspec.json.encode(value)


def _unix_ns(text: str) -> int:
    moment = _dt.datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=_dt.UTC)
    return max(0, (moment - _EPOCH) // _dt.timedelta(microseconds=1) * 1000)


def _pairs(headers: object) -> list[list[str]]:
    """Headers as [lower-case name, value] pairs, from pairs or an object."""
    if isinstance(headers, Mapping):
        return [[str(name).lower(), value if isinstance(value, str) else MARK] for name, value in headers.items()]
    if isinstance(headers, list):
        return [
            [str(one[0]).lower(), one[1] if isinstance(one[1], str) else MARK]
            for one in headers
            if isinstance(one, list) and len(one) == 2
        ]
    return []


def _marked(value: object) -> Any:
    """A value in which the placeholder of `.sftrace` stands for what is redacted: that format keeps no ref."""
    if isinstance(value, list):
        return [_marked(item) for item in value]
    if isinstance(value, dict):
        if "$redacted" in value:
            return MARK
        return {key: _marked(item) for key, item in value.items()}
    return value


def _seen(spans: Mapping[str, Any]) -> Callable[[int], str | None]:
    scopes, codes = list(spans.get("scopes", [])), list(spans.get("calls", []))

    def seen(number: int) -> str | None:
        code = codes[number - 1] if 0 < number <= len(codes) else 0
        return str(scopes[code - 1]) if code else None

    return seen


def _converted() -> dict[str, Any]:
    return {"schema_version": "1", "origin": "converted", "tool": f"sftrace-otel {__version__}"}
