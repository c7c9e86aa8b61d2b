# SPDX-License-Identifier: Apache-2.0
"""One HTTP exchange, from the request to the end of the answer's body: the same for every client, sync and async.

Decision: bodies are teed as they are read; what was seen is put together once, when the body ends, however it ends. The
client's own types go through untouched. An exchange below an SDK's LLM call is an attempt of that call; any other is a
call of its own, an LLM call where the request is one (`bare`). Rejected: reading the body ahead to have it whole (it
kills streaming), and one record per chunk (the body of a run that died mid-stream is not worth a write per token).
"""

from __future__ import annotations

import base64
import hashlib
import re
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import msgspec

from sftrace_otel.core.mapping import dialects, http_name
from sftrace_otel.core.prepare import Prepared, standing_at
from sftrace_otel.core.redact import MARK, Finding, RedactionPolicy, Vouched
from sftrace_otel.instrumentation.failopen import fails_open
from sftrace_otel.recorder import UNPLACED, Call, Recorder, Scope, current_scope, how_ended

if TYPE_CHECKING:
    from sftrace_otel.instrumentation.llm import LlmCall, ServedLlmCall

__all__ = ["Exchange", "Head", "answer_payload", "body_value", "call_name", "current_llm", "request_payload"]

current_llm: ContextVar[LlmCall | ServedLlmCall | None] = ContextVar("sftrace_llm", default=None)
"""The SDK's LLM call whose attempts are being made here."""

Pairs = list[list[str]]

LARGE = 64 * 1024
"""Bytes of a body beyond which an async client's exchange is recorded in a thread, so that the loop goes on."""


BEGINNING = 1024 * 1024
"""Bytes that are kept of an answer that is longer than MAX_PAYLOAD_BYTES, and of a request longer than `LARGEST`."""

LARGEST = 16 * 1024 * 1024
"""Bytes of a request's body beyond which it is recorded and matched by its beginning, its size and its digest."""

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,200}")
_ATTRIBUTE = re.compile(
    r"\s*(?:Secure|HttpOnly|Partitioned|(?:Path|Domain|Max-Age|SameSite|Priority)=[^,;]{0,200}"
    r"|Expires=[\w ,:+-]{0,40})\s*",
    re.IGNORECASE,
)


class Head:
    """What is known of a request before it is sent: method, URL, headers as [lower-case name, value] pairs."""

    __slots__ = ("headers", "method", "module", "url")

    def __init__(self, module: str, method: str, url: str, headers: Pairs) -> None:
        self.module = module
        self.method = method
        self.url = url
        self.headers = headers

    def media(self) -> str:
        return header(self.headers, "content-type")


def header(pairs: Iterable[Sequence[str]], name: str) -> str:
    """The first value of a header, lower-case name, or nothing."""
    return next((value for key, value in pairs if key == name), "")


def call_name(head: Head, policy: RedactionPolicy) -> str:
    """The event's name of a call; secrets in its path redacted."""
    return http_name(head.method, policy.redact_url(head.url))


def body_value(data: bytes | None, media: str, policy: RedactionPolicy, seen: list[Vouched] | None = None) -> object:
    """A body as a value: JSON if it parses, else text, else `{"base64": …}`, of which `policy` hides what it can read.

    Of one beyond `LARGEST` the beginning, with size and SHA-256 of the whole; without the digest where the beginning
    holds a secret, since it would let guesses be tested. What the policy found out about a whole that is no text is
    added to `seen`.
    """
    if not data:
        return None
    if len(data) > LARGEST:
        beginning = data[:BEGINNING]
        digest = {} if policy.holds_secret(beginning) else {"sha256": hashlib.sha256(data).hexdigest()}
        return {"beginning": body_value(beginning, media, policy), "size": len(data), **digest}
    if not media.startswith("text/event-stream"):
        try:
            return msgspec.json.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        found = policy.cleaned(data)
        if seen is not None:
            seen.append(found)
        clean = found.data
        return MARK if clean == MARK.encode() else {"base64": base64.b64encode(clean).decode("ascii")}


def vouched_for(
    recorder: Recorder, prepared: Prepared, member: bytes | None, body: bytes, seen: list[Vouched]
) -> Vouched | None:
    """What the policy says of a body whose value is `prepared`, or the last `member` of it (`RedactionPolicy.vouched`):
    one look serves the event and the wire. `seen` is what reading it has found out already."""
    if seen:
        return seen[0]
    if not prepared.clean or not body or len(body) > LARGEST or not recorder.has_content:
        return None  # of a body beyond `LARGEST` the event holds another one
    data = prepared.data
    if member is not None:
        data = data[data.find(b'"%s":' % member) + len(member) + 3 : -1]
    return recorder.policy.vouched(body, data)


