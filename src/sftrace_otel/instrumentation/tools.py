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

import fnmatch
import functools
import inspect
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, TypeVar, cast, overload

import wrapt

from sftrace_otel import recorder as recording
from sftrace_otel.instrumentation import replaying, tracing
from sftrace_otel.instrumentation.outcomes import give_back
from sftrace_otel.recorder import Call, Recorder, current_scope, enter, inner, leave

__all__ = ["install", "patched", "trace_tool", "uninstall"]

_log = logging.getLogger("sftrace_otel")
_SCOPE = "sftrace_otel.tools"
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

    __slots__ = ("attributes", "call", "fixed", "name", "parameters", "policy", "serializer", "signature", "span_name")

    def __init__(self, call: Callable[..., Any], name: str, serializer: Serializer | None, policy: str) -> None:
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
            self.signature: inspect.Signature | None = inspect.signature(call)
        except (TypeError, ValueError):
            self.signature = None
        self.parameters = _simple(self.signature)
        self.fixed = {} if self.parameters is None else _defaults(self.signature)

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by parameter name, defaults applied, `self` and `cls` left out; as given where they do not bind."""
        names = self.parameters
        if names is not None and len(args) <= len(names) and (not kwargs or kwargs.keys() <= self.fixed.keys()):
            bound = dict(self.fixed)
            bound.update(zip(names, args, strict=False))
            bound.update(kwargs)
            if _missing not in bound.values() and len(args) + len(kwargs) <= len(names):
                if names and names[0] in ("self", "cls"):
                    del bound[names[0]]
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
        first = next(iter(arguments), None)
        if first in ("self", "cls"):
            del arguments[first]
        return arguments


class _Missing:
    """No default. Compares by identity only, whatever it meets."""


_missing = _Missing()


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


class _Recording:
    """A tool call being recorded: span and journal entry. Fails open: a fault of ours leaves the tool alone."""

    __slots__ = ("call", "recorder", "scope", "span", "token", "tool")

    def __init__(self, recorder: Recorder, tool: Tool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.recorder = recorder
        self.tool = tool
        self.call: Call | None = None
        outer = current_scope()
        lineage = outer.place()
        around = tracing.current_ids()
        run = recorder.run_for(outer, around[1])
        prepared = recorder.prepare(tool.arguments(args, kwargs), tool.serializer)
        reserved = run.new_id()
        attributes = {
            **tool.attributes,
            "sftrace.run.id": run.id,
            "sftrace.event.id": reserved,
            "sftrace.input_hash": prepared.digest,
        }
        named = run.named
        if not around[1] and named:
            attributes["sftrace.bundle"] = run.name  # a root span: cheaper now than set later
        if recorder.settings.content == "span":
            attributes["gen_ai.tool.call.arguments"] = prepared.data.decode()
        self.span = tracing.start_span(_SCOPE, tool.span_name, tracing.INTERNAL, attributes)
        ids = tracing.ids_of(self.span)
        self.call = recorder.begin(
            "tool",
            tool.name,
            prepared,
            scope=outer,
            lineage=lineage,
            policy=tool.policy,
            span=ids,
            run=run,
            event_id=reserved,
        )
        if self.call is not None:
            recorder.refer(ids[1], self.call)
            if not named:
                tracing.name_root(self.span, run.name)
        self.scope = inner(self.call, lineage, outer)

    def enter(self) -> tuple[Any, Any]:
        """Make the call's span and scope current."""
        return enter(self.scope), tracing.attached(self.span)

    @staticmethod
    def leave(tokens: tuple[Any, Any]) -> None:
        tracing.detach(tokens[1])
        leave(tokens[0])

    def returned(self, value: object, end: str = "finished") -> None:
        try:
            prepared = self.recorder.prepare(value, self.tool.serializer)
            digest = self.recorder.end(self.call, prepared, end=end)
            if digest is not None:
                self.span.set_attribute("sftrace.output_hash", digest)
                if self.recorder.settings.content == "span":
                    self.span.set_attribute("gen_ai.tool.call.result", prepared.data.decode())
        except Exception as error:
            self.recorder.fault("recording a tool result", error)
        self._end_span(None)

    def raised(self, error: BaseException) -> None:
        try:
            self.recorder.fail(self.call, error)
        except Exception as fault:
            self.recorder.fault("recording a tool error", fault)
        self._end_span(error)

    def _end_span(self, error: BaseException | None) -> None:
        try:
            tracing.end_span(self.span, error)
        except Exception as fault:  # a span processor of the program's own
            self.recorder.fault("ending a span", fault)


