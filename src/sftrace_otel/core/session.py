# SPDX-License-Identifier: Apache-2.0
"""The replay session: decides for each live call which recorded call answers it, or stops the replay.

A live call is looked for by *lineage* (the same place in the program's tree of calls and spawns), then by *digest* (an
equal call, in recorded order), then where a `[REDACTED]` of the recording stands for the live value. So two equal calls
in flight at once each get their own answer, and a program whose threads cannot be followed still replays.

Default order is *causal* (`core.causal`): what overlapped in the recording may come in any order, what waited for
something must wait for it again. `strict` wants the exact sequence of starts, `any` no order at all.

The first error is latched and raised again by every later call, so that a program which catches everything still cannot
run on without its recording. Rejected: one cursor over the events (calls in flight at once diverge when their order
changes), a dict from request to answer (two answers to one prompt collapse), and a context variable (invisible in
threads). Sans-IO: no file, clock, id or context; one lock makes it safe for threads, and what is done under it costs
the same at the first and at the last call while the program does what was recorded.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple, NoReturn

from sftrace_otel.core import diagnose, match, miss
from sftrace_otel.core.causal import CausalOrder
from sftrace_otel.core.lookup import Asked, LiveCall, Lookup
from sftrace_otel.core.match import Rule
from sftrace_otel.core.miss import Miss
from sftrace_otel.core.plan import RecordedCall
from sftrace_otel.core.report import ReplayReport, RunOutcome, compare_outcomes
from sftrace_otel.errors import (
    FormatError,
    ReplayError,
    ReplayExhaustedError,
    ReplayMismatchError,
    SettingsError,
)
from sftrace_otel.formats import Json

__all__ = ["Decision", "LiveCall", "Miss", "ReplayReport", "RunOutcome", "Session"]

MODES: Final = ("frozen",)
ORDERS: Final = ("causal", "strict", "any")
RUNGS: Final = ("lineage", "digest", "redacted")

_NO_HOSTS: Final[Mapping[str, str]] = MappingProxyType({})


class Decision(NamedTuple):
    """What to do with a live call.

    Attributes:
        action: "serve" (answer from `call`) or "live" (let it out). Frozen mode only serves.
        call: The recorded call; None for a live call that has none.
        rung: How it was found: "lineage", "digest" or "redacted".
    """

    action: str
    call: RecordedCall | None
    rung: str | None


class Session:
    """Serves each recorded call at most once. Safe for any number of threads.

    Args:
        calls: The recorded calls, in the order in which they started.
        mode: "frozen": every call is served or stops the replay.
        order: "causal", "strict" (the exact sequence of starts) or "any".
        ignore: What to leave out of matching, on both sides: JSON Pointers into the view, or functions.
        map_hosts: `host[:port]` or origin in the recording → the live one that stands for it.
        redact: Redacts a payload as the live side does, for recordings whose own redaction was weaker; applied to a
            recorded input only where it does not match as it is.

    Raises:
        SettingsError: An unknown mode or order, or a rule that is neither a JSON Pointer nor a function.
    """

    def __init__(
        self,
        calls: Iterable[RecordedCall],
        *,
        mode: str = "frozen",
        order: str = "causal",
        ignore: Sequence[Rule] = (),
        map_hosts: Mapping[str, str] = _NO_HOSTS,
        redact: Callable[[Json], Json] | None = None,
    ) -> None:
        _require(mode, MODES, "replay mode")
        _require(order, ORDERS, "replay order")
        self.mode = mode
        self.order = order
        self._ignore = _checked(ignore)
        hosts = {match.normal_origin(live): match.normal_origin(recorded) for recorded, live in map_hosts.items()}
        self._lookup = Lookup(calls, hosts=hosts, rules=self._ignore, redact=redact)
        self._causal = CausalOrder(self._lookup.calls) if order == "causal" else None
        self._inside = _inside(self._lookup.calls)
        self._next = 0
        self._lock = threading.RLock()
        self._latched: ReplayError | None = None
        self._matched = dict.fromkeys(RUNGS, 0)
        self._skipped = 0
        self._respelled = 0
        self._unhashed = 0

    @property
    def calls(self) -> tuple[RecordedCall, ...]:
        """The recorded calls."""
        return self._lookup.calls

    @property
    def latched(self) -> ReplayError | None:
        """The error that stopped this replay, None while it goes on."""
        return self._latched

    def latch(self, error: ReplayError) -> None:
        """Stop the replay for a reason found elsewhere (a connection outside the boundaries). The first one stays."""
        with self._lock:
            if self._latched is None:
                self._latched = _twin(error)

    def decide(
        self,
        live: LiveCall,
        otherwise: LiveCall | None = None,
        approve: Callable[[RecordedCall], bool] | None = None,
    ) -> Decision:
        """Which recorded call answers `live`. It is used from then on, and what it enclosed is skipped with it.

        `otherwise` is the same call as another version recorded it; it is looked for where `live` has no answer.
        `approve` is asked about a recorded call whose policy is manual; without it, or if it fails, the replay stops.

        Raises:
            ReplayExhaustedError: Everything that could answer has been used, or the recording ends inside the call.
            ReplayMismatchError: The recording holds no such call, or its turn has not come; `miss` tells more.
            ReplayPolicyError: The recorded call may not be served, or was cut when it was recorded.
            ReplayError: An ignore rule failed. Once raised, each of these is raised again by every later call.
        """
        with self._lock:
            self._raise_latched()
            try:
                forms = [Asked(form, self._lookup) for form in (live, otherwise) if form is not None]
                asked, index, rung = self._in_sequence(forms) if self.order == "strict" else self._find(forms)
                self._require_servable(index, asked, approve)
            except FormatError as error:
                self._stop(diagnose.cannot_match(self._lookup, error))
            except ReplayError as error:
                self._stop(error)
            self._use(index, rung, asked)
            return Decision("serve", self._lookup.calls[index], rung)

    def unused(self) -> tuple[RecordedCall, ...]:
        """Recorded calls that were neither served nor skipped; those inside another unused call are left out."""
        with self._lock:
            used, calls = self._lookup.used, self._lookup.calls
            left = (calls[index] for index in self._lookup.unused())
            return tuple(call for call in left if call.parent is None or used[call.parent])

    def verify_complete(self) -> None:
        """Raise what stopped the replay, or a ReplayMismatchError (`unused_calls`) where recorded calls are left."""
        with self._lock:
            self._raise_latched()
            left = self.unused()
            if left:
                raise diagnose.left_unused(self._lookup, left)

    def report(self, *, outcome: RunOutcome, expected: RunOutcome) -> ReplayReport:
        """What happened, after the program ended with `outcome`; `expected` is what the recording ended with."""
        with self._lock:
            stopped = self._latched
            same, parted = (None, ()) if stopped is not None else compare_outcomes(expected, outcome)
            return ReplayReport(
                mode=self.mode,
                order=self.order,
                recorded=len(self._lookup),
                matched=dict(self._matched),
                served=sum(self._matched.values()),
                live=0,
                skipped=self._skipped,
                respelled=self._respelled,
                unhashed=self._unhashed,
                diverged=stopped,
                ended=isinstance(stopped, ReplayExhaustedError) and self._lookup.used_count == len(self._lookup),
                unused=tuple(miss.describe(call) for call in self.unused()),
                expected=expected,
                outcome=outcome,
                same_outcome=same,
                outcome_differences=parted,
                ignored=tuple(map(_rule_name, self._ignore)),
            )

    # --- finding ------------------------------------------------------------------------------------------------------

    def _find(self, forms: Sequence[Asked]) -> tuple[Asked, int, str]:
        """The recorded call that answers, by the first rung that has one whose turn has come, and to which form."""
        early: tuple[Asked, int] | None = None
        for asked in forms:
            for index, rung in self._candidates(asked):
                blocker = None if self._causal is None else self._causal.blocker(index)
                if blocker is None:
                    return asked, index, rung
                early = (asked, blocker) if early is None else early
        if early is not None:
            raise diagnose.out_of_order(self._lookup, *early, self.order)
        raise diagnose.no_answer(self._lookup, self._nearer(forms))

    def _nearer(self, forms: Sequence[Asked]) -> Asked:
        """The form of a call without an answer in which the recording has calls like it; the first if in none."""
        lookup = self._lookup
        for asked in forms if len(forms) > 1 else ():
            name = asked.live.name if asked.live.kind == "http" else None
            for index, call in enumerate(lookup.calls):
                if lookup.identity_of(index) == asked.identity and name in (None, call.name):
                    return asked
        return forms[0]

    def _candidates(self, asked: Asked) -> Iterator[tuple[int, str]]:
        lookup = self._lookup
        for index in lookup.at(asked.live.lineage):
            if lookup.equals(index, asked):
                yield index, "lineage"
        for index in lookup.equal(asked):
            yield index, "digest"
        for index in lookup.equal_where_redacted(asked):
            yield index, "redacted"

    def _in_sequence(self, forms: Sequence[Asked]) -> tuple[Asked, int, str]:
        """Strict order: the next recorded call, or an error."""
        lookup = self._lookup
        while self._next < len(lookup) and lookup.used[self._next]:
            self._next += 1
        index = self._next
        if index == len(lookup):
            raise diagnose.no_answer(lookup, self._nearer(forms))
        kind = lookup.calls[index].kind
        asked = next((form for form in forms if form.live.kind == kind), forms[0])
        if lookup.equals(index, asked):
            rung = "lineage" if lookup.calls[index].lineage == asked.live.lineage is not None else "digest"
            return asked, index, rung
        if lookup.agrees(index, asked):
            return asked, index, "redacted"
        if next(lookup.equal(asked), None) is not None:
            raise diagnose.out_of_order(lookup, asked, index, self.order)
        raise diagnose.no_answer(lookup, asked, nearest=index)

    # --- serving ------------------------------------------------------------------------------------------------------

    def _require_servable(self, index: int, asked: Asked, approve: Callable[[RecordedCall], bool] | None) -> None:
        call = self._lookup.calls[index]
        if call.policy == "forbidden" or (call.policy == "manual" and not _approved(call, approve)):
            raise diagnose.refused(self._lookup, asked, index, call.policy)
        if call.outcome.truncated:
            raise diagnose.refused(self._lookup, asked, index, "payload_truncated")
        if call.outcome.status == "missing":
            error = diagnose.no_result(self._lookup, asked, index)
            self._mark(index)
            raise error

    def _use(self, index: int, rung: str, asked: Asked) -> None:
        self._matched[rung] += 1
        self._note_hashes(self._lookup.calls[index], rung, asked.live)
        self._mark(index)
        if index in self._inside:
            self._skip_inside(index)

    def _note_hashes(self, call: RecordedCall, rung: str, live: LiveCall) -> None:
        """Count what is equal though no stored hash says so, or though the hashes differ."""
        if call.input_hash is None:
            self._unhashed += 1
        elif live.digest is not None and live.digest != call.input_hash and call.kind != "http" and rung != "redacted":
            self._respelled += match.digest(call.input) == match.digest(live.payload)

    def _skip_inside(self, index: int) -> None:
        """The calls that ran inside a served one do not run now."""
        inside = list(self._inside[index])
        while inside:
            child = inside.pop()
            if not self._lookup.used[child]:
                self._mark(child)
                self._skipped += 1
                inside.extend(self._inside.get(child, ()))

    def _mark(self, index: int) -> None:
        self._lookup.mark(index)
        if self._causal is not None:
            self._causal.remove(index)

    # --- stopping -----------------------------------------------------------------------------------------------------

    def _raise_latched(self) -> None:
        if self._latched is not None:
            raise _twin(self._latched)

    def _stop(self, error: ReplayError) -> NoReturn:
        """Latch `error` without the frames it came through, and raise one like it."""
        self.latch(error)
        raise _twin(error) from error.__cause__


def _approved(call: RecordedCall, approve: Callable[[RecordedCall], bool] | None) -> bool:
    try:
        return approve is not None and approve(call) is True
    except Exception:
        return False


def _twin(error: ReplayError) -> ReplayError:
    """An error like `error` that nobody has raised: no traceback that keeps frames alive or mixes those of threads."""
    if isinstance(error, ReplayMismatchError):
        return type(error)(str(error), miss=error.miss, code=error.code)
    return type(error)(str(error), code=error.code)


def _inside(calls: Sequence[RecordedCall]) -> dict[int, list[int]]:
    """Call → the calls directly inside it."""
    inside: defaultdict[int, list[int]] = defaultdict(list)
    for index, call in enumerate(calls):
        if call.parent is not None:
            inside[call.parent].append(index)
    return dict(inside)


def _require(value: str, known: Sequence[str], what: str) -> None:
    if value not in known:
        raise SettingsError(f"{what} {value!r} is not one of {', '.join(known)}")


def _checked(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    if isinstance(rules, str):
        raise SettingsError(f"ignore={rules!r} is one string; give a list of rules")
    for rule in rules:
        if isinstance(rule, str) and not rule.startswith("/"):
            raise SettingsError(
                f'ignore rule {rule!r} is no JSON Pointer: it starts with "/", for instance "/request/user"'
            )
        if not isinstance(rule, str) and not callable(rule):
            raise SettingsError(f"ignore rule {rule!r} is neither a JSON Pointer nor a function")
    return tuple(rules)


def _rule_name(rule: Rule) -> str:
    return rule if isinstance(rule, str) else getattr(rule, "__qualname__", type(rule).__name__)
