# SPDX-License-Identifier: Apache-2.0
"""What a replay says when a live call has no answer in the recording: why, where, how near, and what to do.

Decision: the miss is data; its text is made from it, so that the terminal, the report and a test read the same thing.
Values are the prepared (redacted) ones, shortened around the place where they part, control characters escaped: a
bundle is data from strangers. Rejected: one sentence without the nearest call (nobody can act on it), and whole values
(a chat history would bury the one word that changed).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from sftrace_otel.core import match
from sftrace_otel.core.match import MISSING, Difference, Missing
from sftrace_otel.core.plan import RecordedCall
from sftrace_otel.formats import Json

SHOWN: Final = 6
"""Differences that the text of a miss shows; `to_dict` holds all that were kept."""

_WIDTH: Final = 160
_MARGIN: Final = 48
_CHANGING: Final = {"iso_time": "times", "uuid": "UUIDs", "path": "paths"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Miss:
    """Why a live call was not served.

    Attributes:
        reason: Reason code: input_differs, not_recorded, already_used, recording_ended, out_of_order, no_result,
            payload_truncated, forbidden, manual, manual_refused, manual_live, not_named, blocked, redacted_input,
            derived_differs or unused_calls.
        summary: The reason in words, one line.
        position: Where the replay stood, for instance "call 5 of 9".
        live: What was asked for, for instance "tool 'search'"; empty when the program has ended.
        nearest: The recorded call that comes closest, None when there is none.
        differences: Where the nearest call's view and the live one part; shortened to the first ones.
        more: Differences beyond those.
        recorded_fingerprint: SHA-256 of the nearest call's stored input.
        recorded_computed: Whether that was computed here because the bundle stores none.
        live_fingerprint: SHA-256 of the live input, computed here.
        advice: What to do next, one line each.
    """

    reason: str
    summary: str
    position: str
    live: str = ""
    nearest: RecordedCall | None = None
    differences: tuple[Difference, ...] = ()
    more: int = 0
    recorded_fingerprint: str | None = None
    recorded_computed: bool = False
    live_fingerprint: str | None = None
    advice: tuple[str, ...] = ()

    def text(self) -> str:
        """For people, several lines: fit for a terminal whatever the bundle holds."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"replay stopped at {self.position}: {self.summary} ({self.reason})"
        if self.nearest is not None:
            yield f"  nearest recorded call: {where(self.nearest)}"
            if self.nearest.policy != "frozen":
                yield f"  its replay policy: {printable(self.nearest.policy)}"
        for difference in self.differences[:SHOWN]:
            yield f"  at {printable(difference.pointer) or '(the whole input)'}: {_both(difference)}"
        hidden = self.more + max(0, len(self.differences) - SHOWN)
        if hidden:
            yield f"  and {hidden} more"
        if self.live_fingerprint is not None:
            yield f"  fingerprints: {self._fingerprints()}"
        for line in self.advice:
            yield f"  next: {line}"

    def _fingerprints(self) -> str:
        live = f"live {self.live_fingerprint} (computed)"
        if self.recorded_fingerprint is None:
            return live
        return f"recorded {self.recorded_fingerprint}{' (computed)' if self.recorded_computed else ''}, {live}"

    def to_dict(self) -> dict[str, Json]:
        """For programs: JSON, values as shortened text."""
        return {
            "reason": self.reason,
            "summary": self.summary,
            "position": self.position,
            "call": self.live or None,
            "nearest": None if self.nearest is None else describe(self.nearest),
            "differences": [difference_dict(difference) for difference in self.differences],
            "more_differences": self.more,
            "fingerprints": {
                "recorded": self.recorded_fingerprint,
                "recorded_computed": self.recorded_computed,
                "live": self.live_fingerprint,
                "live_computed": self.live_fingerprint is not None,
            },
            "advice": list(self.advice),
        }


def title(
    kind: str, name: str, provider: str | None = None, model: str | None = None, method: str | None = None
) -> str:
    """A call in words: "tool 'search'", "LLM openai/gpt-5 chat.completions.create", "GET http://h.test/x"."""
    if kind == "llm":
        return printable(f"LLM {provider or 'unknown'}/{model or 'unknown'} {method or ''}".rstrip())
    if kind == "http":
        return printable(name.removeprefix("http "))
    return f"tool '{printable(name)}'"


def title_of(call: RecordedCall) -> str:
    """A recorded call in words."""
    return title(call.kind, call.name, call.provider, call.model, call.method)


def where(call: RecordedCall) -> str:
    """A recorded call in words, with the places to find it."""
    lineage = f", lineage {printable(call.lineage)}" if call.lineage is not None else ""
    return f"{title_of(call)}, step {call.step}, event {printable(call.request_id)}{lineage}"


