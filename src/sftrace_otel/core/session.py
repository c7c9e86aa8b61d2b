# SPDX-License-Identifier: Apache-2.0
"""The replay session: decides for each live call which recorded call answers it, or stops the replay.

A live call is looked for by *lineage* (the same place in the program's tree of calls and spawns), then by *digest* (an
equal call, in recorded order), then where a `[REDACTED]` of the recording stands for the live value. So two equal calls
in flight at once each get their own answer, and a program whose threads cannot be followed still replays.

Default order is *causal* (`core.causal`): what overlapped in the recording may come in any order, what waited for
something must wait for it again. `strict` wants the exact sequence of starts, `any` no order at all.

The first error is latched and raised again by every later call, so that a program which catches everything still cannot
run on without its recording.

Modes: *frozen* only serves. *hybrid* lets the LLM calls out that are named and serves the rest: what the program asks
for after a live answer has to be in the recording, or it is a divergence. *live* serves nothing: LLM calls go out,
tools and HTTP exchanges where they are named. A call that goes out takes the place of its recorded counterpart (same
lineage, else equal, else the next one of its name), whatever its input: what it was asked is not compared.

*resume* serves what is recorded, a fork's prefix, as frozen does, and then goes on: a call that is not recorded is past
the fork point if no recorded call has to come before it (`CausalOrder.due`), else the program did something else inside
the prefix. Past it a call of the parent with the same input answers where those are given (`reuse`), else its policy
decides (`core.resume`). A call that was in flight at the fork point has no answer, so its policy decides as well.

Rejected: one cursor over the events (calls in flight at once diverge when their order
changes), a dict from request to answer (two answers to one prompt collapse), and a context variable (invisible in
threads). Sans-IO: no file, clock, id or context; one lock makes it safe for threads, and what is done under it costs
the same at the first and at the last call while the program does what was recorded.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Final, NamedTuple, NoReturn, TypeAlias

from sftrace_otel.core import diagnose, match, miss
from sftrace_otel.core.causal import CausalOrder
from sftrace_otel.core.draws import Draws
from sftrace_otel.core.lookup import Asked, LiveCall, Lookup
from sftrace_otel.core.match import Normaliser, Rule
from sftrace_otel.core.miss import Miss
from sftrace_otel.core.plan import Deferred, RecordedCall
from sftrace_otel.core.report import ReplayReport, RunOutcome, compare_outcomes
from sftrace_otel.core.resume import Policies, Policy, carried, stubbed
from sftrace_otel.errors import (
    FormatError,
    ReplayError,
    ReplayExhaustedError,
    ReplayMismatchError,
    SettingsError,
)
from sftrace_otel.formats import Json

__all__ = ["Decision", "LiveCall", "Manual", "Miss", "ReplayReport", "RunOutcome", "Session"]

MODES: Final = ("frozen", "hybrid", "live", "resume")
ORDERS: Final = ("causal", "strict", "any")
RUNGS: Final = ("lineage", "digest", "redacted")

Manual: TypeAlias = Callable[[RecordedCall, LiveCall], "bool | str | None"]
"""Decides on a call whose recorded policy is `manual`: "frozen" or True (serve it), "live" (let it out; not in frozen
mode), "derived" (run it and compare), "forbidden", False or None (stop)."""

Approve: TypeAlias = Callable[[RecordedCall], bool]
"""A tool's own say on a call of it whose recorded policy is `manual`: True serves it."""

_NO_HOSTS: Final[Mapping[str, str]] = MappingProxyType({})


Ask: TypeAlias = Callable[[LiveCall], bool]
"""Asks whether a call may go out whose policy is `ask`."""


class Decision(NamedTuple):
    """What to do with a live call.

    Attributes:
        action: "serve" (answer from `call`), "derived" (run it here and give its end to `Session.returned` or
            `Session.raised`, which compare it), or "live" (let it out; never in frozen mode).
        call: The recorded call; None for a live call that has none.
        rung: How it was found: "lineage", "digest" or "redacted"; of a live call also "name"; in resume mode "reused"
            (a call of the parent) or "stub" (`call` was made up).
    """

    action: str
    call: RecordedCall | None
    rung: str | None


