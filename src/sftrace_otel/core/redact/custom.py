# SPDX-License-Identifier: Apache-2.0
"""The user's own redaction rules, from a TOML text.

::

    environment = true                  # values of variables with a secret's name are known secrets (the default)
    variables = ["LEGACY_LOGIN"]        # more variables whose values are secrets
    keys = ["tenant_code"]              # more keys whose values are hidden
    allow_keys = ["session_token"]      # keys that are no secret here
    allow_values = ["sk-test-dummy"]    # texts that are no secret

    [[patterns]]
    name = "ticket"
    regex = 'TICKET-\\d{6}'

The reference's twelve names and six patterns cannot be allowed away. A pattern is refused if it is invalid, matches the
empty text or the mark, or may take more than linear time (`linear`): it runs on every text of every recorded call.
Errors name the entry, never a value or a pattern, since either may hold a secret.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sftrace_otel.core.redact.credentials import MARK, Rule
from sftrace_otel.core.redact.linear import why_not_linear
from sftrace_otel.core.redact.names import normalised, words
from sftrace_otel.errors import SettingsError

_ENTRIES = frozenset({"environment", "variables", "keys", "allow_keys", "allow_values", "patterns"})
_RULE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9 _.-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class CustomRules:
    """The user's rules, checked.

    Attributes:
        keys: Sensitive names, normalised.
        words: Lower-case words, one in each of `keys`, by which texts are searched for them.
        allow_keys: Names that are not sensitive, normalised.
        allow_values: Texts that are no secrets.
        patterns: Compiled patterns with their rules, in order.
        environment: Whether values of the environment are taken as known secrets.
    """

    keys: frozenset[str] = frozenset()
    words: tuple[str, ...] = ()
    allow_keys: frozenset[str] = frozenset()
    allow_values: frozenset[str] = frozenset()
    patterns: tuple[tuple[re.Pattern[str], Rule], ...] = ()
    environment: bool = True
    names: frozenset[str] = field(default=frozenset())


NO_CUSTOM_RULES = CustomRules()
"""The default: nothing of the user's own."""


def from_toml(text: str) -> tuple[CustomRules, list[str]]:
    """The rules in a TOML text, and the further variables whose values are secrets.

    Raises:
        SettingsError: What is wrong and in which entry; never the entry's content.
    """
    try:
        entries = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at .*\)$", str(error))
        raise SettingsError(f"the redaction file is not TOML {place[0] if place else ''}".rstrip()) from None
    unknown = sorted(set(entries) - _ENTRIES)
    if unknown:
        raise SettingsError(f"the redaction file has an unknown entry; known are {', '.join(sorted(_ENTRIES))}")
    keys = _texts(entries, "keys")
    patterns = tuple(_patterns(entries.get("patterns", [])))
    return (
        CustomRules(
            keys=normalised(keys),
            words=tuple({max(words(key), key=len, default=key.lower()) for key in keys}),
            allow_keys=normalised(_texts(entries, "allow_keys")),
            allow_values=frozenset(_texts(entries, "allow_values")),
            patterns=patterns,
            environment=_switch(entries, "environment"),
            names=frozenset(rule.name for _, rule in patterns),
        ),
        _texts(entries, "variables"),
    )


def _texts(entries: Mapping[str, Any], entry: str) -> list[str]:
    found = entries.get(entry, [])
    if not isinstance(found, list) or not all(isinstance(item, str) and item for item in found):
        raise SettingsError(f"redaction entry {entry!r} must be a list of texts")
    return found


def _switch(entries: Mapping[str, Any], entry: str) -> bool:
    found = entries.get(entry, True)
    if not isinstance(found, bool):
        raise SettingsError(f"redaction entry {entry!r} must be true or false")
    return found


def _patterns(entries: Any) -> list[tuple[re.Pattern[str], Rule]]:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise SettingsError("redaction entry 'patterns' must be a list of tables with `name` and `regex`")
    return [_pattern(entry, number) for number, entry in enumerate(entries, 1)]


def _pattern(entry: Mapping[str, Any], number: int) -> tuple[re.Pattern[str], Rule]:
    where = f"redaction pattern {number}"
    if set(entry) - {"name", "regex"} or not isinstance(entry.get("regex"), str):
        raise SettingsError(f"{where} must have a `regex` (text), may have a `name`, and nothing else")
    name = entry.get("name", f"pattern-{number}")
    if not isinstance(name, str) or not _RULE_NAME.fullmatch(name):
        raise SettingsError(f"{where}: `name` must be a short name of letters, digits, space, `_`, `.` and `-`")
    try:
        pattern = re.compile(entry["regex"])
    except (re.error, OverflowError, RecursionError):
        raise SettingsError(f"{where} is not a valid regular expression") from None
    reason = why_not_linear(entry["regex"])
    if reason:
        raise SettingsError(f"{where} may take more than linear time: {reason}")
    if pattern.search("") or pattern.search(MARK):
        raise SettingsError(f"{where} matches the empty text or {MARK}; it would never come to rest")
    return pattern, Rule(name, lambda text: pattern.sub(MARK, text))
