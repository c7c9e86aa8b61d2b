# SPDX-License-Identifier: Apache-2.0
"""The boundary of the tools that the SDKs' own loops run: anthropic's tool runners, openai's tool runners.

Decision: the program's function inside the SDK's tool object, at each call, in a copy of that object (`frameworks`).
anthropic: `BetaFunctionTool.call`, which the sync, async, streaming and session runners go through and a program may
call itself; the function stands behind pydantic's check of the arguments, so the copy has a check around ours. A tool
class of the program's own (`BetaBuiltinFunctionTool`) is recorded at its `call`. openai: `execute` of a registered
function, of a candidate of the Decisions runner, and handlers of agent sessions. Rejected: the runner's step around
a tool, which gives the text that goes to the model and turns each exception into one.

Not recorded: browser and computer toolsets, whose calls are steps in a state that no recording gives back.

Sources: anthropic `lib/tools`, openai `lib/responses_tool_runner`, `lib/decisions_tool_runner`, `lib/streaming/agents`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from sftrace_otel.instrumentation.asked import asked
from sftrace_otel.instrumentation.failopen import fails_open
from sftrace_otel.instrumentation.frameworks import is_active, is_traced, standing_around, unbound
from sftrace_otel.instrumentation.patching import Patches

__all__ = ["install", "patched", "uninstall"]

Wrapped = Callable[..., Any]


# --- anthropic --------------------------------------------------------------------------------------------------------

_driver: ContextVar[Callable[..., Any] | None] = ContextVar("sftrace_runner_tool", default=None)
"""What stands around the function of the tool whose call is under way here."""
_checked: weakref.WeakKeyDictionary[Any, Callable[..., Any]] = weakref.WeakKeyDictionary()
"""Function tool → pydantic's check of the arguments, with `_relay` behind it."""


