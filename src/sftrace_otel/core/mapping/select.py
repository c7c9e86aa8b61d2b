# SPDX-License-Identifier: Apache-2.0
"""Which spans of a tree become calls, when several layers describe the same one.

Decision: with an LLM SDK's instrumentation, a framework's and the HTTP client's at once, one model call shows up as up
to four nested spans. Spans of one kind on one path that agree on what was called are one call, told by the span with
the most content; an HTTP exchange below an LLM call is part of it. Rejected: deciding by scope name, since the list of
instrumentations never ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from sftrace_otel.core.mapping.model import MappedCall, SpanRecord

__all__ = ["Past", "Selected", "looks_like_call", "select_calls"]

_INFERENCE = frozenset({"chat", "generate_content", "text_completion", "embeddings", "fetch_response", "execute_tool"})
_KINDS = {
    "openinference.span.kind": frozenset({"LLM", "TOOL", "EMBEDDING"}),
    "langfuse.observation.type": frozenset({"generation", "tool", "embedding"}),
    "traceloop.span.kind": frozenset({"tool"}),
}
_SIGNS = ("gen_ai.request.model", "gen_ai.tool.name", "llm.request.type", "request_data", "mcp.method.name")


class Past(msgspec.Struct, frozen=True):
    """What is remembered of an ended span: its parent, its call (without content), whether that is recorded, and
    whether a boundary of ours (`own`) did it."""

    parent_id: str | None
    call: MappedCall | None = None
    recorded: bool = False
    own: bool = False


class Selected(msgspec.Struct, frozen=True, kw_only=True):
    """One call: the span that tells it, other spans that are the same call or part of it, and the call around it."""

    record: SpanRecord
    call: MappedCall
    absorbed: tuple[str, ...] = ()
    above: str | None = None


def looks_like_call(attributes: Mapping[str, object]) -> bool:
    """Whether a span that is still open may turn out to be an LLM or tool call: spans below it must wait then."""
    operation = attributes.get("gen_ai.operation.name")
    if operation is not None:
        return operation in _INFERENCE
    for key, kinds in _KINDS.items():
        kind = attributes.get(key)
        if kind is not None:
            return kind in kinds
    return any(sign in attributes for sign in _SIGNS)


def select_calls(
    spans: Sequence[tuple[SpanRecord, MappedCall | None]],
    past: Mapping[str, Past] | None = None,
    below: Iterable[str] = (),
) -> list[Selected]:
    """The calls of ended spans, outer before inner and earlier before later, each once.

    `spans`: the spans of a tree with what `map_content` says of each. `past`: other spans by id, and those of `spans`
    whose call is recorded already; a span that is the same call as a recorded one, or a part of it, is left out.
    `below`: spans of `past` that are below those of `spans` and may be the same call.
    """
    return _Selection(spans, past or {}).result(below)


class _Selection:
    def __init__(self, spans: Sequence[tuple[SpanRecord, MappedCall | None]], past: Mapping[str, Past]) -> None:
        self._records = {record.span_id: record for record, _ in spans}
        self._calls = {record.span_id: call for record, call in spans if call is not None}
        self._past = past
        self._heads: dict[str, str] = {}

    def _parent(self, span_id: str) -> str | None:
        record = self._records.get(span_id) or self._past.get(span_id)
        return None if record is None else record.parent_id

    def _call(self, span_id: str) -> MappedCall | None:
        call = self._calls.get(span_id)
        if call is None:
            past = self._past.get(span_id)
            call = None if past is None else past.call
        return call

    def _recorded(self, span_id: str) -> bool:
        past = self._past.get(span_id)
        return past is not None and past.recorded

    def result(self, below: Iterable[str]) -> list[Selected]:
        groups: dict[str, list[str]] = {}
        for span_id in dict.fromkeys([*self._records, *filter(self._recorded, below)]):
            if self._call(span_id) is not None:
                groups.setdefault(self._head(span_id), []).append(span_id)
        chosen = [
            self._selected(head, members)
            for head, members in groups.items()
            if not self._recorded(head) and not any(map(self._recorded, members))
        ]
        return sorted(chosen, key=lambda item: (self._start(item.record), self._depth(item)))

    def _start(self, record: SpanRecord) -> int:
        return self._records.get(self._head(record.span_id), record).start_ns

    def _selected(self, head: str, members: list[str]) -> Selected:
        best = max(members, key=lambda member: (self._content(member), member == head))
        above = self._call_above(head)
        return Selected(
            record=self._records[best],
            call=self._calls[best],
            absorbed=tuple(member for member in members if member != best),
            above=above,
        )

    def _head(self, span_id: str) -> str:
        """The outermost span of the call that this span belongs to."""
        found = self._heads.get(span_id)
        if found is None:
            self._heads[span_id] = span_id  # parents may form a circle: spans are other people's data
            above = self._call_above(span_id)
            found = self._head(above) if above is not None and self._same(span_id, above) else span_id
            self._heads[span_id] = found
        return found

    def _call_above(self, span_id: str) -> str | None:
        seen = {span_id}
        parent = self._parent(span_id)
        while parent is not None and parent not in seen:
            if self._call(parent) is not None:
                return parent
            seen.add(parent)
            parent = self._parent(parent)
        return None

    def _same(self, below: str, above: str) -> bool:
        inner, outer = self._call(below), self._call(above)
        if inner is None or outer is None:
            return False
        if inner.kind == "http":
            return outer.kind == "llm" or (outer.kind == "http" and self._recorded(above))
        return inner.kind == outer.kind and _agree(inner, outer)

    def _content(self, span_id: str) -> int:
        call = self._calls[span_id]
        return -1 if call.kind == "http" else 2 - len(call.missing) - len(call.cut)

    def _depth(self, item: Selected) -> int:
        seen: set[str] = set()
        above = item.above
        while above is not None and above not in seen:
            seen.add(above)
            above = self._call_above(above)
        return len(seen)


def _agree(inner: MappedCall, outer: MappedCall) -> bool:
    if inner.kind == "tool":
        unknown = "input" in inner.missing or "input" in outer.missing
        return _last(inner.name) == _last(outer.name) and (unknown or inner.input == outer.input)
    if inner.response_id and outer.response_id:
        return inner.response_id == outer.response_id
    return _bare(inner.model) == _bare(outer.model)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _bare(model: str | None) -> str:
    return (model or "").rpartition("/")[2]
