# SPDX-License-Identifier: Apache-2.0
"""Whether a regular expression takes linear time on any text, judged from its structure.

Python's engine backtracks, so some short patterns take quadratic or exponential time on texts made for it, and a tool's
result is such a text if its author wants. A pattern passes if

- it has no back references, conditionals, or repeats of things that themselves vary in length or branch;
- every unbounded repeat is of single characters, cannot overlap with what may follow it (or nothing follows), and is
  preceded by something that its run cannot contain, or is guarded by a look-behind, or ends the pattern;
- its bounded repeats allow no more than a few thousand ways in all.

This refuses some patterns that are linear; the advice in the reason (bound the repeat) always helps. Rejected: trying
patterns on sample texts, which depends on the machine and misses the text that was not thought of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

MAX_WAYS = 4096
"""Ways in which the bounded repeats of a pattern may split a text at one place."""

_SAMPLE = frozenset(map(chr, range(256))) | frozenset("ĀſKİı\u2028\u3000中🙂")
_CATEGORIES = {
    "CATEGORY_DIGIT": r"\d",
    "CATEGORY_NOT_DIGIT": r"\D",
    "CATEGORY_SPACE": r"\s",
    "CATEGORY_NOT_SPACE": r"\S",
    "CATEGORY_WORD": r"\w",
    "CATEGORY_NOT_WORD": r"\W",
}
_BOUND_IT = "bound the repeat, for example {0,64}"

Item = tuple[str, Any]


class _MaybeSlowError(Exception):
    """The pattern is, or may be, more than linear; the message says why."""


def why_not_linear(pattern: str) -> str | None:
    """Why `pattern` (valid, for texts) may take more than linear time; None where it cannot."""
    try:
        from re import _parser  # type: ignore[attr-defined]  # the one reader that agrees with the engine
    except ImportError:
        return None if not re.search(r"[*+]|,\}", pattern) else f"it has an unbounded repeat; {_BOUND_IT}"
    parsed = _parser.parse(pattern)
    try:
        _Judge(list(parsed), ignore_case=bool(parsed.state.flags & re.IGNORECASE)).judge()
    except _MaybeSlowError as error:
        return str(error)
    return None


class _Judge:
    """Judges one pattern, given as the items that the standard library's parser made of it."""

    def __init__(self, items: list[Item], *, ignore_case: bool) -> None:
        self._items = items
        self._ignore_case = ignore_case
        self._sample = _SAMPLE | set(_characters(items))

    def judge(self) -> None:
        """Raise `_MaybeSlowError` where the pattern may be slow."""
        items = self._flat(self._items)
        if len(items) == 1 and _name(items[0]) == "BRANCH":
            for alternative in items[0][1][1]:
                self._sequence(self._flat(alternative))
        else:
            self._sequence(items)

    def _flat(self, items: Iterable[Item]) -> list[Item]:
        """The items with groups opened; flags inside groups count for the whole pattern."""
        flat: list[Item] = []
        for item in items:
            if _name(item) == "SUBPATTERN":
                self._ignore_case = self._ignore_case or bool(item[1][1] & re.IGNORECASE)
                flat += self._flat(item[1][3])
            else:
                flat.append(item)
        return flat

    def _sequence(self, items: list[Item]) -> None:
        for place, item in enumerate(items):
            if _is_unbounded(item):
                self._unbounded(items, place)
        bounded = [item for item in items if not _is_unbounded(item)]
        if self._ways(bounded) > MAX_WAYS:
            raise _MaybeSlowError("its bounded repeats allow too many ways to match one text")

    def _unbounded(self, items: list[Item], place: int) -> None:
        inner = self._flat(items[place][1][2])
        run = self._set(inner[0]) if len(inner) == 1 else None
        if run is None:
            raise _MaybeSlowError(f"it repeats more than a single character without bound; {_BOUND_IT}")
        after = items[place + 1 :]
        if not after:
            return
        if _name(items[place]) != "POSSESSIVE_REPEAT" and run & self._first(after)[0]:
            raise _MaybeSlowError(f"what follows an unbounded repeat may also be part of it; {_BOUND_IT}")
        if not self._is_guarded(items[:place], run):
            raise _MaybeSlowError(f"a match may begin anywhere inside an unbounded repeat; {_BOUND_IT}")

    def _is_guarded(self, before: Sequence[Item], run: frozenset[str]) -> bool:
        """Whether no second match can begin inside a run: something before it never occurs in it."""
        if before and _name(before[0]) == "AT" and str(before[0][1]) in ("AT_BEGINNING_STRING", "AT_BEGINNING"):
            return True
        for item in before:
            least = item[1][2] if _is_repeat(item) and item[1][0] else [item]
            found = self._set(least[0]) if len(least) == 1 else None
            if found is not None and not found & run:
                return True
        if not before or _name(before[-1]) != "ASSERT_NOT" or before[-1][1][0] != -1:
            return False
        behind = self._flat(before[-1][1][1])
        shut_out = self._set(behind[0], widen=False) if len(behind) == 1 else None
        return shut_out is not None and run <= shut_out

    def _ways(self, items: Iterable[Item]) -> int:
        """In how many ways a sequence without unbounded repeats may split one text, at most."""
        ways = 1
        for item in self._flat(items):
            ways = min(ways * self._ways_of(item), MAX_WAYS + 1)
        return ways

    def _ways_of(self, item: Item) -> int:
        name, argument = _name(item), item[1]
        if name in ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT"):
            return 1
        if name == "BRANCH":
            firsts = [self._first(self._flat(alternative)) for alternative in argument[1]]
            apart = sum(len(found) for found, _ in firsts) == len(frozenset().union(*(found for found, _ in firsts)))
            ways = [self._ways(alternative) for alternative in argument[1]]
            return max(ways) if apart and not any(empty for _, empty in firsts) else sum(ways)
        if name in ("ASSERT", "ASSERT_NOT"):
            return self._ways(argument[1])
        if name == "ATOMIC_GROUP":
            return self._ways(argument)
        if _is_repeat(item):
            return self._ways_of_repeat(*argument)
        raise _MaybeSlowError("it uses back references or conditions")

    def _ways_of_repeat(self, least: int, most: int, inner: Sequence[Item]) -> int:
        if _is_unbounded(("MAX_REPEAT", (least, most, inner))):
            raise _MaybeSlowError(f"it has an unbounded repeat inside a group; {_BOUND_IT}")
        each = self._ways(inner)
        if each == 1:
            return most - least + 1
        return int(min(each ** min(most, 16), MAX_WAYS + 1)) + (most - least)

    def _first(self, items: Sequence[Item]) -> tuple[frozenset[str], bool]:
        """The characters with which `items` may begin, and whether they may match the empty text."""
        found: frozenset[str] = frozenset()
        for item in self._flat(items):
            begins, empty = self._first_of(item)
            found |= begins
            if not empty:
                return found, False
        return found, True

    def _first_of(self, item: Item) -> tuple[frozenset[str], bool]:
        name, argument = _name(item), item[1]
        if name in ("AT", "ASSERT", "ASSERT_NOT"):
            return frozenset(), True
        if name == "BRANCH":
            firsts = [self._first(alternative) for alternative in argument[1]]
            return frozenset().union(*(begins for begins, _ in firsts)), any(empty for _, empty in firsts)
        if name == "ATOMIC_GROUP":
            return self._first(argument)
        if _is_repeat(item):
            begins, empty = self._first(argument[2])
            return begins, empty or argument[0] == 0
        return self._set(item) or self._sample, False

    def _set(self, item: Item, *, widen: bool = True) -> frozenset[str] | None:
        """The characters of the sample that a single-character item matches; None for any other item."""
        name, argument = _name(item), item[1]
        if name == "LITERAL":
            found = {chr(argument)}
        elif name == "NOT_LITERAL":
            found = set(self._sample) - {chr(argument)}
        elif name == "ANY":
            found = set(self._sample)
        elif name == "IN":
            found = self._members(argument)
        else:
            return None
        if self._ignore_case and widen:
            found |= {other for character in found for other in (character.lower(), character.upper())}
        return frozenset(found)

    def _members(self, members: Iterable[Item]) -> set[str]:
        found: set[str] = set()
        negated = False
        for member in members:
            name, argument = _name(member), member[1]
            if name == "NEGATE":
                negated = True
            elif name == "LITERAL":
                found.add(chr(argument))
            elif name == "RANGE":
                found |= {character for character in self._sample if argument[0] <= ord(character) <= argument[1]}
            else:
                category = re.compile(_CATEGORIES[str(argument)])
                found |= {character for character in self._sample if category.match(character)}
        return set(self._sample) - found if negated else found


def _name(item: Item) -> str:
    return str(item[0])


def _is_repeat(item: Item) -> bool:
    return _name(item).endswith("_REPEAT")


def _is_unbounded(item: Item) -> bool:
    return _is_repeat(item) and int(item[1][1]) > MAX_WAYS


def _characters(items: Any) -> Iterable[str]:
    """The literal characters and range ends in a parsed pattern, wherever they stand."""
    if isinstance(items, tuple) and len(items) == 2 and str(items[0]) in ("LITERAL", "NOT_LITERAL"):
        yield chr(items[1])
    elif isinstance(items, tuple) and len(items) == 2 and str(items[0]) == "RANGE":
        yield from map(chr, items[1])
    elif not isinstance(items, int | str) and items is not None:
        for item in items:
            yield from _characters(item)
