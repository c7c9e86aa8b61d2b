# SPDX-License-Identifier: Apache-2.0
"""The boundary of tools: `@trace_tool`, and `module:callable` patterns patched on import.

Decision: a plain function around the tool, of the tool's own kind (sync, async, generator, async generator), so that
`inspect`, `pickle` by name and frameworks that read signatures see what they saw. Arguments are bound by signature with
defaults applied and `self`/`cls` left out: a positional call and the same call by keyword are equal. With nothing
active the tool is called at once. Rejected: an object proxy (not picklable) and binding with `inspect` on every call
(6 µs; the plan is made once per tool).

Sources: GenAI conventions, `execute_tool` span; `.sftrace` format page, tool_call and tool_result.
"""

from __future__ import annotations

import asyncio
import fnmatch
import functools
import inspect
import logging
import sys
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any, TypeVar, overload

import wrapt

from sftrace_otel import recorder as recording
from sftrace_otel.core.prepare import Prepared
from sftrace_otel.instrumentation import replaying, tracing
from sftrace_otel.instrumentation.failopen import fails_open
from sftrace_otel.instrumentation.opencall import OpenCall
from sftrace_otel.instrumentation.served import SCOPE, Served, unreadable
from sftrace_otel.instrumentation.steps import UNRECORDED, Items, Steps, async_steps, steps
from sftrace_otel.recorder import Recorder, Run, current_scope, how_ended

__all__ = ["Tool", "driver", "install", "patched", "trace_tool", "uninstall"]

_log = logging.getLogger("sftrace_otel")
F = TypeVar("F", bound=Callable[..., Any])
Serializer = Callable[[object], object]
POLICIES = frozenset({"frozen", "live", "manual", "forbidden", "derived"})


@overload
def trace_tool(tool: F, /) -> F: ...
@overload
def trace_tool(
    tool: None = None,
    /,
    *,
    name: str | None = None,
    serializer: Serializer | None = None,
    replay_policy: str = "frozen",
) -> Callable[[F], F]: ...


def trace_tool(
    tool: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    serializer: Serializer | None = None,
    replay_policy: str = "frozen",
) -> Any:
    """Record each call of a tool, and answer it from the recording under replay.

    Used bare or with options, on functions, methods, classmethods, staticmethods, coroutine functions, generators and
    async generators. `name`: the tool's name in events, by default the function's. `serializer`: turns values of one's
    own types into values that have a JSON form. `replay_policy`: `frozen` (answer from the recording), `live`,
    `manual`, `forbidden` or `derived`, as the format page defines them. Raises ValueError for another policy and
    TypeError for what cannot be called. The tool itself is unchanged: results and exceptions pass through.
    """
    if replay_policy not in POLICIES:
        raise ValueError(f"replay_policy {replay_policy!r}: must be one of {', '.join(sorted(POLICIES))}")
    if tool is None:
        return functools.partial(_decorate, name=name, serializer=serializer, policy=replay_policy)
    return _decorate(tool, name=name, serializer=serializer, policy=replay_policy)


def _decorate(tool: Any, *, name: str | None, serializer: Serializer | None, policy: str) -> Any:
    if isinstance(tool, (classmethod, staticmethod)):
        wrapped = _decorate(tool.__func__, name=name, serializer=serializer, policy=policy)
        return type(tool)(wrapped)
    if isinstance(tool, type):
        raise TypeError(f"trace_tool needs a function or method, not the class {tool.__qualname__}; trace its methods")
    if not callable(tool):
        raise TypeError(f"trace_tool needs something callable, not {type(tool).__name__}")
    return _wrapper(Tool(tool, name or _name_of(tool), serializer, policy))


def _name_of(tool: Any) -> str:
    if isinstance(tool, functools.partial):
        return _name_of(tool.func)
    return str(getattr(tool, "__name__", None) or type(tool).__name__)


# --- binding arguments ------------------------------------------------------------------------------------------------


