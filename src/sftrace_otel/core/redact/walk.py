# SPDX-License-Identifier: Apache-2.0
"""The walk over a JSON value that rebuilds what holds a secret and keeps everything else as the same object.

What is hidden as a whole: the value under a sensitive name, of a pair that spells name and value apart
(`{"name": "Authorization", "value": …}`, `["x-api-key", …]`), and behind an argument such as `--token`. A property of a
JSON Schema that has a sensitive name is not a secret, its default is. All other texts, and the keys, go through the
rules for texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

from sftrace_otel.core.redact.credentials import MARK
from sftrace_otel.core.redact.names import Sensitivity
from sftrace_otel.formats import Json

SENSITIVE_KEY = "sensitive_key"
"""Reason: the whole value under a sensitive name was replaced."""
SECRET_KEY = "secret_in_key"
"""Reason: the key itself held a secret; the pointer spells what it is now."""
CREDENTIAL_PATTERN = "credential_pattern"
"""Reason: a span of a text that looks like a credential was replaced."""
TOO_DEEP = "too_deep"
"""Reason: a part nested deeper than `MAX_DEPTH` was replaced."""

MAX_DEPTH = 300
"""Containers inside containers that are looked into; what is deeper is replaced."""

LONGEST_NAME = 200
"""Characters of the longest text that is taken for a name."""

HEADERS = "headers"
"""The key under which an exchange's header fields stand, as [name, value] pairs."""
NAME_KEYS = ("name", "key", "header", "field", "param", "parameter", "variable", "var", "env")
VALUE_KEYS = frozenset({"value", "val", "default"})
_SCHEMA_VALUES = frozenset({"default", "const", "example", "examples", "enum"})
_SCHEMA_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_MANY = 64
_FEW = 4
_TOKEN_SIBLINGS = ("logprob", "logprobs", "top_logprobs", "bytes")


class Finding(NamedTuple):
    """One place where something was replaced.

    Attributes:
        pointer: JSON Pointer (RFC 6901) of the place in the redacted value; empty for the value itself.
        reason: `sensitive_key`, `credential_pattern`, `known_value`, `secret_in_key`, `too_deep`, or the name of a rule
            of the user.
    """

    pointer: str
    reason: str


