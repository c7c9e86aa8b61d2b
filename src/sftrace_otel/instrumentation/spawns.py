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
from typing import Any

from sftrace_otel import recorder as recording
from sftrace_otel.instrumentation import guard, replaying
from sftrace_otel.instrumentation.failopen import fails_open
from sftrace_otel.instrumentation.patching import Patches
from sftrace_otel.recorder import Scope, aside, enter, leave, spawn

__all__ = ["install", "patched", "uninstall"]


def _create_task(wrapped: Callable[..., Any], loop: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if recording._active is None and replaying._active is None:
        return wrapped(*args, **kwargs)
    token = _placed(args, kwargs.get("context"))
    try:
        return wrapped(*args, **kwargs)
    finally:
        if token is not None:
            _back(token)


@fails_open("following a task", None)
def _placed(args: tuple[Any, ...], context: Context | None) -> Token[Scope | None] | None:
    """Give the task that is about to be made in `context` its scope. Without one it is made in a copy of the current
    context (a task factory need not know of any), which has the scope until `_back` is given the token."""
    # What a client spawns to connect is not the program's: a replay connects nowhere, and later slots would shift.
    # What is spawned to clean up after a collected object comes whenever the collector does.
    scope = aside() if guard.is_inside() or _is_cleanup(args) else spawn()
    if context is None:
        return enter(scope)
    try:
        context.run(enter, scope)
    except RuntimeError:  # it is entered already: its task stays without lineage
        pass
    return None


@fails_open("following a task", None)
def _back(token: Token[Scope | None]) -> None:
    leave(token)


def _is_cleanup(args: tuple[Any, ...]) -> bool:
    """Whether a task closes what was garbage: an async generator, or an object by its `__del__`."""
    if args and type(args[0]).__name__ == "async_generator_athrow":
        return True
    frame = sys._getframe(4)  # above are this, `_placed`, its decorator and `_create_task`
    for _ in range(2):
        if frame.f_code.co_name == "__del__":
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False


_patches = Patches("asyncio")
_patches.add("asyncio.base_events", "BaseEventLoop.create_task", _create_task)

install = _patches.install
uninstall = _patches.uninstall
patched = _patches.installed
