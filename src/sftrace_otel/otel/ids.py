# SPDX-License-Identifier: Apache-2.0
"""Trace and span ids from the operating system's randomness.

Decision: the SDK's generator draws from the global `random`, so a program that seeds it gets the same trace ids in
every run, and tracing changes the program's own random numbers: a recording would not replay. We draw from
`os.urandom`, 1,024 ids at a time. Rejected: a private `random.Random`, whose state a forked child shares.
"""

from __future__ import annotations

import os
import threading

from opentelemetry.sdk.trace.id_generator import IdGenerator

__all__ = ["SftraceIdGenerator"]

_BLOCK = 8 * 1024


class SftraceIdGenerator(IdGenerator):
    """W3C-random ids that leave the global `random` alone. Selected by `OTEL_PYTHON_ID_GENERATOR=sftrace`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._block = b""
        self._at = 0

    def generate_span_id(self) -> int:
        """64 bits, not zero."""
        return self._word() or self.generate_span_id()

    def generate_trace_id(self) -> int:
        """128 bits, not zero."""
        return self._word() << 64 | self._word() or self.generate_trace_id()

    def is_trace_id_random(self) -> bool:
        """True: sets the W3C random flag of `traceparent` (SDK 1.45 and later ask)."""
        return True

    def _word(self) -> int:
        if self._pid != os.getpid():  # a forked child must not hand out the ids that its parent will
            self._lock, self._block, self._pid = threading.Lock(), b"", os.getpid()
        with self._lock:
            if self._at + 8 > len(self._block):
                self._block, self._at = os.urandom(_BLOCK), 0
            self._at += 8
            return int.from_bytes(self._block[self._at - 8 : self._at], "big")
