# SPDX-License-Identifier: Apache-2.0
"""asyncio tasks take their place in the lineage where they are spawned.

Decision: wrap `BaseEventLoop.create_task`, through which `asyncio.create_task`, `gather`, `TaskGroup` and `run` go:
the spawn takes a slot of the scope it happens in, and the task starts in a scope of its own. Only the context that the
new task would have got anyway is changed. A loop that makes its tasks otherwise leaves calls without lineage, which
matching then does without. Rejected: numbering tasks by their first call, which another schedule numbers otherwise.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

from sftrace_otel import recorder as recording
from sftrace_otel.instrumentation import replaying
from sftrace_otel.instrumentation.patching import Patches
from sftrace_otel.recorder import enter, spawn

__all__ = ["install", "uninstall"]


def _create_task(wrapped: Callable[..., Any], loop: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if recording._active is None and replaying._active is None:
        return wrapped(*args, **kwargs)
    scope = spawn()
    context = kwargs.get("context")
    if context is None:
        context = contextvars.copy_context()
    try:
        context.run(enter, scope)
    except RuntimeError:  # the context that was given is entered already: its task stays without lineage
        return wrapped(*args, **kwargs)
    return wrapped(*args, **{**kwargs, "context": context})


_patches = Patches("asyncio")
_patches.add("asyncio.base_events", "BaseEventLoop.create_task", _create_task)


def install() -> None:
    """Follow asyncio's spawns, now or once asyncio is imported. Twice is once."""
    _patches.install()


def uninstall() -> None:
    """Stop following them."""
    _patches.uninstall()
