# SPDX-License-Identifier: Apache-2.0
"""The boundary of langchain-core's tools, which langgraph's agents call too.

Decision: the tool's own code is `_run` or `_arun` of its class; `BaseTool.run` and `arun`, which every tool goes
through, say that a call of them is coming, with the model's id of it, and see to it that the class's methods are
wrapped. The first of these methods that is entered is the call: what it calls itself (`super()._run`, `_run` from
`_arun`, in whatever executor) is part of it. `BaseTool._arun` is left as it is: the framework compares it by identity.
Arguments that the framework puts in (state, store, runtime, config, callbacks) are left out by its own rules. A call
whose arguments the framework refuses before the tool's code is entered is recorded as one that failed.
Rejected: `StructuredTool.func`, which classes with a `_run` of their own do not have; callbacks, which see results as
they were formatted and cannot answer.

Source: langchain-core 1.8, `tools/base.py`, `tools/structured.py`, `tools/simple.py`; langgraph 1.2, `errors.py`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Awaitable, Callable
from contextvars import ContextVar, Token
from typing import Any

from sftrace_otel import recorder as recording
from sftrace_otel.instrumentation import replaying
from sftrace_otel.instrumentation.failopen import fails_open
from sftrace_otel.instrumentation.framework_tools import (
    Forms,
    FrameworkTool,
    Methods,
    by_name,
    is_traced,
    owner_of,
    refused,
)
from sftrace_otel.instrumentation.patching import Patches

__all__ = ["install", "patched", "uninstall"]

_MESSAGES = (
    "ToolMessage", "HumanMessage", "AIMessage", "SystemMessage", "RemoveMessage", "ChatMessage", "FunctionMessage",
)  # fmt: skip
_FORMS = Forms(
    objects=(
        *(f"langchain_core.messages:{name}" for name in _MESSAGES),
        "langchain_core.documents:Document",
        "langgraph.types:Command",
        "langgraph.types:Send",
        "langgraph.types:Interrupt",
    ),
    exceptions={
        "langgraph.errors:ParentCommand": lambda error: {"command": error.args[0]},
        "langgraph.errors:GraphInterrupt": lambda error: {"interrupts": list(error.args[0])},
        "langgraph.errors:GraphDrained": lambda error: {"reason": error.reason},
    },
)
_OF_FUNCTIONS = frozenset({"langchain_core.tools.simple", "langchain_core.tools.structured"})
"""Modules of the classes that make a tool of a function."""


class _Expected:
    """A call of a tool that is coming, and whether it came."""

    __slots__ = ("call_id", "taken", "tool")

    def __init__(self, tool: Any, call_id: str | None) -> None:
        self.tool = tool
        self.call_id = call_id
        self.taken = False


_expected: ContextVar[_Expected | None] = ContextVar("sftrace_langchain_call", default=None)


# --- run and arun -----------------------------------------------------------------------------------------------------


def _run(wrapped: Callable[..., Any], tool: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    token = _expect(tool, kwargs.get("tool_call_id"), "_run")
    try:
        return wrapped(*args, **kwargs)
    finally:
        _came(token)


async def _arun(
    wrapped: Callable[..., Awaitable[Any]], tool: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    token = _expect(tool, kwargs.get("tool_call_id"), "_arun")
    try:
        return await wrapped(*args, **kwargs)
    finally:
        _came(token)


def _arun_entry(
    wrapped: Callable[..., Awaitable[Any]], tool: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Awaitable[Any]:
    return _arun(wrapped, tool, args, kwargs)


@fails_open("recording a tool call", None)
def _expect(tool: Any, call_id: str | None, method: str) -> Token[_Expected | None] | None:
    """Wrap the method that holds the tool's code, and say that a call of it is coming."""
    if recording._active is None and replaying._active is None:
        return None
    base = sys.modules["langchain_core.tools.base"].BaseTool
    has_own = method == "_run" or owner_of(type(tool), method) is not base
    _methods.put_on(type(tool), method if has_own else "_run")
    return _expected.set(_Expected(tool, call_id))


@fails_open("leaving a tool call", None, replay_too=True)
def _came(token: Token[_Expected | None] | None) -> None:
    if token is not None:
        _expected.reset(token)


def _parse_input(wrapped: Callable[..., Any], tool: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return wrapped(*args, **kwargs)
    except Exception as error:
        _refused(tool, error, *args, **kwargs)
        raise


@fails_open("recording a tool call", None)
def _refused(tool: Any, error: Exception, tool_input: Any, tool_call_id: str | None = None) -> None:
    """The call that is coming does not come: the framework refuses its arguments."""
    expected = _expected.get()
    if expected is None or expected.tool is not tool or expected.taken:
        return
    expected.taken = True

    def raising() -> None:
        raise error

    given = tool._filter_injected_args(tool_input) if isinstance(tool_input, dict) else {"tool_input": tool_input}
    refused(FrameworkTool(raising, tool.name, lambda: given, forms=_FORMS, call_id=tool_call_id))


# --- _run and _arun ---------------------------------------------------------------------------------------------------


@fails_open("recording a tool call", None)
def _made(method: Any, tool: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FrameworkTool | None:
    """The call, if it is the one that was expected and nothing else of ours records it."""
    expected = _expected.get()
    if expected is None or expected.tool is not tool or expected.taken:
        return None
    expected.taken = True
    function, given = _function_of(method, tool, kwargs)
    if is_traced(function) or is_traced(method):
        return None
    return FrameworkTool(
        functools.partial(method, tool, *args, **kwargs),
        tool.name,
        lambda: _arguments(tool, function, args, given),
        forms=_FORMS,
        call_id=expected.call_id,
        function=function,
    )


def _function_of(method: Any, tool: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The program's function that the method is or calls, and the arguments by name that are meant for it."""
    if method.__module__ not in _OF_FUNCTIONS:
        return functools.partial(method, tool), kwargs
    function = (inspect.iscoroutinefunction(method) and tool.coroutine) or tool.func
    given = {name: value for name, value in kwargs.items() if name not in ("config", "run_manager")}
    return function, given


def _arguments(tool: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What the function gets by name, but for what the framework itself puts in."""
    config = sys.modules["langchain_core.tools.base"]._get_runnable_config_param(_own(function))
    found: dict[str, Any] = tool._filter_injected_args(by_name(function, args, kwargs))
    found.pop(config, None)
    return found


def _own(function: Any) -> Any:
    return function.func if isinstance(function, functools.partial) else function


_patches = Patches("langchain")
_patches.add("langchain_core.tools.base", "BaseTool.run", _run)
_patches.add("langchain_core.tools.base", "BaseTool.arun", _arun_entry)
_patches.add("langchain_core.tools.base", "BaseTool._parse_input", _parse_input)
_methods = Methods(_made)


def install() -> None:
    """Record and replay calls of tools, now or once langchain-core is imported. Twice is once."""
    _patches.install()


def uninstall() -> None:
    """Take the boundary off again."""
    _patches.uninstall()
    _methods.take_off()


def patched() -> list[str]:
    """What is wrapped now."""
    return [*_patches.installed(), *_methods.patched()]
