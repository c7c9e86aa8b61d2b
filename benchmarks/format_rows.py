# SPDX-License-Identifier: Apache-2.0
"""The rows of the format: loading, validating, journalling, closing, packing; each beside its contender."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness import ROUNDS, Row, interleaved, wall, worker

EVENTS = 100_000
APPENDED = 40_000


def bundles(every_round: bool) -> Iterator[Row]:
    """Reading: 100,000 events of 1 KB, beside a plain list of them and beside stepfork 0.2.1."""
    with tempfile.TemporaryDirectory() as folder:
        worker("format_worker.py", "make", folder, str(EVENTS))
        bundle = str(Path(folder) / f"{EVENTS}.sftrace")
        kib: dict[str, float] = {}

        def turn(name: str) -> float:
            done = worker("format_worker.py", name, bundle)
            kib[name] = min(kib.get(name, done["kib"]), done["kib"])
            return done["seconds"]

        best = interleaved({name: lambda name=name: turn(name) for name in ("list", "load", "validate")})  # type: ignore[misc]
        theirs = min(turn("stepfork") for _ in range(ROUNDS if every_round else 1))
    note = f"{best['load']:.2f} s, list {best['list']:.2f} s, stepfork {theirs:.2f} s"
    yield Row(
        what="load 100,000 events of 1 KB / a plain orjson list",
        value=best["load"] / best["list"],
        limit=0.8,
        note=note,
    )
    yield Row(what="the same / stepfork's Trace.load", value=best["load"] / theirs, limit=0.2)
    yield Row(what="memory of the same / the list", value=kib["load"] / kib["list"], limit=0.9)
    what = "validate them with payload hashes and checksums / the list"
    yield Row(what=what, value=best["validate"] / best["list"], limit=2.5, note=f"{best['validate']:.2f} s")


def journal(every_round: bool) -> Iterator[Row]:
    """Writing: an event in the journal, and the bundle made of it, beside JSON, hash and buffered write."""
    closed = float("inf")

    def turn() -> float:
        nonlocal closed
        done = worker("format_worker.py", "append", str(APPENDED))
        closed = min(closed, done["close_us"])
        return done["us"]

    best = interleaved(
        {
            "floor": lambda: worker("format_worker.py", "floor", str(APPENDED))["us"],
            "append": turn,
            "buffered": lambda: worker("format_worker.py", "buffered", str(APPENDED))["us"],
        }
    )
    floor = best["floor"]
    note = f"{best['append']:.1f} µs an event, floor {floor:.1f} µs"
    yield Row(
        what="append to the journal, a write an event / the floor", value=best["append"] / floor, limit=3.2, note=note
    )
    yield Row(what="the same into a buffer / the floor", value=best["buffered"] / floor, limit=2.5)
    yield Row(
        what="build the bundle at close, an event / the floor", value=closed / floor, limit=3.0, note=f"{closed:.1f} µs"
    )
    count = 1_000_000 if every_round else 200_000
    runs = [worker("format_worker.py", "append", str(count)) for _ in range(3)]
    few = min(worker("format_worker.py", "append", "10000")["close_us"] for _ in range(3))
    growth = min(run["last_us"] / run["first_us"] for run in runs)
    yield Row(what=f"append: the last tenth of {count:,} events / the first tenth", value=growth, limit=1.3)
    yield Row(
        what=f"close of {count:,} events, an event / of 10,000",
        value=min(run["close_us"] for run in runs) / few,
        limit=1.3,
    )


def history(every_round: bool) -> Iterator[Row]:
    """An agent that resends its history for 100 turns."""
    done = [worker("format_worker.py", "history") for _ in range(ROUNDS)]
    late, plain, fresh = (min(one[key] for one in done) for key in ("late_us", "plain_us", "fresh_us"))
    what = "redaction and hashing of turn 100 of a resent history"
    yield Row(what=f"{what} / without what was seen before", value=late / fresh, limit=0.35, note=f"{late:.0f} µs")
    yield Row(what=f"{what} / one JSON and hash of it", value=late / plain, limit=2.5, note=f"{plain:.0f} µs")
    yield Row(
        what="pack of 100 resent turns / the unique text",
        value=done[0]["packed_by_unique"],
        limit=2,
        note=f"unpacked {done[0]['unpacked_by_unique']:.0f} times",
    )


def verbs(every_round: bool) -> Iterator[Row]:
    """`validate` of a small bundle beside the bare interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        worker("format_worker.py", "make", folder, "200")
        command = [sys.executable, "-m", "sftrace_otel", "validate", str(Path(folder) / "200.sftrace")]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = str(Path(folder) / "compiled")
        wall(command, environment)  # what is started is compiled, as an installed package is
        best = interleaved(
            {
                "python": lambda: wall([sys.executable, "-c", "pass"], environment),
                "validate": lambda: wall(command, environment),
            },
            rounds=10,
        )
    yield Row(
        what="validate 200 events / python -c pass",
        value=best["validate"] / best["python"],
        limit=6,
        note=f"{best['validate'] * 1e3:.0f} ms",
    )


def formats(every_round: bool) -> Iterator[Row]:
    """The format's rows."""
    for rows in (bundles, journal, history, verbs):
        yield from rows(every_round)
