# SPDX-License-Identifier: Apache-2.0
"""What the boundaries of agent frameworks share: a tool as a framework has it, and functions that run again.

Decision: the record is taken at the program's own function, below the framework, so that its arguments are what it got
and its result or exception what it gave, before the framework turns either into a text for the model; a replay goes
through the framework's own code. The objects of the program are left as they are: a framework gets a copy of its tool,
for this one call, in which ours stands around the function. Rejected: wrapping at decoration, which misses the tools
made before we were put on (`record()` in the middle of a program) and shows in what the decorator returns; and
recording at the framework's own call, whose arguments are a JSON text and whose errors are texts already.

A function that `@trace_tool` or OTEL_SFTRACE_TOOLS traces already is recorded by that alone.

Source: `design.md`, "From calls and spans to events"; ADR 15.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from sftrace_otel import recorder as recording
from sftrace_otel.core.prepare import Prepared
from sftrace_otel.core.session import Decision
from sftrace_otel.instrumentation import replaying, tracing
from sftrace_otel.instrumentation.asked import identified
from sftrace_otel.instrumentation.failopen import fails_open
from sftrace_otel.instrumentation.opencall import Replayed
from sftrace_otel.instrumentation.served import SCOPE, unreadable
from sftrace_otel.instrumentation.tools import Tool, _begin, _Recording, calling
from sftrace_otel.recorder import current_scope, enter, inner, leave

__all__ = ["FrameworkTool", "again", "is_active", "is_traced", "of_json", "standing_around", "unbound"]

T = TypeVar("T")
Read = Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]


def is_active() -> bool:
    """Whether anything is recorded or replayed."""
    return recording._active is not None or replaying._active is not None


def is_traced(function: object) -> bool:
    """Whether a function records its calls by itself."""
    while isinstance(function, functools.partial):
        function = function.func
    return hasattr(getattr(function, "__func__", function), "__sftrace_tool__")


class FrameworkTool(Tool):
    """A tool under the name that the model knows.

    `read` tells the arguments by name from those of the call, by default the function's signature does. `skip`: so many
    leading arguments are the framework's own (its context), not the model's.
    """

    __slots__ = ("_read", "_skip")

    def __init__(
        self,
        call: Callable[..., Any],
        name: str,
        *,
        read: Read | None = None,
        skip: int = 0,
        policy: str = "frozen",
        call_id: object = None,
    ) -> None:
        super().__init__(call, name, None, policy)
        self._read = read
        self._skip = skip
        if isinstance(call_id, str):
            self.attributes = {**self.attributes, "gen_ai.tool.call.id": call_id}

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name."""
        if self._read is not None:
            return self._read(args, kwargs)
        arguments = super().arguments(args, kwargs)
        for name in list(arguments)[: self._skip]:
            del arguments[name]
        return arguments


def standing_around(function: Callable[..., Any], name: str, **members: Any) -> Callable[..., Any]:
    """`function`, recorded as the tool `name` (`FrameworkTool`); itself where it is traced already."""
    return function if is_traced(function) else calling(FrameworkTool(function, name, **members))


def unbound(wrapped: Any) -> Callable[..., Any]:
    """The function of what a wrapper is given for a method, to be called on a copy of the object."""
    function: Callable[..., Any] = getattr(wrapped, "__func__", None) or wrapped.__wrapped__
    return function


def of_json(text: object) -> dict[str, Any]:
    """The arguments in a model's JSON text; what is no JSON object as one argument `input`."""
    if isinstance(text, str):
        try:
            value = json.loads(text) if text else {}
        except ValueError:
            return {"input": text}
        text = value
    return dict(text) if isinstance(text, dict) else {"input": text}


async def again(tool: Tool, args: tuple[Any, ...], call: Callable[[], Awaitable[T]], told: Callable[[T], object]) -> T:
    """A tool that is the framework's own code: recorded as any other, and run again under replay.

    For what gives an object of the program that no recording can hold (the agent of a handoff), or keeps books beside
    its result (an agent as a tool). What it calls is answered from the recording, so it does the same again; `told` is
    what is recorded as its result.
    """
    recorder = recording._active
    replay = replaying._active
    if replay is not None:
        return await _rerun(replay, tool, args, call, told)
    record = None if recorder is None else _begin(recorder, tool, args, {})
    if record is None:
        return await call()
    tokens = record.enter()
    try:
        result = await call()
    except BaseException as error:
        record.raised(error)
        raise
    finally:
        record.leave(tokens)
    record.returned(_told(told, result))
    return result


@fails_open("recording a tool result", None)
def _told(told: Callable[[T], object], result: T) -> object:
    return told(result)


async def _rerun(
    replay: replaying.Active,
    tool: Tool,
    args: tuple[Any, ...],
    call: Callable[[], Awaitable[T]],
    told: Callable[[T], object],
) -> T:
    """The call takes its place, runs, and uses up the recorded one: what it called must have been answered before."""
    outer = current_scope()
    lineage = outer.place()
    prepared = _prepared(replay, tool, args)
    attributes = {**identified(tool.attributes), "sftrace.replay.active": True}
    span = tracing.start_span(SCOPE, tool.span_name, tracing.INTERNAL, attributes)
    token, attached = enter(inner(None, lineage, outer)), tracing.attached(span)
    failed: BaseException | None = None
    try:
        result = await call()
    except BaseException as error:
        failed = error
        raise
    finally:
        tracing.detach(attached)
        leave(token)
        tracing.end_span(span, failed)
        decision = replay.decide("tool", tool.name, prepared, lineage=lineage, own=True)
        record = _record_past(decision, tool, args, lineage)
        if record is not None and failed is not None:
            record.raised(failed)
    if record is not None:
        record.returned(_told(told, result))
    return result


@fails_open("recording a tool call", None)
def _record_past(decision: Decision, tool: Tool, args: tuple[Any, ...], lineage: str | None) -> _Recording | None:
    """The record, where the replay is recorded, of a call past the end of a resumed recording, which nobody served."""
    recorder = recording._active
    if decision.action != "live" or recorder is None:
        return None
    return _Recording(recorder, tool, args, {}, Replayed(lineage, replaying.marks(decision), False))


def _prepared(replay: replaying.Active, tool: Tool, args: tuple[Any, ...]) -> Prepared:
    try:
        return replay.prepare(tool.arguments(args, {}), tool.serializer)
    except BaseException as error:
        return replay.prepare(unreadable(error))
