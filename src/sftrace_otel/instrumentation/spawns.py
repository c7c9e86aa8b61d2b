# SPDX-License-Identifier: Apache-2.0
"""asyncio tasks take their place in the lineage where they are spawned.

Decision: wrap `BaseEventLoop.create_task`, through which `asyncio.create_task`, `gather`, `TaskGroup` and `run` go:
the spawn takes a slot of the scope it happens in, and the task starts in a scope of its own. Only the context that the
new task would have got anyway is changed. A loop that makes its tasks otherwise leaves calls without lineage, which
matching then does without. Rejected: numbering tasks by their first call, which another schedule numbers otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import Context, Token
from types import FrameType
from typing import Any

from sftrace_otel import recorder as recording
from sftrace_otel.instrumentation import guard, replaying
from sftrace_otel.instrumentation.failopen import fails_open
from sftrace_otel.instrumentation.patching import Patches
from sftrace_otel.recorder import Scope, aside, enter, leave, spawn

__all__ = ["install", "uninstall"]


def _create_task(wrapped: Callable[..., Any], loop: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if recording._active is None and replaying._active is None:
        return wrapped(*args, **kwargs)
    token = _placed(kwargs.get("context"))
    try:
        return wrapped(*args, **kwargs)
    finally:
        if token is not None:
            _back(token)


@fails_open("following a task", None)
def _placed(context: Context | None) -> Token[Scope | None] | None:
    """Give the task that is about to be made in `context` its scope. Without one it is made in a copy of the current
    context (a task factory need not know of any), which has the scope until `_back` is given the token."""
    # What a client spawns to connect is not the program's: a replay connects nowhere, and later slots would shift.
    scope = aside() if guard.is_inside() or _is_finalizer() else spawn()
    if context is None:
        return enter(scope)
    try:
        context.run(enter, scope)
    except RuntimeError:  # it is entered already: its task stays without lineage
        pass
    return None


def _is_finalizer() -> bool:
    """Whether a `__del__` spawns: openai's clients close themselves so, whenever the garbage collector comes along."""
    frame: FrameType | None = sys._getframe(3)  # the wrapper of ours that the spawn came to
    for _ in range(4):
        if frame is None:
            break
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


@fails_open("following a task", None)
def _back(token: Token[Scope | None]) -> None:
    leave(token)


_patches = Patches("asyncio")
_patches.add("asyncio.base_events", "BaseEventLoop.create_task", _create_task)


def install() -> None:
    """Follow asyncio's spawns, now or once asyncio is imported. Twice is once."""
    _patches.install()


def uninstall() -> None:
    """Stop following them."""
    _patches.uninstall()
