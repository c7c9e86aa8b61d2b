# SPDX-License-Identifier: Apache-2.0
"""Secrets that markup names: the content of an XML element, the value of a field (`<input name="password" value="…">`),
the part of a multipart form (RFC 7578).

All rules begin at a literal and go on behind what they took, so their time grows with the text and no faster.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from sftrace_otel.core.redact.credentials import MARK, Rule
from sftrace_otel.core.redact.names import Sensitivity

__all__ = ["element_rule", "field_rule", "may_hold_element", "may_hold_field", "may_hold_part", "part_rule"]

NameRule = Callable[[str], Sensitivity]

_ELEMENT = re.compile(
    r"(<(?:[A-Za-z_][\w.-]{0,63}:)?([A-Za-z_][\w.-]{0,63})(?:\s[^<>]{0,1024})?>)"
    r"(<!\[CDATA\[[^<>]{0,65536}\]\]>|[^<]{1,65536})(?=<\\?/)"
)
_TAG = re.compile(r"<([A-Za-z][\w:.-]{0,63})(?=[\s/])")
_ATTRIBUTE = re.compile(r"""[\s/]{1,64}([A-Za-z_:@.\[(*][\w:.\-\])]{0,63})(?:\s{0,8}=\s{0,8}(?=\S))?""")
_QUOTE = re.compile(r"""\\{0,7}["']""")
_UNQUOTED = re.compile(r"""[^\s"'<>]{1,65536}""")
_CONTENT = re.compile(r"\s{0,64}>([^<]{1,65536})(?=<\\?/)")
_NAMING = frozenset({"name", "id", "key", "property", "autocomplete"})
_HOLDING = frozenset({"value", "content"})
_WITH_CONTENT = frozenset({"textarea", "property", "string", "entry", "param", "setting", "option", "add"})
_NO_FIELD = frozenset({"submit", "button", "reset", "image", "checkbox", "radio"})
_MOST_ATTRIBUTES = 64
_PART = re.compile(
    r'(?i)content-disposition:[^\r\n]{0,200}?[ ;]name="([^"\r\n]{1,200})"[^\r\n]{0,500}'
    r"(?:\r?\n[^\r\n]{1,500}){0,8}?\r?\n\r?\n"
)


def may_hold_element(low: bytes) -> bool:
    """Whether a text, lower case in UTF-8, may hold an XML element at all."""
    return b"</" in low or b"<\\/" in low


def may_hold_field(low: bytes) -> bool:
    """Whether a text, lower case in UTF-8, may hold an element that is named by an attribute at all."""
    named = b"name" in low or b"id=" in low or b"key" in low or b"password" in low or b"property" in low
    return named and (b"value" in low or b"content" in low or b"</" in low or b"<\\/" in low)


def may_hold_part(low: bytes) -> bool:
    """Whether a text, lower case in UTF-8, may hold a named part of a form at all."""
    return b'name="' in low and b"content-disposition:" in low


def element_rule(sensitivity: NameRule) -> Rule:
    """The rule for `<name>secret</name>`, with or without a prefix, attributes, or a CDATA section."""

    def hide(found: re.Match[str]) -> str:
        start, name, content = found.groups()
        kind = sensitivity(name)
        if not kind or MARK in content or not any(map(str.isalnum, content)):
            return found[0]
        if kind is Sensitivity.TEXT and content.strip().isalpha():  # `<auth>basic</auth>`
            return found[0]
        return f"{start}{MARK}"

    return Rule("xml-element", lambda text: _ELEMENT.sub(hide, text))


def field_rule(sensitivity: NameRule) -> Rule:
    """The rule for an element whose attribute names a secret (`name`, `id`, …, or `type="password"`): what its `value`
    or `content` says, in any order of the attributes, and the content of those that hold their value there."""

    def hide(text: str) -> str:
        pieces: list[str] = []
        done = at = 0
        while (tag := _TAG.search(text, at)) is not None:
            values, named, at = _attributes(text, tag.end(), sensitivity)
            if not named:
                continue
            content = _CONTENT.match(text, at) if tag[1].lower() in _WITH_CONTENT else None
            for start, end in [*values, *([content.span(1)] if content else [])]:
                value = text[start:end]
                if MARK not in value and any(map(str.isalnum, value)) and not value.startswith(("{{", "${")):
                    pieces += (text[done:start], MARK)
                    done = end
            at = max(at, done)
        return "".join((*pieces, text[done:])) if pieces else text

    return Rule("markup-field", hide)


def _attributes(text: str, at: int, sensitivity: NameRule) -> tuple[list[tuple[int, int]], bool, int]:
    """Where the values of a tag stand, whether it is named a secret, and where its attributes end."""
    values: list[tuple[int, int]] = []
    named = False
    for _ in range(_MOST_ATTRIBUTES):
        attribute = _ATTRIBUTE.match(text, at)
        if attribute is None:
            break
        name = attribute[1].lower()
        at = attribute.end()
        if "=" not in attribute[0]:
            continue
        start, end, at = _attribute_value(text, at)
        value = text[start:end]
        if name in _HOLDING:
            values.append((start, end))
        elif name == "type" and value.lower() in _NO_FIELD:
            return [], False, at
        elif name in _NAMING or (name == "type" and value.lower() == "password"):
            named = named or bool(sensitivity(value))
    return values, named, at


def _attribute_value(text: str, at: int) -> tuple[int, int, int]:
    """Start and end of an attribute's value, and where what follows it begins."""
    quote = _QUOTE.match(text, at)
    if quote is not None:
        start = quote.end()
        end = text.find(quote[0], start)
        return (start, end, end + len(quote[0])) if end >= 0 else (start, start, start)
    bare = _UNQUOTED.match(text, at)
    if bare is None:
        return at, at, at
    end = bare.end() - (bare[0][-1] == "/" and text[bare.end() : bare.end() + 1] == ">")
    return at, end, end


def part_rule(sensitivity: NameRule) -> Rule:
    """The rule for a part of a multipart form whose name is sensitive: its content up to the next boundary."""

    def hide(text: str) -> str:
        pieces: list[str] = []
        done = 0
        part = _PART.search(text)
        while part is not None:
            start = end = part.end()
            if sensitivity(part[1]):
                end = text.find("\n--", start)
                end = len(text) if end < 0 else end - (text[end - 1] == "\r")
                if end > start and text[start:end] != MARK:
                    pieces += (text[done:start], MARK)
                    done = end
            part = _PART.search(text, max(end, start))
        return "".join((*pieces, text[done:])) if pieces else text

    return Rule("form-part", hide)
