# SPDX-License-Identifier: Apache-2.0
"""The boundary of openai-agents: its function tools, agents as tools and handoffs; and its own traces.

Decision: the one function through which every function tool is invoked, `_invoke_function_tool_with_metadata`, gets a
copy of the tool for each call. What `function_tool` made holds the program's function in a closure; the copy has the
same code with ours in that place, so that its check of the arguments, its failure function, its timeout and its guards
work on, recorded or replayed. Of a tool made otherwise nothing but the JSON text is known: it is recorded at
`on_invoke_tool`. A handoff's function gives an agent, and an agent as a tool keeps books beside its result: they are
recorded as tools and run again under replay, where all that they call is answered. So is the message of a guard that
refuses a call, since it is what the model gets for the tool. A tool of an MCP server is left to
the boundary of MCP, through which it calls.

The traces that the SDK sends to its makers, over HTTP from a thread of its own and whenever that comes round, are no
part of the run: while recording they go out unseen, under replay they are not sent. Rejected: leaving them to the HTTP
boundary (a run would hold a call that comes at another place each time, and the traces of other runs), and turning
tracing off (the program's own processors would hear of nothing).

Sources: agents 0.24 `tool.py`, `run_internal/tool_execution.py`, `run_internal/turn_resolution.py`,
`tracing/processors.py`; ADR 15.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Awaitable, Callable
from types import CellType, FunctionType
from typing import Any

from sftrace_otel.instrumentation import replaying, tracing
from sftrace_otel.instrumentation.asked import asked
from sftrace_otel.instrumentation.failopen import fails_open
from sftrace_otel.instrumentation.frameworks import FrameworkTool, again, is_active, of_json, standing_around
from sftrace_otel.instrumentation.patching import Patches

__all__ = ["install", "patched", "uninstall"]

Wrapped = Callable[..., Any]
_OURS = "__sftrace_copy__"
"""Marks a copy of ours: the inner of two wrappers lets it through."""


# --- function tools ---------------------------------------------------------------------------------------------------


async def _invoke(wrapped: Wrapped, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tool = kwargs.get("function_tool")
    if not is_active() or _OURS in getattr(tool, "__dict__", {}):
        return await wrapped(*args, **kwargs)
    twin = _twin(tool)
    with asked(getattr(kwargs.get("context"), "tool_call_id", None)):
        return await wrapped(*args, **(kwargs if twin is None else {**kwargs, "function_tool": twin}))


@fails_open("recording a tool call", None)
def _twin(tool: Any) -> Any:
    """A copy of a tool with ours around what it calls; None for one that is left alone."""
    if getattr(tool, "_mcp_tool_binding", None) is not None:
        return None
    invoker = tool.on_invoke_tool
    inner = getattr(invoker, "_invoke_tool_impl", None)  # of what the SDK's decorators make; errors are texts above it
    if inner is None:
        ours = standing_around(_awaiting(invoker), tool.name, read=_json_input)
    else:
        ours = copy.copy(invoker)
        ours._invoke_tool_impl = _around(inner, tool)
    twin = _copied(tool)
    twin.on_invoke_tool = ours
    return twin


def _copied(original: Any) -> Any:
    """The same object again, its class's own ways of copying left aside: what they bind anew must stay bound."""
    twin = object.__new__(type(original))
    twin.__dict__.update(original.__dict__)
    twin.__dict__[_OURS] = True
    return twin


def _around(implementation: Callable[..., Awaitable[Any]], tool: Any) -> Callable[..., Awaitable[Any]]:
    function = _in_closure(implementation, "the_func")
    if function is not None:
        skip = 1 if getattr(_in_closure(implementation, "schema"), "takes_context", False) else 0
        return _with(implementation, "the_func", standing_around(function, tool.name, skip=skip))
    if getattr(tool, "_is_agent_tool", False):
        return _agent(implementation, tool.name)
    return standing_around(_awaiting(implementation), tool.name, read=_json_input)


