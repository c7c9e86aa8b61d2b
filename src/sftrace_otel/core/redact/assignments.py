# SPDX-License-Identifier: Apache-2.0
"""Secrets that a text assigns to a sensitive name: `PASSWORD=…`, `"api_key": "…"`, `--token …`, `Cookie: …`.

Covers shell lines, environment files, YAML and INI, connection strings, reprs of Python objects, JSON at any level of
quoting, and header lines. The name decides (`names`), and where the value is not quoted, its look decides too, since
prose has sentences such as "token: the smallest unit".

Decision: find the few words that every sensitive name contains, then judge each place. Rejected: one regular expression
with an identifier before the word; it is quadratic on `A_A_A_…` and starts at every letter of the text. All steps here
are bounded or consume what they read, so the cost grows with the text and no faster.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from sftrace_otel.core.redact.names import Sensitivity

NameRule = Callable[[str], Sensitivity]
Span = tuple[int, int]

WORDS = ("pass", "pwd", "secret", "token", "key", "auth", "cookie", "cred", "signature", "jwt")
"""Lower-case texts, one of which stands in every sensitive name that is looked for in texts."""

_NAME_REACH = 64
_NAME_CHARS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-."
_REST = re.compile(r"[A-Za-z0-9_\-]{0,40}+")
_OPERATOR = re.compile(
    r"""(?:\\{0,7}["'`])?\]?[ \t]{0,8}(?::=|=>|={1,2}(?!=)|:)\s{0,8}(?:[bBrRfFuU]{1,2}(?=["']))?(?=\S)"""
)
_ARGUMENT = re.compile(r"""(?:\\{0,7}["'`])?,?\s{1,8}(?=[^\s\-])""")
_QUOTE = re.compile(r"""\\{0,7}["'`]""")
_BARE = re.compile(r"""[^\s"'`,;&|<>(){}\[\]\\]{1,128}+""")
_BARE_REST = re.compile(r"""[^\s"'`,;&|<>(){}\[\]\\]*+""")
_LETTER = re.compile(r"[^\W_]")
_DIGIT = re.compile(r"\d")
_SCHEME = re.compile(r"(?:bearer|basic|digest|token|negotiate|apikey|key|bot)(?:\s{1,8}|%20|\+)(?=\S)", re.IGNORECASE)
_BLOCK_STARTS = ("|", ">", "!", "&")
_BLOCK = re.compile(r"(?:[!&][^\s,]{0,64}[ \t]{1,8}){0,2}[|>][-+1-9]{0,2}[ \t]{0,64}(?:#[^\r\n]{0,200})?\r?\n")
_DEEPEST, _LONGEST_TEXT = 512, 4096
"""Characters: an indentation up to which YAML is read, and how much of a block that may be no secret."""
_INDENTED = re.compile(r"([ \t]*)([^\r\n]*)(?:\r?\n|\Z)")
_PAIRS = re.compile(r"""[^"'`\r\n\\=]{0,128}+=[^"'`\r\n\\]*+""")

_NOT_VALUES = (
    " none null nil true false undefined required optional missing invalid string str int integer bool boolean bytes "
    "any object number field value password secret token redacted hidden masked removed empty unset here "
)
_STAND_IN = re.compile(r"\$|%[({]|\*\*|xxx|your[-_]|my[-_]|[\W_]*$", re.IGNORECASE)


def find(text: str, low: str, words: tuple[str, ...], sensitivity: NameRule) -> Iterator[Span]:
    """The places in `text` that hold a secret assigned to a sensitive name, in order, without overlaps.

    Args:
        text: The text.
        low: `text` with its ASCII letters in lower case, of the same length.
        words: Lower-case texts, one of which every sensitive name contains (`WORDS` and more).
        sensitivity: What a name says about its value.
    """
    done = 0
    for start, end in places(low, words):
        if start >= done:
            done = _REST.match(text, end).end()  # type: ignore[union-attr]
            span = _judge(text, start, done, sensitivity)
            if span is not None:
                yield span
                done = span[1]


def mentions(text: str, low: str, words: tuple[str, ...], sensitivity: NameRule) -> bool:
    """Whether a sensitive name stands in `text` in quotes, before an operator, or as a command line option. Arguments
    as for `find`."""
    done = 0
    for start, end in places(low, words):
        if start < done:
            continue
        done = _REST.match(text, end).end()  # type: ignore[union-attr]
        least = max(0, start - _NAME_REACH)
        named = text[done : done + 1] in ("'", '"', "\\") or _OPERATOR.match(text, done) is not None
        named = named or text.find("--", least, start) >= 0
        if named and sensitivity(text[least + len(text[least:start].rstrip(_NAME_CHARS)) : done]):
            return True
    return False


def places(low: str, words: tuple[str, ...]) -> list[Span]:
    """Every occurrence of one of `words`, in order."""
    places = []
    for word in words:
        at = low.find(word)
        while at >= 0:
            places.append((at, at + len(word)))
            at = low.find(word, at + len(word))
    return sorted(places)


def _judge(text: str, start: int, end: int, sensitivity: NameRule) -> Span | None:
    """The secret assigned to the name around `text[start:end]`, where the name ends at `end` and is sensitive."""
    least = max(0, start - _NAME_REACH)
    operator = _OPERATOR.match(text, end)
    if operator is None and text.find("--", least, start) < 0:
        return None
    begin = least + len(text[least:start].rstrip(_NAME_CHARS))
    argument = None if operator or not text.startswith("--", begin) else _ARGUMENT.match(text, end)
    if operator is None and argument is None:
        return None
    name = text[begin:end].rpartition(".")[2]
    kind = sensitivity(name)
    if not kind:
        return None
    if operator:
        return _value(text, begin, operator.end(), name.lower(), kind, ":" in operator.group())
    return _argument(text, argument.end()) if argument else None


def _argument(text: str, at: int) -> Span | None:
    """`--token VALUE`: a quoted value, or one that does not look like a word of a sentence."""
    quote = _QUOTE.match(text, at)
    if quote:
        return _quoted(text, quote)
    value = _BARE.match(text, at)
    if value and len(value.group()) >= 6 and not value.group().isalpha() and not _STAND_IN.match(value.group()):
        return _whole(text, value)
    return None


def _value(text: str, begin: int, at: int, name: str, kind: Sensitivity, colon: bool) -> Span | None:
    quote = _QUOTE.match(text, at)
    if quote:
        return _quoted(text, quote)
    block = _BLOCK.match(text, at) if colon and text[at : at + 1] in _BLOCK_STARTS else None
    if block:
        return _indented(text, begin, block.end(), kind)
    if "cookie" in name:
        pairs = _PAIRS.match(text, at)
        return pairs.span() if pairs else None
    scheme = _SCHEME.match(text, at) if "authorization" in name or "auth" in name else None
    if scheme:
        token = _BARE.match(text, scheme.end())
        return _whole(text, token) if token and len(token.group()) >= 4 else None
    value = _BARE.match(text, at)
    if value is None or not _is_bare_secret(text, begin, value, name, kind, colon):
        return None
    return _whole(text, value)


def _indented(text: str, begin: int, at: int, kind: Sensitivity) -> Span | None:
    """The lines of a YAML block scalar (YAML 1.2, section 8.1) that begins at `at`: those indented deeper than the name
    at `begin` is."""
    before = text[max(0, begin - _DEEPEST) : begin].rpartition("\n")[2]
    if before.strip(" \t-?\"'") or len(before) == _DEEPEST:
        return None
    least = len(before.rstrip("\"'"))
    start = end = -1
    last = at + _LONGEST_TEXT if kind is Sensitivity.TEXT else len(text)  # what is read in vain is read again
    while at < min(last, len(text)):
        line = _INDENTED.match(text, at)
        if line is None or (line[2] and len(line[1]) <= least):
            break
        if start < 0 and line[2].startswith(("${", "{{", "<")):
            return None
        if line[2]:
            start, end = (line.start(2) if start < 0 else start), line.end(2)
        at = line.end()
    value = text[start:end] if start >= 0 else ""
    if (
        value == "[REDACTED]"
        or not _LETTER.search(value)
        or (kind is Sensitivity.TEXT and not any(map(_is_opaque, value.split())))
    ):
        return None
    return start, end


def _whole(text: str, value: re.Match[str]) -> Span:
    """The span of an unquoted value of which `value` is the beginning."""
    rest = _BARE_REST.match(text, value.end())
    return value.start(), rest.end() if rest else value.end()


def _is_bare_secret(text: str, begin: int, value: re.Match[str], name: str, kind: Sensitivity, colon: bool) -> bool:
    """Whether an unquoted value is a secret and not a word of prose, a number that counts, a stand-in or code."""
    word = value.group()
    if _STAND_IN.match(word) or f" {word.lower().strip('.:?!')} " in _NOT_VALUES or word.lower() == name:
        return False
    if text[value.end() : value.end() + 1] in ("(", "[", "{") and word[-1] != "=":
        return False
    if kind is Sensitivity.TEXT:
        return _is_opaque(word)
    if _is_opaque(word) or (len(word) >= 4 and not word.isalpha() and not _is_dotted_name(word)):
        return True
    return _ends_line(text, begin, value.end()) if colon else len(word) >= 4 and not _is_dotted_name(word)


def _is_opaque(word: str) -> bool:
    """Eight characters or more with a digit beside something that is not one, or long and of mixed case."""
    if len(word) < 8 or word.replace(".", "").isdigit():
        return False
    if _DIGIT.search(word):
        return True
    return len(word) >= 16 and not (word.islower() or word.isupper()) and not _is_dotted_name(word)


def _is_dotted_name(word: str) -> bool:
    return "." in word and all(part.isidentifier() for part in word.split("."))


def _ends_line(text: str, begin: int, end: int) -> bool:
    """`name: value` alone on its line, as in YAML and in header blocks."""
    before = text[max(0, begin - _NAME_REACH) : begin].rpartition("\n")[2].strip(" \t-")
    after = text[end : end + 1]
    return not before and (after in ("", "\n", "\r")) and len(text[begin:end]) >= 8


def _quoted(text: str, quote: re.Match[str]) -> Span | None:
    """What stands between `quote` and its closing twin; to the end of the line, or of the text, where there is none."""
    start = quote.end()
    end = _closing(text, start, quote.group()[-1], len(quote.group()) - 1)
    value = text[start:end]
    return (start, end) if value and not _is_hidden(value) else None


def _is_hidden(value: str) -> bool:
    return value == "[REDACTED]" or value.startswith(("${", "{{", "<")) or not _LETTER.search(value)


def _closing(text: str, start: int, mark: str, slashes: int) -> int:
    """Where the string that began before `start` ends: at a `mark` with as many backslashes before it, or fewer."""
    at = text.find(mark, start)
    while at >= 0:
        before = at
        while before > start and text[before - 1] == "\\":
            before -= 1
        count = at - before
        if count <= slashes and (slashes or not count):
            return before
        if not slashes and count % 2 == 0:
            return at
        at = text.find(mark, at + 1)
    line = text.find("\n", start)
    return line if line > start else len(text)
