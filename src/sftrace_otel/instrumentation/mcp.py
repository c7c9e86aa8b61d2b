# SPDX-License-Identifier: Apache-2.0
"""The boundary of MCP clients: every request of a `ClientSession`, of the `mcp` SDK 1.x and 2.x.

Decision: one seam, `ClientSession.send_request` (in 1.x `BaseSession`'s), through which all typed methods go, whatever
the transport, and `send_discover`, which goes past it. A `tools/call` is the tool's call; each other request is a tool
call named `mcp METHOD`, so that a session opens and lists its tools under replay with no server. Results are recorded
as they stand on the wire and read again by the model that the SDK asked for. What a transport does below is in
`mcp_transports`. Rejected: `call_tool` alone (no session gets that far without a server), the streams below (ids and
trace context differ in every run), and a sidecar for the other requests (a second matcher).

Source: ADR 14; semantic conventions, MCP client spans.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from sftrace_otel import recorder as recording
from sftrace_otel.errors import ReplayPolicyError
from sftrace_otel.instrumentation import mcp_served, mcp_transports, replaying, tracing
from sftrace_otel.instrumentation.failopen import fails_open
from sftrace_otel.instrumentation.mcp_answers import ServedRequest, listed, result_of
from sftrace_otel.instrumentation.mcp_messages import CALL, SCOPE, Asked, asked, discovering, raw, refusal_of
from sftrace_otel.instrumentation.opencall import OpenCall
from sftrace_otel.instrumentation.patching import Patches
from sftrace_otel.recorder import Recorder, Scope, aside, current_scope, enter, how_ended, leave

if TYPE_CHECKING:
    from sftrace_otel.core.plan import RecordedCall

__all__ = ["install", "patched", "uninstall"]

_PROGRESS = 4096
"""How many progress notifications of a call are kept."""
_TOOL_ERROR = "tool_error"
"""`error.type` of a result with `isError`, as the conventions have it."""


# --- recording --------------------------------------------------------------------------------------------------------


class _Recording(OpenCall):
    """A request being recorded. Fails open."""

    __slots__ = ("method", "progress", "session")

    def __init__(self, recorder: Recorder, session: Any, asked: Asked) -> None:
        self.method = asked.method
        self.progress: list[list[Any]] = []
        self.session = session
        prepared = recorder.prepare(asked.input)
        attributes = asked.attributes
        if asked.method == CALL and recorder.settings.content == "span":
            attributes = {**attributes, "gen_ai.tool.call.arguments": prepared.data.decode()}
        super().__init__(
            recorder,
            "tool",
            asked.name,
            prepared,
            tracer=SCOPE,
            span_name=asked.span_name,
            span_kind=tracing.CLIENT,
            attributes=attributes,
            policy="frozen",
        )
        _in_flight.setdefault(session, []).append(self)

    @fails_open("recording the progress of an MCP request", None)
    def watched(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments whose progress callback is one that notes what it is told, and passes it on."""
        callback = kwargs.get("progress_callback")
        if callback is None:
            return kwargs

        async def progress(*told: Any, **named: Any) -> None:
            self._note(told, named)
            await callback(*told, **named)

        return {**kwargs, "progress_callback": progress}

    @fails_open("recording the progress of an MCP request", None)
    def _note(self, told: tuple[Any, ...], named: dict[str, Any]) -> None:
        if len(self.progress) < _PROGRESS:
            rest = [named[key] for key in ("progress", "total", "message") if key in named]
            self.progress.append([*told, *rest])

    def _extra(self) -> dict[str, object]:
        if not self.progress or not self.recorder.has_content:
            return {}
        return {"progress": self.recorder.prepare(self.progress).value}

    @fails_open("recording an MCP result", None)
    def returned(self, result: Any) -> None:
        """The request was answered, maybe by a tool that failed."""
        error: dict[str, Any] | None = None
        try:
            answer = raw(result)
            if self.method == CALL and answer.get("isError") is True:
                error = self._tool_error(answer)
            prepared = self.recorder.prepare(answer)
            end, status = ("failed", "error") if error else ("finished", "ok")
            digest = self.recorder.end(self.call, prepared, end=end, status=status, error=error, extra=self._extra())
            self.note_output(digest)
            if digest is not None and self.method == CALL and self.recorder.settings.content == "span":
                self.span.set_attribute("gen_ai.tool.call.result", prepared.data.decode())
        except Exception as fault:
            self.fault("recording an MCP result", fault)
        self._ended(_TOOL_ERROR if error else None)

    def _tool_error(self, answer: dict[str, Any]) -> dict[str, Any]:
        content = answer.get("content") if self.recorder.has_content else None
        texts = [part.get("text") for part in content or () if isinstance(part, dict)]
        text = next((text for text in texts if isinstance(text, str) and text), _TOOL_ERROR)
        message, found = self.recorder.policy.redact_text(text)
        return {"type": _TOOL_ERROR, "message": message, "findings": sorted({item.reason for item in found})}

    @fails_open("recording an MCP error", None)
    def raised(self, error: BaseException) -> None:
        """The request was refused, was cancelled or came to nothing."""
        refusal = None
        try:
            described = self.recorder.describe_error(error)
            output = {"error_type": described["type"], "message": described["message"]}
            refusal = refusal_of(error)
            if refusal is not None:
                output["error"] = refusal
                self.span.set_attribute("rpc.response.status_code", str(refusal["code"]))
            prepared = self.recorder.prepare(output)
            self.recorder.end(
                self.call, prepared, end=how_ended(error), status="error", error=described, extra=self._extra()
            )
        except Exception as fault:
            self.fault("recording an MCP error", fault)
        self._ended(error if refusal is None else str(refusal["code"]))

    def _ended(self, error: BaseException | str | None) -> None:
        tracing.end_span(self.span, error)
        open_calls = _in_flight.get(self.session, [])
        if self in open_calls:
            open_calls.remove(self)


