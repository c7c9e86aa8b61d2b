# SPDX-License-Identifier: Apache-2.0
"""The boundary of pydantic-ai's tools: `call_tool` of the toolsets that hold the program's own code.

Decision: the innermost toolset, so that what wraps it (prefixes, filters, approval, the program's own wrappers) runs
under replay as it does without. That is `FunctionToolset`, and any toolset class of the program's that is no wrapper;
these are found when a tool manager is made for a step. Tools of MCP servers are recorded by the boundary of mcp. A
timeout is part of the call, and comes back without the wait. `CallDeferred` and `ApprovalRequired` say that there is no
result yet: a result here, raised again under replay. `ModelRetry` and `ToolFailed` are failures of the tool.
The name is the one that the model uses. Rejected: `ToolManager`, where wrappers and approval would be answered from the
recording together with the tool.

Source: pydantic-ai 2.68, `tool_manager.py`, `toolsets/`, `_function_schema.py`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Awaitable, Callable
from contextvars import ContextVar, Token
from typing import Any

from sftrace_otel import recorder as recording
from sftrace_otel.errors import RecordedDependencyError
from sftrace_otel.instrumentation import replaying
from sftrace_otel.instrumentation.failopen import fails_open
from sftrace_otel.instrumentation.framework_tools import (
    Forms,
    FrameworkTool,
    Methods,
    arun,
    is_traced,
    owner_of,
    refused,
)
from sftrace_otel.instrumentation.patching import Patches

__all__ = ["install", "patched", "uninstall"]

_CONTENT = (
    "ToolReturn", "BinaryContent", "BinaryImage", "ImageUrl", "AudioUrl", "VideoUrl", "DocumentUrl", "TextContent",
)  # fmt: skip
_FORMS = Forms(
    objects=[f"pydantic_ai.messages:{name}" for name in _CONTENT],
    exceptions={
        "pydantic_ai.exceptions:CallDeferred": lambda error: {"metadata": error.metadata, "kind": error.kind},
        "pydantic_ai.exceptions:ApprovalRequired": lambda error: {"metadata": error.metadata},
    },
)

_Key = tuple[Any, Any, Any]
_under_way: ContextVar[_Key | None] = ContextVar("sftrace_pydantic_ai_call", default=None)
"""The toolset, run and call id of the call that a boundary stands around here."""


def _call_tool_entry(
    wrapped: Callable[..., Awaitable[Any]], toolset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Awaitable[Any]:
    return _call_tool(wrapped, toolset, args, kwargs)


async def _call_tool(
    wrapped: Callable[..., Awaitable[Any]], toolset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    tool = _made(functools.partial(wrapped, *args, **kwargs), toolset, args, kwargs)
    return await (wrapped(*args, **kwargs) if tool is None else arun(tool))


def _made_of_method(method: Any, toolset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FrameworkTool | None:
    return _made(functools.partial(method, toolset, *args, **kwargs), toolset, args, kwargs)


@fails_open("recording a tool call", None)
def _made(
    call: Callable[[], Awaitable[Any]], toolset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> FrameworkTool | None:
    """The call, unless a boundary of ours stands around it already or the function itself is recorded."""
    if recording._active is None and replaying._active is None:
        return None
    name, given, ctx, tool = _arguments(*args, **kwargs)
    key = (toolset, ctx.run_id, ctx.tool_call_id)
    function = _function_of(tool)
    if _is_same(_under_way.get(), key) or is_traced(function):
        return None

    async def made() -> Any:
        token = _under_way.set(key)
        try:
            return await call()
        finally:
            _left(token)

    return FrameworkTool(
        made,
        _name(name, ctx),
        lambda: dict(given),
        forms=_FORMS,
        call_id=ctx.tool_call_id,
        function=function,
    )


@fails_open("leaving a tool call", None, replay_too=True)
def _left(token: Token[_Key | None]) -> None:
    _under_way.reset(token)


def _is_same(one: _Key | None, other: _Key) -> bool:
    return one is not None and one[0] is other[0] and one[1:] == other[1:]


def _arguments(name: str, tool_args: dict[str, Any], ctx: Any, tool: Any) -> tuple[str, dict[str, Any], Any, Any]:
    """The parameters of `call_tool`, however they were passed."""
    return name, tool_args, ctx, tool


def _name(name: str, ctx: Any) -> str:
    """The name that the model called the tool by; `name` is that without a toolset's prefix, or before a renaming."""
    return getattr(ctx, "_dispatched_tool_name", None) or name if ctx.tool_name == name else name


def _function_of(tool: Any) -> Callable[..., Any] | None:
    """The program's function, for a tool that is one."""
    schema = getattr(getattr(tool, "call_func", None), "__self__", None)
    function: Callable[..., Any] | None = getattr(schema, "function", None)
    return function


