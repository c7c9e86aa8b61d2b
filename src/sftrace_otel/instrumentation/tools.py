# SPDX-License-Identifier: Apache-2.0
"""The boundary of tools: `@trace_tool`, and `module:callable` patterns patched on import.

Decision: a plain function around the tool, of the tool's own kind (sync, async, generator, async generator), so that
`inspect`, `pickle` by name and frameworks that read signatures see what they saw; around a partial or a callable
object, which have no name, one of these. Arguments are bound by signature with
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
from typing import Any, NamedTuple, TypeVar, overload

import wrapt

from sftrace_otel import recorder as recording
from sftrace_otel.core.plan import RecordedCall
from sftrace_otel.core.prepare import Prepared
from sftrace_otel.instrumentation import replaying, tracing
from sftrace_otel.instrumentation.asked import identified
from sftrace_otel.instrumentation.failopen import fails_open
from sftrace_otel.instrumentation.hiding import Hiding, Rule, scrubbed
from sftrace_otel.instrumentation.opencall import OpenCall, Replayed
from sftrace_otel.instrumentation.running import Running, awaited
from sftrace_otel.instrumentation.served import SCOPE, Served, unreadable
from sftrace_otel.instrumentation.steps import UNRECORDED, Items, Steps, async_steps, steps
from sftrace_otel.recorder import Recorder, Run, current_scope, how_ended

__all__ = ["Tool", "calling", "driver", "install", "patched", "trace_tool", "uninstall"]

_log = logging.getLogger("sftrace_otel")
F = TypeVar("F", bound=Callable[..., Any])
Serializer = Callable[[object], object]
Approve = Callable[[RecordedCall], bool]
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
    approve: Approve | None = None,
    redact: Rule | Sequence[Rule] = (),
) -> Callable[[F], F]: ...


def trace_tool(
    tool: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    serializer: Serializer | None = None,
    replay_policy: str = "frozen",
    approve: Approve | None = None,
    redact: Rule | Sequence[Rule] = (),
) -> Any:
    """Record each call of a tool, and answer it from the recording under replay.

    Used bare or with options, on functions, methods, classmethods, staticmethods, coroutine functions, generators and
    async generators. `name`: the tool's name in events, by default the function's. `serializer`: turns values of one's
    own types into values that have a JSON form. `replay_policy`: `frozen` (answer from the recording), `live`,
    `manual` (ask `approve`), `forbidden` or `derived`, as the format page defines them. `approve`: given the recorded
    call (`name`, `input`, `outcome`), says whether a replay may answer from it; asked while other calls of the replay
    wait. `redact`: what is hidden before anything is stored, beside what the policy hides: names of arguments,
    pointers (`/input/user/ssn`, `/output/rows/*/name`), and functions from the arguments (by name) or the result, as
    JSON, to what is stored instead. A replay hides the same, and gives the program a result as it was stored.

    Raises ValueError for another policy or a rule that fits no argument, TypeError for what cannot be called. The tool
    itself is unchanged: results and exceptions pass through.
    """
    if replay_policy not in POLICIES:
        raise ValueError(f"replay_policy {replay_policy!r}: must be one of {', '.join(sorted(POLICIES))}")
    if approve is not None and replay_policy != "manual":
        raise ValueError("approve is asked for replay_policy='manual' only")
    rules = (redact,) if isinstance(redact, str) or callable(redact) else tuple(redact)
    options = _Options(name, serializer, replay_policy, approve, rules)
    return functools.partial(_decorate, options=options) if tool is None else _decorate(tool, options)


class _Options(NamedTuple):
    """What a decorator was given."""

    name: str | None = None
    serializer: Serializer | None = None
    policy: str = "frozen"
    approve: Approve | None = None
    redact: tuple[Rule, ...] = ()


def _decorate(tool: Any, options: _Options) -> Any:
    if isinstance(tool, (classmethod, staticmethod)):
        return type(tool)(_decorate(tool.__func__, options))
    if isinstance(tool, functools.partialmethod):
        return functools.partialmethod(_decorate(tool.func, options), *tool.args, **tool.keywords)
    if isinstance(tool, type):
        raise TypeError(f"trace_tool needs a function or method, not the class {tool.__qualname__}; trace its methods")
    if not callable(tool):
        raise TypeError(f"trace_tool needs something callable, not {type(tool).__name__}")
    known = Tool(
        tool, options.name or _name_of(tool), options.serializer, options.policy,
        approve=options.approve, redact=options.redact,
    )  # fmt: skip
    return _wrapper(known) if hasattr(tool, "__name__") else _nameless(known, options)


def _name_of(tool: Any) -> str:
    if isinstance(tool, functools.partial):
        return _name_of(tool.func)
    return str(getattr(tool, "__name__", None) or type(tool).__name__)


# --- binding arguments ------------------------------------------------------------------------------------------------


class Tool:
    """What is known of a tool: how to call it, its name, and how its arguments bind."""

    __slots__ = (
        "approve", "attributes", "call", "fixed", "hiding", "is_method", "name", "parameters", "policy", "receiver",
        "serializer", "signature", "span_name",
    )  # fmt: skip

    def __init__(
        self,
        call: Callable[..., Any],
        name: str,
        serializer: Serializer | None,
        policy: str,
        *,
        approve: Approve | None = None,
        redact: Sequence[Rule] = (),
        signature: bool = True,
    ) -> None:
        self.call = call
        self.name = name
        self.serializer = serializer
        self.policy = policy
        self.approve = approve
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
        self.hiding = _hiding(self.signature, redact) if redact else None

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

    def prepared(
        self, prepare: Callable[[object, Serializer | None], Prepared], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Prepared:
        """The arguments of a call as they are stored and matched; `prepare` is the recorder's or the replay's."""
        try:
            prepared = prepare(self.arguments(args, kwargs), self.serializer)
        except BaseException as error:
            prepared = prepare(unreadable(error), None)
        if self.hiding is None:
            return prepared
        return self.hiding.input(prepared, lambda value: prepare(value, None), bound=self._binds(args, kwargs))

    def _binds(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        try:
            if self.signature is not None:
                self.signature.bind(*args, **kwargs)
        except TypeError:
            return False
        return self.signature is not None

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


def _hiding(signature: inspect.Signature | None, redact: Sequence[Rule]) -> Hiding:
    if signature is None:
        return Hiding(redact, None, None)
    parameters = signature.parameters.values()
    keywords = next((one.name for one in parameters if one.kind is inspect.Parameter.VAR_KEYWORD), None)
    return Hiding(redact, None if keywords is not None else [one.name for one in parameters], keywords)


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

    __slots__ = ("extra", "items", "quoted", "tool")

    def __init__(
        self,
        recorder: Recorder,
        tool: Tool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        replayed: Replayed | None = None,
    ) -> None:
        self.tool = tool
        self.items: Items | None = None
        prepared = tool.prepared(recorder.prepare, args, kwargs)
        self.quoted = [] if tool.hiding is None else tool.hiding.texts(_as_given(tool, recorder, args, kwargs))
        attributes = identified(tool.attributes)
        call_id = attributes.get("gen_ai.tool.call.id")
        self.extra: dict[str, object] = {} if call_id is None else {"tool_call_ids": [call_id]}
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
            replayed=replayed,
        )

    @fails_open("recording a tool result", None)
    def returned(self, value: object, awaitable: str | None = None) -> None:
        try:
            prepared = self._hidden(self._prepare(value))
            digest = self.recorder.end(self.call, prepared, extra=self._extra(awaitable))
            self._note_result(digest, prepared)
        except Exception as error:
            self.fault("recording a tool result", error)
        self.end_span(None)

    @fails_open("recording a tool error", None)
    def raised(self, error: BaseException, awaitable: str | None = None) -> None:
        try:
            end = "failed" if isinstance(error, asyncio.CancelledError) and not _is_cancelling() else None
            extra = self._extra(awaitable)
            if self.call is None or (self.items is None and self.tool.hiding is None):
                self.recorder.fail(self.call, error, end=end, extra=extra)
            else:
                described = self._described(error)
                if self.items is not None:
                    output = self._hidden(self.items.output(described))
                else:
                    output = self._prepare({"error_type": described["type"], "message": described["message"]})
                how = end or how_ended(error)
                self.recorder.end(self.call, output, end=how, status="error", error=described, extra=extra)
        except BaseException as fault:
            unreadable(fault)
            self.fault("recording a tool error", fault)
        self.end_span(error)

    def _extra(self, awaitable: str | None) -> dict[str, object]:
        return self.extra if awaitable is None else {**self.extra, "awaitable": awaitable}

    def _described(self, error: BaseException) -> dict[str, Any]:
        """The error as it is stored. Where the tool hides something, its text may quote that, and its members hold it:
        the members are left out, and what was hidden of the arguments is replaced in the text."""
        described = self.recorder.describe_error(error)
        if self.tool.hiding is None:
            return described
        text = scrubbed(described["message"], self.quoted)
        hidden = self._hidden(self._prepare({"error_type": described["type"], "message": text})).value
        message = hidden.get("message") if isinstance(hidden, dict) else hidden
        left = {name: described[name] for name in ("type", "module", "qualname", "findings")}
        return {**left, "message": message if isinstance(message, str) and message else described["type"]}

    def _hidden(self, prepared: Prepared) -> Prepared:
        """A result without what the tool hides."""
        hiding = self.tool.hiding
        return prepared if hiding is None else hiding.output(prepared, self.recorder.prepare)

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
            extra = self.extra
            if value is not None and self.recorder.settings.capture == "full":
                returned = self._hidden(self._prepare(value))
                self.items.cut = self.items.cut or returned.truncated
                extra = {**extra, "returned": {"value": returned.value, "tags": returned.tags}}
            prepared = self._hidden(self.items.output())
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
            return awaited(self, result)
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
        self.recorder.fail(self.call, error, end="cancelled", extra=self._extra("future"))
        self.end_span(error)


def _as_given(tool: Tool, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prepared:
    """The arguments before the tool's own rules."""
    try:
        return recorder.prepare(tool.arguments(args, kwargs), tool.serializer)
    except BaseException as error:
        return recorder.prepare(unreadable(error))


