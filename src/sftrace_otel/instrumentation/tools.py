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
import gc
import importlib.abc
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
from sftrace_otel.core.session import Decision
from sftrace_otel.instrumentation import replaying, tracing
from sftrace_otel.instrumentation.asked import identified
from sftrace_otel.instrumentation.failopen import fails_open
from sftrace_otel.instrumentation.hiding import Hiding, Rule, scrubbed
from sftrace_otel.instrumentation.opencall import OpenCall, Replayed
from sftrace_otel.instrumentation.running import Running, awaited
from sftrace_otel.instrumentation.served import SCOPE, Served, unreadable
from sftrace_otel.instrumentation.steps import UNRECORDED, Items, Steps, async_steps, steps
from sftrace_otel.recorder import Recorder, Run, current_scope, how_ended

__all__ = ["Tool", "calling", "driver", "install", "patched", "trace_tool", "unfollowed", "uninstall"]

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

    def same(
        self, replay: replaying.Active, args: tuple[Any, ...], kwargs: dict[str, Any], lineage: str | None
    ) -> Decision | None:
        """What `Active.same` says of a call whose arguments are taken as they are, None where they are not."""
        if self.serializer is not None or self.hiding is not None:
            return None
        try:
            arguments = self.arguments(args, kwargs)
        except BaseException as error:
            unreadable(error)
            return None
        return replay.same(self.name, arguments, lineage)

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

_installed: list[tuple[Any, str, Any, Any, bool]] = []
"""Owner, attribute, what was there, what is there now, and whether it was the owner's own and not inherited."""

_wanted: dict[str, list[str]] = {}
"""Module, which may hold wildcards, to paths inside it."""

_hooked: set[tuple[str, str]] = set()
_said: set[str] = set()
_unfollowed: dict[str, None] = {}
_on = False
_NEVER = ("sftrace_otel", "opentelemetry", "wrapt", "importlib")
"""Packages in which wildcards name nothing: tracing them would trace the tracing."""


def install(patterns: Sequence[str] = ()) -> None:
    """Trace the callables that `module:callable` patterns name, now or once their module is imported.

    Both sides may hold `*` and `?`; `callable` may be a path into a class (`Class.method`, `*Tool.run`). A wildcard
    stands for names without a leading underscore that the module itself defines; `pkg.*` for every module below `pkg`.
    Nothing is imported for it. A function that other modules had imported by name is replaced there too; what else
    holds it is named in a log line and by `unfollowed`. A pattern that names nothing is logged once.
    """
    global _on
    _on = True
    for pattern in patterns:
        module, _, path = pattern.partition(":")
        if not module or not path:
            _say(f"{pattern!r} is not module:callable and has no effect")
            continue
        paths = _wanted.setdefault(module, [])
        if path not in paths:
            paths.append(path)
        if _is_wild(module):
            for name in list(sys.modules):
                _want(name)
            if _finder not in sys.meta_path:
                wrapt.register_post_import_hook(_ignore, _finder.__class__.__name__)  # wrapt's finder goes in first
                sys.meta_path.insert(0, _finder)
        else:
            _register(module, path)
    if "__main__" in _wanted:
        _say("the functions of __main__ cannot be patched on import; use @trace_tool there")


def _is_wild(text: str) -> bool:
    return "*" in text or "?" in text


def _say(line: str) -> None:
    if line not in _said:
        _said.add(line)
        _log.warning("OTEL_SFTRACE_TOOLS: %s", line)


def _ignore(module: ModuleType) -> None:
    """A hook for a module that nobody has."""


def _register(module: str, path: str) -> None:
    loaded = sys.modules.get(module)
    if (module, path) not in _hooked:
        _hooked.add((module, path))
        wrapt.register_post_import_hook(functools.partial(_hook, path), module)
    elif loaded is not None:
        _hook(path, loaded)


def _want(name: str) -> None:
    """Have what wildcards name in the module `name` patched once it is imported."""
    if name.partition(".")[0] in _NEVER:
        return
    for module, paths in list(_wanted.items()):
        if _is_wild(module) and fnmatch.fnmatchcase(name, module):
            for path in paths:
                _register(name, path)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds no module: it learns the names of those that are about to be imported."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        try:
            _want(name)
        except Exception as error:  # an import must not fail because of us
            recording.fault("following an import", error)


_finder = _Finder()


def _hook(path: str, module: ModuleType) -> None:
    """Called when `module` has been imported; must not fail its import."""
    exact = path in _wanted.get(module.__name__, ())
    if not _on or not (exact or _is_wanted(module.__name__, path)):
        return
    try:
        found = list(_matches(module, path))
        replaced = tuple(original for owner, attribute in found for original in _patch(owner, attribute))
        own = tuple(one for one in replaced if isinstance(one, FunctionType) and one.__module__ == module.__name__)
        if own and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            _follow(module, own)
        if not found and exact:
            _say(f"{module.__name__} has no callable {path}{_hint(module, path)}")
    except Exception as error:
        _say(f"{module.__name__}:{path} is not traced ({type(error).__name__})")