# --- calls that are refused -------------------------------------------------------------------------------------------


_refusals: ContextVar[list[str] | None] = ContextVar("sftrace_pydantic_ai_refusals", default=None)
"""Ids of calls that were recorded as refused while the framework looks at their arguments here."""


async def _validate(
    wrapped: Callable[..., Awaitable[Any]], manager: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    noted: list[str] = []
    token = _refusals.set(noted)
    try:
        validated = await wrapped(*args, **kwargs)
    finally:
        _looked(token)
    _note(validated, noted)
    return validated


def _validate_entry(
    wrapped: Callable[..., Awaitable[Any]], manager: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Awaitable[Any]:
    return _validate(wrapped, manager, args, kwargs)


@fails_open("leaving a tool call", None, replay_too=True)
def _looked(token: Token[list[str] | None]) -> None:
    _refusals.reset(token)


@fails_open("recording a tool call", None)
def _note(validated: Any, noted: list[str]) -> None:
    """Record a call whose arguments, or whose tool, the framework refuses: the model is told so in the tool's place."""
    error = validated.validation_error
    if error is None or (recording._active is None and replaying._active is None):
        return
    call = validated.call
    if call.tool_call_id not in noted:

        def raising() -> None:
            raise error.__cause__ or error

        refused(FrameworkTool(raising, call.tool_name, call.args_as_dict, forms=_FORMS, call_id=call.tool_call_id))


async def _on_validate_error(
    wrapped: Callable[..., Awaitable[Any]], capability: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The framework's own instrumentation makes a span for a refused call: it goes inside ours, and so is the same."""
    tool = _refused_in_span(functools.partial(wrapped, *args, **kwargs), **kwargs)
    if tool is None:
        return await wrapped(*args, **kwargs)
    try:
        await arun(tool)
    except RecordedDependencyError:
        pass
    raise kwargs["error"]


def _on_validate_error_entry(
    wrapped: Callable[..., Awaitable[Any]], capability: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Awaitable[Any]:
    return _on_validate_error(wrapped, capability, args, kwargs)


@fails_open("recording a tool call", None)
def _refused_in_span(
    made: Callable[[], Awaitable[Any]], *, call: Any, error: BaseException, **rest: Any
) -> FrameworkTool | None:
    noted = _refusals.get()
    if noted is None or (recording._active is None and replaying._active is None):
        return None
    noted.append(call.tool_call_id)

    async def refusing() -> Any:
        return await made()

    return FrameworkTool(refusing, call.tool_name, call.args_as_dict, forms=_FORMS, call_id=call.tool_call_id)


# --- toolsets of the program's own ------------------------------------------------------------------------------------


async def _for_run_step(
    wrapped: Callable[..., Awaitable[Any]], manager: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    made = await wrapped(*args, **kwargs)
    _look_at(made.toolset)
    return made


def _for_run_step_entry(
    wrapped: Callable[..., Awaitable[Any]], manager: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Awaitable[Any]:
    return _for_run_step(wrapped, manager, args, kwargs)


@fails_open("putting the boundary on toolsets", None)
def _look_at(toolset: Any) -> None:
    """Wrap `call_tool` of toolset classes that the program defines and that call tools themselves."""
    wrapper = sys.modules["pydantic_ai.toolsets.wrapper"].WrapperToolset

    def visit(leaf: Any) -> None:
        kind = type(leaf)
        owner = owner_of(kind, "call_tool")
        if owner is None or isinstance(leaf, wrapper) or owner.__module__.partition(".")[0] == "pydantic_ai":
            return
        _methods.put_on(kind, "call_tool")

    if recording._active is not None or replaying._active is not None:
        toolset.apply(visit)


_patches = Patches("pydantic_ai")
_patches.add("pydantic_ai.toolsets.function", "FunctionToolset.call_tool", _call_tool_entry)
_patches.add("pydantic_ai.tool_manager", "ToolManager.for_run_step", _for_run_step_entry)
_patches.add("pydantic_ai.tool_manager", "ToolManager.validate_tool_call", _validate_entry)
_patches.add(
    "pydantic_ai.capabilities.instrumentation", "Instrumentation.on_tool_validate_error", _on_validate_error_entry
)
_methods = Methods(_made_of_method)


def install() -> None:
    """Record and replay calls of tools, now or once pydantic-ai is imported. Twice is once."""
    _patches.install()


def uninstall() -> None:
    """Take the boundary off again."""
    _patches.uninstall()
    _methods.take_off()


def patched() -> list[str]:
    """What is wrapped now."""
    return [*_patches.installed(), *_methods.patched()]
