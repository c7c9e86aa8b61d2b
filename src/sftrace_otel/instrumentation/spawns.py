# SPDX-License-Identifier: Apache-2.0
"""Tasks, threads, jobs and callbacks take their place in the lineage where they are spawned.

Decision: what is wrapped is where each is made, and what runs it one frame below the program's own: a task by
`BaseEventLoop.create_task`, through which `asyncio.create_task`, `gather`, `TaskGroup` and `run` go; a thread by
`Thread.start` and `Thread._bootstrap_inner`; a job of a pool by its `_WorkItem`, made by `submit`; a callback by
`call_soon`, `call_at` and `call_soon_threadsafe`. So the program's callables, tracebacks and results are its own
objects, and a context is changed only where the new task or callback would have got a copy of it anyway. A thread is
told of its scope beside its context (`recorder.lineage.Job`), and of the OpenTelemetry span that was current where it
was started, if it has none.

What a library starts for itself (`_PLUMBING`) and what is spawned inside a boundary's transport takes no slot: it
comes and goes with connections and idle threads, and a replay connects nowhere. A callback of a future of asyncio,
which is a C object, and what other loops spawn, has no lineage; matching then does without.

Rejected: numbering by the first call, which another schedule numbers otherwise; wrapping the submitted callable, which
adds a frame to every traceback; setting `Thread.run`, which subclasses override.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from contextvars import Context, Token
from sys import _getframe
from types import CoroutineType
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import ref as _ref

from sftrace_otel import recorder as recording
from sftrace_otel.instrumentation import guard, replaying, tracing
from sftrace_otel.instrumentation.failopen import fails_open
from sftrace_otel.instrumentation.patching import Patches
from sftrace_otel.recorder import Job, Scope, aside, enter, leave, lineage, spawn, spawn_job
from sftrace_otel.recorder.lineage import CALLBACK, begin_job, end_job, unfollowed

if TYPE_CHECKING:
    from opentelemetry.trace import Span

__all__ = ["install", "patched", "uninstall"]

_Task = asyncio.Task
_inside = guard._inside.get
_variable = lineage._scope
_reset = _variable.reset
Function: TypeAlias = Callable[..., Any]
Spawned: TypeAlias = "tuple[Job | None, Span | None]"

_PLUMBING = frozenset(
    {"aiohttp", "anthropic", "anyio", "asyncio", "builtins", "concurrent", "h11", "h2", "httpcore", "httpcore2",
     "httpx", "httpx2", "logging", "multiprocessing", "openai", "opentelemetry", "requests", "sftrace_otel",
     "socketserver", "ssl", "urllib3", "uvicorn", "websockets"}
)  # fmt: skip
"""Packages whose own threads and callbacks are no part of what the program does."""


# --- tasks ------------------------------------------------------------------------------------------------------------


def _create_task(original: Function) -> Function:
    """One function, since each call of another would cost a tenth of what following a task may cost."""

    def create_task(self: Any, coro: Any, **kwargs: Any) -> Any:
        if recording._active is None and replaying._active is None:
            return original(self, coro, **kwargs) if kwargs else original(self, coro)
        token = None
        try:
            above = _getframe(1)
            if (
                above.f_code.co_name == "__del__"
                or (above.f_back or above).f_code.co_name == "__del__"
                or (_inside() and guard.is_inside())
                or (type(coro) is not CoroutineType and type(coro).__name__ == "async_generator_athrow")
            ):
                # What a client spawns to connect is not the program's: a replay connects nowhere, and later slots would
                # shift. What is spawned to clean up after a collected object comes whenever the collector does.
                scope = aside()
            else:
                scope = spawn(self)
            # A task is made in a copy of the current context (a task factory need not know of any), if not in a given.
            if kwargs and kwargs.get("context") is not None:
                _place(scope, kwargs["context"])
            else:
                token = enter(scope)
        except Exception as error:
            _fault("following a task", error)
            return original(self, coro, **kwargs)
        try:
            task = original(self, coro, **kwargs) if kwargs else original(self, coro)
        finally:
            if token is not None:
                try:
                    _reset(token)
                except Exception as error:
                    _fault("following a task", error)
        if type(scope) is Scope and scope.task is None and isinstance(task, _Task):
            scope.task = _ref(task)  # its own, whichever of those that copy its context makes the first call
        return task

    return create_task


def _fault(what: str, error: Exception) -> None:
    """What `fails_open` does, where its own call would cost too much."""
    if replaying._active is not None:
        raise error
    recording.fault(what, error)


def _place(scope: Scope, context: Context) -> None:
    """Give what is made in `context` its scope; where it is entered already, that stays without lineage."""
    try:
        context.run(enter, scope)
    except RuntimeError:
        pass


@fails_open("following a task", None)
def _back(token: Token[Scope | None]) -> None:
    """Undo `enter`."""
    leave(token)


# --- callbacks --------------------------------------------------------------------------------------------------------


_followed_callbacks = False
"""Whether there has been one yet: a context may be a copy of its."""


def _call_soon(original: Function, safe: bool = False) -> Function:
    """`safe`: what may be called by any thread."""

    def call_soon(self: Any, callback: Any, *args: Any, context: Context | None = None) -> Any:
        if context is not None:  # each step of a task comes by here
            if _followed_callbacks:
                _unplaced(context)
            if args:
                return original(self, callback, *args, context=context)
            return original(self, callback, context=context)
        if recording._active is None and replaying._active is None:
            return original(self, callback, *args)
        token = _called_back(None if safe else self, callback)
        try:
            return original(self, callback, *args)
        finally:
            if token is not None:
                _back(token)

    return call_soon


def _call_at(original: Function) -> Function:
    def call_at(self: Any, when: Any, callback: Any, *args: Any, context: Context | None = None) -> Any:
        if context is not None or (recording._active is None and replaying._active is None):
            return original(self, when, callback, *args, context=context)
        token = _called_back(self, callback)
        try:
            return original(self, when, callback, *args)
        finally:
            if token is not None:
                _back(token)

    return call_at


@fails_open("following a callback", None)
def _called_back(loop: Any, function: Any) -> Token[Scope | None] | None:
    """Give the callback its scope: it gets a copy of the current context, which has the scope until `_back`."""
    if _plumbing.get(getattr(function, "__module__", None)) or _is_plumbing(function):
        return None
    scope = aside() if _inside() and guard.is_inside() else spawn(loop)
    if type(scope) is Scope:
        global _followed_callbacks
        _followed_callbacks = True
        scope.task = CALLBACK
    return enter(scope)


@fails_open("following a callback", None)
def _unplaced(context: Context) -> None:
    """What was to be called when a future is done: a callback's own scope is not that of its callbacks."""
    held = context.get(_variable)
    if held is not None and held.task is CALLBACK:
        unfollowed(context)


