# SPDX-License-Identifier: Apache-2.0
"""Recorders of this process: one per folder, and the active one that boundaries hand their calls to."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sftrace_otel.core.redact import RedactionPolicy
from sftrace_otel.recorder.exceptions import how_ended
from sftrace_otel.recorder.keeper import Keeper
from sftrace_otel.recorder.lineage import (
    UNPLACED,
    Job,
    Scope,
    aside,
    current_scope,
    enter,
    entered,
    forget_place,
    inner,
    leave,
    restart_lineage,
    spawn,
    spawn_job,
)
from sftrace_otel.recorder.recorder import PARENT, Recorder, absolute
from sftrace_otel.recorder.run import Answered, Call, Run
from sftrace_otel.settings import Settings

__all__ = [
    "PARENT", "UNPLACED", "Answered", "Call", "Job", "Recorder", "Run", "Scope", "acquire", "active", "aside",
    "close_all", "current_scope", "enter", "entered", "fault", "how_ended", "inner", "leave",
    "load_policy", "release", "restart_lineage", "spawn", "spawn_job", "use", "watchers",
]  # fmt: skip

_log = logging.getLogger("sftrace_otel")

_recorders: dict[Path, Recorder] = {}
_active: Recorder | None = None
_registry = threading.Lock()
_said: set[str] = set()
watchers: list[Callable[[], None]] = []
"""Told when another recorder is the active one; they raise nothing."""


def active() -> Recorder | None:
    """The recorder that boundaries hand their calls to, None when nothing records."""
    return _active


def fault(what: str, error: BaseException) -> None:
    """Count a loss on the run around, or log it where nothing records; once for each place and class of error.

    Never raises.
    """
    try:
        kind = type(error).__name__
        key = f"{what}:{kind}"
        if _active is not None:
            if key in _said:
                _active.told(key)
            _active.fault(what, error)
        elif key not in _said:
            _said.add(key)
            _log.error("sftrace: %s failed with %s; the program goes on", what, kind)
    except Exception:
        pass


def acquire(settings: Settings, policy: RedactionPolicy | None = None) -> Recorder:
    """The recorder of `settings.dir` in this process, made on first use and from then on the active one."""
    global _active
    key = absolute(settings.dir)
    with _registry:
        recorder = _recorders.get(key)
        if recorder is None:
            recorder = Recorder(settings, policy or load_policy(settings))
            if not _recorders:
                atexit.register(close_all)
                _close_with_worker()
            _recorders[key] = recorder
        _active = recorder
    _tell_watchers()
    return recorder


def _tell_watchers() -> None:
    for watcher in list(watchers):
        watcher()


def use(recorder: Recorder | None) -> Recorder | None:
    """Let boundaries hand their calls to `recorder` from now on, which its maker closes; gives the one before."""
    global _active
    with _registry:
        before, _active = _active, recorder
    _tell_watchers()
    return before


def release() -> None:
    """Close every recorder of this process and forget them (tests, and `uninstrument`)."""
    global _active
    close_all()
    with _registry:
        _recorders.clear()
        _active = None
        atexit.unregister(close_all)


def close_all() -> None:
    """End every open run of this process."""
    for recorder in list(_recorders.values()):
        try:
            recorder.close()
        except Exception as error:
            recorder.fault("closing the recording", error)


def load_policy(settings: Settings) -> RedactionPolicy:
    """The policy that the settings name; one that cannot be read means the strictest."""
    if settings.redaction is None:
        return RedactionPolicy.default(os.environ)
    try:
        return RedactionPolicy.from_toml(settings.redaction.read_text("utf-8"), os.environ)
    except (OSError, ValueError) as error:
        _log.error(
            "OTEL_SFTRACE_REDACTION=%s cannot be used (%s); the strictest policy applies", settings.redaction, error
        )
        return RedactionPolicy.strictest()


def _after_fork() -> None:
    """In a forked child: leave the parent's journals alone and start with a run of one's own.

    Locks are made anew: another thread of the parent may have held them at the fork.
    """
    global _registry, _active
    _registry = threading.Lock()
    here = current_scope()
    recorders = list(_recorders.values())
    if _active is not None and _active not in recorders:  # one of `use`: it is the parent's alone
        recorders.append(_active)
        _active = None
    for recorder in recorders:
        parent = recorder.known_run(here)
        recorder._lock = threading.RLock()
        for run in recorder._runs.values():
            run.lock = threading.RLock()
            run.closed = True
            if run.journal is not None:
                run.journal.abandon()
        recorder._runs.clear()
        recorder._closers.clear()
        recorder._budget_lock = threading.Lock()
        recorder._live.clear()
        recorder._refs.clear()
        recorder._recorded.clear()
        recorder._notices.clear()
        recorder._writing = threading.Lock()
        recorder._over.clear()
        recorder._traces.clear()
        recorder._keeper = Keeper(recorder.sweep)
        recorder._sweeping = threading.RLock()
        recorder._process = None
        if parent is not None:
            recorder.settings = replace(recorder.settings, parent=parent.id)
    forget_place()
    process = sys.modules.get("multiprocessing.process")
    if process is not None:  # a process of multiprocessing has its own, and becomes the current one after this
        process.current_process()._config.pop(PARENT, None)
    util = sys.modules.get("multiprocessing.util")
    if util is not None:  # its own fork forgets finalizers right after this, so ours is added once it has
        util.register_after_fork(close_all, lambda _: _close_with_worker())


def _close_with_worker() -> None:
    """In a worker of multiprocessing, which leaves by `os._exit`: close at its end, since `atexit` is not run there."""
    process = sys.modules.get("multiprocessing.process")
    util = sys.modules.get("multiprocessing.util")
    if process is None or util is None:
        return
    if process.parent_process() is not None:
        util.Finalize(None, close_all, exitpriority=-100)
    else:  # a worker of a fork server imports the program before it knows that it is one
        util.register_after_fork(close_all, lambda _: _close_with_worker())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