class Session:
    """Serves each recorded call at most once. Safe for any number of threads.

    Args:
        calls: The recorded calls, in the order in which they started.
        mode: "frozen": every call is served or stops the replay. "hybrid": `live_llms` go out, the rest is served.
            "live": LLM calls and `live_tools` go out, nothing is served. "resume": what is recorded is served, what
            comes after its end goes by `policies`.
        order: "causal", "strict" (the exact sequence of starts) or "any".
        ignore: What to leave out of matching, on both sides: JSON Pointers into the view, or functions.
        normalize: Normalisers, applied to every text on both sides, after `ignore`.
        map_hosts: `host[:port]` or origin in the recording → the live one that stands for it.
        live_llms: LLM calls that go out in hybrid mode: `provider/model` as recorded; `*` stands for anything.
        live_tools: Tools, and HTTP exchanges by the name of their event, that go out in live mode; likewise.
        manual: Decides on calls whose policy is `manual`; without it they stop the replay. It is called under the lock
            of the session: other threads wait for it.
        redact: Redacts a payload as the live side does, for recordings whose own redaction was weaker; applied to a
            recorded input only where it does not match as it is.
        policies: Resume mode: what becomes of calls past the end of the recording.
        ask: Decides on those whose policy is `ask`, under the lock of the session; without it they are blocked.
        reuse: Calls of the parent's recording that answer such calls where their input is the same.
        allow_redacted: Resume mode: tools and HTTP exchanges go out with placeholders of redacted values in them.

    Raises:
        SettingsError: An unknown mode or order; a rule or normaliser that is none; names that the mode has no use for,
            lacks, or that are not in the recording.
    """

    def __init__(
        self,
        calls: Iterable[RecordedCall],
        *,
        mode: str = "frozen",
        order: str = "causal",
        ignore: Sequence[Rule] = (),
        normalize: Sequence[Normaliser] = (),
        map_hosts: Mapping[str, str] = _NO_HOSTS,
        live_llms: Iterable[str] = (),
        live_tools: Iterable[str] = (),
        manual: Manual | None = None,
        redact: Callable[[Json], Json] | None = None,
        policies: Policies | None = None,
        ask: Ask | None = None,
        reuse: Iterable[RecordedCall] = (),
        allow_redacted: bool = False,
    ) -> None:
        _require(mode, MODES, "replay mode")
        _require(order, ORDERS, "replay order")
        self.mode = mode
        self.order = order
        self._ignore = _checked(ignore)
        self._normalize = _all_normalisers(normalize)
        self._manual = manual
        hosts = {match.normal_origin(live): match.normal_origin(recorded) for recorded, live in map_hosts.items()}
        rules = (*self._ignore, *map(match.normalising, self._normalize))
        self._lookup = Lookup(calls, hosts=hosts, rules=rules, redact=redact)
        self._live_llms, self._live_tools = _names(live_llms), _names(live_tools)
        self._require_names()
        places = CausalOrder(self._lookup.calls) if order == "causal" or mode == "resume" else None
        self._causal = places if order == "causal" else None
        self._places = places
        self._policies = policies or Policies(live_tools=self._live_tools, live_llms=self._live_llms)
        self._ask = ask
        self._allow_redacted = allow_redacted
        self._pool = Lookup((call for call in reuse if _is_whole(call)), hosts=hosts, rules=rules, redact=redact)
        self._inside_pool = _inside_by_id(self._pool.calls)
        self._inside = _inside(self._lookup.calls)
        self._swift = mode == "frozen" and order != "strict"
        self._next = 0
        self.draws: Draws | None = None
        """Recorded reads of the clock and random draws, where the recording has some."""
        self._lock = threading.RLock()
        self._latched: ReplayError | None = None
        self._matched = dict.fromkeys(RUNGS, 0)
        self._went_out: Counter[str] = Counter()
        self._replaced = 0
        self._derived = 0
        self._skipped = 0
        self._respelled = 0
        self._unhashed = 0
        self._answered_past: dict[str, list[tuple[str, RecordedCall]]] = {"stub": [], "reused": []}
        self._carried = 0
        self._blocked: str | None = None
        self.went_live: LiveCall | None = None
        """The first call that went out past the end of the recording."""

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
        *,
        runs: bool = False,
        inside_live: bool = False,
        redacted: Iterable[str] = (),
        own: bool = False,
    ) -> Decision:
        """Which recorded call answers `live`. It is used from then on, and what it enclosed is skipped with it.

        `otherwise` is the same call as another version recorded it; it is looked for where `live` has no answer.
        `approve` decides on a recorded call whose policy is manual, before `manual`; where it fails, it refuses.
        `runs`: the caller can run it here without letting it out, so that "derived" may be the answer. For resume mode
        `inside_live` says that it is made inside a call that went out, `redacted` what our own redaction took out of
        its payload (JSON Pointers), and `own` that it is the framework's own code, whose calls are asked for too.

        Raises:
            ReplayExhaustedError: Everything that could answer has been used, or the recording ends inside the call.
            ReplayMismatchError: The recording holds no such call, or its turn has not come; `miss` tells more.
            ReplayPolicyError: The recorded call may not be served, was cut when it was recorded, or the mode does not
                let it out.
            ReplayError: A rule, normaliser or `manual` failed. Once raised, each of these is raised again by every
                later call.
        """
        with self._lock:
            self._raise_latched()
            served = self._at_its_place(live) if otherwise is None else None
            if served is not None:
                return served
            try:
                forms = [Asked(form, self._lookup) for form in (live, otherwise) if form is not None]
                if self.mode == "resume":
                    return self._resume(forms, runs, approve, inside_live, redacted, own)
                if self.mode != "frozen" and self._lets_out(live):
                    return self._let_out(forms, approve)
                found = self._in_sequence(forms) if self.order == "strict" else self._find(forms)
                return self._answer(*found, runs, approve)
            except FormatError as error:
                self._stop(diagnose.cannot_match(self._lookup, error))
            except ReplayError as error:
                self._stop(error)

    def same(self, live: LiveCall) -> Decision | None:
        """Serve `live` if the call recorded at its place has its very digest; None where that takes `decide`.

        For a digest of the input as the program gave it: the recording holds exactly this, so there is nothing in it
        to hide. `payload` may be left out. Raises what stopped the replay.
        """
        with self._lock:
            self._raise_latched()
            return self._at_its_place(live)

    def _at_its_place(self, live: LiveCall) -> Decision | None:
        """Serve the recorded call that `live` is beyond doubt, where nothing but serving it is left to decide.

        The one at its lineage, with the live digest, whole, frozen, its turn come: what all else would come to.
        """
        index = self._lookup.same(live) if self._swift else None
        if index is None:
            return None
        call = self._lookup.calls[index]
        if call.policy != "frozen" or call.outcome.truncated or call.outcome.status == "missing":
            return None
        if self._causal is not None and self._causal.blocker(index) is not None:
            return None
        self._matched["lineage"] += 1
        self._mark(index)
        if index in self._inside:
            self._skip_inside(index)
        return Decision("serve", call, "lineage")

    def _answer(self, asked: Asked, index: int, rung: str, runs: bool, approve: Approve | None) -> Decision:
        """What to do with a live call that equals the recorded one at `index`: as its policy says."""
        call = self._lookup.calls[index]
        action = self._by_policy(index, asked, runs, approve)
        if action == "live":
            return self._out(asked, index, rung)
        if self.mode == "live" and action == "serve":
            raise diagnose.refused(self._lookup, asked, index, "not_named")
        self._require_whole(index, asked)
        if action == "derived":
            self._derived += 1
            self._mark(index)
        else:
            self._use(index, rung, asked)
        return Decision(action, call, rung)

    def _by_policy(self, index: int, asked: Asked, runs: bool, approve: Approve | None) -> str:
        """ "serve", "derived" or "live". Raises ReplayPolicyError for what the policy forbids."""
        call = self._lookup.calls[index]
        policy = call.policy
        if policy == "manual" and approve is not None:
            policy = "frozen" if _approved(call, approve) else "forbidden"
            if policy == "forbidden":
                raise diagnose.refused(self._lookup, asked, index, "manual_refused")
        elif policy == "manual" and self._manual is not None:
            try:
                said = self._manual(call, asked.live)
            except Exception as error:
                raise ReplayError(f"the manual callback failed: {error!r}; mend it", code="manual_failed") from error
            policy = said if isinstance(said, str) else ("frozen" if said is True else "forbidden")
            if policy == "forbidden":
                raise diagnose.refused(self._lookup, asked, index, "manual_refused")
            if policy == "live":
                if self.mode == "frozen":
                    raise diagnose.refused(self._lookup, asked, index, "manual_live")
                return "live"
            if policy not in ("frozen", "derived"):
                raise ReplayError(
                    f"the manual callback answered {said!r}: frozen, live, derived or forbidden", code="manual_failed"
                )
        if policy in ("forbidden", "manual"):
            raise diagnose.refused(self._lookup, asked, index, policy)
        return "derived" if policy == "derived" and runs else "serve"

    # --- letting out --------------------------------------------------------------------------------------------------

    def _lets_out(self, live: LiveCall) -> bool:
        """Whether the mode lets a call out, whatever is recorded."""
        if live.kind == "llm":
            return self.mode == "live" or _is_named(_label(live.provider, live.model), self._live_llms)
        return self.mode == "live" and _is_named(live.name, self._live_tools)

    def _let_out(self, forms: Sequence[Asked], approve: Approve | None) -> Decision:
        asked, index, rung = self._counterpart(forms)
        if index is not None:
            call = self._lookup.calls[index]
            if call.policy in ("forbidden", "manual") and self._by_policy(index, asked, False, approve) == "serve":
                return self._answer_as_asked(asked, index)
        return self._out(asked, index, rung)

    def _answer_as_asked(self, asked: Asked, index: int) -> Decision:
        """`manual` said to serve a call that would have gone out."""
        self._require_whole(index, asked)
        self._use(index, "lineage", asked)
        return Decision("serve", self._lookup.calls[index], "lineage")

    def _out(self, asked: Asked, index: int | None, rung: str | None) -> Decision:
        self._went_out[asked.title] += 1
        if index is None:
            return Decision("live", None, None)
        self._replaced += 1
        self._mark(index)
        self._skip_inside(index, only=None if self.mode == "live" else "http")
        return Decision("live", self._lookup.calls[index], rung)

    def _counterpart(self, forms: Sequence[Asked]) -> tuple[Asked, int | None, str | None]:
        """The recorded call whose place a call takes that goes out; its input is not compared."""
        lookup = self._lookup
        if self.order == "strict":
            index = self._up_next()
            asked = forms[0]
            if index == len(lookup):
                raise diagnose.no_answer(lookup, asked)
            if not lookup.named_alike(index, asked):
                raise diagnose.out_of_order(lookup, asked, index, self.order)
            return asked, index, "name"
        for asked in forms:
            for index in lookup.at(asked.live.lineage):
                if lookup.named_alike(index, asked):
                    return asked, index, "lineage"
        for asked in forms:
            for index in lookup.equal(asked):
                return asked, index, "digest"
        for asked in forms:
            for index in lookup.same_kind(asked):
                return asked, index, "name"
        return forms[0], None, None

    # --- resuming -----------------------------------------------------------------------------------------------------

    def _resume(
        self,
        forms: Sequence[Asked],
        runs: bool,
        approve: Approve | None,
        inside: bool,
        redacted: Iterable[str],
        own: bool,
    ) -> Decision:
        """As recorded while the recording lasts; past its end as the parent or the policy says."""
        found = self._in_sequence_or_none(forms) if self.order == "strict" else self._found(forms)
        if found is None:
            if self._is_due(forms[0].live.lineage):
                raise diagnose.no_answer(self._lookup, self._nearer(forms))
            return self._past(forms, None, inside, redacted, own)
        asked, index, _ = found
        call = self._lookup.calls[index]
        if call.outcome.status == "missing" and not call.outcome.truncated and call.policy in ("frozen", "live"):
            return self._past([asked], index, inside, redacted, own)
        return self._answer(*found, runs, approve)

    def _in_sequence_or_none(self, forms: Sequence[Asked]) -> tuple[Asked, int, str] | None:
        return None if self._up_next() == len(self._lookup) else self._in_sequence(forms)

    def _is_due(self, lineage: str | None) -> bool:
        """Whether a recorded call has to come before a call at `lineage` that is not recorded."""
        lookup, places = self._lookup, self._places
        assert places is not None
        if lookup.used_count == len(lookup):
            return False
        if self.order == "strict" or (lineage is not None and places.due(lineage) is not None):
            return True
        if self.order == "any":
            return False
        # Without a lineage on one side nothing is known but that what had ended came first.
        return any(
            not lookup.used[index]
            and lookup.calls[index].ended is not None
            and (lineage is None or lookup.calls[index].lineage is None)
            for index in range(self._up_next(), len(lookup))
        )

    def _past(
        self, forms: Sequence[Asked], index: int | None, inside: bool, redacted: Iterable[str], own: bool
    ) -> Decision:
        """A call past the end of the recording; `index`: the recorded one that was in flight there."""
        live = forms[0].live
        answer, rung = self._of_parent(form.live for form in forms), "reused"
        if answer is None and not own:
            policy = self._policies.of(live, inside_live=inside)
            self._require_let(forms[0], policy)
            if policy.action == "stub":
                answer, rung = stubbed(live, policy.stub), "stub"
        if answer is None:
            self._note_carried(forms[0], redacted)
        if index is not None:
            self._replaced += 1
            self._mark(index)
            if answer is not None:
                self._skip_inside(index)
        if answer is not None:
            self._answered_past[rung].append((forms[0].title, answer))
            return Decision("serve", answer, rung)
        self._went_out[forms[0].title] += 1
        self.went_live = self.went_live or live
        return Decision("live", None if index is None else self._lookup.calls[index], None)

    def _require_let(self, asked: Asked, policy: Policy) -> None:
        """Raise ReplayPolicyError for a call that its policy blocks, or that nobody lets go."""
        if policy.action in ("live", "stub"):
            return
        if policy.action == "ask" and self._ask is not None and self._ask(asked.live):
            return
        self._blocked = asked.title
        raise diagnose.blocked(self._lookup, asked, policy)

    def _note_carried(self, asked: Asked, redacted: Iterable[str]) -> None:
        """Count the placeholders of redacted values that go out. Raises ReplayPolicyError where they must not."""
        count = carried(asked.live.payload, redacted)
        if count and asked.live.kind != "llm" and not self._allow_redacted:
            self._blocked = asked.title
            raise diagnose.would_carry(self._lookup, asked, count)
        self._carried += count

    def _of_parent(self, forms: Iterable[LiveCall]) -> RecordedCall | None:
        """The parent's call with the same input, none twice: at the same place first."""
        if not len(self._pool):
            return None
        for live in forms:
            asked = Asked(live, self._pool)
            there = (index for index in self._pool.at(live.lineage) if self._pool.equals(index, asked))
            index = next(there, None)
            index = next(self._pool.equal(asked), None) if index is None else index
            if index is not None:
                self._take(index)
                return self._pool.calls[index]
        return None

    def _take(self, index: int) -> None:
        """A call of the parent is used, with what it enclosed."""
        if not self._pool.used[index]:
            self._pool.mark(index)
            for child in self._inside_pool.get(self._pool.calls[index].index, ()):
                self._take(child)

    # --- derived ------------------------------------------------------------------------------------------------------

    def returned(self, call: RecordedCall, output: Json) -> None:
        """A derived call ran and gave `output`. Raises ReplayMismatchError, latched, where it gave another one."""
        outcome = call.outcome
        if outcome.status != "ok":
            self._derived_differs(call, (match.Difference("", _failure(call), output),))
        elif not match.equal_where_redacted(outcome.output, output):
            self._derived_differs(call, tuple(match.iter_differences(outcome.output, output)))

    def raised(self, call: RecordedCall, error_type: str) -> None:
        """A derived call ran and raised. Raises ReplayMismatchError, latched, where it had not, or another class."""
        if call.outcome.status != "error" or call.outcome.error_type != error_type:
            recorded = _failure(call) if call.outcome.status == "error" else call.outcome.output
            self._derived_differs(call, (match.Difference("", recorded, f"raised {error_type}"),))

    def _derived_differs(self, call: RecordedCall, found: Sequence[match.Difference]) -> NoReturn:
        with self._lock:
            self._stop(diagnose.derived_differs(self._lookup, call, found))

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
                live=sum(self._went_out.values()),
                live_calls=dict(self._went_out),
                replaced=self._replaced,
                derived=self._derived,
                skipped=self._skipped,
                respelled=self._respelled,
                unhashed=self._unhashed,
                diverged=stopped,
                ended=self._ended(stopped),
                unused=tuple(miss.describe(call) for call in self.unused()),
                expected=expected,
                outcome=outcome,
                same_outcome=same,
                outcome_differences=parted,
                ignored=tuple(map(_rule_name, self._ignore)),
                normalised=tuple(map(match.normaliser_name, self._normalize)),
                stubbed=Counter(title for title, _ in self._answered_past["stub"]),
                reused=len(self._answered_past["reused"]),
                reused_tokens=sum(_tokens(call) for _, call in self._answered_past["reused"]),
                blocked=self._blocked,
                carried=self._carried,
                nondeterminism={} if self.draws is None else self.draws.report(),
            )

    def _ended(self, stopped: ReplayError | None) -> bool:
        """Whether all that was recorded had been used when the program asked for more; a call that was blocked may be
        the one that was in flight at its end."""
        lookup = self._lookup
        if self._blocked is None:
            return isinstance(stopped, ReplayExhaustedError) and lookup.used_count == len(lookup)
        return all(lookup.calls[index].outcome.status == "missing" for index in lookup.unused())

    # --- finding ------------------------------------------------------------------------------------------------------

    def _find(self, forms: Sequence[Asked]) -> tuple[Asked, int, str]:
        """The recorded call that answers, by the first rung that has one whose turn has come, and to which form."""
        found = self._found(forms)
        if found is not None:
            return found
        if self.mode == "live":
            raise diagnose.not_let_out(self._lookup, forms[0])
        raise diagnose.no_answer(self._lookup, self._nearer(forms))

    def _found(self, forms: Sequence[Asked]) -> tuple[Asked, int, str] | None:
        """The same; None where there is none. Raises ReplayMismatchError where there is one whose turn has not come."""
        early: tuple[Asked, int] | None = None
        for asked in forms:
            for index, rung in self._candidates(asked):
                blocker = None if self._causal is None else self._causal.blocker(index)
                if blocker is None:
                    return asked, index, rung
                early = (asked, blocker) if early is None else early
        if early is not None:
            raise diagnose.out_of_order(self._lookup, *early, self.order)
        return None

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
        index = self._up_next()
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

    def _up_next(self) -> int:
        """The first recorded call that is not used; as many as there are when all are."""
        while self._next < len(self._lookup) and self._lookup.used[self._next]:
            self._next += 1
        return self._next

    # --- serving ------------------------------------------------------------------------------------------------------

    def _require_whole(self, index: int, asked: Asked) -> None:
        call = self._lookup.calls[index]
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

    def _skip_inside(self, index: int, only: str | None = None) -> None:
        """The calls that ran inside a served one do not run now; `only` those of one kind."""
        inside = list(self._inside.get(index, ()))
        while inside:
            child = inside.pop()
            if not self._lookup.used[child] and only in (None, self._lookup.calls[child].kind):
                self._mark(child)
                self._skipped += 1
                inside.extend(self._inside.get(child, ()))

    def _mark(self, index: int) -> None:
        self._lookup.mark(index)
        if self._places is not None:
            self._places.remove(index)

    def _require_names(self) -> None:
        """Names are asked for, known and of use."""
        if self.mode == "hybrid" and not self._live_llms:
            raise SettingsError(
                "hybrid mode needs the LLM calls that go out: live_llms=[…], --live-llm PROVIDER/MODEL or "
                "OTEL_SFTRACE_REPLAY_LIVE_LLMS"
            )
        if self.mode == "resume":  # what comes past a fork point need not be in the fork
            return
        if self._live_llms and self.mode != "hybrid":
            raise SettingsError(f"live LLMs are for hybrid mode and for resume; {self.mode} mode has no use for them")
        if self._live_tools and self.mode != "live":
            raise SettingsError(f"live tools are for live mode and for resume; {self.mode} mode has no use for them")
        llms = {_label(call.provider, call.model) for call in self.calls if call.kind == "llm"}
        tools = {call.name for call in self.calls if call.kind != "llm"}
        for what, names, known in (("LLM", self._live_llms, llms), ("tool", self._live_tools, tools)):
            for name in names:
                if not any(_is_named(one, (name,)) for one in known):
                    there = ", ".join(map(miss.printable, sorted(known)[:8])) or "none"
                    raise SettingsError(f"live {what} {name!r} is not in the recording, which has {there}")

    # --- stopping -----------------------------------------------------------------------------------------------------

    def _raise_latched(self) -> None:
        if self._latched is not None:
            raise _twin(self._latched)

    def _stop(self, error: ReplayError) -> NoReturn:
        """Latch `error` without the frames it came through, and raise one like it."""
        self.latch(error)
        raise _twin(error) from error.__cause__


