# SPDX-License-Identifier: Apache-2.0
"""The rows about what runs at once: following a spawn, and many runs side by side."""

from __future__ import annotations

from collections.abc import Iterator

from harness import Row, interleaved, worker

SPAWNS = {"task": "an asyncio task", "job": "a job of a thread pool", "thread": "a thread"}


def spawns(every_round: bool) -> Iterator[Row]:
    """CPU of the spawning thread, and calls of 1,000 runs."""
    for kind, what in SPAWNS.items():
        best = interleaved({n: lambda k=kind, n=n: worker("spawn_worker.py", k, n)["all"] for n in ("plain", "ours")})  # type: ignore[misc]
        yield Row(
            what=f"CPU that following {what} adds to its spawn",
            value=best["ours"] - best["plain"],
            limit=2,
            unit="µs",
            note=f"{best['ours']:.2f} µs, without us {best['plain']:.2f} µs",
        )
    best = interleaved({n: lambda n=n: worker("spawn_worker.py", "runs", n)["all"] for n in ("one", "many")})  # type: ignore[misc]
    yield Row(
        what="a tool call in 1,000 concurrent runs of 10 calls / in one run of them all",
        value=best["many"] / best["one"],
        limit=1.2,
        note=f"{best['many']:.0f} µs, in one run {best['one']:.0f} µs",
    )