_plumbing: dict[str | None, bool] = {None: True}  # what is built in makes no call of its own


def _is_plumbing(function: Any) -> bool:
    """Whether a callable is a library's own."""
    while isinstance(function, functools.partial):
        function = function.func
    return _is_module_plumbing(getattr(function, "__module__", None))


def _is_module_plumbing(module: Any) -> bool:
    known = _plumbing.get(module)
    if known is None:
        known = _plumbing[module] = str(module).partition(".")[0] in _PLUMBING
    return known


# --- threads ----------------------------------------------------------------------------------------------------------

_SPAWNED = "_sftrace_spawned"


def _thread_start(original: Function) -> Function:
    def start(self: Any) -> None:
        if recording._active is not None or replaying._active is not None:
            _started(self)
        original(self)

    return start


@fails_open("following a thread", None)
def _started(thread: Any) -> None:
    if not _is_own(thread) and not (_inside() and guard.is_inside()):
        thread._sftrace_spawned = (spawn_job(), tracing.span_here())


def _is_own(thread: Any) -> bool:
    """Whether a library started a thread for itself: the thread's class is the library's, or what it runs is."""
    target, kind = getattr(thread, "_target", None), type(thread).__module__
    module = None if target is None else getattr(target, "__module__", None)
    return (module is not None and _is_module_plumbing(module)) or (kind != "threading" and _is_module_plumbing(kind))


def _bootstrap_inner(original: Function) -> Function:
    def _bootstrap_inner(self: Any) -> None:
        spawned = self.__dict__.pop(_SPAWNED, None)
        if spawned is None:
            original(self)
            return
        context = getattr(self, "_context", None)  # Python 3.14: what the thread runs in
        own = context if isinstance(context, Context) else None
        before = _begin(spawned) if own is None else own.run(_begin, spawned)
        try:
            original(self)
        finally:
            if own is None:
                _end(before)
            else:
                own.run(_end, before)

    return _bootstrap_inner


# --- jobs -------------------------------------------------------------------------------------------------------------


def _make_item(original: Function) -> Function:
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        if recording._active is not None or replaying._active is not None:
            try:
                if not (_inside() and guard.is_inside()) and not _is_telemetry(args[1] if len(args) > 1 else None):
                    self._sftrace_spawned = _spawned()
            except Exception as error:
                _fault("following a job", error)
        original(self, *args, **kwargs)

    return made


def _is_telemetry(function: Any) -> bool:
    """Whether a job is OpenTelemetry's or ours: it comes with its set-up, which a replay has another one of."""
    return str(getattr(function, "__module__", None)).startswith(("opentelemetry.", "sftrace_otel."))