def _agent(implementation: Callable[..., Awaitable[Any]], name: str) -> Callable[..., Awaitable[Any]]:
    """An agent as a tool."""
    tool = FrameworkTool(implementation, name, read=_json_input, policy="derived")

    @functools.wraps(implementation)
    async def call(*args: Any) -> Any:
        return await again(tool, args, functools.partial(implementation, *args), lambda result: result)

    return call


def _awaiting(function: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """A coroutine function with the signature of `function`, which the SDK reads; `function` may be any callable."""

    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        return await function(*args, **kwargs)

    return call


def _json_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return of_json(args[1] if len(args) > 1 else None)


def _in_closure(function: object, name: str) -> Any:
    """What a name in a function's closure stands for, None where there is none."""
    if not isinstance(function, FunctionType) or name not in function.__code__.co_freevars:
        return None
    cells = function.__closure__ or ()
    return cells[function.__code__.co_freevars.index(name)].cell_contents


def _with(function: Any, name: str, value: object) -> Callable[..., Awaitable[Any]]:
    """`function` with another value for one of the names in its closure."""
    cells = list(function.__closure__)
    cells[function.__code__.co_freevars.index(name)] = CellType(value)
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells))
    made.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(made, function)


async def _guard(wrapped: Wrapped, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The guards before a tool: where one refuses the call, its message is the tool's answer to the model."""
    message = await wrapped(*args, **kwargs)
    tool = _refused(kwargs) if message is not None and is_active() else None
    if tool is None:
        return message

    async def refusal() -> Any:
        return message

    given = getattr(kwargs["tool_context"], "tool_arguments", None)
    return await again(tool, (None, given), refusal, lambda said: said)


@fails_open("recording a tool call", None)
def _refused(kwargs: dict[str, Any]) -> FrameworkTool:
    tool, call_id = kwargs["func_tool"], getattr(kwargs["tool_context"], "tool_call_id", None)
    return FrameworkTool(tool.on_invoke_tool, tool.name, read=_json_input, policy="derived", call_id=call_id)


# --- handoffs ---------------------------------------------------------------------------------------------------------


async def _hand_off(wrapped: Wrapped, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    runs = kwargs.get("run_handoffs")
    twins = _handoff_twins(runs) if is_active() else None
    return await wrapped(*args, **(kwargs if twins is None else {**kwargs, "run_handoffs": twins}))


@fails_open("recording a tool call", None)
def _handoff_twins(runs: Any) -> list[Any] | None:
    """The handoffs of a turn, of which the first is made, with ours around that."""
    if not runs or _OURS in runs[0].__dict__:
        return None
    first = _copied(runs[0])
    first.handoff = _copied(first.handoff)
    first.handoff.on_invoke_handoff = _handoff(runs[0].handoff, runs[0].tool_call)
    return [first, *runs[1:]]


def _handoff(handoff: Any, tool_call: Any) -> Callable[..., Awaitable[Any]]:
    invoke = handoff.on_invoke_handoff
    tool = FrameworkTool(
        invoke, handoff.tool_name, read=_json_input, policy="derived", call_id=getattr(tool_call, "call_id", None)
    )

    async def call(*args: Any) -> Any:
        return await again(tool, args, functools.partial(invoke, *args), handoff.get_transfer_message)

    return call


# --- the SDK's own traces ---------------------------------------------------------------------------------------------


def _export(wrapped: Wrapped, exporter: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if replaying._active is not None:
        return None
    token = tracing.suppress()
    try:
        return wrapped(*args, **kwargs)
    finally:
        tracing.detach(token)


_patches = Patches("agents")
for _module in ("agents.tool", "agents.run_internal.tool_execution"):
    _patches.add(_module, "_invoke_function_tool_with_metadata", _invoke)
_patches.add("agents.run_internal.tool_execution", "_execute_tool_input_guardrails", _guard)
_patches.add("agents.run_internal.turn_resolution", "execute_handoffs", _hand_off)
for _name in ("export", "_export_with_deadline"):
    _patches.add("agents.tracing.processors", f"BackendSpanExporter.{_name}", _export)

install = _patches.install
uninstall = _patches.uninstall
patched = _patches.installed