def describe(call: RecordedCall) -> dict[str, Json]:
    """A recorded call as JSON, without its payloads."""
    return {
        "call": call.index,
        "kind": call.kind,
        "title": title_of(call),
        "step": call.step,
        "event_id": call.request_id,
        "lineage": call.lineage,
        "policy": call.policy,
    }


def printable(text: str) -> str:
    """`text` on one line, with every control, bidirectional or otherwise unprintable character escaped."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def excerpt(value: Json | Missing, start: int = 0) -> str:
    """`value` as JSON, at most `_WIDTH` characters of it, from a little before character `start` of a string."""
    if isinstance(value, Missing):
        return repr(value)
    if isinstance(value, str) and len(value) > _WIDTH:
        begin = max(0, min(start - _MARGIN, len(value) - _WIDTH))
        piece = json.dumps(value[begin : begin + _WIDTH], ensure_ascii=False)
        return f"{'…' if begin else ''}{printable(piece)}{'…' if begin + _WIDTH < len(value) else ''}"
    text = json.dumps(value, ensure_ascii=False)
    return printable(text if len(text) <= _WIDTH else f"{text[:_WIDTH]}…")


def _both(difference: Difference) -> str:
    recorded, live = _excerpts(difference)
    return f"recorded {recorded}, live {live}"


def _excerpts(difference: Difference) -> tuple[str, str]:
    start = 0
    if isinstance(difference.recorded, str) and isinstance(difference.live, str):
        start = _first_difference(difference.recorded, difference.live)
    return excerpt(difference.recorded, start), excerpt(difference.live, start)


def _first_difference(left: str, right: str) -> int:
    """Length of the common beginning, by halving: long prompts share most of it."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[:middle] == right[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def difference_dict(difference: Difference) -> dict[str, Json]:
    """A difference as JSON, values as shortened text; a side that has nothing is left out."""
    recorded, live = _excerpts(difference)
    sides: dict[str, Json] = {"pointer": difference.pointer}
    if difference.recorded is not MISSING:
        sides["recorded"] = recorded
    if difference.live is not MISSING:
        sides["live"] = live
    return sides


def advise_on(kind: str, found: Sequence[Difference]) -> tuple[str, ...]:
    """What to do about differences between the nearest recorded call and the live one."""
    if not found:
        return ()
    if kind == "http" and found[0].pointer == "/url" and (other := _other_origin(found)) is not None:
        return (f"if the same service answers at another address, replay with --map-host {other}",)
    needed = [_volatile(item) for item in found]
    if all(needed):
        names = [name for name in match.NORMALISERS if any(name in given for given in needed)]
        places = ", ".join(f'"{printable(item.pointer)}"' for item in found[:SHOWN])
        options = " ".join(f"--normalize {name}" for name in names)
        return (
            f"only {' and '.join(_CHANGING[name] for name in names)} differ: replay with {options} "
            f"(normalize={names} in Python), or leave the places out with ignore=[{places}]",
        )
    pointers = ", ".join(f'"{printable(item.pointer)}"' for item in found[:SHOWN] if item.pointer)
    if not pointers:
        return ("the program asks for something else than it did: change it back, or record again",)
    options = " ".join(f"--ignore {printable(item.pointer)}" for item in found[:SHOWN] if item.pointer)
    return (
        f"change the program back or record again; if this changes in every run, replay with {options} "
        f"(ignore=[{pointers}] in Python)",
    )


def _other_origin(found: Sequence[Difference]) -> str | None:
    """`A=B` where only the host or port of a URL differs."""
    recorded, live = found[0].recorded, found[0].live
    if len(found) > 1 or not isinstance(recorded, str) or not isinstance(live, str):
        return None
    old, _, old_path = recorded.partition("://")[2].partition("/")
    new, _, new_path = live.partition("://")[2].partition("/")
    if old_path != new_path or recorded.partition("://")[0] != live.partition("://")[0]:
        return None
    return f"{printable(old)}={printable(new)}"


def _volatile(difference: Difference) -> list[str]:
    """The normalisers that make a difference go away; none where it is more than what they know."""
    recorded, live = difference.recorded, difference.live
    if not isinstance(recorded, str) or not isinstance(live, str):
        return []
    needed = []
    for name, pattern in match.NORMALISERS.items():
        if pattern.findall(recorded) != pattern.findall(live):
            needed.append(name)
        recorded, live = pattern.sub("", recorded), pattern.sub("", live)
    return needed if recorded == live else []
