# SPDX-License-Identifier: Apache-2.0
"""The calls of a recording, as replay, diff and inspect need them: each request with its result, whatever wrote it.

Events say what was asked and answered; the sidecar `calls.jsonl` adds lineage, exact times, type tags and how the call
ended; `wire.jsonl` adds the HTTP attempts. All sidecars are optional: without them a call has no lineage and its order
keys are places in the file.

Pairing follows parents. Only a result that names no request (legacy bundles) is paired by name, with the first call of
that name still open. Rejected: pairing by position (wrong as soon as two calls overlap). Payloads are decoded when they
are looked at, so that a long recording opens fast.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal, TypeAlias, cast

import msgspec

from sftrace_otel.formats import Json
from sftrace_otel.formats.sftrace import ErrorEvent, EventBase, LLMRequest, LLMResponse, ToolCall, ToolResult
from sftrace_otel.formats.sidecars import BlobRef, CallRow, Recorded, Returned, WireRow

__all__ = ["Deferred", "Outcome", "RecordedCall", "extract_calls"]

Kind: TypeAlias = Literal["tool", "llm", "http"]

OrderKey: TypeAlias = tuple[int, int]
"""When something happened: (ns since run start, place in the file); the first is 0 where times are not known."""

ReadBlob: TypeAlias = Callable[[BlobRef], bytes]
"""Reads the bytes that a `{"$blob": …}` reference names."""

_HTTP_NAME: Final = re.compile(r"http ([A-Z]+) \w+://\S*")
_LINEAGE: Final = re.compile(r"(?:t?[0-9]{1,9}/)*[0-9]{1,9}")
_NO_TAGS: Final[dict[str, str]] = {}
_NO_ROW: Final = CallRow()
_REQUESTS: Final = (ToolCall, LLMRequest)
_RESULTS: Final = (ToolResult, LLMResponse)


class Deferred(msgspec.Struct, frozen=True, gc=False):
    """A payload that is decoded each time it is asked for: no reader can change it for another."""

    event: EventBase
    field: str

    def load(self) -> Json:
        """The payload."""
        return cast(Json, getattr(self.event, self.field))


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a recorded call ended.

    Attributes:
        status: "ok", "error", or "missing" when the recording holds no result.
        held: The output, or where to decode it; read it as `output`.
        output_tags: JSON Pointer into `output` → type tag.
        output_hash: Stored SHA-256 of `output`, None where the bundle has none.
        error_type: Class name of the exception, for status "error".
        error_message: Its text.
        exception: `{"module", "qualname", "args", "state", "tags"}` of the sidecar, None without one.
        wire: Rows of `wire.jsonl` of this call, one per attempt, in order.
        read_blob: Reads the bodies that these rows refer to; None where the recording has no blobs.
        end: How the call ended, in the words of `calls.jsonl`; None without a row.
        truncated: Whether a payload was cut when it was recorded: such a call can't be served.
        awaitable: "coroutine" or "future" where a plain function gave one and `output` is what that came to, else None.
        returned: `{"value", "tags"}` of what a generator returned after its items, None where that was None.
        progress: What a progress callback was told, call by call.
    """

    status: Literal["ok", "error", "missing"]
    held: Json | Deferred = None
    output_tags: dict[str, str] = _NO_TAGS
    output_hash: str | None = None
    error_type: str | None = None
    error_message: str | None = None
    exception: Recorded | None = None
    wire: tuple[WireRow, ...] = ()
    read_blob: ReadBlob | None = None
    end: str | None = None
    truncated: bool = False
    awaitable: str | None = None
    returned: Returned | None = None
    progress: tuple[list[Json], ...] = ()

    @property
    def output(self) -> Json:
        """Recorded output: of a failed tool what the format stores, of a failed LLM call null."""
        return self.held.load() if isinstance(self.held, Deferred) else self.held

    @property
    def is_fresh(self) -> bool:
        """Whether each reading of `output` gives a value of its own."""
        return type(self.held) is Deferred


class RecordedCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of the recording.

    Attributes:
        index: Its place among the calls, in the order in which they started.
        kind: "tool", "llm", or "http" (a tool event named `http METHOD scheme://host/path`).
        name: Name of the tool event, or the model.
        provider: LLM calls: as recorded.
        model: LLM calls: as recorded.
        held: The input, or where to decode it; read it as `input`.
        input_tags: JSON Pointer into `input` → type tag.
        input_hash: Stored SHA-256 of `input`, None where the bundle has none.
        policy: frozen, live, manual, forbidden or derived.
        lineage: Path of calls and spawns that led here ("t1/0"), None where it is not known.
        started: When the request was recorded.
        ended: When the result was recorded, None when there is none.
        step: Step of the request event.
        request_id: Id of the request event.
        parent: Index of the recorded call that encloses it.
        tool_call_ids: The model's calls that it answered, where the recording knows them.
        outcome: How it ended.
    """

    index: int
    kind: Kind
    name: str
    provider: str | None = None
    model: str | None = None
    held: Json | Deferred = None
    input_tags: dict[str, str] = _NO_TAGS
    input_hash: str | None = None
    policy: str = "frozen"
    lineage: str | None = None
    started: OrderKey
    ended: OrderKey | None
    step: int = 0
    request_id: str = ""
    parent: int | None = None
    tool_call_ids: tuple[str, ...] = ()
    outcome: Outcome

    @property
    def input(self) -> Json:
        """Recorded input, redacted."""
        return self.held.load() if isinstance(self.held, Deferred) else self.held

    @property
    def method(self) -> str | None:
        """LLM calls: the SDK path, where the input tells ("chat.completions.create"); HTTP calls: "GET", …"""
        if self.kind == "http":
            match = _HTTP_NAME.fullmatch(self.name)
            return match.group(1) if match else None
        value = self.input if self.kind == "llm" else None
        method = value.get("method") if isinstance(value, dict) and "request" in value else None
        return method if isinstance(method, str) else None


def extract_calls(
    events: Iterable[EventBase],
    calls_rows: Iterable[CallRow] = (),
    wire_rows: Iterable[WireRow] = (),
    blob: ReadBlob | None = None,
) -> list[RecordedCall]:
    """Every call of a recording, in the order in which they started.

    Args:
        events: The events in file order.
        calls_rows: Rows of `calls.jsonl` (sidecar page): matched by the id of the request event.
        wire_rows: Rows of `wire.jsonl`: likewise.
        blob: Reads what `{"$blob": …}` in those rows refers to; handed on in `Outcome.read_blob`.
    """
    opened = _pair(events)
    _add_rows(opened, calls_rows, wire_rows)
    timed = all("start_ns" in call.row for call in opened)
    if timed:
        opened.sort(key=lambda call: (call.row["start_ns"], call.place))
    parents = _parents(opened)
    return [call.finish(index, parents[index], timed, blob) for index, call in enumerate(opened)]


class _Open:
    """A call while its events are being gathered."""

    __slots__ = ("end_place", "error", "kind", "lineage", "name", "place", "request", "result", "row", "wire")

    def __init__(self, request: ToolCall | LLMRequest, place: int) -> None:
        self.request = request
        self.place = place
        if isinstance(request, LLMRequest):
            self.kind: Kind = "llm"
            self.name = request.model
        else:
            self.name = request.name
            self.kind = "http" if self.name.startswith("http ") and _HTTP_NAME.fullmatch(self.name) else "tool"
        self.end_place: int | None = None
        self.result: ToolResult | LLMResponse | None = None
        self.error: ErrorEvent | None = None
        self.row: CallRow = _NO_ROW
        self.lineage: str | None = None
        self.wire: tuple[WireRow, ...] = ()

    def describe(self, row: CallRow) -> None:
        """The first row of the sidecar counts. A lineage that names no call is none."""
        if self.row is _NO_ROW:
            self.row = row
            lineage = row.get("lineage")
            self.lineage = lineage if lineage and _LINEAGE.fullmatch(lineage) else None

    def takes(self, result: ToolResult | LLMResponse) -> bool:
        """Whether `result` is of the kind that answers this request."""
        return isinstance(result, ToolResult) == isinstance(self.request, ToolCall)

    def answer(self, result: ToolResult | LLMResponse, place: int) -> None:
        """The first result counts."""
        if self.result is None:
            self.result = result
            self.end_place = place

    def fail(self, error: ErrorEvent, place: int) -> None:
        """The first error counts; it ends a call that has no result."""
        if self.error is None:
            self.error = error
            if self.end_place is None:
                self.end_place = place

    def finish(self, index: int, parent: int | None, timed: bool, blob: ReadBlob | None) -> RecordedCall:
        request, tags = self.request, self.row.get("tags")
        return RecordedCall(
            index=index,
            kind=self.kind,
            name=self.name,
            provider=request.provider if isinstance(request, LLMRequest) else None,
            model=request.model if isinstance(request, LLMRequest) else None,
            held=Deferred(request, "input"),
            input_tags=_tags(tags, "/input"),
            input_hash=request.input_hash,
            policy=request.replay_policy,
            lineage=self.lineage,
            started=(self.row["start_ns"] if timed else 0, self.place),
            ended=self._ended(timed),
            step=request.step,
            request_id=request.id,
            parent=parent,
            tool_call_ids=tuple(map(str, self.row.get("tool_call_ids", ()))),
            outcome=self._outcome(_tags(tags, "/output"), blob),
        )

    def _ended(self, timed: bool) -> OrderKey | None:
        if self.end_place is None:
            return None
        if not timed:
            return (0, self.end_place)
        end = self.row.get("end_ns")
        return None if end is None else (end, self.end_place)

    def _outcome(self, tags: dict[str, str], blob: ReadBlob | None) -> Outcome:
        row = self.row
        error_type, message = self._failure()
        awaitable, returned, progress = row.get("awaitable"), row.get("returned"), row.get("progress")
        return Outcome(
            status=self._status(error_type),
            held=None if self.result is None else Deferred(self.result, "output"),
            output_tags=tags,
            output_hash=None if self.result is None else self.result.output_hash,
            error_type=error_type,
            error_message=message,
            exception=row.get("exception"),
            wire=tuple(sorted(self.wire, key=_attempt)) if len(self.wire) > 1 else self.wire,
            read_blob=blob,
            end=row.get("end"),
            truncated=bool(row.get("truncated", False)),
            awaitable=awaitable if awaitable in ("coroutine", "future") else None,
            returned=returned if isinstance(returned, dict) else None,
            progress=tuple(told for told in progress if isinstance(told, list)) if isinstance(progress, list) else (),
        )

    def _status(self, error_type: str | None) -> Literal["ok", "error", "missing"]:
        if error_type is not None:
            return "error"
        return "missing" if self.result is None else "ok"

    def _failure(self) -> tuple[str | None, str | None]:
        """Class and text of the exception: from the result of a failed tool, else from the error event."""
        if self.result is not None and self.result.status == "error":
            output = self.result.output
            stored = output if isinstance(output, dict) else {}
            error_type, message = stored.get("error_type"), stored.get("message")
            if isinstance(error_type, str) and isinstance(message, str):
                return error_type, message
            if self.error is None:
                return "Exception", ""
        if self.error is not None and (self.result is None or self.result.status == "error"):
            return self.error.error_type, self.error.message
        return None, None


def _pair(events: Iterable[EventBase]) -> list[_Open]:
    """Requests in file order, each with the result and the error that belong to it."""
    calls: list[_Open] = []
    by_event: dict[str, _Open] = {}
    open_by_name: defaultdict[tuple[type[EventBase], str], deque[_Open]] = defaultdict(deque)
    for place, event in enumerate(events):
        if isinstance(event, _REQUESTS):
            call = _Open(event, place)
            calls.append(call)
            by_event[event.id] = call
            open_by_name[type(event), call.name].append(call)
        elif isinstance(event, _RESULTS):
            owner = _owner(event, by_event, open_by_name)
            if owner is not None:
                owner.answer(event, place)
                by_event[event.id] = owner
        elif isinstance(event, ErrorEvent) and event.parent_id in by_event:
            by_event[event.parent_id].fail(event, place)
    return calls


def _owner(
    result: ToolResult | LLMResponse,
    by_event: Mapping[str, _Open],
    open_by_name: Mapping[tuple[type[EventBase], str], deque[_Open]],
) -> _Open | None:
    """The call that a result answers: its parent, else (legacy) the first without a result.

    Of tools the first of its name. Of LLM calls the first at all: services answer with another model name.
    """
    if result.parent_id is not None:
        parent = by_event.get(result.parent_id)
        if parent is not None and parent.request.id == result.parent_id and parent.takes(result):
            return parent
    if isinstance(result, ToolResult):
        return _waiting(open_by_name.get((ToolCall, result.name)))
    queues = (queue for (kind, _), queue in open_by_name.items() if kind is LLMRequest)
    waiting = (call for call in map(_waiting, queues) if call is not None)
    return min(waiting, key=lambda call: call.place, default=None)


def _waiting(queue: deque[_Open] | None) -> _Open | None:
    """The first call of a queue without a result; those before it are dropped."""
    while queue and queue[0].result is not None:
        queue.popleft()
    return queue[0] if queue else None


def _attempt(row: WireRow) -> int:
    return row.get("attempt", 0)


def _add_rows(calls: Sequence[_Open], calls_rows: Iterable[CallRow], wire_rows: Iterable[WireRow]) -> None:
    by_request = {call.request.id: call for call in calls}
    for row in calls_rows:
        call = by_request.get(row.get("request", ""))
        if call is not None:
            call.describe(row)
    for attempt in wire_rows:
        call = by_request.get(attempt.get("event_id", ""))
        if call is not None:
            call.wire = (*call.wire, attempt)


def _tags(tags: dict[str, str] | None, below: str) -> dict[str, str]:
    """The type tags under `below`, their pointers made relative to it."""
    if tags is None:
        return _NO_TAGS
    size = len(below)
    return {
        pointer[size:]: tag
        for pointer, tag in tags.items()
        if pointer.startswith(below) and pointer[size : size + 1] in ("", "/")
    }


def _parents(calls: Sequence[_Open]) -> list[int | None]:
    """For each call the one that encloses it: by lineage where that is known, else by parent events.

    A parent event encloses only what began before its own result: recorders also hang the next call on it.
    """
    by_lineage: dict[str, int] = {}
    by_request = {call.request.id: index for index, call in enumerate(calls)}
    for index, call in enumerate(calls):
        if call.lineage is not None:
            by_lineage.setdefault(call.lineage, index)
    return [_parent(index, call, calls, by_lineage, by_request) for index, call in enumerate(calls)]


def _parent(
    index: int, call: _Open, calls: Sequence[_Open], by_lineage: Mapping[str, int], by_request: Mapping[str, int]
) -> int | None:
    if call.lineage is not None and "/" in call.lineage:
        path = call.lineage
        while "/" in path:
            path = path.rpartition("/")[0]
            if by_lineage.get(path, index) < index:
                return by_lineage[path]
    above = by_request.get(call.request.parent_id or "")
    if above is None or above >= index:
        return None
    end = calls[above].end_place
    return above if end is None or call.place < end else None