def _approved(call: RecordedCall, approve: Approve) -> bool:
    try:
        return approve(call) is True
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


def _inside_by_id(calls: Sequence[RecordedCall]) -> dict[int, list[int]]:
    """Index of a call in its own recording → places in `calls` of those directly inside it."""
    inside: defaultdict[int, list[int]] = defaultdict(list)
    for place, call in enumerate(calls):
        if call.parent is not None:
            inside[call.parent].append(place)
    return dict(inside)


def _is_whole(call: RecordedCall) -> bool:
    """Whether a call of the parent can answer another one."""
    outcome = call.outcome
    return outcome.status != "missing" and not outcome.truncated and call.policy not in ("forbidden", "manual")


def _tokens(call: RecordedCall) -> int:
    """Tokens that an LLM call took, as far as they were recorded."""
    event = call.outcome.held.event if isinstance(call.outcome.held, Deferred) else None
    total = getattr(event, "total_tokens", None)
    if total is not None:
        return int(total)
    return sum(getattr(event, f"{kind}_tokens", None) or 0 for kind in ("prompt", "completion"))


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


def _all_normalisers(normalize: Sequence[Normaliser]) -> tuple[Normaliser, ...]:
    if isinstance(normalize, str):
        raise SettingsError(f"normalize={normalize!r} is one string; give a list of normalisers")
    return tuple(normalize)


def _names(names: Iterable[str]) -> tuple[str, ...]:
    found = (names,) if isinstance(names, str) else tuple(names)
    if not all(isinstance(name, str) and name for name in found):
        raise SettingsError("names of live calls are texts that are not empty")
    return found


def _is_named(label: str, names: Iterable[str]) -> bool:
    return any(label == name or fnmatchcase(label, name) for name in names)


def _label(provider: str | None, model: str | None) -> str:
    return f"{provider}/{model}" if provider else model or ""


def _failure(call: RecordedCall) -> Json:
    return f"raised {call.outcome.error_type}"


def _rule_name(rule: Rule) -> str:
    return rule if isinstance(rule, str) else getattr(rule, "__qualname__", type(rule).__name__)
