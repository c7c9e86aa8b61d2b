# SPDX-License-Identifier: Apache-2.0
"""Secrets that markup names: the content of an XML element, the part of a multipart form (RFC 7578).

Both rules begin at a literal and go on behind what they took, so their time grows with the text and no faster.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from sftrace_otel.core.redact.credentials import MARK, Rule
from sftrace_otel.core.redact.names import Sensitivity

__all__ = ["element_rule", "may_hold_element", "may_hold_part", "part_rule"]

NameRule = Callable[[str], Sensitivity]

_ELEMENT = re.compile(
    r"(<(?:[A-Za-z_][\w.-]{0,63}:)?([A-Za-z_][\w.-]{0,63})(?:\s[^<>]{0,1024})?>)"
    r"(<!\[CDATA\[[^<>]{0,65536}\]\]>|[^<]{1,65536})(?=<\\?/)"
)
_PART = re.compile(
    r'(?i)content-disposition:[^\r\n]{0,200}?[ ;]name="([^"\r\n]{1,200})"[^\r\n]{0,500}'
    r"(?:\r?\n[^\r\n]{1,500}){0,8}?\r?\n\r?\n"
)


def may_hold_element(low: bytes) -> bool:
    """Whether a text, lower case in UTF-8, may hold an XML element at all."""
    return b"</" in low or b"<\\/" in low


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
