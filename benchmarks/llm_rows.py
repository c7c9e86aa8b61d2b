# SPDX-License-Identifier: Apache-2.0
"""The rows about LLM calls: what recording adds to a call of the real openai client over a mock transport.

What is added is the contender's cost less that of the same program without a recorder, in the same run. The other
recorders are used as their documentation says; those that are not installed (`make bench` installs them into `.bench`)
are left out and said.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from harness import Row, interleaved, worker

PEERS = {"stepfork": "stepfork", "agent-rewind": "rewind", "agenttape": "agenttape", "vcrpy": "vcr"}


def llm(every_round: bool) -> Iterator[Row]:
    """LLM calls, plain and streamed, one at a time and many at once."""
    there = [name for name, module in PEERS.items() if importlib.util.find_spec(module) is not None]
    names = ["plain", "ours", *there]
    best = interleaved({name: lambda name=name: worker("llm_worker.py", "call", name)["least"] for name in names})  # type: ignore[misc]
    added = {name: best[name] - best["plain"] for name in names if name != "plain"}
    costs = ", ".join(f"{name} {cost:.0f}" for name, cost in added.items())
    missing = ", ".join(sorted(PEERS.keys() - set(there)))
    yield Row(
        what="CPU that recording adds to an LLM call of 4 KB in and 2 KB out",
        value=added["ours"],
        limit=150,
        unit="µs",
        note=f"plain {best['plain']:.0f}; added: {costs}" + (f"; not installed: {missing}" if missing else ""),
    )
    for name in there:
        yield Row(what=f"the same: ours / {name}", value=added["ours"] / max(added[name], 1), limit=1)
    for what, text, limit, unit in (
        ("chunk", "CPU that recording adds to a streamed chunk", 5, "µs"),
        ("first", "the first chunk comes later by", 1, "ms"),
    ):
        pair = _pair(what)
        yield Row(what=text, value=pair["ours"] - pair["plain"], limit=limit, unit=unit, note=_both(pair, unit))
    yield from _on_the_loop()
    yield from _memory(100_000 if every_round else 20_000)


def _pair(what: str, key: str = "all") -> dict[str, float]:
    return interleaved({name: lambda n=name: worker("llm_worker.py", what, n)[key] for name in ("plain", "ours")})  # type: ignore[misc]


def _both(pair: dict[str, float], unit: str) -> str:
    return f"{pair['ours']:.3g} {unit}, without us {pair['plain']:.3g} {unit}"


def _on_the_loop() -> Iterator[Row]:
    for size, limit in (("64 KB", 1), ("2 MB", 3)):
        pair = _pair("block", size)
        yield Row(
            what=f"a call of {size} holds the event loop longer by",
            value=pair["ours"] - pair["plain"],
            limit=limit,
            unit="ms",
            note=_both(pair, "ms"),
        )
    one, hundred = _pair("many", "1"), _pair("many", "100")
    yield Row(
        what="CPU a call of 100 at once / of one, beside the same without us",
        value=(hundred["ours"] / one["ours"]) / (hundred["plain"] / one["plain"]),
        limit=1.05,
        note=f"{hundred['ours']:.0f} / {one['ours']:.0f} µs, without us {hundred['plain']:.0f} / {one['plain']:.0f} µs",
    )


def _memory(calls: int) -> Iterator[Row]:
    found = worker("llm_worker.py", "memory", "ours", str(calls))
    yield Row(
        what=f"peak memory after {calls:,} calls less that after a tenth of them",
        value=found["all"] - found["tenth"],
        limit=5,
        unit="MB",
    )
    pair = {name: worker("llm_worker.py", "runs", name)["all"] for name in ("plain", "ours")}
    yield Row(
        what="100 open runs of 10 calls take more memory by",
        value=pair["ours"] - pair["plain"],
        limit=50,
        unit="MB",
        note=_both(pair, "MB"),
    )