@fails_open("recording a tool call", None)
def _begin(recorder: Recorder, tool: Tool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Recording | None:
    try:
        return _Recording(recorder, tool, args, kwargs)
    except Exception as error:
        recorder.fault("recording a tool call", error, _run_here(recorder))
        return None


def _running(
    served: Served, recorder: Recorder | None, tool: Tool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Running:
    """A tool that runs under replay, recorded where that is."""
    decision, replay = served.decision, served.replay
    replayed = Replayed(served.lineage, replaying.marks(decision), decision.action == "live")
    return Running(
        replay,
        decision,
        served.lineage,
        None if recorder is None else _Recording(recorder, tool, args, kwargs, replayed),
        lambda value: replay.prepare(value, tool.serializer),
        tracer=SCOPE,
        span_name=tool.span_name,
        span_kind=tracing.INTERNAL,
        attributes=tool.attributes,
    )


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
    return _driver(tool, tool.call)


def _driver(tool: Tool, kind: object) -> Callable[..., Any]:
    """A function around the tool of the kind that `kind` is."""
    if inspect.isasyncgenfunction(kind):
        return _async_generator(tool)
    if inspect.iscoroutinefunction(kind):
        return _coroutine(tool)
    if inspect.isgeneratorfunction(kind):
        return _generator(tool)
    return _function(tool)


def _wrapper(tool: Tool) -> Callable[..., Any]:
    target = tool.call
    wrapper = _driver(tool, target)
    wrapper.__annotations__ = {}
    wrapper = functools.wraps(target)(wrapper)
    if isinstance(target, FunctionType):  # read by frameworks; without a use for our own, which takes anything
        wrapper.__defaults__ = target.__defaults__  # type: ignore[attr-defined]
        wrapper.__kwdefaults__ = target.__kwdefaults__  # type: ignore[attr-defined]
    for method in _OF_CACHES:
        if hasattr(target, method):
            setattr(wrapper, method, getattr(target, method))
    wrapper.__sftrace_tool__ = tool.name  # type: ignore[attr-defined]
    return wrapper


_OF_CACHES = ("cache_info", "cache_clear")
"""Methods of what `functools.lru_cache` makes, which `functools.wraps` does not see."""


def _nameless(tool: Tool, options: _Options) -> Any:
    """A partial or callable object stays one, since a function would have a name: frameworks ask for it."""
    target = tool.call
    if isinstance(target, functools.partial):
        made: Any = _TracedPartial(_driver(tool, target))
    else:
        called = _driver(tool, type(target).__call__)
        kind = type("TracedCallable", (_TracedCallable,), {"__call__": staticmethod(called), "__slots__": ()})
        made = kind()
    vars(made)["__annotations__"] = {}
    functools.update_wrapper(made, target)
    vars(made).update(__sftrace_tool__=tool.name, _sftrace_options=options)
    return made


class _TracedPartial(functools.partial[Any]):
    """A traced `functools.partial`; it is copied and pickled as what it was made of."""

    def __reduce__(self) -> tuple[Any, ...]:
        made = vars(self)
        return _decorate, (made["__wrapped__"], made["_sftrace_options"])


class _TracedCallable:
    """A traced object with `__call__`; its other attributes are those of the object."""

    def __getattr__(self, name: str) -> Any:
        made = vars(self)
        if "__wrapped__" not in made:
            raise AttributeError(name)
        return getattr(made["__wrapped__"], name)

    def __reduce__(self) -> tuple[Any, ...]:
        made = vars(self)
        return _decorate, (made["__wrapped__"], made["_sftrace_options"])


def calling(tool: Tool) -> Callable[..., Any]:
    """`tool.call` as a boundary of a framework calls it: recorded, or answered from the recording."""
    return _wrapper(tool)


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
            served = Served(replay, tool, args, kwargs)
            if not served.runs:
                return served.answer()
            record: _Recording | Running | None = _running(served, recorder, tool, args, kwargs)
        else:
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


def _coroutine(tool: Tool) -> Callable[..., Any]:
    target = tool.call

    async def call(*args: Any, **kwargs: Any) -> Any:
        recorder = recording._active
        replay = replaying._active
        if recorder is None and replay is None:
            return await target(*args, **kwargs)
        if replay is not None:
            served = Served(replay, tool, args, kwargs)
            if not served.runs:
                return await served.awaited()
            record: _Recording | Running | None = _running(served, recorder, tool, args, kwargs)
        else:
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
        record: _Recording | Running | None
        if replay is not None:
            served = Served(replay, tool, args, kwargs)
            if not served.runs:
                return (yield from served.items())
            record = _running(served, recorder, tool, args, kwargs)
        else:
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
        record: _Recording | Running | None
        if replay is not None:
            served = Served(replay, tool, args, kwargs)
            if not served.runs:
                return UNRECORDED, served.async_items()
            record = _running(served, recorder, tool, args, kwargs)
        else:
            record = None if recorder is None else _begin(recorder, tool, args, kwargs)
        if record is None:
            return UNRECORDED, target(*args, **kwargs)
        return record.generating() or UNRECORDED, _made(record, target, args, kwargs)

    return async_steps(begin)


def _made(
    record: _Recording | Running, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
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
        named = getattr(owner, last, None)
        if callable(named) or _is_of_framework(named):
            yield owner, last
        return
    for name, value in sorted(vars(owner).items()):
        function = getattr(value, "__func__", value)
        own = getattr(function, "__module__", None) == module.__name__ and not isinstance(value, type)
        if not name.startswith("_") and own and callable(function) and fnmatch.fnmatchcase(name, last):
            yield owner, name


_FRAMEWORKS = frozenset({"agents", "anthropic", "openai"})
"""Packages with a boundary of their own for the tool objects that their decorators make."""


def _is_of_framework(value: object) -> bool:
    """Whether a name stands for a framework's tool object, not for a function: it stays what it is."""
    return not isinstance(value, type) and type(value).__module__.partition(".")[0] in _FRAMEWORKS


def _patch(owner: Any, attribute: str) -> None:
    original = vars(owner).get(attribute, getattr(owner, attribute))
    if hasattr(getattr(original, "__func__", original), "__sftrace_tool__") or _is_of_framework(original):
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