class Tool:
    """What is known of a tool: how to call it, its name, and how its arguments bind."""

    __slots__ = (
        "attributes", "call", "fixed", "is_method", "name", "parameters", "policy", "receiver", "serializer",
        "signature", "span_name",
    )  # fmt: skip

    def __init__(
        self,
        call: Callable[..., Any],
        name: str,
        serializer: Serializer | None,
        policy: str,
        *,
        signature: bool = True,
    ) -> None:
        self.call = call
        self.name = name
        self.serializer = serializer
        self.policy = policy
        self.span_name = f"execute_tool {name}"
        self.attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": name,
            "gen_ai.tool.type": "function",
        }
        try:
            self.signature: inspect.Signature | None = inspect.signature(call) if signature else None
        except (TypeError, ValueError):
            self.signature = None
        self.parameters = _simple(self.signature)
        self.fixed = {} if self.parameters is None else _defaults(self.signature)
        self.receiver = _receiver(self.signature)
        self.is_method = _is_in_class(call)

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by parameter name, defaults applied, `self` and `cls` left out; as given where they do not bind."""
        names = self.parameters
        if names is not None and len(args) <= len(names) and (not kwargs or kwargs.keys() <= self.fixed.keys()):
            bound = dict(self.fixed)
            bound.update(zip(names, args, strict=False))
            bound.update(kwargs)
            for value in bound.values():  # by identity: `in` would ask values that answer with arrays
                if value is _missing:
                    break
            else:
                if len(args) + len(kwargs) <= len(names):
                    if self.receiver is not None and (self.is_method or self._is_used_as_method(args)):
                        del bound[self.receiver]
                    return bound
        return self._bind(args, kwargs)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        try:
            if self.signature is None:
                raise TypeError
            bound = self.signature.bind(*args, **kwargs)
        except TypeError:
            return {"args": list(args), "kwargs": dict(kwargs)}
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        if self.receiver is not None and (self.is_method or self._is_used_as_method(args)):
            arguments.pop(self.receiver, None)
        return arguments

    def _is_used_as_method(self, args: tuple[Any, ...]) -> bool:
        """Whether a function defined outside a class was put into the class of its first argument; once is always."""
        if not args:
            return False
        owner = args[0] if isinstance(args[0], type) else type(args[0])
        members = (member for base in owner.__mro__ for member in tuple(vars(base).values()))
        self.is_method = any(_function_of(member) is self.call for member in members)
        return self.is_method


_missing = object()
"""Stands where a parameter has no default."""


def _receiver(signature: inspect.Signature | None) -> str | None:
    """The first parameter, if its name says that it is the object or class of a method."""
    first = next(iter(signature.parameters), None) if signature is not None else None
    return first if first in ("self", "cls") else None


def _is_in_class(function: object) -> bool:
    """Whether a function was defined in a class body."""
    around = str(getattr(function, "__qualname__", "")).rpartition(".")[0]
    return around != "" and not around.endswith("<locals>")


def _function_of(member: object) -> object:
    """What a traced function in a class was made of."""
    function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
    return function.__dict__.get("__wrapped__") if isinstance(function, FunctionType) else None


def _simple(signature: inspect.Signature | None) -> tuple[str, ...] | None:
    """Parameter names in order if each can be given by position or by name and no default has an odd `==`."""
    if signature is None:
        return None
    parameters = signature.parameters.values()
    if any(parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for parameter in parameters):
        return None
    return tuple(parameter.name for parameter in parameters)


def _defaults(signature: inspect.Signature | None) -> dict[str, Any]:
    assert signature is not None
    empty = inspect.Parameter.empty
    return {
        parameter.name: _missing if parameter.default is empty else parameter.default
        for parameter in signature.parameters.values()
    }


# --- one call ---------------------------------------------------------------------------------------------------------


class _Recording(OpenCall):
    """A tool call being recorded. Fails open: a fault of ours leaves the tool alone."""

    __slots__ = ("items", "tool")

    def __init__(self, recorder: Recorder, tool: Tool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tool = tool
        self.items: Items | None = None
        try:
            prepared = recorder.prepare(tool.arguments(args, kwargs), tool.serializer)
        except BaseException as error:
            prepared = recorder.prepare(unreadable(error))
        attributes = tool.attributes
        if recorder.settings.content == "span":
            attributes = {**attributes, "gen_ai.tool.call.arguments": prepared.data.decode()}
        super().__init__(
            recorder,
            "tool",
            tool.name,
            prepared,
            tracer=SCOPE,
            span_name=tool.span_name,
            span_kind=tracing.INTERNAL,
            attributes=attributes,
            policy=tool.policy,
        )

    @fails_open("recording a tool result", None)
    def returned(self, value: object, awaitable: str | None = None) -> None:
        try:
            try:
                prepared = self.recorder.prepare(value, self.tool.serializer)
            except BaseException as error:
                prepared = self.recorder.prepare(unreadable(error))
            extra = None if awaitable is None else {"awaitable": awaitable}
            digest = self.recorder.end(self.call, prepared, extra=extra)
            self._note_result(digest, prepared)
        except Exception as error:
            self.fault("recording a tool result", error)
        self.end_span(None)

    @fails_open("recording a tool error", None)
    def raised(self, error: BaseException, awaitable: str | None = None) -> None:
        try:
            end = "failed" if isinstance(error, asyncio.CancelledError) and not _is_cancelling() else None
            if self.items is not None and self.call is not None:
                described = self.recorder.describe_error(error)
                how = end or how_ended(error)
                output = self.items.output(described)
                self.recorder.end(self.call, output, end=how, status="error", error=described)
            else:
                extra = None if awaitable is None else {"awaitable": awaitable}
                self.recorder.fail(self.call, error, end=end, extra=extra)
        except BaseException as fault:
            unreadable(fault)
            self.fault("recording a tool error", fault)
        self.end_span(error)

    def _note_result(self, digest: str | None, prepared: Prepared) -> None:
        self.note_output(digest)
        if digest is not None and self.recorder.settings.content == "span":
            self.span.set_attribute("gen_ai.tool.call.result", prepared.data.decode())

    # -- generators

    @fails_open("recording an item of a tool", None)
    def gave(self, item: object) -> None:
        """A generator gave an item."""
        assert self.items is not None
        try:
            self.items.add(item)
        except Exception as error:
            self.items.cut = True
            self.fault("recording an item of a tool", error)

    @fails_open("recording a tool result", None)
    def exhausted(self, value: object = None, end: str = "finished") -> None:
        """A generator returned `value`, or was closed."""
        try:
            assert self.items is not None
            extra: dict[str, object] | None = None
            if value is not None and self.recorder.settings.capture == "full":
                returned = self._prepare(value)
                self.items.cut = self.items.cut or returned.truncated
                extra = {"returned": {"value": returned.value, "tags": returned.tags}}
            prepared = self.items.output()
            digest = self.recorder.end(self.call, prepared, end=end, extra=extra)
            self._note_result(digest, prepared)
        except Exception as error:
            self.fault("recording a tool result", error)
        self.end_span(None)

    @fails_open("recording a tool call", None)
    def generating(self) -> _Recording | None:
        """The same, for a generator."""
        self.items = Items(self._prepare, self.recorder.settings.max_payload_bytes)
        return self

    def _prepare(self, value: object) -> Prepared:
        try:
            return self.recorder.prepare(value, self.tool.serializer)
        except BaseException as error:
            return self.recorder.prepare(unreadable(error))

    # -- what is awaited later

    @fails_open("recording a tool result", None)
    def pending(self, result: Any) -> Any:
        """A tool that is a plain function gave something to await: the call ends when that does.

        A future stays the program's own object and only a coroutine, which can be awaited once and has no other use, is
        wrapped. Of other awaitables nothing is known; the call ends with them as its result.
        """
        if inspect.iscoroutine(result):
            return _awaited(self, result)
        if asyncio.isfuture(result):
            result.add_done_callback(self._settled)
        else:
            self.returned(result)
        return result

    @fails_open("recording a tool result", None)
    def _settled(self, future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            self._cancelled()
            return
        # `exception()` would mark it as seen, and the loop would not report one that the program never looks at
        error = future._exception if hasattr(future, "_exception") else future.exception()
        if error is None:
            self.returned(future.result(), "future")
        else:
            self.raised(error, "future")

    def _cancelled(self) -> None:
        error = asyncio.CancelledError()
        self.recorder.fail(self.call, error, end="cancelled", extra={"awaitable": "future"})
        self.end_span(error)


@fails_open("recording a tool call", None)
def _begin(recorder: Recorder, tool: Tool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Recording | None:
    try:
        return _Recording(recorder, tool, args, kwargs)
    except Exception as error:
        recorder.fault("recording a tool call", error, _run_here(recorder))
        return None


def _run_here(recorder: Recorder) -> Run | None:
    """The run that lost a call."""
    try:
        return recorder.run_for(current_scope(), tracing.current_ids()[1])
    except Exception:
        return None


def _is_cancelling() -> bool:
    """Whether the current task was asked to stop: else a CancelledError is the tool's own."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return task is not None and task.cancelling() > 0


