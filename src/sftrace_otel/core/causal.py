# SPDX-License-Identifier: Apache-2.0
"""Happens-before among recorded calls: which call has to be used before another may be.

A must be used before B only if A had finished before B started and A was made in B's own scope, or in a scope above it
before the spawn (or the call) that led to B. A lineage such as "2/t1/0" names the scopes: "2/t1/" is B's own, "2/" is
above it and left in slot 1, the root is above that and left in slot 2. Calls of sibling tasks never wait for each
other, nor does a call without lineage.

Decision: one linked list of unused calls per scope, in slot order, so that asking and removing cost the depth of the
lineage plus the calls that were in flight, whatever the length of the recording. Rejected: a graph of all pairs
(quadratic), and a low-water mark per scope (one call left open would make every later question walk the whole scope).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from sftrace_otel.core.plan import RecordedCall

_END: Final = -1


class CausalOrder:
    """The unused calls of a recording and the order between them. Not safe for threads by itself."""

    def __init__(self, calls: Sequence[RecordedCall]) -> None:
        self._calls = calls
        self._scopes = [_scope(call.lineage) for call in calls]
        self._slots = [_own_slot(call.lineage) for call in calls]
        self._after = [_END] * len(calls)
        self._before = [_END] * len(calls)
        self._first: dict[str, int] = {}
        last: dict[str, int] = {}
        for index in self._placed():
            self._append(index, last)

    def _placed(self) -> list[int]:
        """Calls with a lineage, in slot order; recorded order is nearly that."""
        placed = [index for index, slot in enumerate(self._slots) if slot != _END]
        placed.sort(key=self._slots.__getitem__)
        return placed

    def _append(self, index: int, last: dict[str, int]) -> None:
        scope = self._scopes[index]
        previous = last.get(scope, _END)
        if previous == _END:
            self._first[scope] = index
        else:
            self._after[previous] = index
            self._before[index] = previous
        last[scope] = index

    def remove(self, index: int) -> None:
        """The call has been used."""
        if self._slots[index] == _END:
            return
        before, after = self._before[index], self._after[index]
        if before == _END:
            self._first[self._scopes[index]] = after
        else:
            self._after[before] = after
        if after != _END:
            self._before[after] = before

    def blocker(self, index: int) -> int | None:
        """The first unused call, in recorded order, that has to be used before the call at `index`."""
        slot, scope = self._slots[index], self._scopes[index]
        if slot == _END:
            return None
        found = None if self._first[scope] == index else self._first_finished(scope, slot, index)
        for above, left in _scopes_above(scope):
            blocker = self._first_finished(above, left, index)
            if blocker is not None and (found is None or blocker < found):
                found = blocker
        return found

    def due(self, lineage: str) -> int | None:
        """An unused call that the program makes before one at `lineage` that is not recorded: any of its own scope
        (those before it, at its place, and after it, since it would come between them), and of the scopes above one
        from before the spawn."""
        scope = _scope(lineage)
        for above, left in ((scope, None), *_scopes_above(scope)):
            first = self._first.get(above, _END)
            if first != _END and (left is None or self._slots[first] < left):
                return first
        return None

    def _first_finished(self, scope: str, slot: int, index: int) -> int | None:
        """The first unused call of `scope` before `slot` that had finished before the call at `index` started."""
        started = self._calls[index].started
        candidate = self._first.get(scope, _END)
        while candidate != _END and self._slots[candidate] < slot:
            ended = self._calls[candidate].ended
            if ended is not None and ended < started:
                return candidate
            candidate = self._after[candidate]
        return None


def _scope(lineage: str | None) -> str:
    """The scope of a call: its lineage up to and with the last slash."""
    return "" if lineage is None else lineage[: lineage.rfind("/") + 1]


def _own_slot(lineage: str | None) -> int:
    """The slot of a call in its scope, `_END` where its lineage is not known."""
    return _END if lineage is None else int(lineage[lineage.rfind("/") + 1 :])


def _scopes_above(scope: str) -> Iterator[tuple[str, int]]:
    """(scope, slot in which it was left) from the scope above `scope` up to the root."""
    while scope:
        inner = scope[:-1]
        scope = inner[: inner.rfind("/") + 1]
        yield scope, int(inner[len(scope) :].removeprefix("t"))
