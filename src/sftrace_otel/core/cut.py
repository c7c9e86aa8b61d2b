# SPDX-License-Identifier: Apache-2.0
"""Cutting what is too large: a rough cut of any value before the work on it grows, an exact one of redacted JSON.

Decision: parts that fit are kept as the same objects, many at a time, and only the way to the place of the cut is
copied, so a cut costs little more than counting. Texts are cut between words where secrets have not been hidden yet,
since half a secret is not found any more. Rejected: counting by writing JSON, which takes the memory that the limit is
there to save.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

import orjson

__all__ = ["CUT", "Cutter", "at_word", "is_plain"]

CUT = "cut"
"""Tag of a text, array or object of which a part was dropped because the payload was too large."""

_MAX_DEPTH = 100
_MAX_CONTAINERS = 1_000_000
_SCALAR = 24
_TOGETHER = 256
_WORD = 4096
_LOOKED_AT = 4096
_PLAIN = frozenset({str, int, bool, type(None)})


def is_plain(value: Any) -> bool:
    """Whether `value` is JSON already: exact builtin types, finite floats, text that is UTF-8, at most 100 levels deep.

    Ints beyond 64 bits count as not plain here.
    """
    level: list[Any] = [[value]]
    containers = 0
    for _ in range(_MAX_DEPTH + 1):
        below: list[Any] = []
        for container in level:
            items = container.values() if type(container) is dict else container
            if _PLAIN.issuperset(map(type, items)):
                continue
            for item in items:
                kind = type(item)
                if kind is dict or kind is list:
                    below.append(item)
                elif kind is float:
                    if not isfinite(item):
                        return False
                elif kind not in _PLAIN:
                    return False
        containers += len(below)
        if not below or containers > _MAX_CONTAINERS:
            break
        level = below
    return not below and _is_encodable(value)


def _is_encodable(value: Any) -> bool:
    try:
        orjson.dumps(value)
    except TypeError:  # keys that are no text, lone surrogates, large ints
        return False
    return True


def at_word(text: str, room: int) -> str:
    """At most `room` characters of `text`, without a last word that may be half of one."""
    kept = text[:room]
    for place in range(len(kept) - 1, max(len(kept) - _WORD, -1), -1):
        if kept[place].isspace():
            return kept[:place]
    return kept


class Cutter:
    """Copies a value until about `room` bytes of JSON are used. One use.

    Args:
        room: Bytes, as estimated by lengths; escapes are not counted.
        at_words: Whether texts are cut between words.

    Attributes:
        pointers: JSON Pointers of the parts that lost something.
    """

    def __init__(self, room: int, *, at_words: bool = False) -> None:
        self.pointers: list[str] = []
        self._room = room
        self._at_words = at_words

    def cut(self, value: Any, pointer: str = "") -> Any:
        """`value` as far as there is room. What is neither JSON nor bytes is kept as it is."""
        if isinstance(value, str):
            return self._text(value, pointer)
        if isinstance(value, bytes | bytearray):
            return self._bytes(value, pointer)
        if type(value) not in (dict, list):
            self._room -= _SCALAR
            return value
        if self._fits(value):
            return value
        if pointer.count("/") > _MAX_DEPTH:
            self.pointers.append(pointer)
            return None
        return self._object(value, pointer) if isinstance(value, dict) else self._array(value, pointer)

    def _fits(self, value: Any) -> bool:
        """Whether all of `value` fits; then its size is taken off the room. False also where that takes long to say."""
        room = self._room
        pending: list[Any] = [value]
        for container in pending:
            room -= 4 * len(container) + 2
            if room < 0 or len(pending) > _LOOKED_AT:
                return False
            if type(container) is dict:
                for key in container:
                    room -= len(key) if type(key) is str else _SCALAR
                items: Any = container.values()
            else:
                room += 3 * len(container)
                items = container
            for item in items:
                kind = type(item)
                if kind is str:
                    room -= len(item) + 2 if item.isascii() else _length(item) + 2
                elif kind is dict or kind is list:
                    pending.append(item)
                else:
                    room -= len(item) * 4 // 3 if kind is bytes or kind is bytearray else _SCALAR
            if room < 0:
                return False
        self._room = room
        return True

    def _text(self, text: str, pointer: str) -> str:
        size = _length(text) + 2
        if size <= self._room:
            self._room -= size
            return text
        room, self._room = max(self._room, 0), 0
        self.pointers.append(pointer)
        kept = text[:room].encode("utf-8", "surrogatepass")[:room].decode("utf-8", "ignore")
        return at_word(kept, room) if self._at_words else kept

    def _bytes(self, data: bytes | bytearray, pointer: str) -> bytes | bytearray:
        size = len(data) * 4 // 3
        if size <= self._room:
            self._room -= size
            return data
        kept = data[: max(self._room, 0) * 3 // 4]
        self._room = 0
        self.pointers.append(pointer)
        return kept

    def _object(self, members: dict[Any, Any], pointer: str) -> dict[Any, Any]:
        kept: dict[Any, Any] = {}
        for key, item in members.items():
            self._room -= (_length(key) if isinstance(key, str) else _SCALAR) + 4
            if self._room <= 0:
                self.pointers.append(pointer)
                break
            kept[key] = self.cut(item, f"{pointer}/{str(key).replace('~', '~0').replace('/', '~1')}")
        return kept

    def _array(self, items: list[Any], pointer: str) -> list[Any]:
        kept: list[Any] = []
        index = 0
        while index < len(items):
            several = items[index : index + _TOGETHER]
            if len(several) > 1 and self._fits(several):
                kept += several
                index += len(several)
                continue
            for item in several:
                self._room -= 1
                if self._room <= 0:
                    self.pointers.append(pointer)
                    return kept
                kept.append(self.cut(item, f"{pointer}/{index}"))
                index += 1
        return kept


def _length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
