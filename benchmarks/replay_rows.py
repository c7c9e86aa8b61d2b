# SPDX-License-Identifier: Apache-2.0
"""The rows of replay: a call, an exchange, a long recording, opening one; each beside its contender."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial

from harness import ROUNDS, Row, interleaved, worker

CALLS = 10_000
MANY = 100_000
EXCHANGES = 200
PEERS = ("vcrpy", "agenttape")


def _turn(what: str, contender: str, folder: str, calls: int) -> float:
    return worker("replay_worker.py", what, contender, folder, str(calls))["all"]


def _turns(what: str, folder: str, *contenders: str) -> dict[str, Callable[[], float]]:
    return {name: partial(_turn, what, name, folder, CALLS) for name in contenders}


def replays(every_round: bool) -> Iterator[Row]:
    """Frozen replay without a TracerProvider."""
    with tempfile.TemporaryDirectory() as folder:
        worker("replay_worker.py", "make", "ours", folder, str(CALLS))
        floor = partial(_turn, "floor", "none", folder, MANY)
        best = interleaved({"floor": floor, **_turns("call", folder, "ours", "stepfork")})
        note = f"{best['ours']:.1f} µs, floor {best['floor']:.1f} µs, stepfork {best['stepfork']:.0f} µs"
        what = "a replayed tool call of 1 KB"
        yield Row(what=f"{what} / the floor of one event", value=best["ours"] / best["floor"], limit=8, note=note)
        yield Row(what=f"{what}: ours / stepfork 0.2.1", value=best["ours"] / best["stepfork"], limit=1 / 15)
        best = interleaved(_turns("open", folder, "ours", "stepfork"))
        note = f"{best['ours']:.0f} ms, payload hashes and checksums compared; stepfork {best['stepfork']:.0f} ms"
        what = f"open {CALLS:,} calls for a replay: ours / stepfork 0.2.1"
        yield Row(what=what, value=best["ours"] / best["stepfork"], limit=1 / 8, note=note)
        worker("replay_worker.py", "make", "ours", folder, str(MANY))
        runs = [worker("replay_worker.py", "call", "ours", folder, str(MANY)) for _ in range(3)]
        growth = min(run["last"] / run["first"] for run in runs)
        yield Row(
            what=f"the last tenth of {MANY:,} replayed calls / the first tenth (medians)", value=growth, limit=1.3
        )
        yield from _exchanges(folder, every_round)


def _exchanges(folder: str, every_round: bool) -> Iterator[Row]:
    for name in ("ours", *PEERS):
        worker("replay_worker.py", "make-http", name, folder, str(EXCHANGES))
    turns = {name: partial(_turn, "http", name, folder, EXCHANGES) for name in ("ours", *PEERS)}
    best = interleaved(turns, ROUNDS if every_round else 2)
    fastest = min(PEERS, key=best.__getitem__)
    note = ", ".join(f"{name} {best[name]:.0f} µs" for name in ("ours", *PEERS))
    what = f"a replayed HTTP exchange of 1 KB, of {EXCHANGES}: ours / {fastest}"
    yield Row(what=what, value=best["ours"] / best[fastest], limit=1, note=note)