def request_payload(
    head: Head, body: bytes | None, policy: RedactionPolicy, seen: list[Vouched] | None = None
) -> dict[str, object]:
    """The input of an HTTP call."""
    return {
        "method": head.method,
        "url": head.url,
        "headers": head.headers,
        "body": body_value(body, head.media(), policy, seen),
    }


def answer_payload(
    status: int, headers: Pairs, body: bytes | None, policy: RedactionPolicy, seen: list[Vouched] | None = None
) -> dict[str, object]:
    """The output of an HTTP call."""
    value = body_value(body, header(headers, "content-type"), policy, seen)
    return {"status_code": status, "headers": headers, "body": value}


class Exchange:
    """Records one attempt. Its methods never raise; `finish` counts once."""

    __slots__ = (
        "_bare", "_chunks", "_cut", "_done", "_full", "_http_span", "_lineage", "_number", "_raw", "_room", "_scope",
        "_sent_cut", "_span", "_started", "_status", "_upload_room", "_vouched", "call", "decoder", "head", "headers",
        "llm", "reader", "reason", "recorder", "sent", "version",
    )  # fmt: skip

    def __init__(
        self,
        recorder: Recorder,
        head: Head,
        llm: LlmCall | None,
        bare: Callable[[Recorder, Head, bytes, Scope, str | None], LlmCall | None] | None = None,
    ) -> None:
        """`llm`: the call that this is an attempt of; `bare` makes one of a request that is an LLM call by itself."""
        self.recorder = recorder
        self._bare = bare
        self.head = head
        self.llm = llm
        self.call: Call | None = None
        self.sent: list[bytes] | bytes = []
        self.headers: Pairs = []
        self.reason = ""
        self.version = ""
        self.reader = 0
        self.decoder: Callable[[str, list[bytes]], list[bytes] | None] = unpacked
        self._status: int | None = None
        self._raw: list[bytes] = []
        self._chunks: list[int] = []
        self._room = recorder.settings.max_payload_bytes
        self._upload_room = self._room
        self._cut = False
        self._sent_cut = False
        self._full: _Full | None = None
        self._number = 0
        self._span = (0, 0)
        self._http_span = 0
        self._scope: Scope = UNPLACED
        self._lineage: str | None = None
        self._vouched: Vouched | None = None
        self._started = recorder.ticks()
        self._done = False

    @fails_open("placing an exchange", None)
    def place(self, span: tuple[int, int], http_span: int, replayed: tuple[str | None] | None = None) -> None:
        """Where the exchange is made: its spans, and its place in the lineage. Called where the program calls.

        `replayed`: the place that a replay which lets it out has found.
        """
        self._span = span
        self._http_span = http_span
        self._scope = current_scope()
        if self.llm is None:
            self._lineage = self._scope.place() if replayed is None else replayed[0]

    @fails_open("recording a request", None)
    def begin(self, body: bytes) -> None:
        """The request is about to be sent with `body`. Not called for one that streams: it begins with the answer."""
        self.sent = body
        self._sent_cut = len(body) > LARGEST
        if self._sent_cut:  # the whole is the program's, and is not kept
            self.sent = body[:BEGINNING]
        elif self.llm is None and self._bare is not None:
            self.llm = self._bare(self.recorder, self.head, body, self._scope, self._lineage)
        if self.llm is not None:
            self.call = self.llm.attempt(self.head, body)
            self._number = self.llm.attempts - 1
            self._vouched = self.llm.vouched
            if self.call is not None and self._http_span:
                self.recorder.fold(self._http_span)
        else:
            self.call = self._begin_http(body)
        if self.call is not None and self.recorder.takes_requests(self.call):
            self.recorder.sent(self.call, self._sent_row(self.call.run.mono0), bytes(self.sent) or None, self._vouched)

    def _begin_http(self, body: bytes) -> Call | None:
        seen: list[Vouched] = []
        prepared = self.recorder.prepare(request_payload(self.head, body, self.recorder.policy, seen))
        self._vouched = vouched_for(self.recorder, prepared, b"body", body, seen)
        call = self.recorder.begin(
            "http",
            call_name(self.head, self.recorder.policy),
            prepared,
            scope=self._scope,
            lineage=self._lineage,
            span=self._span,
            sends=True,
        )
        if call is not None:
            self.recorder.refer(self._http_span, call)
        return call

    def _sent_by_now(self) -> None:
        """The answer is here, or there will be none: what was streamed out until now is the request's body."""
        if isinstance(self.sent, list):
            self.begin(b"".join(self.sent))

    def late_span(self, span_id: int) -> None:
        """The request went out under `span_id`: the span of an HTTP instrumentation that sits below this boundary."""
        if self.call is None or span_id in (0, self._span[1]):
            return
        if self.llm is not None:
            self.recorder.fold(span_id)
        else:
            self.recorder.refer(span_id, self.call)

    @fails_open("recording a request", None)
    def sending(self, part: Any, encoded: Callable[[Any], bytes] = bytes) -> None:
        """A part of a streamed request body went out; `encoded` gives its bytes."""
        chunk = encoded(part)
        self._upload_room -= len(chunk)
        if self._upload_room < 0:
            self._cut = True
        elif isinstance(self.sent, list):
            self.sent.append(chunk)

    def answered(self, status: int, reason: str, version: str, headers: Pairs) -> None:
        """The head of the answer arrived."""
        self._sent_by_now()
        self._status = status
        self.reason = reason
        self.version = version
        self.headers = headers
        if self.call is not None:
            self.reader = threading.get_ident()
            self.call.run.reading.add(self)

    @fails_open("recording an answer", None)
    def chunk(self, data: bytes) -> None:
        """A part of the answer's body was read by the program."""
        self._room -= len(data)
        if self._room < 0:  # what is beyond the limit is not kept in memory either
            if self._full is None:
                self._full = _Full(self._raw)
                self._keep_beginning()
            self._full.add(data)
            self._cut = True
            return
        self._raw.append(data)
        self._chunks.append(self.recorder.ticks())

    def _keep_beginning(self) -> None:
        """Let go of all but the beginning: a cut answer is not replayed, and to put it together takes many times it."""
        room, kept = BEGINNING, 0
        for part in self._raw:
            room -= len(part)
            if room < 0:
                break
            kept += 1
        del self._raw[kept:], self._chunks[kept:]

    @property
    @fails_open("recording an answer", False)
    def large(self) -> bool:
        """Whether what was read is too much to be put together on an event loop."""
        return self.recorder.settings.max_payload_bytes - self._room > LARGE

    @fails_open("recording an answer", None)
    def failed(self, error: BaseException) -> None:
        """The transport raised before there was an answer."""
        self._sent_by_now()
        self.finish(how_ended(error), error)

    @fails_open("recording an answer", None)
    def finish(self, end: str, error: BaseException | None = None) -> None:
        """The exchange is over: finished, failed, closed, abandoned, cancelled or cut. Only the first call counts."""
        if self._done:
            return
        self._done = True
        if self.call is not None:
            self.call.run.reading.discard(self)
        try:
            self._finish(end, error)
        except Exception as fault:
            self.recorder.fault("recording an answer", fault)

    def cut(self) -> None:
        """The run ends while the answer is still being read: what came so far is kept."""
        self.finish("cut")

    def _finish(self, end: str, error: BaseException | None) -> None:
        body, chunks, removed = self._decoded()
        if end in ("closed", "abandoned", "cut") and not self._cut and self._whole(body):
            end = "finished"
        extra = {"truncated": True} if self._cut else None
        sent = self.sent if isinstance(self.sent, bytes) else b"".join(self.sent)
        seen: list[Vouched] = []
        payload = self._answer(body, seen) if self.llm is None and self._status is not None else None
        if payload is not None:
            vouched = vouched_for(self.recorder, payload, b"body", body, seen)
        elif self.llm is not None and self._status is not None:
            vouched = self.llm.read(body, header(self.headers, "content-type"))
        else:
            vouched = None
        if self.call is not None:
            self.recorder.wire(
                self.call,
                self._row(end, error, chunks, removed),
                sent or None,
                body if self._status is not None else None,
                header(self.headers, "content-type") or None,
                (self._vouched, vouched),
            )
        if self.llm is not None:
            self.llm.exchange_done(self._status, self.headers, body, end, error, self._first_chunk(), extra)
        elif payload is None:
            if error is not None:
                self.recorder.fail(self.call, error, end=end, extra=extra)
        else:
            described = self.recorder.describe_error(error) if error is not None else None
            status = "error" if described else "ok"
            self.recorder.end(self.call, payload, end=end, status=status, error=described, extra=extra)

    def _answer(self, body: bytes, seen: list[Vouched]) -> Prepared:
        """The output of an HTTP call; what it hands out is known before any of it is written."""
        assert self._status is not None
        given = answer_payload(self._status, self.headers, body, self.recorder.policy, seen)
        payload = self.recorder.prepare(given)
        if payload.findings and self.recorder.policy.remember(_handed_out(given, payload.findings)):
            payload = self.recorder.prepare(given)
        return payload

    def _first_chunk(self) -> float | None:
        return (self._chunks[0] - self._started) / 1e9 if self._chunks else None

    def _whole(self, body: bytes) -> bool:
        length = header(self.headers, "content-length")
        if length.isdigit():
            return sum(map(len, self._raw)) == int(length)
        if self._status in (204, 304) or self.head.method == "HEAD":
            return True
        return dialects.complete_stream(body, header(self.headers, "content-type"))

    def _decoded(self) -> tuple[bytes, list[list[int]], str | None]:
        """The body without its content-encoding, its chunks as [size, ns since the request], the encoding removed."""
        encoding = header(self.headers, "content-encoding").strip().lower()
        parts = self._raw
        removed = None
        if encoding and encoding != "identity" and parts:
            decoded = self.decoder(encoding, parts)
            if decoded is not None:
                parts, removed = decoded, encoding
        chunks = [[len(part), at - self._started] for part, at in zip(parts, self._chunks, strict=False) if part]
        return b"".join(parts), chunks, removed

    def _sent_row(self, zero: int) -> dict[str, object]:
        """The row as far as it is known when the request goes out; `zero`: ticks when the run began."""
        policy = self.recorder.policy
        request: dict[str, object] = {"headers": _redacted(policy, self.head.headers), "body": None}
        if self._sent_cut:
            request["truncated"] = True
        return {
            "attempt": self._number,
            "module": self.head.module,
            "method": self.head.method,
            "url": policy.redact_url(self.head.url),
            "request": request,
            "start_ns": self._started - zero,
        }

    def _row(
        self, end: str, error: BaseException | None, chunks: list[list[int]], removed: str | None
    ) -> dict[str, object]:
        policy = self.recorder.policy
        run = self.call.run if self.call is not None else None
        zero = run.mono0 if run is not None else self._started
        row = self._sent_row(zero)
        row["end_ns"] = self.recorder.ticks() - zero
        row["end"] = end
        if self._status is not None:
            row.update(
                {
                    "status": self._status,
                    "reason": self.reason,
                    "http_version": self.version,
                    "headers": _redacted(policy, self.headers),
                    "body": None,
                    "chunks": chunks,
                }
            )
        if removed is not None:
            row["encoding_removed"] = removed
        if self._cut:
            row["truncated"] = True
        if self._full is not None:
            row["full"] = self._full.row()
        if error is not None:
            described = self.recorder.describe_error(error)
            row["exception"] = {key: described[key] for key in ("module", "qualname", "message")}
        return row


