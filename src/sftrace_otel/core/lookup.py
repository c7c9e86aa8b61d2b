# SPDX-License-Identifier: Apache-2.0
"""Which recorded calls equal a live one, and which of them are left.

Decision: three indexes, each built when first asked for. Calls by lineage cost nothing but a dict; the digests of all
recorded calls are computed only when lineage has failed once, so that opening a long recording stays cheap. A stored
`input_hash` that equals the live payload's canonical digest proves equality without a view. Rejected: one index of all
digests up front (opening pays for a rung that most replays never reach).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from sftrace_otel.core import match, miss
from sftrace_otel.core.match import Difference, Rule
from sftrace_otel.core.plan import RecordedCall
from sftrace_otel.errors import ReplayError
from sftrace_otel.formats import Json

Identity: TypeAlias = tuple[str | None, ...]
"""What two calls share before their payloads are compared; the method and the URL are in the view."""


class LiveCall(NamedTuple):
    """A call that the program is about to make.

    Attributes:
        kind: "tool", "llm" or "http".
        name: Tool name, `http METHOD scheme://host/path`, or the model.
        provider: LLM calls only.
        model: LLM calls only.
        method: LLM calls: SDK path; HTTP calls: the method.
        payload: Its prepared input: redacted by the policy of the recording.
        lineage: Where in the program it is made, None where that is not known.
        digest: Canonical digest of `payload` where the caller has it (`Prepared.digest`): saves computing a view.
    """

    kind: str
    name: str
    provider: str | None = None
    model: str | None = None
    method: str | None = None
    payload: Json = None
    lineage: str | None = None
    digest: str | None = None


class Asked:
    """A live call with what is computed from it, each at most once and only when asked for."""

    __slots__ = ("_digest", "_identity", "_lookup", "_redacted", "_view", "live")

    def __init__(self, live: LiveCall, lookup: Lookup) -> None:
        self.live = live
        self._lookup = lookup
        self._identity: Identity | None = None
        self._view: tuple[Json] | None = None
        self._digest: str | None = None
        self._redacted: bool | None = None

    @property
    def identity(self) -> Identity:
        """What it shares with every call that could answer it."""
        if self._identity is None:
            live = self.live
            self._identity = self._lookup.identity(live.kind, live.name, live.provider, live.model, live.payload)
        return self._identity

    @property
    def view(self) -> Json:
        """What of the payload takes part in matching."""
        if self._view is None:
            self._view = (self._lookup.seen(self.live.kind, self.live.name, self.live.payload),)
        return self._view[0]

    @property
    def digest(self) -> str:
        """The key of the view."""
        if self._digest is None:
            self._digest = match.digest(self.view)
        return self._digest

    @property
    def redacted(self) -> bool:
        """Whether something in the live view is redacted."""
        if self._redacted is None:
            self._redacted = match.holds_redaction(self.view)
        return self._redacted

    @property
    def title(self) -> str:
        """The call in words."""
        live = self.live
        return miss.title(live.kind, live.name, live.provider, live.model, live.method)


class Lookup:
    """The recorded calls, which of them are used, and the indexes. Not safe for threads by itself.

    Args:
        calls: The recorded calls in the order in which they started.
        hosts: Live `host[:port]` or origin → the recorded one, both as `match.normal_origin` spells them.
        rules: What to leave out of matching.
        redact: Redacts a recorded payload as the live side does, None where both sides are redacted alike.
    """

    def __init__(
        self,
        calls: Iterable[RecordedCall],
        *,
        hosts: Mapping[str, str],
        rules: Sequence[Rule],
        redact: Callable[[Json], Json] | None,
    ) -> None:
        self.calls: tuple[RecordedCall, ...] = tuple(calls)
        self.used = bytearray(len(self.calls))
        self.used_count = 0
        self._hosts = hosts
        self._rules = rules
        self._redact = redact
        self._digests: list[str | None] = [None] * len(self.calls)
        self._identities: list[Identity | None] = [None] * len(self.calls)
        self._by_lineage: dict[str, tuple[int, ...]] = {}
        for index, call in enumerate(self.calls):
            if call.lineage is not None:
                self._by_lineage[call.lineage] = (*self._by_lineage.get(call.lineage, ()), index)
        self._by_digest: dict[tuple[Identity, str], list[int]] | None = None
        self._by_identity: dict[Identity, list[int]] | None = None
        self._by_name: dict[Identity, list[int]] | None = None

    def __len__(self) -> int:
        return len(self.calls)

    def mark(self, index: int) -> None:
        """The call at `index` is used from now on."""
        self.used[index] = 1
        self.used_count += 1

    # --- what a call is ---------------------------------------------------------------------------------------------

    def identity(self, kind: str, name: str, provider: str | None, model: str | None, payload: Json) -> Identity:
        """Kind and name of a tool; provider and model of an LLM call; of an HTTP call the kind."""
        if kind == "llm":
            return (kind, self._hosts.get(provider, provider) if provider else provider, model)
        if kind == "http" and isinstance(payload, dict) and isinstance(payload.get("url"), str):
            return (kind,)
        return (kind, name)

    def identity_of(self, index: int) -> Identity:
        """The identity of a recorded call."""
        identity = self._identities[index]
        if identity is None:
            call = self.calls[index]
            payload = call.input if call.kind == "http" else None
            identity = self._identities[index] = self.identity(call.kind, call.name, call.provider, call.model, payload)
        return identity

    def seen(self, kind: str, name: str, payload: Json) -> Json:
        """The view of a payload, rules applied.

        Raises:
            ReplayError: A rule raised; code `ignore_rule_failed`.
        """
        view = match.view(kind, payload, hosts=self._hosts)
        if not self._rules:
            return view
        try:
            return match.apply_rules(self._rules, kind, name, view)
        except Exception as error:
            raise ReplayError(f"an ignore rule failed: {error!r}; mend it", code="ignore_rule_failed") from error

    def view(self, index: int) -> Json:
        """The view of a recorded call as it is stored."""
        call = self.calls[index]
        return self.seen(call.kind, call.name, call.input)

    def _redacted_view(self, index: int, redact: Callable[[Json], Json]) -> Json:
        """The view of a recorded call as the live side's redaction would have left it."""
        call = self.calls[index]
        return self.seen(call.kind, call.name, redact(call.input))

    def digest(self, index: int) -> str:
        """The key of a recorded call's view."""
        digest = self._digests[index]
        if digest is None:
            digest = self._digests[index] = match.digest(self.view(index))
        return digest

    # --- which calls answer -----------------------------------------------------------------------------------------

    def at(self, lineage: str | None) -> Iterator[int]:
        """Unused calls recorded at `lineage`: one, or none, or more where a bundle joins several processes."""
        places = () if lineage is None else self._by_lineage.get(lineage, ())
        return (index for index in places if not self.used[index])

    def same(self, live: LiveCall) -> int | None:
        """The unused call at the place of `live` whose stored hash proves it equal; None where there is not just one
        call, or that takes a closer look."""
        places = self._by_lineage.get(live.lineage or "", ())
        if len(places) != 1 or self.used[places[0]]:
            return None
        call = self.calls[places[0]]
        if call.input_hash is None or call.input_hash != live.digest or call.kind != live.kind:
            return None
        return places[0] if _same_owner(call, live) else None

    def equals(self, index: int, asked: Asked) -> bool:
        """Whether a recorded call equals the live one."""
        call, live = self.calls[index], asked.live
        if call.kind != live.kind:
            return False
        if call.input_hash is not None and call.input_hash == live.digest and _same_owner(call, live):
            return True
        if self.identity_of(index) != asked.identity:
            return False
        if self._digests[index] is None and match.spelled_alike(self.view(index), asked.view):
            return True
        return self.digest(index) == asked.digest

    def equal(self, asked: Asked) -> Iterator[int]:
        """Unused calls that equal the live one, in recorded order."""
        if self._by_digest is None:
            self._by_digest = {}
            for index in range(len(self.calls) - 1, -1, -1):
                if not self.used[index]:
                    self._by_digest.setdefault((self.identity_of(index), self.digest(index)), []).append(index)
        return self._unused(self._by_digest.get((asked.identity, asked.digest), []))

    def equal_where_redacted(self, asked: Asked) -> Iterator[int]:
        """Unused calls that equal the live one but for what is redacted: at its own place first, then in order."""
        if self._by_identity is None:
            self._by_identity = {}
            for index in range(len(self.calls) - 1, -1, -1):
                if self._redact is not None or match.holds_redaction(self.calls[index].input):
                    self._by_identity.setdefault(self.identity_of(index), []).append(index)
        queue = self._by_identity.get(asked.identity)
        if queue:
            yield from (index for index in self.at(asked.live.lineage) if self.agrees(index, asked))
            yield from (index for index in self._unused(queue) if self.agrees(index, asked))

    def agrees(self, index: int, asked: Asked) -> bool:
        """Whether a recorded call equals the live one but for what is redacted, on either side.

        A mark in the recording stands for anything. A mark in the live payload stands only for what the live side's
        redaction makes of the recorded text: the recording shows what is a secret on this machine.
        """
        if self.identity_of(index) != asked.identity:
            return False
        if match.equal_where_redacted(self.view(index), asked.view):
            return True
        if self._redact is None or not asked.redacted:
            return False
        return match.digest(self._redacted_view(index, self._redact)) == asked.digest

    def differences(self, index: int, asked: Asked) -> Iterator[Difference]:
        """Where a recorded call and the live one part; recorded values are shown as the live side would redact them."""
        found = match.iter_differences(self.view(index), asked.view)
        if self._redact is None:
            return found
        return _hidden(found, self._redacted_view(index, self._redact))

    def same_kind(self, asked: Asked) -> Iterator[int]:
        """Unused calls of the same tool, model or URL whatever their input, in recorded order."""
        if self._by_name is None:
            self._by_name = {}
            for index in range(len(self.calls) - 1, -1, -1):
                if not self.used[index]:
                    self._by_name.setdefault(self._named(index), []).append(index)
        return self._unused(self._by_name.get(self.name_of(asked), []))

    def named_alike(self, index: int, asked: Asked) -> bool:
        """Whether a recorded call is one of the same tool, model or URL as the live one."""
        return self._named(index) == self.name_of(asked)

    def _named(self, index: int) -> Identity:
        call = self.calls[index]
        return self._what(self.identity_of(index), call.kind, call.input if call.kind == "http" else None)

    def name_of(self, asked: Asked) -> Identity:
        """What a call is, less its input: of an HTTP call its method and URL."""
        return self._what(asked.identity, asked.live.kind, asked.live.payload)

    def _what(self, identity: Identity, kind: str, payload: Json) -> Identity:
        if kind != "http":
            return identity
        seen = match.view(kind, payload, hosts=self._hosts)
        where = (seen.get("method"), seen.get("url")) if isinstance(seen, dict) else ()
        return (*identity, *map(str, where))

    def _unused(self, queue: list[int]) -> Iterator[int]:
        """The unused calls of a queue, whose first one is last; used ones at its front are dropped for good."""
        while queue and self.used[queue[-1]]:
            queue.pop()
        return (index for index in reversed(queue) if not self.used[index])

    def twins(self, asked: Asked) -> list[int]:
        """All calls that equal the live one, used or not, redacted or not. Walks the whole recording."""
        return [
            index
            for index, call in enumerate(self.calls)
            if self.equals(index, asked) or (match.holds_redaction(call.input) and self.agrees(index, asked))
        ]

    def unused(self) -> Iterator[int]:
        """Unused calls in recorded order. Walks the whole recording."""
        return (index for index in range(len(self.calls)) if not self.used[index])


def _hidden(found: Iterable[Difference], redacted: Json) -> Iterator[Difference]:
    """`found` with recorded values taken from their redacted view, less what is no difference there."""
    for item in found:
        value = item.recorded
        if not isinstance(value, match.Missing):
            value = match.value_at(redacted, item.pointer)
            if isinstance(value, str) and match.REDACTED in value and value == item.live:
                continue
        yield Difference(item.pointer, value, item.live)


def _same_owner(call: RecordedCall, live: LiveCall) -> bool:
    """Whether two calls of one kind have the same identity, as far as that is plain to see."""
    if call.kind == "llm":
        return call.model == live.model and call.provider == live.provider
    return call.name == live.name