def _run_item(original: Function) -> Function:
    def run(self: Any, *args: Any) -> None:
        try:
            spawned = self._sftrace_spawned
        except AttributeError:
            original(self, *args)
            return
        before = _begin(spawned)
        try:
            original(self, *args)
        finally:
            _end(before)

    return run


def _spawned() -> Spawned:
    """What the code of a thread is told of the place here and now: its job, and the span that is current."""
    return spawn_job(), tracing.span_here()


Before: TypeAlias = "tuple[Job | None, Any, Span | None]"


@fails_open("following a thread", None)
def _begin(spawned: Spawned) -> Before | None:
    """This thread works for what spawned it; give the result to `_end`."""
    job, span = spawned
    token = None if span is None or tracing.span_here() is not None else tracing.attached(span)
    return begin_job(job), token, span


@fails_open("following a thread", None, replay_too=True)
def _end(before: Before | None) -> None:
    if before is not None:
        job, token, span = before
        end_job(job)
        if token is not None and span is not None and tracing.is_current(span):
            tracing.detach(token)


# --- what is called when a job is done --------------------------------------------------------------------------------


class _Done:
    """What the program wants called when a future is done, with the place where it said so."""

    def __init__(self, function: Function, spawned: Spawned) -> None:
        self.__wrapped__ = function
        self._spawned = spawned

    def __call__(self, future: Any) -> Any:
        token = self._enter()
        before = _begin(self._spawned)
        try:
            return self.__wrapped__(future)
        finally:
            _end(before)
            if token is not None:
                _back(token)

    @fails_open("following a callback", None)
    def _enter(self) -> Token[Scope | None] | None:
        """It is called by whoever ends the future, in any thread, task and context."""
        job = self._spawned[0]
        if job is None:
            return None
        job.scope.claim()
        return enter(job.scope)

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def __eq__(self, other: object) -> bool:
        return self.__wrapped__ == getattr(other, "__wrapped__", other)

    def __hash__(self) -> int:
        return hash(self.__wrapped__)


def _add_done_callback(original: Function) -> Function:
    def add_done_callback(self: Any, fn: Any) -> None:
        if recording._active is not None or replaying._active is not None:
            fn = _when_done(fn) or fn
        original(self, fn)

    return add_done_callback


@fails_open("following a callback", None)
def _when_done(function: Any) -> _Done | None:
    return None if _is_plumbing(function) or guard.is_inside() else _Done(function, _spawned())


# --- threads of anyio -------------------------------------------------------------------------------------------------


def _run_sync(original: Function) -> Function:
    async def run_sync(*args: Any, **kwargs: Any) -> Any:
        token = None
        if recording._active is not None or replaying._active is not None:
            token = _to_thread()
        try:
            return await original(*args, **kwargs)
        finally:
            if token is not None:
                _back(token)

    return run_sync


@fails_open("following a thread", None)
def _to_thread() -> Token[Scope | None] | None:
    """The thread runs in a copy of the context that is current now."""
    return None if guard.is_inside() else enter(spawn())


# --- processes --------------------------------------------------------------------------------------------------------


def _process_start(original: Function) -> Function:
    def start(self: Any) -> None:
        if recording._active is not None:
            _told(self)
        original(self)

    return start


@fails_open("following a process", None)
def _told(process: Any) -> None:
    """Tell a process of multiprocessing which run starts it: its `_config` goes to the child however that is made."""
    recorder = recording._active
    if recorder is not None:
        process._config[recording.PARENT] = recorder.run_here().id


_patches = Patches("spawns")
_patches.add_plain("asyncio.base_events", "BaseEventLoop.create_task", _create_task)
_patches.add_plain("asyncio.base_events", "BaseEventLoop.call_soon", _call_soon)
_patches.add_plain("asyncio.base_events", "BaseEventLoop.call_at", _call_at)
_patches.add_plain(
    "asyncio.base_events", "BaseEventLoop.call_soon_threadsafe", functools.partial(_call_soon, safe=True)
)
_patches.add_plain("threading", "Thread.start", _thread_start)
_patches.add_plain("threading", "Thread._bootstrap_inner", _bootstrap_inner)
_patches.add_plain("concurrent.futures.thread", "_WorkItem.__init__", _make_item)
_patches.add_plain("concurrent.futures.thread", "_WorkItem.run", _run_item)
_patches.add_plain("concurrent.futures._base", "Future.add_done_callback", _add_done_callback)
_patches.add_plain("anyio.to_thread", "run_sync", _run_sync)
_patches.add_plain("multiprocessing.process", "BaseProcess.start", _process_start)

install = _patches.install
uninstall = _patches.uninstall
patched = _patches.installed
