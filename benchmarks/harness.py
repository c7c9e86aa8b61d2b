# SPDX-License-Identifier: Apache-2.0
"""How a row is measured: contenders interleaved in one run, best of several, and only ratios are judged.

Decision: the contenders of a row take turns (ours, theirs, ours, theirs, …), each turn a fresh process, so that
neither a slow minute of the machine nor a heap left behind by one falls on the other only. Best of the turns, because
what disturbs a run only ever adds to it. Absolute times are printed for orientation.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Row:
    """One target and what was measured for it; `value` and `limit` in the unit that `unit` names."""

    what: str
    value: float
    limit: float
    unit: str = "times"
    note: str = ""

    @property
    def met(self) -> bool:
        """Whether the measured value is within the limit."""
        return self.value <= self.limit

    def text(self) -> str:
        """The row as one line of the report."""
        verdict = "met   " if self.met else "MISSED"
        note = f"  ({self.note})" if self.note else ""
        return f"{verdict}  {self.what}: {self.value:.4g} {self.unit}, target at most {self.limit:.4g}{note}"


def interleaved(contenders: Mapping[str, Callable[[], float]], rounds: int = ROUNDS) -> dict[str, float]:
    """The best of each contender's turns."""
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, turn in contenders.items():
            best[name] = min(best[name], turn())
    return best


def worker(script: str, *arguments: str) -> dict[str, float]:
    """Run a script of this folder in a fresh process; the last line it prints is a JSON object of numbers."""
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def wall(command: Sequence[str], environment: Mapping[str, str] | None = None, cwd: Path | None = None) -> float:
    """Seconds that a command takes."""
    started = time.perf_counter()
    subprocess.run(command, env=environment, cwd=cwd, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started
