# SPDX-License-Identifier: Apache-2.0
"""What a replay came to: how calls matched, what was left, whether the program ended as it did, and the exit code.

Exit code 0: every recorded call was used, nothing diverged, the same outcome. 1: something of that is not so. 4: the
recording ended: a fork's prefix or a partial recording matched to its end and the program asked for more.

A resumed run goes on after that. 0: it ran to its end; nothing was recorded that it could be compared with, but for a
whole recording past whose end it made no call. 1: it left the recording before its end, or failed. 4: the recording was
used up and a call behind it was blocked.
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
        stubbed: Calls past the end of a resumed recording that a stub answered, by what they are.
        reused: Such calls that a call of the parent with the same input answered.
        reused_tokens: Tokens that these took when they were recorded.
        blocked: Such a call that was not made, and so ended the replay.
        carried: Placeholders of redacted values that went out in live calls.
        redacted: Placeholders in what the recording had to serve.
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
    stubbed: Mapping[str, int] = field(default_factory=dict)
    reused: int = 0
    reused_tokens: int = 0
    blocked: str | None = None
    carried: int = 0
    redacted: int = 0
    nondeterminism: Mapping[str, Json] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 the same, or resumed to the end; 1 diverged, or the resumed run failed; 4 the recording ended."""
        if self.diverged is not None:
            return 4 if self.ended and (self.expected.status == "partial" or self.blocked is not None) else 1
        if self.went_on:
            return 1 if self.unused or self.outcome.status == "failed" else 0
        return 1 if self.unused or self.same_outcome is False else 0

    @property
    def went_on(self) -> bool:
        """Whether a resumed run went on past the end of its recording, or of one that has no end."""
        past = self.live or self.stubbed or self.reused
        return self.mode == "resume" and (bool(past) or self.expected.status == "partial")

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
            **(self._resumed() if self.mode == "resume" else {}),
        }

    def _resumed(self) -> dict[str, Json]:
        return {
            "stubbed": sum(self.stubbed.values()),
            "stubbed_calls": dict(self.stubbed),
            "reused": self.reused,
            "reused_tokens": self.reused_tokens,
            "blocked": self.blocked,
            "redacted_served": self.redacted,
            "redacted_sent": self.carried,
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
        if self.blocked is not None:
            return "blocked"
        if self.went_on and self.diverged is None and not self.unused:
            return "resumed" if self.outcome.status != "failed" else "resumed, and failed"
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
        if self.reused:
            tokens = f", which took {self.reused_tokens} tokens" if self.reused_tokens else ""
            yield f"  reused {self.reused} of the parent's calls{tokens}"
        if self.live:
            yield f"  went out {self.live}: {_listed(self.live_calls)}"
        if self.stubbed:
            yield f"  answered by a stub {sum(self.stubbed.values())}: {_listed(self.stubbed)}"
        if self.blocked is not None:
            yield f"  blocked: {self.blocked}"
        if self.carried:
            yield f"  placeholders of redacted values that went out: {self.carried}"
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
        if self.went_on and self.diverged is None:
            told = f": {printable(self.outcome.message)}" if self.outcome.message else ""
            yield f"  outcome: {_words(self.outcome)}{told}"
            return
        if self.same_outcome is None:
            return
        if self.same_outcome:
            yield f"  outcome: {_words(self.expected)}, as recorded"
            return
        yield f"  outcome: recorded {_words(self.expected)}, now {_words(self.outcome)}"
        for item in self.outcome_differences[:_SHOWN]:
            place = printable(item.pointer) or "the output"
            yield f"    at {place}: recorded {excerpt(item.recorded)}, now {excerpt(item.live)}"


def _listed(calls: Mapping[str, int]) -> str:
    shown = [f"{printable(name)} ({count})" for name, count in calls.items()]
    more = f", and {len(shown) - _SHOWN} more kinds" if len(shown) > _SHOWN else ""
    return f"{', '.join(shown[:_SHOWN])}{more}"


def _words(outcome: RunOutcome) -> str:
    if outcome.status != "failed":
        return outcome.status
    return f"failed with {printable(outcome.error_type or 'an error')}"