def _call(wrapped: Wrapped, tool: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    twin = _twin(tool) if is_active() else None
    if twin is None:
        return wrapped(*args, **kwargs)
    token = _driver.set(twin[1])
    try:
        return unbound(wrapped)(twin[0], *args, **kwargs)
    finally:
        _driver.reset(token)


async def _acall(wrapped: Wrapped, tool: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    twin = _twin(tool) if is_active() else None
    if twin is None:
        return await wrapped(*args, **kwargs)
    token = _driver.set(twin[1])
    try:
        return await unbound(wrapped)(twin[0], *args, **kwargs)
    finally:
        _driver.reset(token)


@fails_open("recording a tool call", None)
def _twin(tool: Any) -> tuple[Any, Callable[..., Any]] | None:
    """A copy of a function tool whose function is `_driver`'s, and what that should be; None where it is traced."""
    if is_traced(tool.func):
        return None
    checked = _checked.get(tool)
    if checked is None:
        checked = _checked[tool] = sys.modules["pydantic"].validate_call(_relay(tool.func))
    twin = copy.copy(tool)
    twin._func_with_validate = checked
    return twin, standing_around(tool.func, tool.name)


def _relay(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the signature and kind of `function` that calls what stands around it now."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def arelay(*args: Any, **kwargs: Any) -> Any:
            return await (_driver.get() or function)(*args, **kwargs)

        return arelay

    @functools.wraps(function)
    def relay(*args: Any, **kwargs: Any) -> Any:
        return (_driver.get() or function)(*args, **kwargs)

    return relay


def _run_tool(wrapped: Wrapped, runner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    known = _known(args) if is_active() else None
    if known is None:
        return wrapped(*args, **kwargs)
    with asked(known[1]):
        return wrapped(*known[0], **kwargs)


async def _arun_tool(wrapped: Wrapped, runner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    known = _known(args) if is_active() else None
    if known is None:
        return await wrapped(*args, **kwargs)
    with asked(known[1]):
        return await wrapped(*known[0], **kwargs)


@fails_open("recording a tool call", None)
def _known(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], object] | None:
    """Arguments for a runner's step around a tool, and the model's id of the call."""
    tool, tool_use = args
    return (tool if hasattr(tool, "func") else _Own(tool), tool_use), tool_use.id


class _Own:
    """Stands for a tool class of the program's own, for one call."""

    def __init__(self, tool: Any) -> None:
        self.name = tool.name
        self.call = standing_around(tool.call, self.name, read=_input)


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    given = args[0] if args else kwargs.get("input")
    return dict(given) if isinstance(given, Mapping) else {"input": given}


_patches = Patches("tool runners")
for _kind, _sync in (("BetaFunctionTool", True), ("BetaAsyncFunctionTool", False)):
    _patches.add("anthropic.lib.tools._beta_functions", f"{_kind}.call", _call if _sync else _acall)
for _kind, _sync in (("BaseSyncToolRunner", True), ("BaseAsyncToolRunner", False)):
    _patches.add("anthropic.lib.tools._beta_runner", f"{_kind}._run_tool", _run_tool if _sync else _arun_tool)


# --- openai -----------------------------------------------------------------------------------------------------------


def _execute(wrapped: Wrapped, runner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    twin = _runner_twin(runner, args) if is_active() else None
    if twin is None:
        return wrapped(*args, **kwargs)
    with asked(args[1].call_id):
        return unbound(wrapped)(twin, *args, **kwargs)


async def _aexecute(wrapped: Wrapped, runner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    twin = _runner_twin(runner, args) if is_active() else None
    if twin is None:
        return await wrapped(*args, **kwargs)
    with asked(args[1].call_id):
        return await unbound(wrapped)(twin, *args, **kwargs)


@fails_open("recording a tool call", None)
def _runner_twin(runner: Any, args: tuple[Any, ...]) -> Any:
    """A copy of a Responses runner in which ours stands around the one function that it is about to call."""
    name = args[1].name
    function = runner._functions[name]
    twin = copy.copy(runner)
    driver = standing_around(function.execute, name, read=_members)
    twin._functions = {name: dataclasses.replace(function, execute=driver)}
    return twin


def _members(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name: the members of the one object, a dict or a pydantic model, that an executor gets."""
    given = args[0] if args else None
    if isinstance(given, Mapping):
        return dict(given)
    fields = getattr(type(given), "model_fields", None)
    if not isinstance(fields, Mapping):
        return {} if given is None else {"arguments": given}
    return {getattr(field, "alias", None) or name: getattr(given, name) for name, field in fields.items()}


def _candidates(wrapped: Wrapped, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = wrapped(*args, **kwargs)
    return _recorded(found) or found if is_active() else found


@fails_open("recording a tool call", None)
def _recorded(candidates: list[Any]) -> list[Any]:
    """The Decisions runner's actions, each recorded under its id once it is chosen."""
    return [
        one
        if one.execute is None
        else dataclasses.replace(one, execute=standing_around(one.execute, one.id, read=_members))
        for one in candidates
    ]


def _invoke(wrapped: Wrapped, invocation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handler = _handler(invocation, args) if is_active() else None
    return wrapped(*args, **kwargs) if handler is None else wrapped(handler, *args[1:], **kwargs)


@fails_open("recording a tool call", None)
def _handler(invocation: Any, args: tuple[Any, ...]) -> Any:
    """What an agent session calls for a tool, with ours around the program's function."""
    handler, call = args[0], invocation.call
    function = getattr(handler, "_handler", None)
    if function is None:
        return standing_around(handler, call.name, read=_members, call_id=call.call_id)
    twin = copy.copy(handler)
    twin._handler = standing_around(function, call.name, read=_members, call_id=call.call_id)
    return twin


_patches.add("openai.lib.responses_tool_runner", "ResponsesToolRunner._execute_function", _execute)
_patches.add("openai.lib.responses_tool_runner", "AsyncResponsesToolRunner._execute_function", _aexecute)
_patches.add("openai.lib.decisions_tool_runner", "_Run.candidates", _candidates)
_patches.add("openai.lib.streaming.agents._tools", "ToolInvocation.invoke", _invoke)

install = _patches.install
uninstall = _patches.uninstall
patched = _patches.installed
