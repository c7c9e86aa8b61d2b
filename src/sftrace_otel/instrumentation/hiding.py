# SPDX-License-Identifier: Apache-2.0
"""A tool's own redaction: what its author knows to be confidential, hidden before anything of a call is stored.

Decision: it works on the JSON that the policy has already been over, so a function of the author's never sees or
changes an object of the program, and what it gives goes through the policy again. Recording and replay both ask it, so
a call still matches. What fails hides everything. Rejected: a function over the arguments themselves (it could change
what the tool gets), and rules for output by name alone (an output is no set of arguments).

Pointers are those of `redactions.json`: `/input/user/ssn`, `/output/rows/*/name`; `*` stands for every member.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import msgspec

from sftrace_otel.core import match
from sftrace_otel.core.prepare import NOWHERE, Prepared, standing_at
from sftrace_otel.core.redact import MARK, Finding

__all__ = ["Hiding", "Rule"]

Rule = str | Callable[[Any], Any]
"""The name of an argument, a pointer, or a function from a JSON value to the one that is stored."""

REASON = "tool_redaction"
_SHORTEST = 4


class Hiding:
    """The rules of one tool.

    Args:
        rules: Names, pointers and functions; a function is given the arguments by name, and what the tool gave.
        parameters: Names of the tool's parameters; None where any may be given.
        keywords: The parameter that takes any keyword (`**options`), None without one.

    Raises:
        ValueError: A pointer that begins with neither `/input/` nor `/output/`, or a name that no parameter has.
        TypeError: A rule that is neither text nor callable.
    """

    def __init__(self, rules: Sequence[Rule], parameters: Collection[str] | None, keywords: str | None) -> None:
        self._input: list[list[str]] = []
        self._output: list[list[str]] = []
        self._functions: list[Callable[[Any], Any]] = []
        self._keywords = keywords
        for rule in rules:
            if isinstance(rule, str):
                self._add(rule, parameters)
            elif callable(rule):
                self._functions.append(rule)
            else:
                raise TypeError(f"redact: {type(rule).__name__} is neither a name, a pointer nor a function")

    def _add(self, rule: str, parameters: Collection[str] | None) -> None:
        if not rule.startswith("/"):
            if parameters is not None and rule not in parameters:
                raise ValueError(f"redact: the tool has no argument {rule!r}; it has {', '.join(parameters) or 'none'}")
            self._input.append([rule])
            if self._keywords is not None:
                self._input.append([self._keywords, rule])
            return
        side, *path = [part.replace("~1", "/").replace("~0", "~") for part in rule[1:].split("/")]
        if side not in ("input", "output"):
            raise ValueError(f"redact: {rule!r} begins with neither /input nor /output")
        (self._input if side == "input" else self._output).append(path)

    def input(self, prepared: Prepared, prepare: Callable[[object], Prepared], *, bound: bool = True) -> Prepared:
        """The arguments as they are stored. Where they could not be bound to names, none of them is."""
        return self._hidden(prepared, prepare, self._input if bound or not self._input else [["args"], ["kwargs"]])

    def output(self, prepared: Prepared, prepare: Callable[[object], Prepared]) -> Prepared:
        """A result as it is stored."""
        return self._hidden(prepared, prepare, self._output)

    def texts(self, prepared: Prepared) -> list[str]:
        """The texts of an input that are hidden: an error may quote them."""
        found: list[str] = []
        for path in self._input:
            for pointer in _places(prepared.value, path):
                found += _texts(standing_at(prepared.value, pointer))
        return sorted({text for text in found if len(text) >= _SHORTEST and text != MARK}, key=len, reverse=True)

    def _hidden(
        self, prepared: Prepared, prepare: Callable[[object], Prepared], paths: Sequence[Sequence[str]]
    ) -> Prepared:
        if not paths and not self._functions:
            return prepared
        try:
            value: Any = msgspec.json.decode(prepared.data)
            for path in paths:
                for pointer in list(_places(value, path)):
                    value = _replaced(value, pointer)
            for function in self._functions:
                value = function(value)
        except Exception:
            value = MARK
        again = prepare(value)
        before: Any = prepared.value
        changed = [difference.pointer for difference in match.iter_differences(before, again.value)]
        kept = {
            pointer: tag
            for pointer, tag in prepared.tags.items()
            if standing_at(again.value, pointer) == standing_at(before, pointer)
        }
        findings = [
            *(one for one in prepared.findings if standing_at(again.value, one.pointer) is not NOWHERE),
            *again.findings,
            *(Finding(pointer, REASON) for pointer in changed if standing_at(again.value, pointer) is not NOWHERE),
        ]
        return msgspec.structs.replace(
            again,
            tags={**kept, **again.tags},
            findings=tuple(dict.fromkeys(findings)),
            truncated=prepared.truncated or again.truncated,
        )


def scrubbed(value: Any, texts: Sequence[str]) -> Any:
    """`value` with each of `texts` replaced wherever a text in it holds it."""
    if isinstance(value, str):
        for text in texts:
            value = value.replace(text, MARK)
        return value
    if isinstance(value, list):
        return [scrubbed(item, texts) for item in value]
    if isinstance(value, dict):
        return {name: scrubbed(item, texts) for name, item in value.items()}
    return value


def _places(value: object, path: Sequence[str], at: str = "") -> Iterator[str]:
    """The pointers of what `path` names in `value`."""
    if not path:
        yield at
        return
    first, *rest = path
    if isinstance(value, dict):
        names = list(value) if first == "*" else [first] if first in value else []
        for name in names:
            yield from _places(value[name], rest, f"{at}/{str(name).replace('~', '~0').replace('/', '~1')}")
    elif isinstance(value, list):
        numbers = range(len(value)) if first == "*" else [int(first)] if first.isdecimal() else []
        for number in numbers:
            if number < len(value):
                yield from _places(value[number], rest, f"{at}/{number}")


def _replaced(value: Any, pointer: str) -> Any:
    """`value` with the mark at `pointer`."""
    if not pointer:
        return MARK
    above, _, last = pointer.rpartition("/")
    place: Any = standing_at(value, above)
    place[int(last) if isinstance(place, list) else last.replace("~1", "/").replace("~0", "~")] = MARK
    return value


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield str(value)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