# --- drivers ----------------------------------------------------------------------------------------------------------


def driver(tool: Tool) -> Callable[..., Any]:
    """A function of the tool's own kind that makes its calls: recorded, answered from the recording, or just made."""
    target = tool.call
    if inspect.isasyncgenfunction(target):
        return _async_generator(tool)
    if inspect.iscoroutinefunction(target):
        return _coroutine(tool)
    if inspect.isgeneratorfunction(target):
        return _generator(tool)
    return _function(tool)


def _wrapper(tool: Tool) -> Callable[..., Any]:
    target = tool.call
    wrapper = driver(tool)
    named = hasattr(target, "__name__")
    wrapper.__annotations__ = {}
    wrapper = functools.wraps(target)(wrapper)
    if not named:
        wrapper.__name__ = wrapper.__qualname__ = tool.name
    elif isinstance(target, FunctionType):  # read by frameworks; without a use for our own, which takes anything
        wrapper.__defaults__ = target.__defaults__  # type: ignore[attr-defined]
        wrapper.__kwdefaults__ = target.__kwdefaults__  # type: ignore[attr-defined]
    wrapper.__sftrace_tool__ = tool.name  # type: ignore[attr-defined]
    return wrapper


_FINAL = frozenset({dict, list, tuple, str, int, float, bool, bytes, type(None)})
"""Types of results that need no closer look: nothing of these can be awaited."""