class _Full:
    """Length and digest of a body of which only the beginning is kept, as it came (before any decoding)."""

    __slots__ = ("_digest", "_size")

    def __init__(self, parts: Iterable[bytes]) -> None:
        self._digest = hashlib.sha256()
        self._size = 0
        for part in parts:
            self.add(part)

    def add(self, part: bytes) -> None:
        self._digest.update(part)
        self._size += len(part)

    def row(self) -> dict[str, object]:
        return {"sha256": self._digest.hexdigest(), "size": self._size}


def _handed_out(answer: dict[str, object], findings: Iterable[Finding]) -> Iterator[object]:
    """What an answer holds under sensitive names, and in its cookies: the program will send it again."""
    for finding in findings:
        place = standing_at(answer, finding.pointer)
        if finding.pointer.startswith("/headers/") and isinstance(place, str):
            name, _, value = place.partition(";")[0].partition("=")
            if name.startswith("_") and not name.startswith(("__Host-", "__Secure-")):
                continue  # what gateways count visitors by: new in each answer, and nobody's login
            place = value or place
        yield place


def _redacted(policy: RedactionPolicy, headers: Pairs) -> Pairs:
    """Headers without secrets; a cookie keeps its name and attributes, so that a client can parse it again."""
    plain = policy.redact_headers([(name, value) for name, value in headers])
    return [
        [name, _cookie(policy, headers[at][1]) if name == "set-cookie" else value]
        for at, (name, value) in enumerate(plain)
    ]


def _cookie(policy: RedactionPolicy, value: str) -> str:
    """A cookie's name and the attributes that RFC 6265 and its successors name, as far as they are plain."""
    pair, *attributes = value.split(";")
    name, equals, _ = pair.partition("=")
    if not equals or not _TOKEN.fullmatch(name):
        return MARK
    kept = [one for one in attributes if _ATTRIBUTE.fullmatch(one) and policy.redact_url(one) == one]
    return ";".join([f"{name}{equals}{MARK}", *kept])


def unpacked(encoding: str, parts: list[bytes]) -> list[bytes] | None:
    """gzip and deflate with the standard library; others need the client's own decoder."""
    if encoding not in ("gzip", "deflate"):
        return None
    decoder = zlib.decompressobj(wbits=47)
    try:
        decoded = [decoder.decompress(part) for part in parts]
        tail = decoder.flush()
    except zlib.error:
        return None
    if tail and decoded:
        decoded[-1] += tail
    return decoded


def described_encoding(name: str) -> bool:
    """Headers that described the body's encoding or length on the wire and would be wrong beside another body."""
    return name in ("content-encoding", "content-length")
