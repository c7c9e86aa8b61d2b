# SPDX-License-Identifier: Apache-2.0
"""A thread beside the program that ends runs when their time has come.

Decision: one thread for a recorder, begun when there is something to end, that asks the recorder what is due and sleeps
until the next; with nothing to wait for it ends. An event loop is never held up by a bundle being written, nor by calls
that an ended run waits for. What is due is decided by the recorder and its own clock, so that tests need neither the
thread nor time.
Rejected: a timer for each run (a thread for each of a thousand requests), and closing in `send()` or in a span
processor (a disk's flush would stop every other request of the loop).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Keeper"]

_LINGER = 5.0
"""Seconds that the thread waits for more before it ends."""


class Keeper:
    """Calls `look` when woken, and again after the seconds that it gives (None: when woken)."""

    def __init__(self, look: Callable[[], float | None]) -> None:
        self._look = look
        self._bell = threading.Condition()
        self._rung = False
        self._thread: threading.Thread | None = None

    def wake(self) -> bool:
        """Have `look` called now, in the thread; False where no thread can begin any more (the interpreter ends)."""
        with self._bell:
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="sftrace-keeper", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    return False
                self._thread = thread
            self._rung = True
            self._bell.notify()
        return True

    def _work(self) -> None:
        seconds: float | None = None
        while True:
            with self._bell:
                if not self._rung and not self._bell.wait(_LINGER if seconds is None else seconds) and seconds is None:
                    self._thread = None
                    return
                self._rung = False
            try:
                seconds = self._look()
            except Exception:  # the recorder tells of its own faults; the thread goes on
                seconds = _LINGER