def _function(tool: Tool) -> Callable[..., Any]:
    target = tool.call

    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = recording._active
        replay = replaying._active
        if recorder is None and replay is None:
            return target(*args, **kwargs)
        if replay is not None:
            return Served(replay, tool, args, kwargs).answer()
        assert recorder is not None
        record = _begin(recorder, tool, args, kwargs)
        if record is None:
            return target(*args, **kwargs)
        tokens = record.enter()
        try:
            result = target(*args, **kwargs)
        except BaseException as error:
            record.raised(error)
            raise
        finally:
            record.leave(tokens)
        if type(result) not in _FINAL and inspect.isawaitable(result):
            return record.pending(result) or result
        record.returned(result)
        return result

    return call


async def _awaited(record: _Recording, result: Any) -> Any:
    tokens = record.enter()
    try:
        value = await result
    except BaseException as error:
        record.raised(error, "coroutine")
        raise
    finally:
        record.leave(tokens)
    record.returned(value, "coroutine")
    return value


def _coroutine(tool: Tool) -> Callable[..., Any]:
    target = tool.call

    async def call(*args: Any, **kwargs: Any) -> Any:
        recorder = recording._active
        replay = replaying._active
        if recorder is None and replay is None:
            return await target(*args, **kwargs)
        if replay is not None:
            return await Served(replay, tool, args, kwargs).awaited()
        assert recorder is not None
        record = _begin(recorder, tool, args, kwargs)
        if record is None:
            return await target(*args, **kwargs)
        tokens = record.enter()
        try:
            result = await target(*args, **kwargs)
        except BaseException as error:
            record.raised(error)
            raise
        finally:
            record.leave(tokens)
        record.returned(result)
        return result

    return call