def _is_wanted(module: str, path: str) -> bool:
    return any(_is_wild(one) and path in paths and fnmatch.fnmatchcase(module, one) for one, paths in _wanted.items())


def _hint(module: ModuleType, path: str) -> str:
    named = getattr(module, path, None)
    return f"; it is a class: name its methods, for instance {path}.run" if isinstance(named, type) else ""


def _matches(module: ModuleType, path: str) -> Iterator[tuple[Any, str]]:
    """Owner and attribute of each callable that a path names."""
    *parents, last = path.split(".")
    owners: list[Any] = [module]
    for parent in parents:
        owners = [inner for owner in owners for inner in _classes(module, owner, parent)]
    for owner in owners:
        if _is_wild(last):
            yield from ((owner, name) for name in sorted(vars(owner)) if _is_named(module, owner, name, last))
        elif any(map(_is_wild, parents)) and last not in vars(owner):
            continue  # inherited: where it is from is named too, or was not meant
        elif _is_tool(getattr(owner, last, None)):
            yield owner, last


def _is_tool(value: object) -> bool:
    return (callable(value) and not isinstance(value, type)) or _is_of_framework(value)


_FRAMEWORKS = frozenset({"agents", "anthropic", "openai"})
"""Packages with a boundary of their own for the tool objects that their decorators make."""


def _is_of_framework(value: object) -> bool:
    """Whether a name stands for a framework's tool object, not for a function: it stays what it is."""
    return not isinstance(value, type) and type(value).__module__.partition(".")[0] in _FRAMEWORKS


def _classes(module: ModuleType, owner: Any, named: str) -> list[Any]:
    if not _is_wild(named):
        inner = getattr(owner, named, None)
        return [] if inner is None else [inner]
    return [
        value
        for name, value in sorted(vars(owner).items())
        if isinstance(value, type) and value.__module__ == module.__name__ and _fits(name, named)
    ]


def _fits(name: str, wanted: str) -> bool:
    return not name.startswith("_") and fnmatch.fnmatchcase(name, wanted)


def _is_named(module: ModuleType, owner: Any, name: str, wanted: str) -> bool:
    """Whether a wildcard means this attribute: public, and a function or callable object of the module's own."""
    if not _fits(name, wanted):
        return False
    value = vars(owner)[name]
    function = getattr(value, "__func__", value)
    if isinstance(value, type) or not callable(function):
        return False
    own = function if inspect.isroutine(function) else type(function)
    return getattr(own, "__module__", None) == module.__name__


def _patch(owner: Any, attribute: str) -> list[Any]:
    """Put a traced one in the place of an attribute; gives what was there, nothing where it is traced already."""
    original = inspect.getattr_static(owner, attribute)
    if hasattr(getattr(original, "__func__", original), "__sftrace_tool__") or _is_of_framework(original):
        return []
    _put(owner, attribute, original, trace_tool(original))
    return [original]


def _put(owner: Any, attribute: str, original: Any, wrapped: Any) -> None:
    own = attribute in vars(owner)
    setattr(owner, attribute, wrapped)
    _installed.append((owner, attribute, original, wrapped, own))


def _follow(module: ModuleType, originals: Sequence[Any]) -> None:
    """Replace functions of a module that was imported before us where other modules hold them by name, and note those
    that a list, dictionary, set or class holds, which keeps the original."""
    known = {id(original): wrapped for _, _, original, wrapped, _ in _installed if isinstance(original, FunctionType)}
    wanted = {id(original) for original in originals} & known.keys()
    for other in list(sys.modules.values()):
        names = getattr(other, "__dict__", None)
        if other is module or not isinstance(names, dict) or not isinstance(other, ModuleType):
            continue
        for name, value in list(names.items()):
            if id(value) in wanted:
                _put(other, name, value, known[id(value)])
    for original in originals:
        if id(original) in wanted and any(map(_keeps, gc.get_referrers(original))):
            text = (
                f"{module.__name__}:{original.__qualname__} was taken before it was patched, and stays untraced there"
            )
            _unfollowed[text] = None
            _say(f"{text}; use @trace_tool on it")


def _keeps(holder: object) -> bool:
    """Whether what refers to a function is a container of the program's: no module, and nothing of ours."""
    if type(holder) is dict:
        return "__name__" not in holder and "__wrapped__" not in holder
    return type(holder) in (list, set) and holder is not _installed


def uninstall() -> None:
    """Put back what `install` replaced, where ours is still in place."""
    global _on
    _on = False
    _wanted.clear()
    _hooked.clear()
    _said.clear()
    _unfollowed.clear()
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    while _installed:
        owner, attribute, original, wrapped, own = _installed.pop()
        if vars(owner).get(attribute) is not wrapped:
            continue
        if own:
            setattr(owner, attribute, original)
        else:
            delattr(owner, attribute)


def patched() -> list[str]:
    """What is wrapped now by pattern."""
    return [f"{getattr(owner, '__name__', owner)}.{attribute}" for owner, attribute, *_ in _installed]


def unfollowed() -> list[str]:
    """What could not be traced everywhere, in lines for people."""
    return list(_unfollowed)
