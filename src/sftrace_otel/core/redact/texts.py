# SPDX-License-Identifier: Apache-2.0
"""The scan of texts: which rules can apply is decided by a few cheap searches, and only those run.

Decision: everything the rules look for leaves a trace that bytes methods find at memory speed: a literal, a run of 15
letters and digits, an operator behind a sensitive word. Many texts are judged at once, joined by line ends; only when
the whole is suspicious each is looked at by itself, and texts found clean are remembered (bounded), since agents send
the same messages again and again. Rejected: running the rules (4 MB/s), one alternation of them (3 MB/s), a literal per
rule without a gate (19 MB/s).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from sftrace_otel.core.redact import assignments, markup, tables
from sftrace_otel.core.redact.credentials import (
    BASIC,
    BEARER,
    GITHUB,
    JWT,
    MARK,
    PEM,
    REFERENCE,
    SK_KEY,
    USERINFO,
    VENDOR_LITERALS,
    VENDOR_LITERALS_OUTSIDE,
    VENDORS,
    Rule,
    decode_base64,
    printable,
    query_rule,
)
from sftrace_otel.core.redact.known import KnownValues
from sftrace_otel.core.redact.names import PARAMETER_NAMES, Sensitivity

SHORTEST_SECRET = 8
"""Characters: a text that is shorter holds nothing that a rule could find."""

_RUN_CHARS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-"
_TO_RUNS = bytes(byte in _RUN_CHARS for byte in range(256))
_TO_BASE64 = bytes(byte in _RUN_CHARS + b"+/" for byte in range(256))
_RUN = b"\1" * 15
_NOTED = b"\2"
_CLASSES = bytes(2 if byte in b'=:@<"-_' else byte in _RUN_CHARS for byte in range(256))
_BASE64_RUN = b"\1" * 24
_SCHEMES = re.compile(rb"b(?:earer|asic)[\s\x1c-\x1f%+\\\xc2\xe1\xe2\xe3]")
_JSON_STARTS = ("{", "[", " ", "\n", "\r", "\t")
_JSON_ENDS = ("}", "]", " ", "\n", "\r", "\t")
_USER_OPTION = re.compile(rb"""-(?:u|-user)[\\"']""")
_PARAMETERS = re.compile(
    rb"[?&;#](?:" + b"|".join(re.escape(name.encode()) for name in sorted(PARAMETER_NAMES)) + rb")="
)
_SK = re.compile(rb"k-(?<=sk-)")
_NAME_BEFORE = re.compile(rb""":[\s\]"'`\\]{0,18}([a-z0-9_.-]{2,64})""")
_NAME_BEHIND = re.compile(rb"--([a-z0-9_-]{2,64})")
_GITHUB = re.compile(rb"g(?:h[pousr]|ithub_pat)_")
_LONG_TEXT = 8192
_BLOB_RUN = b"\1" * 4096
_BLOB_END = 64
_KEY_IN_BLOB = re.compile(rb"A(?<![A-Za-z0-9]A)(?:KIA[A-Z0-9]{16}|SIA[A-Z0-9]{16}|Iza[A-Za-z0-9]{30})")
_BASE64 = re.compile(r"(?<![A-Za-z0-9+/_-])[A-Za-z0-9+/_-]{24,}={0,2}")