_in_flight: WeakKeyDictionary[Any, list[_Recording]] = WeakKeyDictionary()
"""The requests of each session that are not answered yet."""


def _is_client(session: Any) -> bool:
    """Whether a session is a client's: in mcp 1.x those of servers have the same base."""
    module = sys.modules.get("mcp.client.session")
    return module is not None and isinstance(session, module.ClientSession)


@fails_open("recording an MCP request", None)
def _begin(recorder: Recorder, session: Any, asked: Callable[..., Asked], args: Any, kwargs: Any) -> _Recording | None:
    if not _is_client(session) or tracing.exporting():
        return None
    return _Recording(recorder, session, asked(session, args, kwargs))


# --- drivers ----------------------------------------------------------------------------------------------------------


def _model(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[1] if len(args) > 1 else kwargs["result_type"]


class _Calling:
    """A `call_tool` under way: its request once that is answered. The call goes on until the result is checked."""

    __slots__ = ("answered", "result", "session")

    def __init__(self, session: Any) -> None:
        self.session = session
        self.answered: _Recording | ServedRequest | None = None
        self.result: Any = None

    def over(self) -> None:
        """The result is checked, and given or refused: it is as it is."""
        if isinstance(self.answered, _Recording):
            self.answered.returned(self.result)


_calling: ContextVar[_Calling | None] = ContextVar("sftrace_mcp_calling", default=None)
_listing: ContextVar[RecordedCall | None] = ContextVar("sftrace_mcp_listing", default=None)
"""The recorded list of tools, for a `call_tool` that checks its result under replay."""


async def _send(
    wrapped: Callable[..., Awaitable[Any]], session: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    replay = replaying._active
    recorder = recording._active
    tools = _listing.get()
    if replay is not None and tools is not None:
        return result_of(replay, tools, _model(args, kwargs))
    if replay is not None and _is_client(session):
        served = ServedRequest(replay, asked(session, args, kwargs), _model(args, kwargs))
        await served.told(kwargs.get("progress_callback"))
        result = await served.awaited()
        _is_answered(served, session, result)
        return result
    if recorder is None or replay is not None:
        return await wrapped(*args, **kwargs)
    return await _recorded(_begin(recorder, session, asked, args, kwargs), wrapped, args, kwargs)


async def _discover(
    wrapped: Callable[..., Awaitable[Any]], session: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    replay = replaying._active
    recorder = recording._active
    if replay is not None:
        return await ServedRequest(replay, discovering(session, args, kwargs), None).awaited()
    if recorder is None:
        return await wrapped(*args, **kwargs)
    return await _recorded(_begin(recorder, session, discovering, args, kwargs), wrapped, args, kwargs)


async def _recorded(
    record: _Recording | None,
    wrapped: Callable[..., Awaitable[Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if record is None:
        return await wrapped(*args, **kwargs)
    kwargs = record.watched(kwargs) or kwargs
    tokens = record.enter()
    try:
        result = await wrapped(*args, **kwargs)
    except BaseException as error:
        record.raised(error)
        raise
    finally:
        record.leave(tokens)
    if not _is_answered(record, record.session, result):
        record.returned(result)
    return result


async def _call_tool(
    wrapped: Callable[..., Awaitable[Any]], session: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if recording._active is None and replaying._active is None:
        return await wrapped(*args, **kwargs)
    calling = _Calling(session)
    token = _calling.set(calling)
    try:
        return await wrapped(*args, **kwargs)
    finally:
        _calling.reset(token)
        calling.over()


@fails_open("following an MCP tool", False, replay_too=True)
def _is_answered(request: _Recording | ServedRequest, session: Any, result: Any) -> bool:
    """Whether a `call_tool` around the request sees to what comes after its answer."""
    calling = _calling.get()
    if calling is None or calling.answered is not None or calling.session is not session or request.method != CALL:
        return False
    calling.answered, calling.result = request, result
    return True


async def _check(
    wrapped: Callable[..., Awaitable[Any]], session: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`call_tool` checks a result against the tool's schema, and lists the tools for it where nobody has yet. Of calls
    in flight that is the affair of whoever comes first, so it is a part of the call, and under replay no call."""
    calling = _calling.get()
    answered = None if calling is None else calling.answered
    if replaying._active is not None and isinstance(answered, ServedRequest):
        tools = listed(replaying._active, answered)
        token = _listing.set(tools)
        try:
            return None if tools is None else await wrapped(*args, **kwargs)
        finally:
            _listing.reset(token)
    if recording._active is None or not isinstance(answered, _Recording):
        return await wrapped(*args, **kwargs)
    tokens = answered.enter()
    try:
        return await wrapped(*args, **kwargs)
    finally:
        answered.leave(tokens)


async def _notify(
    wrapped: Callable[..., Awaitable[Any]], session: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A notification has no answer: under replay there is nobody to tell."""
    if recording._active is None and replaying._active is None:
        return await wrapped(*args, **kwargs)
    if replaying._active is not None and _is_client(session):
        return None
    token = _step_aside()
    try:
        return await wrapped(*args, **kwargs)
    finally:
        _step_back(token)


@fails_open("sending an MCP notification", None)
def _step_aside() -> Token[Scope | None] | None:
    """What a transport spawns to send a notification takes no slot of the program's lineage."""
    return enter(aside())


@fails_open("sending an MCP notification", None, replay_too=True)
def _step_back(token: Token[Scope | None] | None) -> None:
    if token is not None:
        leave(token)


async def _answer(
    wrapped: Callable[..., Awaitable[Any]], session: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The server asks back (sampling, elicitation): what the program calls to answer is part of the call it is for."""
    record = _asking(session)
    if record is None:
        return await wrapped(*args, **kwargs)
    tokens = record.enter()
    try:
        return await wrapped(*args, **kwargs)
    finally:
        record.leave(tokens)


@fails_open("following an MCP server's request", None)
def _asking(session: Any) -> _Recording | None:
    """The request in flight that the server asks back for; of several the last. None where the context knows it."""
    open_calls = _in_flight.get(session)
    if not open_calls or recording._active is None:
        return None
    parent = current_scope().parent
    known = any(record.call is not None and record.call.id == parent for record in open_calls)
    return None if known else open_calls[-1]


async def _send_raw(
    wrapped: Callable[..., Awaitable[Any]], dispatcher: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`subscriptions/listen` goes past the session: a stream without an end, which is not recorded."""
    replay = replaying._active
    if replay is not None and (args[0] if args else kwargs.get("method")) == "subscriptions/listen":
        error = ReplayPolicyError("replay: the program subscribes to an MCP server's events, which are not recorded")
        replay.session.latch(error)
        raise error
    return await wrapped(*args, **kwargs)


_patches = Patches("mcp")
for _module, _class in (("mcp.shared.session", "BaseSession"), ("mcp.client.session", "ClientSession")):
    _patches.add(_module, f"{_class}.send_request", _send, optional=True)  # 1.x has the first, 2.x the second
    _patches.add(_module, f"{_class}.send_notification", _notify, optional=True)
_patches.add("mcp.client.session", "ClientSession.send_discover", _discover, optional=True)
_patches.add("mcp.client.session", "ClientSession._on_request", _answer, optional=True)
_patches.add("mcp.client.session", "ClientSession._received_request", _answer, optional=True)
_patches.add("mcp.client.session", "ClientSession.call_tool", _call_tool)
for _name in ("validate_tool_result", "_validate_tool_result"):
    _patches.add("mcp.client.session", f"ClientSession.{_name}", _check, optional=True)
_patches.add("mcp.shared.jsonrpc_dispatcher", "JSONRPCDispatcher.send_raw_request", _send_raw)
mcp_transports.add(_patches)
mcp_served.add(_patches)

install = _patches.install
uninstall = _patches.uninstall
patched = _patches.installed
