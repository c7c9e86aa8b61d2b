# SPDX-License-Identifier: Apache-2.0
"""Lineage: where in the program's tree of calls and spawns a call is made.

Decision: a scope is carried by the context and owns a counter; what is spawned in it gets a scope of its own. Nothing
is guessed: a call made in a scope by another thread or task has no lineage. Rejected: numbering tasks and threads by
their first call, which another schedule would number otherwise.

Source: `design.md`, "Matching"; ADR 5.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sftrace_otel.recorder.run import Call, Run

__all__ = [
    "UNPLACED", "Scope", "aside", "current_scope", "enter", "entered", "inner", "leave", "restart_lineage", "spawn",
]  # fmt: skip


class Scope:
    """Where calls are made: a path of slots, a counter for the next slot, the enclosing call and run.

    Calls and spawns take slots from one counter, so `t1/0` is the first call of what was spawned in slot 1. A scope
    belongs to the thread and task that first used it; a call made elsewhere in it has no lineage, which is said (None),
    never guessed. `live`: it is inside a call that a replay let out, so what is done there is really done.
    """

    __slots__ = ("_owner", "_task", "count", "live", "parent", "path", "run")

    def __init__(
        self, path: str = "", *, parent: str | None = None, run: Run | None = None, live: bool = False
    ) -> None:
        self.path = path
        self.live = live
        self.parent = parent
        self.run = run
        self.count = 0
        self._owner = 0
        self._task: Callable[[], object] | None = None

    def slot(self) -> int | None:
        """Take the next slot; None where this thread or task is not the scope's own."""
        me = threading.get_ident()
        task = current_task()
        if self._owner == 0:
            # a task holds its context, which holds the scope: held in turn it would outlive its end until the next gc
            self._owner, self._task = me, None if task is None else weakref.ref(task)
        elif self._owner != me or (self._task is not None if task is None else self._is_not(task)):
            return None
        count = self.count
        self.count = count + 1
        return count

    def _is_not(self, task: object) -> bool:
        return self._task is None or self._task() is not task

    def place(self) -> str | None:
        """The lineage of a call that starts now."""
        slot = self.slot()
        return None if slot is None else f"{self.path}{slot}"


def current_task() -> object:
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or asyncio._get_running_loop() is None:
        return None
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


_scope: ContextVar[Scope | None] = ContextVar("sftrace_scope", default=None)
_main_scope = Scope()


def current_scope() -> Scope:
    """The scope of the current context; the main thread's without one; elsewhere one without lineage."""
    scope = _scope.get()
    if scope is not None:
        return scope
    if threading.current_thread() is threading.main_thread():
        return _main_scope
    return UNPLACED


class _Unplaced(Scope):
    __slots__ = ()

    def slot(self) -> int | None:
        return None


UNPLACED = _Unplaced()
"""Where nothing is known of the place: no lineage, no parent, no run."""


def restart_lineage() -> None:
    """Begin numbering anew on the main thread: a replay in this process starts like a new process."""
    global _main_scope
    _main_scope = Scope()


@contextlib.contextmanager
def entered(scope: Scope) -> Iterator[Scope]:
    """Make `scope` the current one inside the block; leaving it in another context is harmless."""
    token = _scope.set(scope)
    try:
        yield scope
    finally:
        leave(token)


def enter(scope: Scope) -> Token[Scope | None]:
    return _scope.set(scope)


def leave(token: Token[Scope | None]) -> None:
    try:
        _scope.reset(token)
    except ValueError:  # left in another context (a generator closed elsewhere): nothing to restore there
        pass


def spawn() -> Scope:
    """The scope for a task that is spawned here and now."""
    here = current_scope()
    if here is UNPLACED:  # an event loop in a thread: no more is known of its tasks than of the thread
        return here
    slot = here.slot()
    if slot is None:
        return _Unplaced(parent=here.parent, run=here.run, live=here.live)
    return Scope(f"{here.path}t{slot}/", parent=here.parent, run=here.run, live=here.live)


def aside() -> Scope:
    """A scope that takes no slot: for what is spawned inside a boundary and is not the program's own."""
    here = current_scope()
    return here if here is UNPLACED else _Unplaced(parent=here.parent, run=here.run, live=here.live)


def inner(call: Call | None, lineage: str | None, outer: Scope, *, live: bool = False) -> Scope:
    """The scope inside a call: its children hang on it. `live`: a replay let the call out."""
    parent = outer.parent if call is None else call.id
    run = outer.run if call is None else call.run
    live = live or outer.live
    if lineage is None:
        return _Unplaced(parent=parent, run=run, live=live)
    return Scope(f"{lineage}/", parent=parent, run=run, live=live)
