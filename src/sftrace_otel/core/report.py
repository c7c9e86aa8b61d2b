# SPDX-License-Identifier: Apache-2.0
"""What a replay came to: how calls matched, what was left, whether the program ended as it did, and the exit code.

Exit code 0: every recorded call was used, nothing diverged, the same outcome. 1: something of that is not so. 4: the
recording ended: a fork's prefix or a partial recording matched to its end and the program asked for more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from sftrace_otel.core import match
from sftrace_otel.core.match import Difference
from sftrace_otel.core.miss import Miss, difference_dict, excerpt, printable
from sftrace_otel.errors import ReplayError, ReplayMismatchError
from sftrace_otel.formats import Json

_SHOWN = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOutcome:
    """How a run ended.

    Attributes:
        status: "completed", "failed", or "partial" for a recording that was cut (a fork, a killed process).
        output: Output of a completed run, redacted; None where none was recorded.
        error_type: Class name of the failure.
        message: Its text, redacted.
    """

    status: Literal["completed", "failed", "partial"]
    output: Json = None
    error_type: str | None = None
    message: str | None = None

    def to_dict(self) -> dict[str, Json]:
        """As JSON."""
        return {
            "status": self.status,
            "output": self.output,
            "error_type": self.error_type,
            "message": self.message,
        }


def compare_outcomes(expected: RunOutcome, actual: RunOutcome) -> tuple[bool | None, tuple[Difference, ...]]:
    """Whether a replay ended as the recording did (None: the recording has no end), and where the outputs part.

    The same failure class or none; the same output where one was recorded, by value, `[REDACTED]` matching anything.
    """
    if expected.status == "partial":
        return None, ()
    if expected.status != actual.status:
        return False, ()
    if expected.status == "failed":
        return _class_name(expected.error_type) == _class_name(actual.error_type), ()
    parted = () if expected.output is None else tuple(match.differences(expected.output, actual.output))
    return not parted, parted


def _class_name(error_type: str | None) -> str | None:
    """The last part of a class name, which recorders write with or without its module."""
    return None if error_type is None else error_type.rpartition(".")[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayReport:
    """The result of one replay.

    Attributes:
        mode: Mode of the session.
        order: Order of the session.
        recorded: Calls in the recording.
        matched: Rung → calls that it matched.
        served: Calls answered from the recording.
        live: Calls that went out; none in frozen mode.
        live_calls: The same by what they are.
        replaced: Recorded calls whose place one of those took.
        derived: Calls that ran again because their policy says so, and came to the recorded end.
        skipped: Recorded calls inside served ones.
        respelled: Matched calls whose payload is equal by value though its digest differs (1 and 1.0).
        unhashed: Matched calls that store no hash: equal to what is stored, which nothing vouches for.
        diverged: The error that stopped the replay.
        ended: Whether every recorded call had been used when the program asked for more.
        unused: Recorded calls that the program never made.
        expected: How the recording ended.
        outcome: How the replay ended.
        same_outcome: Whether these agree; None where the recording has no end, or the replay was stopped.
        outcome_differences: Where the outputs part.
        ignored: The ignore rules that were in force.
        normalised: The normalisers that were in force.
        spans: Spans that a span processor saw end; 0 without one.
        outside: Instrumentation scope → spans of calls among them that no boundary answered: those calls were made.
        nondeterminism: Reads of the clock and random draws: how many were `recorded`, how many of these `served`, and
            by source those `beyond` the recording, which got the real value; empty where none was recorded.
    """

    mode: str
    order: str
    recorded: int
    matched: Mapping[str, int]
    served: int
    live: int
    skipped: int
    respelled: int
    unhashed: int
    diverged: ReplayError | None
    ended: bool
    unused: tuple[dict[str, Json], ...]
    expected: RunOutcome
    outcome: RunOutcome
    same_outcome: bool | None
    outcome_differences: tuple[Difference, ...]
    ignored: tuple[str, ...]
    live_calls: Mapping[str, int] = field(default_factory=dict)
    replaced: int = 0
    derived: int = 0
    normalised: tuple[str, ...] = ()
    spans: int = 0
    outside: Mapping[str, int] = field(default_factory=dict)
    nondeterminism: Mapping[str, Json] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 the same, 1 diverged, 4 the recording ended."""
        if self.diverged is not None:
            return 4 if self.ended and self.expected.status == "partial" else 1
        return 1 if self.unused or self.same_outcome is False else 0

    def to_dict(self) -> dict[str, Json]:
        """As JSON."""
        matched: dict[str, Json] = dict(self.matched)
        return {
            "exit_code": self.exit_code,
            "verdict": self._verdict(),
            "mode": self.mode,
            "order": self.order,
            "recorded": self.recorded,
            "matched": matched,
            "served": self.served,
            "live": self.live,
            "live_calls": dict(self.live_calls),
            "replaced": self.replaced,
            "derived": self.derived,
            "skipped": self.skipped,
            "respelled": self.respelled,
            "unhashed": self.unhashed,
            "diverged": self._diverged(),
            "unused": list(self.unused),
            "outcome": {
                "same": self.same_outcome,
                "expected": self.expected.to_dict(),
                "actual": self.outcome.to_dict(),
                "differences": [difference_dict(item) for item in self.outcome_differences],
            },
            "ignored": list(self.ignored),
            "normalised": list(self.normalised),
            "spans": self.spans,
            "outside": dict(self.outside),
            "nondeterminism": dict(self.nondeterminism),
        }

    def _diverged(self) -> Json:
        if self.diverged is None:
            return None
        miss = self.diverged.miss if isinstance(self.diverged, ReplayMismatchError) else None
        return {
            "reason": self.diverged.code,
            "text": str(self.diverged),
            "miss": miss.to_dict() if isinstance(miss, Miss) else None,
        }

    def _verdict(self) -> str:
        if self.exit_code == 0:
            return "same"
        return "recording ended" if self.exit_code == 4 else "diverged"

    def text(self) -> str:
        """For people, a few lines."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        used = self.served + self.skipped + self.derived + self.replaced
        yield f"replay: {self._verdict()}; {used} of {self.recorded} recorded calls used"
        rungs = ", ".join(f"{count} by {rung}" for rung, count in self.matched.items() if count)
        inside = f"; {self.skipped} inside them" if self.skipped else ""
        if rungs:
            yield f"  served {self.served}: {rungs}{inside}"
        if self.live:
            shown = [f"{printable(name)} ({count})" for name, count in self.live_calls.items()]
            more = f", and {len(shown) - _SHOWN} more kinds" if len(shown) > _SHOWN else ""
            yield f"  went out {self.live}: {', '.join(shown[:_SHOWN])}{more}"
        if self.derived:
            yield f"  ran again {self.derived}, as their policy says, to the recorded end"
        yield from self._notes()
        if self.diverged is not None:
            yield "\n".join(
                f"  {printable(line)}" for line in (str(self.diverged) or type(self.diverged).__name__).split("\n")
            )
        yield from self._unused_lines()
        yield from self._outcome_lines()

    def _notes(self) -> Iterator[str]:
        if self.respelled:
            yield f"  {self.respelled} equal by value though their hashes differ (1 and 1.0)"
        if self.unhashed:
            yield f"  {self.unhashed} without a stored hash: equal to what is stored, not verified"
        if self.matched.get("redacted"):
            yield "  where the recording was redacted, any value was taken"
        if self.ignored:
            yield f"  left out of matching: {', '.join(map(printable, self.ignored))}"
        if self.outside:
            names = ", ".join(f"{printable(name)} ({count})" for name, count in self.outside.items())
            yield f"  spans of calls that no boundary answered, so they were made: {names}; trace those as tools"
        if self.nondeterminism:
            served, recorded = self.nondeterminism["served"], self.nondeterminism["recorded"]
            yield f"  clock and chance: {served} of {recorded} reads as recorded"
        beyond = self.nondeterminism.get("beyond")
        if isinstance(beyond, dict) and beyond:
            names = ", ".join(f"{printable(name)} ({count})" for name, count in beyond.items())
            yield f"  real values, since the recording has no more of them at that place: {names}"
        if self.normalised:
            yield f"  normalised before matching: {', '.join(map(printable, self.normalised))}"

    def _unused_lines(self) -> Iterator[str]:
        if not self.unused:
            return
        yield f"  never reached: {len(self.unused)}"
        for call in self.unused[:_SHOWN]:
            yield f"    {call['title']}, step {call['step']}"
        if len(self.unused) > _SHOWN:
            yield f"    and {len(self.unused) - _SHOWN} more"

    def _outcome_lines(self) -> Iterator[str]:
        if self.same_outcome is None:
            return
        if self.same_outcome:
            yield f"  outcome: {_words(self.expected)}, as recorded"
            return
        yield f"  outcome: recorded {_words(self.expected)}, now {_words(self.outcome)}"
        for item in self.outcome_differences[:_SHOWN]:
            place = printable(item.pointer) or "the output"
            yield f"    at {place}: recorded {excerpt(item.recorded)}, now {excerpt(item.live)}"


def _words(outcome: RunOutcome) -> str:
    if outcome.status != "failed":
        return outcome.status
    return f"failed with {printable(outcome.error_type or 'an error')}"
