# SPDX-License-Identifier: Apache-2.0
"""The rows about forking 100,000 events at the last step: CPU beside a copy and stepfork 0.2.1, and memory.

CPU and not wall time: both sides wait for the same disk, and how long that takes says nothing about either.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness import ROUNDS, Row, interleaved, worker

EVENTS = 100_000


def forks(every_round: bool) -> Iterator[Row]:
    """A bundle of 114 MB forked whole; stepfork takes minutes and runs once unless every round is asked for."""
    with tempfile.TemporaryDirectory() as folder:
        for count in (10, EVENTS):
            worker("format_worker.py", "make", folder, str(count))
        Path(folder, "10.sftrace").rename(Path(folder, "small.sftrace"))
        arguments = (str(Path(folder, f"{EVENTS}.sftrace")), str(EVENTS - 1))
        peak = float("inf")

        def ours() -> float:
            nonlocal peak
            done = worker("fork_worker.py", "ours", *arguments)
            peak = min(peak, done["mib"])
            return done["seconds"]

        best = interleaved({"copy": lambda: worker("fork_worker.py", "copy", *arguments)["seconds"], "ours": ours})
        rounds = range(ROUNDS if every_round else 1)
        theirs = min(worker("fork_worker.py", "stepfork", *arguments)["seconds"] for _ in rounds)
    yield Row(
        what="fork 100,000 events at the last step / copying and hashing them once",
        value=best["ours"] / best["copy"],
        limit=3,
        note=f"{best['ours']:.2f} s of CPU, copy {best['copy']:.2f} s",
    )
    yield Row(
        what="the same / stepfork's fork_trace",
        value=best["ours"] / theirs,
        limit=0.01,
        note=f"stepfork {theirs:.1f} s" + ("" if every_round else ", ran once"),
    )
    yield Row(what="peak memory of it", value=peak, limit=200, unit="MiB")
