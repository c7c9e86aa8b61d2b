# SPDX-License-Identifier: Apache-2.0
"""Lineage: where in the program's tree of calls and spawns a call is made.

Decision: a scope is carried by the context and owns a counter; what is spawned in it gets a scope of its own. A thread
has no context of the place where it was started, and the context that its code runs in may be a copy of the
spawner's: so a thread also knows its *job*, a scope that stands for none and for that of the spawner. Nothing is
guessed: a call made in a scope by another thread, task, callback or greenlet has no lineage. Rejected: numbering tasks
and threads by their first call, which another schedule would number otherwise; copying the spawner's context into
threads, which would hand them the program's own context variables.

Source: `design.md`, "Matching"; ADR 5, ADR 13.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextvars import Context, ContextVar, Token
from threading import get_ident
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from sftrace_otel.recorder.run import Call, Run

__all__ = [
    "CALLBACK", "UNPLACED", "Job", "Scope", "aside", "begin_job", "current_scope", "current_task",
    "end_job", "enter", "entered", "forget_place", "inner", "leave", "restart_lineage", "spawn",
    "spawn_job", "unfollowed",
]  # fmt: skip


_DEEPEST = 1000
"""Characters of a path; what is spawned below has no lineage. A timer that starts itself anew would go on for ever."""


def CALLBACK() -> None:  # noqa: N802
    """Stands, where a scope's task does, for a callback of an event loop: it runs outside every task."""


class Scope(msgspec.Struct, eq=False, gc=False):
    """Where calls are made: a path of slots, the enclosing call and run, a counter for the next slot.

    Calls and spawns take slots from one counter, so `t1/0` is the first call of what was spawned in slot 1. A scope
    belongs to the thread and task that it was made for, else to those that first use it; a call made elsewhere in it
    has no lineage, which is said (None), never guessed. `live`: it is inside a call that a replay let out, so what is
    done there is really done. The collector need not look at one: what it refers to (a run) holds no scopes, and there
    is one for each task.
    """

    base: str = ""
    parent: str | None = None
    run: Run | None = None
    number: int = -1
    """Slot of the spawn below `base` that this is the scope of; -1 where `base` is the path."""
    count: int = 0
    owner: int = 0
    """The thread; 0 as long as it is not known."""
    task: Callable[[], object] | None = None
    """Weak: a task holds its context, which holds the scope. None outside tasks."""
    live: bool = False

    @property
    def path(self) -> str:
        """The slots that led here; put together when first asked for, since most of what is spawned makes no call."""
        if self.number >= 0:
            self.base, self.number = f"{self.base}t{self.number}/", -1
        return self.base

    def claim(self) -> None:
        """Make this thread and task the owner, if there is none."""
        if self.owner == 0 and self.task is None:
            self.owner = get_ident()
            task = _here()
            self.task = task if task is None or task is CALLBACK else weakref.ref(task)

    def slot(self, loop: Any = None) -> int | None:
        """Take the next slot; None where this thread or task is not the scope's own. `loop`: see `_here`."""
        task, held = _here(loop), self.task
        if held is None and self.owner == 0:
            self.claim()
        elif held is None or held is CALLBACK:
            me = get_ident()
            if task is not held or (self.owner != me and self.owner != 0):
                return None
            self.owner = me
        elif held() is not task:
            return None
        count = self.count
        self.count = count + 1
        return count

    def place(self) -> str | None:
        """The lineage of a call that starts now."""
        slot = self.slot()
        return None if slot is None else f"{self.path}{slot}"

    def where(self) -> str | None:
        """The path, of something that takes no slot; None where `place` gives None."""
        count = self.count
        if self.slot() is None:
            return None
        self.count = count
        return self.path


_running_loop: Callable[[], Any] | None = None
_task_of: Callable[[Any], object] = lambda loop: None  # noqa: E731


def _find_asyncio() -> bool:
    """Remember how asyncio tells its running loop and task, once the program has imported it."""
    global _running_loop, _task_of
    asyncio = sys.modules.get("asyncio")
    try:
        if asyncio is None:
            return False
        # before 3.12 it is a Python function, five times slower than the dictionary that it looks into
        slow = sys.version_info < (3, 12)
        _task_of = asyncio.tasks._current_tasks.get if slow else asyncio.current_task
        _running_loop = asyncio._get_running_loop
    except AttributeError:  # it is being imported
        return False
    return True


def current_task() -> object:
    """The asyncio task at work in this thread, None without one."""
    if _running_loop is None and not _find_asyncio():
        return None
    loop = _running_loop()  # type: ignore[misc]
    return None if loop is None else _task_of(loop)


def _here(loop: Any = None) -> object:
    """Who is at work in this thread: a task of asyncio or trio, CALLBACK, a greenlet, or None for the thread itself.

    `loop`: an asyncio loop that this thread runs if it runs; where it does, finding the running one is saved.
    """
    if loop is not None and _running_loop is not None and loop.is_running():
        return _task_of(loop) or CALLBACK
    if _running_loop is not None or _find_asyncio():
        loop = _running_loop()  # type: ignore[misc]
        if loop is not None:
            return _task_of(loop) or CALLBACK
    modules = sys.modules
    if "trio" in modules or "greenlet" in modules:
        return _trio_task() or _greenlet()
    return None


