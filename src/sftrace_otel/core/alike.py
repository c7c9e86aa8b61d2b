# SPDX-License-Identifier: Apache-2.0
"""Events of a stream that differ in one text alone: what a model says, word by word.

Decision: nearly all events of a stream are one event with another word in it. An event that is spelled like an earlier
one is told by one expression, and its word is all that is read of it; what is not spelled exactly alike is read as any
event. Rejected: reading each event as JSON and walking through it (30 µs, most of them for what is always the same).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from sftrace_otel.formats import Json

__all__ = ["Template"]

_LONGEST = 4096
_PLACE = "here"
_TEXT = r'(?P<text>(?:[^"\\\x00-\x1f]++|\\[^\x00-\x1f])*+)'
_PADDING = r'[^"\\\x00-\x1f]*+'
_NUMBER = "[1-9][0-9]{0,8}+"
_VARYING = re.compile(
    rf'"obfuscation": ?"(?P<padding>{_PADDING})"|"sequence_number": ?(?P<number>{_NUMBER})(?=[,}}\r\n]|$)'
)
"""Members that OpenAI makes anew for each event. They say nothing."""


class Template:
    """A line that holds a JSON object, and what lines look like that hold the same one but for a text in it.

    Attributes:
        value: The object.
    """

    __slots__ = ("_like", "value")

    def __init__(self, value: Json, like: re.Pattern[str]) -> None:
        self.value = value
        self._like = like

    @classmethod
    def of(cls, line: str, value: Json, path: Sequence[str | int], text: str) -> Template | None:
        """The template of `line`, which holds the object `value` and in it `text` at `path`, a key last.

        None where the place of the text in the line cannot be told for certain.
        """
        if "\\" in line or len(line) > _LONGEST:  # without any, each quote begins or ends a text
            return None
        spelled = f'"{path[-1]}":"{text}"'
        if spelled not in line:
            spelled = f'"{path[-1]}": "{text}"'
        end = line.find(spelled) + len(spelled) - 1
        if end < len(spelled) or not _is_at(path, line[line.find("{") : end - len(text)] + _PLACE + line[end:]):
            return None
        varying = [(end - len(text), end, _TEXT)]
        for found in _VARYING.finditer(line):
            name = "padding" if found["number"] is None else "number"
            varying.append((*found.span(name), f"(?P<padding>{_PADDING})" if name == "padding" else _NUMBER))
        pattern, done, names = "", 0, 0
        for start, stop, like in sorted(varying):
            pattern += re.escape(line[done:start]) + like
            done = stop
            names += "<padding>" in like
        if names > 1:
            return None
        return cls(value, re.compile(pattern + re.escape(line[done:])))

    def read(self, line: str) -> tuple[str, str] | None:
        """What `line` has in the place of the text, as JSON spells it, and the padding in it.

        None where the line is not spelled like the template's.
        """
        found = self._like.fullmatch(line)
        if found is None:
            return None
        return found["text"], found["padding"] if self._like.groups == 2 else ""


def _is_at(path: Sequence[str | int], text: str) -> bool:
    """Whether the JSON `text` has `_PLACE` at `path`."""
    try:
        found = msgspec.json.decode(text)
        for step in path:
            found = found[step]
    except (msgspec.MsgspecError, UnicodeEncodeError, LookupError, TypeError):
        return False
    return bool(found == _PLACE)
