# SPDX-License-Identifier: Apache-2.0
"""The rows of `.flight`: appending to a chain, verifying one, and canonical bytes; each beside its contender."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness import ROUNDS, Row, interleaved, worker

EVENTS = 100_000
APPENDED = 40_000
KINDS = {"tool": 5, "chat": 5, "rag": 9, "embedding": 5}  # values, and rfc8785 must take at least this many times ours


def flights(every_round: bool) -> Iterator[Row]:
    """The rows of `.flight`."""
    for rows in (appending, verifying, canonical_bytes):
        yield from rows(every_round)


def appending(every_round: bool) -> Iterator[Row]:
    """An event of 1 KB in a live chain, beside JSON, hash and buffered write."""
    best = interleaved(
        {
            name: lambda name=name: worker("flight_worker.py", name, str(APPENDED))["us"]  # type: ignore[misc]
            for name in ("floor", "append", "buffered")
        }
    )
    floor = best["floor"]
    note = f"{best['append']:.1f} µs an event, floor {floor:.1f} µs; canonical, two digests"
    what = "append an event of 1 KB to a .flight chain"
    yield Row(what=f"{what}, a write an event / the floor", value=best["append"] / floor, limit=3.2, note=note)
    yield Row(what="the same into a buffer / the floor", value=best["buffered"] / floor, limit=2.5)


def verifying(every_round: bool) -> Iterator[Row]:
    """A chain of 100,000 events of 1 KB, beside a plain list of them and beside the oracle of the tests."""
    with tempfile.TemporaryDirectory() as folder:
        worker("flight_worker.py", "make", folder, str(EVENTS))
        ours, other = (str(Path(folder) / f"{name}.flight") for name in ("canonical", "respelled"))
        best = interleaved(
            {
                "list": lambda: worker("flight_worker.py", "list", ours)["seconds"],
                "verify": lambda: worker("flight_worker.py", "verify", ours)["seconds"],
                "respelled": lambda: worker("flight_worker.py", "verify", other)["seconds"],
            }
        )
        rounds = ROUNDS if every_round else 1
        theirs = min(worker("flight_worker.py", "oracle", ours)["seconds"] for _ in range(rounds))
    note = f"{best['verify']:.2f} s, list {best['list']:.2f} s"
    what = "verify 100,000 events of 1 KB of a .flight chain / a plain orjson list"
    yield Row(what=what, value=best["verify"] / best["list"], limit=1.6, note=note)
    yield Row(
        what="the same, the lines spelled otherwise",
        value=best["respelled"] / best["list"],
        limit=2.5,
        note=f"{best['respelled']:.2f} s",
    )
    yield Row(what="verify / the oracle", value=best["verify"] / theirs, limit=0.1, note=f"oracle {theirs:.1f} s")


def canonical_bytes(every_round: bool) -> Iterator[Row]:
    """RFC 8785 beside the package of that name."""
    for kind, factor in KINDS.items():
        done = {}

        def turn(name: str, kind: str = kind, done: dict[str, float] = done) -> float:
            result = worker("flight_worker.py", name, kind)
            done["bytes"] = result["bytes"]
            return result["us"]

        best = interleaved({name: lambda name=name, turn=turn: turn(name) for name in ("ours", "rfc8785")})  # type: ignore[misc]
        yield Row(
            what=f"canonical bytes, {kind} of {done['bytes'] / 1000:.1f} KB: ours / rfc8785",
            value=best["ours"] / best["rfc8785"],
            limit=1 / factor,
            note=f"{best['ours']:.1f} µs, rfc8785 {best['rfc8785']:.1f} µs",
        )
