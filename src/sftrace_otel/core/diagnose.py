# SPDX-License-Identifier: Apache-2.0
"""Why a live call has no answer: finds the reason, the nearest recorded call and the advice.

Runs once per replay, when it stops, so it may walk the recording; what it compares is bounded. Three causes are told
apart because they ask for three remedies: never recorded, recorded but with another input (where), and recorded n
times but asked for once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from sftrace_otel.core.lookup import Asked, Lookup
from sftrace_otel.core.match import Difference
from sftrace_otel.core.miss import Miss, advise_on, excerpt, printable, title_of
from sftrace_otel.core.plan import RecordedCall
from sftrace_otel.core.resume import ANYTHING, Policy
from sftrace_otel.errors import (
    CanonicalizationError,
    ReplayExhaustedError,
    ReplayMismatchError,
    ReplayPolicyError,
    SftraceError,
)
from sftrace_otel.formats import canonical

_NEAR: Final = 256
"""Recorded calls that are compared with the live one to find the nearest."""

_KEPT: Final = 50
"""Differences that a miss keeps."""

_FAR: Final = 20
"""Differences beyond which two calls are equally unlike."""

_RECORD_AGAIN: Final = "change the program back, or record again"

_REFUSALS: Final = {
    "forbidden": ("its recorded policy forbids replaying it", "change its replay policy, or do not make the call"),
    "manual": (
        "its recorded policy asks for approval, and nobody is there to give it",
        "give the tool an approve=, or ReplaySession.from_trace a manual=: it is given the recorded call, and decides; "
        "or change its replay policy",
    ),
    "manual_refused": ("its recorded policy asks for approval, which was refused", "approve it, or do not make it"),
    "manual_live": (
        "frozen mode lets nothing out, whatever was approved",
        'approve it as "frozen", or replay in hybrid or live mode',
    ),
    "not_named": (
        "live mode serves nothing, and runs tools and HTTP exchanges only where they are named",
        "name it (--allow-live-tool, allow_live_tools=), or keep tools frozen with hybrid mode",
    ),
    "payload_truncated": (
        "its payload was cut when it was recorded",
        "record again with a larger OTEL_SFTRACE_MAX_PAYLOAD_BYTES",
    ),
}


def position(lookup: Lookup) -> str:
    """Where the replay stands: "call 5 of 9"."""
    total = len(lookup)
    if lookup.used_count >= total:
        return f"call {lookup.used_count + 1}, after all {total} recorded calls"
    return f"call {lookup.used_count + 1} of {total}"


def no_answer(lookup: Lookup, asked: Asked, nearest: int | None = None) -> ReplayMismatchError:
    """The error for a live call that no unused recorded call equals; `nearest` where the order demands that call."""
    twins = lookup.twins(asked)
    if twins:
        return _used_up(lookup, asked, twins)
    if lookup.used_count == len(lookup):
        return _ended(lookup, asked)
    return _unlike(lookup, asked, _nearest(lookup, asked) if nearest is None else nearest)


def _unlike(lookup: Lookup, asked: Asked, nearest: int) -> ReplayMismatchError:
    """No recorded call equals the live one: its input differs from the nearest, or there is none of its kind."""
    call = lookup.calls[nearest]
    found, more = _differences(lookup, nearest, asked)
    if lookup.identity_of(nearest) == asked.identity and not _elsewhere(asked, found):
        reason, summary = "input_differs", f"the input of {asked.title} differs from the recording"
        advice = advise_on(asked.live.kind, found)
    else:
        reason, summary = "not_recorded", _not_recorded(lookup, asked, call)
        advice = (*advise_on(asked.live.kind, found[:1] if asked.live.kind == "http" else ()), _RECORD_AGAIN)
        if call.kind != asked.live.kind or asked.live.kind == "tool":
            found, more = (), 0
    recorded, computed = _recorded_fingerprint(call)
    return _mismatch(
        Miss(
            reason=reason,
            summary=summary,
            position=position(lookup),
            live=asked.title,
            nearest=call,
            differences=found,
            more=more,
            recorded_fingerprint=recorded,
            recorded_computed=computed,
            live_fingerprint=_fingerprint(asked),
            advice=advice,
        )
    )


def _used_up(lookup: Lookup, asked: Asked, twins: Sequence[int]) -> ReplayExhaustedError:
    count = len(twins)
    skipped = next((lookup.calls[i].parent for i in twins if lookup.calls[i].parent is not None), None)
    advice = [f"the program makes this call more often than when it was recorded: {_RECORD_AGAIN}"]
    if skipped is not None and lookup.used[skipped]:
        advice.insert(0, f"it was recorded inside {title_of(lookup.calls[skipped])}, which was served as a whole")
    return _exhausted(
        Miss(
            reason="already_used",
            summary=f"{asked.title} was already used: recorded {_times(count)}, asked for {_times(count + 1)}",
            position=position(lookup),
            live=asked.title,
            nearest=lookup.calls[twins[-1]],
            live_fingerprint=_fingerprint(asked),
            advice=tuple(advice),
        )
    )


def _times(count: int) -> str:
    return "1 time" if count == 1 else f"{count} times"


def _ended(lookup: Lookup, asked: Asked) -> ReplayExhaustedError:
    return _exhausted(
        Miss(
            reason="recording_ended",
            summary=f"{asked.title} was asked for after the recording had ended",
            position=position(lookup),
            live=asked.title,
            live_fingerprint=_fingerprint(asked),
            advice=(f"a fork or a partial recording goes no further; else {_RECORD_AGAIN}",),
        )
    )


def no_result(lookup: Lookup, asked: Asked, index: int) -> ReplayExhaustedError:
    """The error for a recorded call that has no result: the run was cut, or forked, inside it."""
    call = lookup.calls[index]
    return _exhausted(
        Miss(
            reason="no_result",
            summary=f"no answer in this fork or cut recording to {asked.title}: it holds the request and no result",
            position=position(lookup),
            live=asked.title,
            nearest=call,
            advice=("fork at a later step, or record again",),
        )
    )


def refused(lookup: Lookup, asked: Asked, index: int, reason: str) -> ReplayPolicyError:
    """The error for a recorded call that must not be served: reason forbidden, manual or payload_truncated."""
    why, advice = _REFUSALS[reason]
    miss = Miss(
        reason=reason,
        summary=f"{asked.title} cannot be served: {why}",
        position=position(lookup),
        live=asked.title,
        nearest=lookup.calls[index],
        advice=(advice,),
    )
    return ReplayPolicyError(miss.text(), code=reason)


def not_let_out(lookup: Lookup, asked: Asked) -> ReplayPolicyError:
    """The error for a live call that live mode does not let out and that the recording does not hold."""
    why, advice = _REFUSALS["not_named"]
    miss = Miss(
        reason="not_named",
        summary=f"{asked.title} is not let out: {why}",
        position=position(lookup),
        live=asked.title,
        live_fingerprint=_fingerprint(asked),
        advice=(advice,),
    )
    return ReplayPolicyError(miss.text(), code="not_named")


def blocked(lookup: Lookup, asked: Asked, policy: Policy) -> ReplayPolicyError:
    """The error for a call past the end of the recording that its policy does not let out."""
    where = _where(asked)
    by = "the default" if policy.pattern == ANYTHING else str(policy)
    why = "and nobody let it go" if policy.action == "ask" else f"and its policy is block ({by})"
    miss = Miss(
        reason="blocked",
        summary=f"{asked.title} comes after the recording had ended, {why}; it was not made, with the input "
        f"{excerpt(asked.live.payload)}",
        position=position(lookup),
        live=asked.title,
        advice=(
            f"let it out with --policy '{where}=live', be asked with '{where}=ask', or answer it with "
            f"'{where}=stub:JSON'",
        ),
    )
    return ReplayPolicyError(miss.text(), code="blocked")


def would_carry(lookup: Lookup, asked: Asked, count: int) -> ReplayPolicyError:
    """The error for a tool or an exchange that would act on placeholders of redacted values."""
    values = "a value that was" if count == 1 else f"{count} values that were"
    miss = Miss(
        reason="redacted_input",
        summary=f"{asked.title} was to go out with {values} redacted in the recording; it was not made",
        position=position(lookup),
        live=asked.title,
        advice=(
            f"answer it with --policy '{_where(asked)}=stub:JSON', override the answer that held the value in a fork, "
            "or let it go out with the placeholder: --allow-redacted",
        ),
    )
    return ReplayPolicyError(miss.text(), code="redacted_input")


def _where(asked: Asked) -> str:
    """A call as a policy names it."""
    live = asked.live
    if live.kind == "llm":
        return printable(f"llm:{live.provider}/{live.model}" if live.provider else f"llm:{live.model}")
    if live.kind == "tool":
        return f"tool:{printable(live.name)}"
    return f"http:{printable(live.name.removeprefix('http ').partition('://')[2].partition('/')[0])}"


def derived_differs(lookup: Lookup, call: RecordedCall, found: Sequence[Difference]) -> ReplayMismatchError:
    """The error for a call that ran again, as its policy `derived` says, and came to another end."""
    return _mismatch(
        Miss(
            reason="derived_differs",
            summary=f"{title_of(call)} ran again, as its policy says, and its result differs from the recorded one",
            position=position(lookup),
            live=title_of(call),
            nearest=call,
            differences=tuple(found[:_KEPT]),
            more=max(0, len(found) - _KEPT),
            advice=("change it back; if it does not depend on its input alone, record it as frozen",),
        )
    )


def out_of_order(lookup: Lookup, asked: Asked, blocker: int, order: str) -> ReplayMismatchError:
    """The error for a call that is recorded but whose turn it is not: `blocker` has to come first."""
    first = lookup.calls[blocker]
    had = "had finished before it started" if order == "causal" else "comes first"
    return _mismatch(
        Miss(
            reason="out_of_order",
            summary=f"{asked.title} was asked for before {title_of(first)}, which {had} in the recording",
            position=position(lookup),
            live=asked.title,
            nearest=first,
            live_fingerprint=_fingerprint(asked),
            advice=(
                f"make {title_of(first)} first, as it was recorded; if their order does not matter, replay with "
                'order="any" (--order any)',
            ),
        )
    )


def left_unused(lookup: Lookup, unused: Sequence[RecordedCall]) -> ReplayMismatchError:
    """The error for a program that ended before it had made every recorded call."""
    more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
    return _mismatch(
        Miss(
            reason="unused_calls",
            summary=f"the program ended without {title_of(unused[0])}{more}",
            position=f"the end, with {lookup.used_count} of {len(lookup)} recorded calls used",
            nearest=unused[0],
            advice=(_RECORD_AGAIN,),
        )
    )


def cannot_match(lookup: Lookup, error: SftraceError) -> ReplayMismatchError:
    """The error for a payload that has no view or no key."""
    return ReplayMismatchError(f"replay stopped at {position(lookup)}: {error}", code=error.code)


def _mismatch(miss: Miss) -> ReplayMismatchError:
    return ReplayMismatchError(miss.text(), miss=miss, code=miss.reason)


def _exhausted(miss: Miss) -> ReplayExhaustedError:
    return ReplayExhaustedError(miss.text(), miss=miss, code=miss.reason)


# --- the nearest recorded call ----------------------------------------------------------------------------------------


def _nearest(lookup: Lookup, asked: Asked) -> int:
    """The unused call that comes closest; there is at least one."""
    here = [index for index in lookup.at(asked.live.lineage) if lookup.identity_of(index) == asked.identity]
    if here and asked.live.kind != "http":
        return here[0]
    alike = (index for index in lookup.unused() if lookup.identity_of(index) == asked.identity)
    near = list(islice(alike, _NEAR))
    if not near:
        near = list(islice((index for index in lookup.unused() if lookup.calls[index].kind == asked.live.kind), 1))
    if not near:
        return next(lookup.unused())
    return min(near, key=lambda index: _distance(lookup, index, asked))


def _distance(lookup: Lookup, index: int, asked: Asked) -> int:
    """How unlike a recorded call is; another URL is further off than any other difference."""
    found = list(islice(lookup.differences(index, asked), _FAR))
    return len(found) + (_FAR if _elsewhere(asked, found) else 0)


def _elsewhere(asked: Asked, found: Iterable[Difference]) -> bool:
    """Whether the live call is an HTTP call to another URL or with another method."""
    return asked.live.kind == "http" and any(item.pointer in ("/url", "/method") for item in found)


def _differences(lookup: Lookup, index: int, asked: Asked) -> tuple[tuple[Difference, ...], int]:
    """The first differences from a recorded call, and how many more there are."""
    found = lookup.differences(index, asked)
    kept = tuple(islice(found, _KEPT))
    return kept, sum(1 for _ in found)


def _not_recorded(lookup: Lookup, asked: Asked, nearest: RecordedCall) -> str:
    same = [call for call in lookup.calls if call.kind == asked.live.kind]
    if asked.live.kind == "tool":
        count = sum(call.name == asked.live.name for call in same)
        if count:
            return f"{asked.title} with this input is not in the recording; all {count} recorded calls of it are used"
        names = sorted({call.name for call in same})
        known = ", ".join(map(printable, names[:8])) + (", …" if len(names) > 8 else "")
        return f"{asked.title} is not in the recording, whose tools are: {known or 'none'}"
    if asked.live.kind == "llm" and nearest.kind == "llm":
        return f"{asked.title} is not in the recording; here it has {title_of(nearest)}"
    return f"{asked.title} is not in the recording"


# --- fingerprints -----------------------------------------------------------------------------------------------------


def _recorded_fingerprint(call: RecordedCall) -> tuple[str | None, bool]:
    """(the stored hash, False), or (a computed one, True) where the bundle stores none."""
    if call.input_hash is not None:
        return call.input_hash, False
    try:
        return canonical.digest(call.input), True
    except CanonicalizationError:
        return None, True


def _fingerprint(asked: Asked) -> str | None:
    if asked.live.digest is not None:
        return asked.live.digest
    try:
        return canonical.digest(asked.live.payload)
    except CanonicalizationError:
        return None