def _trio_task() -> object:
    lowlevel = sys.modules.get("trio.lowlevel")
    try:
        return None if lowlevel is None else lowlevel.current_task()
    except (AttributeError, RuntimeError):
        return None


def _greenlet() -> object:
    """The greenlet at work, None in the one that a thread begins with."""
    greenlet = sys.modules.get("greenlet")
    try:
        current = None if greenlet is None else greenlet.getcurrent()
    except AttributeError:
        return None
    return None if current is None or current.parent is None else current


class Job(msgspec.Struct, frozen=True, eq=False):
    """What a thread is doing for somebody: the scope of that, which also stands for that of the spawner, `instead`."""

    scope: Scope
    instead: Scope | None


class _Thread(threading.local):
    job: Job | None = None
    greenlet: object = None


_thread = _Thread()
_scope: ContextVar[Scope | None] = ContextVar("sftrace_scope", default=None)


def _main() -> Scope:
    return Scope(owner=threading.main_thread().ident or get_ident())


_main_scope = _main()


def current_scope() -> Scope:
    """The scope of this thread's job, else of the context; the main thread's without one; else one without lineage."""
    scope = _scope.get()
    job = _thread.job
    if (
        job is not None
        and (scope is None or scope is job.instead)
        and ("greenlet" not in sys.modules or _greenlet() is _thread.greenlet)
    ):
        return job.scope
    if scope is not None:
        return scope
    if get_ident() == _main_scope.owner and ("greenlet" not in sys.modules or _greenlet() is None):
        return _main_scope
    return UNPLACED


def begin_job(job: Job | None) -> Job | None:
    """This thread works for `job` from now on, which is its own; give the result to `end_job`."""
    before = _thread.job
    _thread.job = job
    if job is not None:
        scope = job.scope
        if "greenlet" in sys.modules:
            _thread.greenlet = _greenlet()
            scope.claim()
        elif scope.owner == 0 and scope.task is None:
            scope.owner = get_ident()
    return before


def end_job(before: Job | None) -> None:
    """This thread works again for what it worked for before."""
    _thread.job = before


class _Unplaced(Scope):
    def claim(self) -> None:
        pass

    def slot(self, loop: Any = None) -> int | None:
        return None


UNPLACED = _Unplaced()
"""Where nothing is known of the place: no lineage, no parent, no run."""


def restart_lineage() -> None:
    """Begin numbering anew on the main thread: a replay in this process starts like a new process."""
    global _main_scope
    _main_scope = _main()


def forget_place() -> None:
    """In a forked child: it begins as a new process does, whatever the parent was doing."""
    _thread.job = None
    _scope.set(None)
    restart_lineage()


@contextlib.contextmanager
def entered(scope: Scope) -> Iterator[Scope]:
    """Make `scope` the current one inside the block; leaving it in another context is harmless."""
    token = _scope.set(scope)
    try:
        yield scope
    finally:
        leave(token)


enter: Callable[[Scope], Token[Scope | None]] = _scope.set
"""Make a scope the current one; give the result to `leave`."""


def leave(token: Token[Scope | None]) -> None:
    try:
        _scope.reset(token)
    except ValueError:  # left in another context (a generator closed elsewhere): nothing to restore there
        pass


def spawn(loop: Any = None) -> Scope:
    """The scope for a task that is spawned here and now, on `loop` if it is asyncio's."""
    here = _scope.get()
    if loop is not None and here is not None:
        held = here.task
        if held is not None and held() is _task_of(loop) is not None:  # `slot`, in short, for the usual case
            count = here.count
            here.count = count + 1
            path = here.base if here.number < 0 else here.path
            if len(path) <= _DEEPEST:
                return Scope(path, here.parent, here.run, count)
            return _Unplaced("", here.parent, here.run)
    here = current_scope()
    if here is UNPLACED:  # nothing is known of what spawns: no more is known of its tasks
        return here
    slot = here.slot(loop)
    path = here.path
    if slot is None or len(path) > _DEEPEST:
        return _unplaced(here)
    return Scope(path, here.parent, here.run, slot, live=here.live)


def _unplaced(here: Scope) -> Scope:
    """A scope without lineage, its parent and run those of `here`."""
    return _Unplaced("", here.parent, here.run, live=here.live)


def spawn_job() -> Job | None:
    """The job of a thread that is started, or of work that is handed to one, here and now; None where nothing is known
    of the place."""
    scope = spawn()
    return None if scope is UNPLACED else Job(scope, _scope.get())


def unfollowed(context: Context) -> None:
    """What runs in `context` has no lineage; its parent and its run stay."""
    scope = context.get(_scope)
    if scope is not None:
        context.run(_scope.set, _unplaced(scope))


def aside() -> Scope:
    """A scope that takes no slot: for what is spawned inside a boundary and is not the program's own."""
    here = current_scope()
    return here if here is UNPLACED else _unplaced(here)


def inner(call: Call | None, lineage: str | None, outer: Scope, *, live: bool = False) -> Scope:
    """The scope inside a call: its children hang on it. `live`: a replay let the call out."""
    parent = outer.parent if call is None else call.id
    run = outer.run if call is None else call.run
    live = live or outer.live
    if lineage is None:
        return _Unplaced(parent=parent, run=run, live=live)
    return Scope(f"{lineage}/", parent=parent, run=run, live=live)
