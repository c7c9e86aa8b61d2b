# SPDX-License-Identifier: Apache-2.0
"""What a replay gives back for reads of the clock and random draws: the recorded ones, by place and order.

Decision: reads of one source at one place of the lineage are a sequence of their own, so that what another thread or
task reads in between, or a read of another source more or less, shifts nothing. Past the end of its sequence a read
gets the real value, which is counted by source and told in the report; in strict order it stops the replay, at its
next call, since a clock may not raise. Rejected: one sequence for a run (any schedule would shift it), and raising
inside `time.time()`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from sftrace_otel.formats import Json

__all__ = ["NONE", "Draws"]

NONE: Final = object()
"""There is no recorded value."""


class Draws:
    """The recorded reads, each given back once. `rows`: those of `nondeterminism.jsonl`; `of_block`: the
    run was a `record()` block, so what the program reads before it is not in the recording. Safe for threads."""

    def __init__(self, rows: Iterable[Mapping[str, Any]], *, of_block: bool = False) -> None:
        self.of_block = of_block
        self._left: dict[tuple[str, str | None], list[tuple[int, Json, int | None]]] = {}
        self._lock = threading.Lock()
        self.recorded = 0
        self.served = 0
        self.beyond: Counter[str] = Counter()
        for row in rows:
            key = (row["source"], row.get("lineage"))
            self._left.setdefault(key, []).append((row["index"], row["value"], row.get("bits")))
            self.recorded += 1
        for waiting in self._left.values():
            waiting.sort(key=lambda one: one[0], reverse=True)

    def take(self, source: str, lineage: str | None, bits: int | None = None) -> Json | object:
        """The next value of `source` at a place; NONE where there is none, or it was drawn with other `bits`."""
        with self._lock:
            waiting = self._left.get((source, lineage))
            if waiting and waiting[-1][2] == bits:
                self.served += 1
                return waiting.pop()[1]
            self.beyond[source] += 1
            return NONE

    def report(self) -> dict[str, Json]:
        """For the replay's report."""
        with self._lock:
            return {"recorded": self.recorded, "served": self.served, "beyond": dict(self.beyond)}