class TextRules:
    """The rules of one policy for texts.

    Args:
        sensitivity: What a name says about its value.
        words: Lower-case ASCII texts, one of which every sensitive name contains.
        known: Secrets whose value is known.
        custom: The user's own rules: they run on every text, first.
    """

    def __init__(
        self,
        sensitivity: Callable[[str], Sensitivity],
        words: tuple[str, ...],
        known: KnownValues,
        custom: Sequence[tuple[re.Pattern[str], Rule]] = (),
    ) -> None:
        self._sensitivity = sensitivity
        self._words = words
        self._spelled = [(word, word.encode()) for word in words]
        self._spellings = [spelled for _, spelled in self._spelled]
        self._known = known
        self._custom = tuple(custom)
        self._custom_rules = tuple(rule for _, rule in self._custom)
        self._query = query_rule(sensitivity)
        self._assigned = Rule("assignment", self._hide_assigned)
        self._element = markup.element_rule(sensitivity)
        self._field = markup.field_rule(sensitivity)
        self._table = tables.table_rule(words, sensitivity)
        self._part = markup.part_rule(sensitivity)
        self._base64 = Rule("base64", self._hide_base64)
        self._known_rule = Rule("known-value", known.hide)

    def names(self) -> list[str]:
        """The rules in the order in which they run."""
        own = (self._known_rule, PEM, USERINFO, self._query, BEARER, BASIC, SK_KEY, GITHUB, JWT, VENDORS)
        every = [rule for _, rule in self._custom] + [
            *own,
            self._assigned,
            self._element,
            self._field,
            self._part,
            self._table,
            self._base64,
            *REFERENCE,
        ]
        return [rule.name for rule in every]

    def suspicious(self, texts: Sequence[str]) -> bool:
        """Whether any of `texts` may hold a secret; False is certain."""
        if self._custom and any(looks_like_json(text) or self._matches_custom(text) for text in texts):
            return True
        joined = texts[0] if len(texts) == 1 else "\n".join(texts)
        data = joined.encode("utf-8", "surrogatepass")
        if self._is_quiet(data):
            return any(self._begins_with_table(text) for text in texts if "\n" in text)
        json = any(map(looks_like_json, texts))
        if json and b"-" in data and _USER_OPTION.search(data) is not None:
            return True
        if json and b"\\n" in data and self._mentions_word(data.lower()):  # lines of a text, which are not read here
            return True
        return bool(self._fired(joined, json, data)) or (json and ("\\u" in joined or "\\/" in joined))

    def _is_quiet(self, data: bytes) -> bool:
        """Whether no rule can find anything in `data`, by what takes next to no time; most texts pass."""
        mask = data.translate(_CLASSES)
        if _NOTED in mask or _RUN in mask:
            return False
        if _SCHEMES.search(data.lower()) is not None:
            return False
        return not self._known.any or not self._known.occur(data, b"")

    def hide(self, text: str) -> tuple[str, list[str]]:
        """`text` as plain text with every secret replaced, once over all rules, and the names of the rules that did."""
        return _run((*self._custom_rules, *self._fired(text, False)), text)

    def hide_by_reference(self, text: str) -> tuple[str, list[str]]:
        """The reference's rules and the known values alone: for JSON whose texts have been seen to one by one."""
        data = text.encode("utf-8", "surrogatepass")
        found = [self._known_rule] if self.holds_known(data) else []
        if _SCHEMES.search(data.lower()) is not None:
            found += REFERENCE[:2]
        if b"-" in data and _SK.search(data) is not None:
            found.append(REFERENCE[2])
        if b"_" in data and _GITHUB.search(data) is not None:
            found += REFERENCE[3:]
        return _run(found, text)

    def holds_known(self, data: bytes) -> bool:
        """Whether `data`, text or not, contains a known value in one of its spellings."""
        return self._known.occur(data, b" ")

    def _matches_custom(self, text: str) -> bool:
        return any(pattern.search(text) for pattern, _ in self._custom)

    def _fired(self, text: str, json: bool, data: bytes | None = None) -> list[Rule]:
        """The rules that may change `text`, in order. With `json`, a sensitive name in quotes is enough. `data`: it in
        UTF-8."""
        whole = data = text.encode("utf-8", "surrogatepass") if data is None else data
        blobs: list[bytes] = []
        if len(data) > _LONG_TEXT:
            data, blobs = _without_blobs(data)
            text = data.decode("utf-8", "surrogatepass") if blobs else text
        low = data.lower()
        runs = _runs(data)
        dash = b"-" in data
        words = self._named(low, json, dash)
        fired: list[Rule] = []
        last: list[Rule] = []
        if self._known.any and self._known.occur(whole, runs):
            fired.append(self._known_rule)
        if dash and b"-----BEGIN" in data:
            fired.append(PEM)
        if b"@" in data and b"://" in data:
            fired.append(USERINFO)
        if b"=" in data and self._has_secret_parameter(text, low, words):
            fired.append(self._query)
        if _SCHEMES.search(low):
            fired += (BEARER, BASIC)
            last += REFERENCE[:2]
        if dash and _SK.search(data):
            fired.append(SK_KEY)
            last.append(REFERENCE[2])
        if b"_" in data and _GITHUB.search(data):
            fired.append(GITHUB)
            last += REFERENCE[3:]
        if runs:
            fired += self._fired_by_runs(data, runs, blobs)
        if words and self._assigns(text, low, words, json):
            fired.append(self._assigned)
        if b"\n" in data and tables.may_hold_table(low, self._spellings) and self._has_column(text, low):
            fired.append(self._table)
        if b"<" in data and self._mentions_word(low):
            fired += self._fired_by_markup(text, data, low)
        if b'"' in data and markup.may_hold_part(low) and self._mentions_word(low):
            fired.append(self._part)
        return fired + last if last else fired

    def _fired_by_markup(self, text: str, data: bytes, low: bytes) -> Iterable[Rule]:
        if markup.may_hold_element(low):
            yield self._element
        if b"=" in data and markup.may_hold_field(low) and self._field.apply(text) != text:
            yield self._field

    def _fired_by_runs(self, data: bytes, runs: bytes, blobs: list[bytes]) -> Iterable[Rule]:
        if b"eyJ" in runs:
            yield JWT
        inside = any(byte in runs and any(map(runs.__contains__, literals)) for byte, literals in VENDOR_LITERALS)
        if inside or any(map(data.__contains__, VENDOR_LITERALS_OUTSIDE)):
            yield VENDORS
        if any(map(self._is_base64_of_secret, blobs + _runs_of(data, _TO_BASE64, _BASE64_RUN))):
            yield self._base64

    def _named(self, low: bytes, json: bool, dash: bool) -> tuple[str, ...]:
        """The words of sensitive names that stand where names stand; in JSON, anywhere."""
        near = low if json else _names(low, dash)
        return tuple([word for word, spelled in self._spelled if spelled in near]) if near else ()

    def _mentions_word(self, low: bytes) -> bool:
        return any(map(low.__contains__, self._spellings))

    def _has_secret_parameter(self, text: str, low: bytes, words: tuple[str, ...]) -> bool:
        if b"?" not in low and b"&" not in low and b";" not in low:
            return False
        named = words or b"_key=" in low or b"-key=" in low or _PARAMETERS.search(low) is not None
        return bool(named) and self._query.apply(text) != text

    def _assigns(self, text: str, low: bytes, words: tuple[str, ...], json: bool) -> bool:
        lowered = low.decode("utf-8", "surrogatepass")
        if json:
            return assignments.mentions(text, lowered, words, self._sensitivity)
        return next(assignments.find(text, lowered, words, self._sensitivity), None) is not None

    def _begins_with_table(self, text: str) -> bool:
        """Whether one of the first lines of a text is the head of a table with a sensitive column."""
        data = text[: tables.LONGEST_HEAD].encode("utf-8", "surrogatepass").lower()
        return tables.may_hold_table(data, self._spellings) and self._has_column(text[: tables.LONGEST_HEAD], data)

    def _has_column(self, text: str, low: bytes) -> bool:
        lowered = low.decode("utf-8", "surrogatepass")
        return next(tables.find(text, lowered, self._words, self._sensitivity), None) is not None

    def _hide_assigned(self, text: str) -> str:
        lowered = text.encode("utf-8", "surrogatepass").lower().decode("utf-8", "surrogatepass")
        pieces: list[str] = []
        done = 0
        for start, end in assignments.find(text, lowered, self._words, self._sensitivity):
            pieces += (text[done:start], MARK)
            done = end
        return "".join((*pieces, text[done:]))

    def _hide_base64(self, text: str) -> str:
        return _BASE64.sub(
            lambda found: MARK if self._is_base64_of_secret(found[0].rstrip("=").encode()) else found[0], text
        )

    def _is_base64_of_secret(self, token: bytes) -> bool:
        """Whether `token` is base64 of a text with a secret in it (one level deep; images and digests are not text)."""
        head = decode_base64(token[:24])
        if head is None or not head.isascii() or not printable(head):
            return False
        plain = decode_base64(token)
        if plain is None or not printable(plain):
            return False
        text = plain.decode()
        rules = [rule for rule in self._fired(text, False) if rule is not self._base64]
        return _run((*self._custom_rules, *rules), text)[0] != text


