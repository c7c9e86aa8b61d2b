# SPDX-License-Identifier: Apache-2.0
"""What a recorder wants to know of its process: the exception that ended it, and connections outside every boundary.

Decision: `sys.excepthook` is wrapped and always calls the hook that was there, so tracebacks stay as they are. A
program that ends by `sys.exit` has completed, whatever the code: nothing in Python tells an exit hook the code, and
replacing `sys.exit` would miss `raise SystemExit`.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from sftrace_otel.instrumentation import guard
from sftrace_otel.recorder import Recorder

__all__ = ["unwatch", "watch"]

_previous: Any = None
_recorder: Recorder | None = None


def watch(recorder: Recorder) -> None:
    """Tell `recorder` of an uncaught exception, and of connections outside the boundaries. Twice is once."""
    global _previous, _recorder
    _recorder = recorder
    recorder.connections = guard.connections
    guard.notice_connections()
    if sys.excepthook is not _hook:
        _previous = sys.excepthook
        sys.excepthook = _hook


def unwatch() -> None:
    """Put the program's own hook back, if ours is still in place."""
    global _recorder
    _recorder = None
    if sys.excepthook is _hook:
        sys.excepthook = _previous


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    recorder = _recorder
    if recorder is not None:
        try:
            recorder.set_failure(error)
        except Exception as fault:
            recorder.fault("recording the failure", fault)
    _previous(kind, error, trace)