def _generator(tool: Tool) -> Callable[..., Any]:
    target = tool.call

    def call(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        recorder = recording._active
        replay = replaying._active
        if replay is not None:
            return (yield from Served(replay, tool, args, kwargs).items())
        record = None if recorder is None else _begin(recorder, tool, args, kwargs)
        if record is None:
            return (yield from target(*args, **kwargs))
        return (yield from steps(record.generating() or UNRECORDED, _made(record, target, args, kwargs)))

    return call


def _async_generator(tool: Tool) -> Callable[..., Any]:
    target = tool.call

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Steps, AsyncGenerator[Any, Any]]:
        recorder = recording._active
        replay = replaying._active
        if replay is not None:
            return UNRECORDED, Served(replay, tool, args, kwargs).async_items()
        record = None if recorder is None else _begin(recorder, tool, args, kwargs)
        if record is None:
            return UNRECORDED, target(*args, **kwargs)
        return record.generating() or UNRECORDED, _made(record, target, args, kwargs)

    return async_steps(begin)


def _made(record: _Recording, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tool's generator; arguments that do not bind end the call."""
    try:
        return target(*args, **kwargs)
    except BaseException as error:
        record.raised(error)
        raise


# --- OTEL_SFTRACE_TOOLS -----------------------------------------------------------------------------------------------

_installed: list[tuple[Any, str, Any, Any]] = []
_wanted: dict[str, list[str]] = {}
_on = False


def install(patterns: Sequence[str] = ()) -> None:
    """Trace the callables that `module:callable` patterns name, now or once their module is imported.

    `callable` may be a dotted path into a class and may hold `*`, which stands for any names without a leading
    underscore that the module itself defines. Nothing is imported for it. A pattern that names nothing is logged.
    """
    global _on
    _on = True
    for pattern in patterns:
        module, _, path = pattern.partition(":")
        if not module or not path:
            _log.warning("OTEL_SFTRACE_TOOLS: %r is not module:callable and has no effect", pattern)
            continue
        paths = _wanted.setdefault(module, [])
        if path not in paths:
            paths.append(path)
        wrapt.register_post_import_hook(functools.partial(_hook, path), module)
    main = sys.modules.get("__main__")
    if main is not None and "__main__" in _wanted:
        _log.warning("OTEL_SFTRACE_TOOLS: the functions of __main__ cannot be patched on import; use @trace_tool there")


def _hook(path: str, module: ModuleType) -> None:
    """Called when `module` has been imported; must not fail its import."""
    if not _on:
        return
    try:
        found = list(_matches(module, path))
        for owner, attribute in found:
            _patch(owner, attribute)
        if not found:
            _log.warning("OTEL_SFTRACE_TOOLS: %s has no callable %s", module.__name__, path)
    except Exception as error:
        _log.warning("OTEL_SFTRACE_TOOLS: %s:%s is not traced (%s)", module.__name__, path, type(error).__name__)


def _matches(module: ModuleType, path: str) -> Iterator[tuple[Any, str]]:
    *parents, last = path.split(".")
    owner: Any = module
    for parent in parents:
        owner = getattr(owner, parent)
    if "*" not in last and "?" not in last:
        if callable(getattr(owner, last, None)):
            yield owner, last
        return
    for name, value in sorted(vars(owner).items()):
        function = getattr(value, "__func__", value)
        own = getattr(function, "__module__", None) == module.__name__ and not isinstance(value, type)
        if not name.startswith("_") and own and callable(function) and fnmatch.fnmatchcase(name, last):
            yield owner, name


def _patch(owner: Any, attribute: str) -> None:
    original = vars(owner).get(attribute, getattr(owner, attribute))
    if hasattr(getattr(original, "__func__", original), "__sftrace_tool__"):
        return
    wrapped = trace_tool(original)
    setattr(owner, attribute, wrapped)
    _installed.append((owner, attribute, original, wrapped))


def uninstall() -> None:
    """Put back what `install` replaced, where ours is still in place."""
    global _on
    _on = False
    _wanted.clear()
    while _installed:
        owner, attribute, original, wrapped = _installed.pop()
        if vars(owner).get(attribute) is wrapped:
            setattr(owner, attribute, original)


def patched() -> list[str]:
    """What is wrapped now by pattern."""
    return [f"{getattr(owner, '__name__', owner)}.{attribute}" for owner, attribute, *_ in _installed]