def _run(rules: Iterable[Rule], text: str) -> tuple[str, list[str]]:
    reasons = []
    for rule in rules:
        changed = rule.apply(text)
        if changed != text:
            reasons.append(rule.name)
            text = changed
    return text, reasons


def looks_like_json(text: str) -> bool:
    """Whether `text` may be a JSON object or array: its first and last characters, apart from white space, say so."""
    if text[:1] not in _JSON_STARTS or text[-1:] not in _JSON_ENDS:
        return False
    return text.lstrip()[:1] in ("{", "[") and text.rstrip()[-1:] in ("}", "]")


def _runs(data: bytes) -> bytes:
    """The runs of 15 and more letters, digits, `_` and `-` in `data`, a line each; empty where there is none."""
    if len(data) < len(_RUN) or _RUN not in data.translate(_TO_RUNS):
        return b""
    return b"\n".join(_runs_of(data, _TO_RUNS, _RUN))


def _runs_of(data: bytes, table: bytes, least: bytes) -> list[bytes]:
    mask = data.translate(table)
    start = mask.find(least)
    runs = []
    while start >= 0:
        end = mask.find(b"\0", start)
        if end < 0:
            end = len(mask)
        runs.append(data[start:end])
        start = mask.find(least, end)
    return runs


def _without_blobs(data: bytes) -> tuple[bytes, list[bytes]]:
    """`data` with the middle of each long run of base64 (an image, a file) left out, and these runs.

    Runs keep their ends, which may belong to a secret beside them. One that spells a vendor's key, or that is not of
    the standard alphabet, stays whole; known values are looked for in the whole text, and what a run decodes to is
    judged as ever.
    """
    mask = data.translate(_TO_BASE64)
    start = mask.find(_BLOB_RUN)
    pieces: list[bytes] = []
    blobs: list[bytes] = []
    done = 0
    while start >= 0:
        end = mask.find(b"\0", start)
        end = len(data) if end < 0 else end
        run = data[start:end]
        if b"-" not in run and b"_" not in run and not _spells_key(run):
            pieces += (data[done : start + _BLOB_END], b"\0")
            done = end - _BLOB_END
            blobs.append(run)
        start = mask.find(_BLOB_RUN, end)
    return (b"".join((*pieces, data[done:])), blobs) if blobs else (data, blobs)


def _spells_key(run: bytes) -> bool:
    return any(literal in run for literal in (b"AKIA", b"ASIA", b"AIza")) and _KEY_IN_BLOB.search(run) is not None


def _names(low: bytes, dash: bool) -> bytes:
    """The names before each `=` and `:` and behind each `--` in `low`, read forwards."""
    names: list[bytes] = []
    if b"=" in low or b":" in low:
        names = _NAME_BEFORE.findall(low.replace(b"=", b":")[::-1])
    if dash and b"--" in low:
        names += [name[::-1] for name in _NAME_BEHIND.findall(low)]
    return b"\n".join(names)[::-1] if names else b""