class Rules(Protocol):
    """What the walk asks its policy."""

    def sensitivity(self, name: str) -> Sensitivity:
        """What `name` says about its value."""

    def is_clean(self, value: object) -> bool:
        """Whether `value` is certainly without secrets."""

    def is_allowed(self, value: str) -> bool:
        """Whether the user has declared that `value` is no secret."""

    def hide(self, text: str, nesting: int) -> tuple[str, Sequence[str]]:
        """`text` without secrets, and the reasons; `nesting` counts the JSON texts around it."""

    def redact_headers(self, pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Header fields without credentials."""


def hides(rules: Rules, key: str, kind: Sensitivity, item: Json, members: dict[str, Json]) -> bool:
    """Whether `item`, which stands under the sensitive name `key` in `members`, is replaced as a whole."""
    if kind is Sensitivity.REFERENCE:
        return item != MARK
    if item is None or isinstance(item, bool) or item in ("", MARK) or item == [] or item == {}:
        return False
    if isinstance(item, str):
        return not (rules.is_allowed(item) or (kind is Sensitivity.TEXT and _is_plain_text(key, item, members)))
    if kind is Sensitivity.ANY:
        return not _is_schema(item)
    if isinstance(item, list):
        return any(map(_is_text, item))
    return isinstance(item, dict) and not _is_schema(item) and any(map(_is_text, item.values()))


def _is_text(item: Json) -> bool:
    return isinstance(item, str) and item not in ("", MARK)


def _is_plain_text(key: str, item: str, members: dict[str, Json]) -> bool:
    """A model's token among log probabilities, or the kind of an authentication (`"auth": "basic"`)."""
    name = key.lower()
    if name == "token":
        return any(sibling in members for sibling in _TOKEN_SIBLINGS)
    return name.endswith("auth") and item.isalpha()


def _is_schema(item: Json) -> bool:
    """Whether `item` describes values (JSON Schema) rather than being one."""
    if not isinstance(item, dict):
        return False
    kind = item.get("type")
    if isinstance(kind, list) or (isinstance(kind, str) and kind in _SCHEMA_TYPES):
        return True
    return not {"$ref", "anyOf", "allOf", "oneOf"}.isdisjoint(item)


def secret_pair(rules: Rules, members: dict[str, Json]) -> str | None:
    """The key under which `members`, an object that spells name and value apart, holds a secret."""
    value_key = next((key for key in members if key in VALUE_KEYS), None)
    if value_key is None:
        return None
    item = members[value_key]
    for key in NAME_KEYS:
        name = members.get(key)
        if isinstance(name, str) and len(name) <= LONGEST_NAME:
            kind = rules.sensitivity(name)
            if kind:
                kind = min(kind, Sensitivity.ANY)
                return value_key if hides(rules, name, kind, item, members) else None
    return None


class Walk:
    """One walk. `findings` holds what was replaced, in the order of the value.

    Args:
        rules: The policy.
        nesting: How many JSON texts stand around the value.
    """

    def __init__(self, rules: Rules, nesting: int = 0) -> None:
        self.findings: list[Finding] = []
        self._rules = rules
        self._nesting = nesting
        self._path: list[str | int] = []
        self._clean: set[int] = set()

    def value(self, value: Json) -> Json:
        """`value` without secrets; the same object where it holds none."""
        if isinstance(value, str):
            return self._text(value)
        if not isinstance(value, dict | list) or not value:
            return value
        if len(self._path) >= MAX_DEPTH:
            return self._replaced(TOO_DEEP)
        if id(value) in self._clean:  # shared many times, or one would walk what is no tree for ever
            return value
        new: Json = self._object(value) if isinstance(value, dict) else self._array(value)
        if new is value:
            self._clean.add(id(value))
        return new

    def _text(self, text: str) -> str:
        hidden, reasons = self._rules.hide(text, self._nesting)
        self.findings += [Finding(self._pointer(), reason) for reason in reasons]
        return hidden

    def _object(self, members: dict[str, Json], *, of_schema: bool = False) -> dict[str, Json]:
        pair = secret_pair(self._rules, members)
        names = self._names(members)
        changed: dict[str, Json] = {}
        same = names is None
        for key, item in members.items():
            name = names[key] if names else key
            self._path.append(name)
            if name != key:
                self.findings.append(Finding(self._pointer(), SECRET_KEY))
            new = self._member((key, name), item, members, secret=key == pair, of_schema=of_schema)
            self._path.pop()
            same = same and new is item
            changed[name] = new
        return members if same else changed

    def _member(
        self, names: tuple[str, str], item: Json, members: dict[str, Json], *, secret: bool, of_schema: bool
    ) -> Json:
        """What becomes of `item`; `names` are its key as it was and as it is now, which both may call for hiding."""
        key = max(names, key=self._rules.sensitivity)
        kind = self._rules.sensitivity(key)
        if secret or (kind and hides(self._rules, key, kind, item, members)):
            return self._replaced(SENSITIVE_KEY)
        if of_schema and key in _SCHEMA_VALUES:
            return self._schema_value(item)
        if key == HEADERS and is_header_list(item):
            return self._headers(item)  # type: ignore[arg-type]
        if kind and isinstance(item, dict) and item and len(self._path) < MAX_DEPTH:
            return self._object(item, of_schema=True)
        return self.value(item)

    def _headers(self, fields: list[Json]) -> list[Json]:
        changed: list[Json] = []
        for index, field in enumerate(fields):
            assert isinstance(field, list)
            name, value = str(field[0]), str(field[1])
            hidden = self._rules.redact_headers([(name, value)])[0][1]
            if hidden != value:
                self._path += (index, 1)
                self.findings.append(Finding(self._pointer(), SENSITIVE_KEY if hidden == MARK else CREDENTIAL_PATTERN))
                del self._path[-2:]
            changed.append(field if hidden == value else [field[0], hidden])
        return fields if all(new is old for new, old in zip(changed, fields, strict=True)) else changed

    def _schema_value(self, item: Json) -> Json:
        """The default, constant or examples of a property whose name is sensitive."""
        if _is_text(item) or (isinstance(item, list) and any(map(_is_text, item))):
            return self._replaced(SENSITIVE_KEY)
        return self.value(item)

    def _names(self, members: dict[str, Json]) -> dict[str, str] | None:
        """New names for the keys that hold secrets themselves; None where there are none."""
        new = {key: self._rules.hide(key, self._nesting)[0] for key in members}
        if all(name is key or name == key for key, name in new.items()):
            return None
        taken = {key for key, name in new.items() if name == key}
        for key in sorted(key for key, name in new.items() if name != key):
            name, number = new[key], 1
            while new[key] in taken:
                number += 1
                new[key] = f"{name} ({number})"
            taken.add(new[key])
        return new

    def _array(self, items: list[Json]) -> list[Json]:
        secret = self._secret_items(items)
        changed: list[Json] = []
        same = self._items(items, 0, len(items), secret, changed)
        return items if same else changed

    def _items(self, items: list[Json], start: int, end: int, secret: set[int], changed: list[Json]) -> bool:
        """Append what becomes of `items[start:end]` to `changed`; True where nothing changes. Many are looked at
        together, and by halves where one of them is not clean."""
        if end - start > _FEW and secret.isdisjoint(range(start, end)) and self._rules.is_clean(items[start:end]):
            changed += items[start:end]
            return True
        if end - start > _MANY or (end - start > _FEW and len(items) > _MANY):
            middle = (start + end) // 2
            first = self._items(items, start, middle, secret, changed)
            return self._items(items, middle, end, secret, changed) and first
        same = True
        for index in range(start, end):
            item = items[index]
            self._path.append(index)
            new = self._replaced(SENSITIVE_KEY) if index in secret else self.value(item)
            self._path.pop()
            same = same and new is item
            changed.append(new)
        return same

    def _secret_items(self, items: list[Json]) -> set[int]:
        """The indices of values whose name or option is the item before them."""
        if is_secret_pair(self._rules, items):
            return {1}
        pairs = enumerate(pairwise(items), 1)
        return {index for index, (item, after) in pairs if is_secret_argument(self._rules, item, after)}

    def _replaced(self, reason: str) -> str:
        self.findings.append(Finding(self._pointer(), reason))
        return MARK

    def _pointer(self) -> str:
        return "".join(f"/{str(part).replace('~', '~0').replace('/', '~1')}" for part in self._path)


def is_header_list(item: object) -> bool:
    """Whether `item` is a list of [name, value] texts."""
    return (
        isinstance(item, list)
        and bool(item)
        and all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in item)
        and all(isinstance(pair[1], str) for pair in item)
    )


def is_secret_pair(rules: Rules, items: list[Json]) -> bool:
    """Whether `items` is a header or the like: a sensitive name and a text that is not just a word."""
    if len(items) != 2:
        return False
    name, value = items
    if not isinstance(name, str) or not isinstance(value, str) or value in ("", MARK) or not may_be_name(name):
        return False
    return bool(rules.sensitivity(name)) and not value.isidentifier() and not rules.is_allowed(value)


def may_be_name(text: str) -> bool:
    """Whether `text` is short and of one word, as the names of headers and variables are."""
    return len(text) <= LONGEST_NAME and " " not in text


def is_secret_argument(rules: Rules, option: Json, argument: Json) -> bool:
    """Whether `argument` follows a command line option that names it a secret, or is curl's `-u user:password`."""
    if not isinstance(option, str) or not isinstance(argument, str) or len(option) > LONGEST_NAME:
        return False
    if argument in ("", MARK) or argument.startswith("-") or not option.startswith("-"):
        return False
    if option in ("-u", "--user"):
        return ":" in argument
    return option.startswith("--") and bool(rules.sensitivity(option))