def _begin(recorder: Recorder, tool: Tool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Recording | None:
    try:
        return _Recording(recorder, tool, args, kwargs)
    except Exception as error:
        recorder.fault("recording a tool call", error)
        return None


def _serve(replay: replaying.Active, tool: Tool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """The recorded result, or its exception. Raises a ReplayError where the recording has none."""
    lineage = current_scope().place()
    prepared = replay.prepare(tool.arguments(args, kwargs), tool.serializer)
    decision = replay.decide("tool", tool.name, prepared, lineage=lineage)
    assert decision.call is not None
    span = tracing.start_span(
        _SCOPE, tool.span_name, tracing.INTERNAL, {**tool.attributes, **replaying.marks(decision)}
    )
    try:
        result = give_back(decision.call)
    except BaseException as error:
        tracing.end_span(span, error)
        raise
    tracing.end_span(span)
    return result


# --- drivers ----------------------------------------------------------------------------------------------------------


def _wrapper(tool: Tool) -> Callable[..., Any]:
    target = tool.call
    if inspect.isasyncgenfunction(target):
        driver: Callable[..., Any] = _async_generator(tool)
    elif inspect.iscoroutinefunction(target):
        driver = _coroutine(tool)
    elif inspect.isgeneratorfunction(target):
        driver = _generator(tool)
    else:
        driver = _function(tool)
    if hasattr(target, "__name__"):
        driver = functools.wraps(target)(driver)
    else:
        driver.__name__ = driver.__qualname__ = tool.name
        driver.__wrapped__ = target  # type: ignore[attr-defined]
    driver.__sftrace_tool__ = tool.name  # type: ignore[attr-defined]
    return driver


def _function(tool: Tool) -> Callable[..., Any]:
    target = tool.call

    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = recording._active
        replay = replaying._active
        if recorder is None and replay is None:
            return target(*args, **kwargs)
        if replay is not None:
            return _serve(replay, tool, args, kwargs)
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
        if inspect.isawaitable(result):
            return _awaited(record, result)
        record.returned(result)
        return result

    return call


async def _awaited(record: _Recording, result: Any) -> Any:
    """A tool that is a plain function but gave something to await: the call ends when that does."""
    tokens = record.enter()
    try:
        value = await result
    except BaseException as error:
        record.raised(error)
        raise
    finally:
        record.leave(tokens)
    record.returned(value)
    return value


def _coroutine(tool: Tool) -> Callable[..., Any]:
    target = tool.call

    async def call(*args: Any, **kwargs: Any) -> Any:
        recorder = recording._active
        replay = replaying._active
        if recorder is None and replay is None:
            return await target(*args, **kwargs)
        if replay is not None:
            return _serve(replay, tool, args, kwargs)
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

    def call(*args: Any, **kwargs: Any) -> Iterator[Any]:
        recorder = recording._active
        replay = replaying._active
        if replay is not None:
            yield from cast("list[Any]", _serve(replay, tool, args, kwargs))
            return
        record = None if recorder is None else _begin(recorder, tool, args, kwargs)
        if record is None:
            yield from target(*args, **kwargs)
            return
        items: list[Any] = []
        try:
            for item in target(*args, **kwargs):
                items.append(item)
                yield item
        except GeneratorExit:
            record.returned(items, end="closed")
            raise
        except BaseException as error:
            record.raised(error)
            raise
        record.returned(items)

    return call


def _async_generator(tool: Tool) -> Callable[..., Any]:
    target = tool.call

    async def call(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        recorder = recording._active
        replay = replaying._active
        if replay is not None:
            for item in cast("list[Any]", _serve(replay, tool, args, kwargs)):
                yield item
            return
        record = None if recorder is None else _begin(recorder, tool, args, kwargs)
        items: list[Any] = []
        try:
            async for item in target(*args, **kwargs):
                if record is not None:
                    items.append(item)
                yield item
        except GeneratorExit:
            if record is not None:
                record.returned(items, end="closed")
            raise
        except BaseException as error:
            if record is not None:
                record.raised(error)
            raise
        if record is not None:
            record.returned(items)

    return call


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
