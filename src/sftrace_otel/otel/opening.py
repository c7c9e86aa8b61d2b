# SPDX-License-Identifier: Apache-2.0
"""From settings to a recorder, for the exporter and the processor; and closing in the right order.

Decision: whoever delivers spans holds the recorder, and the last holder that shuts down closes its runs, so a provider
that is shut down leaves a whole bundle. At exit the SDK's provider may be shut down after the recorder closes (handlers
run in reverse order of registration), and then a `BatchSpanProcessor` would hand over its queue too late: so before the
recorder closes, batches in front of our exporters are flushed, found by asking the garbage collector who holds them.
Rejected: closing only when the provider does, since a provider may have no exit handler; and wrapping the SDK's batch
processor, since the exporter never patches.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from sftrace_otel import recorder as recording
from sftrace_otel.errors import SettingsError
from sftrace_otel.otel.intake import SpanIntake, intake_of
from sftrace_otel.recorder import Recorder
from sftrace_otel.settings import Settings

__all__ = ["Holder", "read_settings", "sdk_disabled"]

_log = logging.getLogger("sftrace_otel")
_told: set[str] = set()


def sdk_disabled(environ: Mapping[str, str]) -> bool:
    """Whether `OTEL_SDK_DISABLED` turns tracing off."""
    return environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def read_settings(keywords: Mapping[str, Any]) -> Settings | None:
    """Settings of this process; None, with one log line that names it, where a variable is wrong.

    Raises SettingsError for a wrong keyword: there is a programmer to read it.
    """
    Settings.from_environ({}, **keywords)
    try:
        return Settings.from_environ(os.environ, **keywords)
    except SettingsError as error:
        if str(error) not in _told:
            _told.add(str(error))
            _log.error("sftrace: %s; nothing is recorded", error)
        return None


class Holder:
    """One deliverer's hold on the recorder of its destination; inert where recording is off.

    Off: `OTEL_SDK_DISABLED`, `OTEL_SFTRACE_CAPTURE=off`, a wrong variable, or a replay (nothing is written under one).
    """

    def __init__(self, keywords: Mapping[str, Any], *, exporter: object | None = None) -> None:
        self.intake: SpanIntake | None = None
        self._released = False
        try:
            self._open(keywords, exporter)
        except SettingsError:
            raise
        except Exception as error:
            recording.fault("opening the recording", error)

    def _open(self, keywords: Mapping[str, Any], exporter: object | None) -> None:
        settings = read_settings(keywords)
        if settings is None or settings.capture == "off" or settings.replay or sdk_disabled(os.environ):
            return
        recorder = recording.acquire(settings)
        self.intake = intake_of(recorder)
        if keywords.get("dir") is not None:
            self.intake.always_write = True
        _holds(recorder).add(self, exporter)

    @property
    def open(self) -> bool:
        """Whether spans are still taken."""
        return self.intake is not None and not self._released

    def release(self) -> None:
        """Give up the hold; the last one closes the open runs. Twice is once. Never raises."""
        if self.intake is None or self._released:
            return
        self._released = True
        recorder = self.intake.recorder
        try:
            if _holds(recorder).remove(self):
                recorder.close()
        except BaseException as error:
            recorder.fault("closing the recording", error)


class _Holds:
    """Who holds one recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = weakref.ref(recorder)
        self._holders: dict[int, weakref.ref[object] | None] = {}
        self._lock = threading.Lock()

    def add(self, holder: Holder, exporter: object | None) -> None:
        with self._lock:
            self._holders[id(holder)] = None if exporter is None else weakref.ref(exporter)

    def remove(self, holder: Holder) -> bool:
        """True if that was the last one."""
        with self._lock:
            return self._holders.pop(id(holder), _NOBODY) is not _NOBODY and not self._holders

    def flush_batches(self) -> None:
        """Let every batch processor in front of a held exporter hand over its queue."""
        with self._lock:
            exporters = [ref() for ref in self._holders.values() if ref is not None]
        for exporter in exporters:
            for owner in [] if exporter is None else _owners(exporter):
                owner.force_flush()


_NOBODY: Any = object()
_known: weakref.WeakKeyDictionary[Recorder, _Holds] = weakref.WeakKeyDictionary()


def _holds(recorder: Recorder) -> _Holds:
    holds = _known.get(recorder)
    if holds is None:
        holds = _known[recorder] = _Holds(recorder)
        # Batches go into the intake, which its own hook then empties; only then is it known which run there is to fail.
        recorder.before_close.insert(0, holds.flush_batches)
        recorder.before_close.append(functools.partial(_note_failure, weakref.ref(recorder)))
    return holds


def _note_failure(reference: weakref.ref[Recorder]) -> None:
    """The interpreter keeps the exception that nobody caught; in a session at a prompt that is no end of a run."""
    error = getattr(sys, "last_value", None)
    recorder = reference()
    if recorder is not None and isinstance(error, BaseException) and not hasattr(sys, "ps1"):
        recorder.set_failure(error)


def _owners(exporter: object) -> list[Any]:
    """Objects with a `force_flush` that keep `exporter` in an attribute."""
    found = []
    for referrer in gc.get_referrers(exporter):
        holders = gc.get_referrers(referrer) if isinstance(referrer, dict) else [referrer]
        found += [item for item in holders if _keeps(item, exporter)]
    return found


def _keeps(item: object, exporter: object) -> bool:
    if item is exporter or not callable(getattr(type(item), "force_flush", None)):
        return False
    return any(value is exporter for value in getattr(item, "__dict__", {}).values())
