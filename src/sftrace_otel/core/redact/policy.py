# SPDX-License-Identifier: Apache-2.0
"""The redaction policy: what is hidden in values, texts, documents, URLs and headers before anything is written.

One object holds all rules, so that recording, replay and re-redaction agree. A clean value costs one look over its keys
and one scan over its texts, and is returned itself; texts found clean are remembered, within bounds, since agents send
the same messages again and again. Redaction is stable: what was redacted stays as it is when it is redacted again; a
text that does not come to rest is hidden as a whole.

Decision: whole values under sensitive names, spans inside texts, JSON inside texts as JSON. Rejected: hashes, lengths
or kept prefixes in the place of a secret (the `.sftrace` format forbids them, and a prefix narrows a guess).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

from sftrace_otel.core.redact import assignments, documents, jsontext
from sftrace_otel.core.redact.credentials import MARK
from sftrace_otel.core.redact.custom import NO_CUSTOM_RULES, CustomRules, from_toml
from sftrace_otel.core.redact.known import KnownValues, is_handed_out, of_environment
from sftrace_otel.core.redact.names import REFERENCE_NAMES, Sensitivity, normalise, sensitivity
from sftrace_otel.core.redact.texts import SHORTEST_SECRET, TextRules, looks_like_json
from sftrace_otel.core.redact.walk import (
    CREDENTIAL_PATTERN,
    HEADERS,
    LONGEST_NAME,
    VALUE_KEYS,
    Finding,
    Walk,
    hides,
    is_header_list,
    is_secret_argument,
    is_secret_pair,
    may_be_name,
    secret_pair,
)
from sftrace_otel.formats import Json

KNOWN_VALUE = "known_value"
"""Reason: a span that equals a secret of the environment was replaced."""

MAX_PLAIN_DEPTH = 100
"""Containers inside containers up to which `is_clean` can say yes."""

_ROUNDS = 6
_NESTED_TEXTS = 5
_MANY_CONTAINERS = 4_096
_TOO_MANY_CONTAINERS = 1_000_000
_MANY_ITEMS = 16
_BATCH_CHARS = 1 << 20
_NO_LIMIT = 1 << 62
_MANY_NAMES = 8192
_MANY_HEADERS = 1024
_MANY_HANDED = 64
_REMEMBERED_CHARS = 4_000_000
_REMEMBERED_TEXT = 262_144
_SCALARS = frozenset({int, bool, type(None)})


class Look(Enum):
    """What a first look at a value says."""

    SUSPICIOUS = 0
    """Not plain JSON, or perhaps not without secrets: look closer."""
    CLEAN = 1
    """Plain JSON without secrets."""
    CLEAN_WITHOUT_FLOATS = 2
    """The same of texts, ints, booleans and null alone."""
    LARGE = 3
    """Larger than there is room for; not looked at further."""


_CLEAN, _EXACT = Look.CLEAN, Look.CLEAN_WITHOUT_FLOATS


def _any_of(values: Iterable[str]) -> re.Pattern[str] | None:
    """An expression that splits a text at each of `values` and keeps them; None for no values."""
    longest_first = sorted(values, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None


def _keys_of(value: Json) -> set[str]:
    """All keys in `value`."""
    if isinstance(value, dict):
        return set(value).union(*map(_keys_of, value.values()))
    return set().union(*map(_keys_of, value)) if isinstance(value, list) else set()


def _settled(text: str, redact: Callable[[str], str]) -> str:
    """`text` redacted until it does not change any more; the mark where it does not come to rest."""
    for _ in range(_ROUNDS):
        again = redact(text)
        if again == text:
            return text
        text = again
    return MARK


class Vouched(NamedTuple):
    """What a policy found out about a body.

    Attributes:
        rules: By which rules: the texts known to be clean by them, a new set with each secret that is learned.
        data: The body as it may be written; the very same where it holds no secret.
    """

    rules: object
    data: bytes


class RedactionPolicy:
    """What is hidden, and how. Thread-safe; make it once and share it, since it remembers what it found clean.

    Use `RedactionPolicy.default(os.environ)`, `from_toml`, `reference` or `strictest`.

    Args:
        policy_id: Name of the policy, for reports.
        custom: The user's own rules.
        secrets: Known secrets; those shorter than eight characters are left out.
        of_environ: The known secrets among variables, for `learn`.
    """

    def __init__(
        self,
        *,
        policy_id: str = "default",
        custom: CustomRules = NO_CUSTOM_RULES,
        secrets: Iterable[str] = (),
        of_environ: Callable[[Mapping[str, str]], Iterable[str]] | None = None,
    ) -> None:
        self._id = policy_id
        self._custom = custom
        self._of_environ = of_environ
        self._learning = threading.Lock()
        self._secrets = frozenset(secrets)
        self._handed: tuple[str, ...] = ()
        self._know()
        self._allowed = _any_of(custom.allow_values)
        self._kinds: dict[str, Sensitivity] = {}
        self._plain_names: set[str] = set()
        self._plain_headers: set[tuple[str, str]] = set()
        self._clean: set[str] = set()
        self._clean_chars = 0

    @classmethod
    def default(cls, environ: Mapping[str, str]) -> RedactionPolicy:
        """All rules, and as known secrets the values of the variables in `environ` whose names call for it."""
        return cls(secrets=of_environment(environ), of_environ=of_environment)

    @classmethod
    def from_toml(cls, text: str, environ: Mapping[str, str]) -> RedactionPolicy:
        """The default rules with the user's own (keys, patterns, allow-lists; see `custom.from_toml`).

        Raises:
            SettingsError: The text is not TOML, has an unknown entry, or a pattern that is invalid or not linear. The
                caller goes on with `strictest()`.
        """
        custom, variables = from_toml(text)

        def of_environ(environ: Mapping[str, str]) -> list[str]:
            secrets = of_environment(environ) if custom.environment else []
            return [*secrets, *(environ.get(name, "") for name in variables)]

        return cls(policy_id="custom", custom=custom, secrets=of_environ(environ), of_environ=of_environ)

    @classmethod
    def reference(cls) -> RedactionPolicy:
        """The rules of stepfork 0.2.1 and nothing else, for bundles that it wrote."""
        from sftrace_otel.core.redact.variants import ReferencePolicy

        return ReferencePolicy()

    @classmethod
    def strictest(cls) -> RedactionPolicy:
        """No content at all: every text and number is hidden, structure and names stay. For unreadable settings."""
        from sftrace_otel.core.redact.variants import StrictestPolicy

        return StrictestPolicy()

    def _know(self) -> None:
        self._known = KnownValues(self._secrets, self._handed)
        self._texts = TextRules(
            self.sensitivity, (*assignments.WORDS, *self._custom.words), self._known, self._custom.patterns
        )

    def learn(self, environ: Mapping[str, str]) -> None:
        """Know the secrets of `environ` too: variables may be set after start. What was known stays so."""
        if self._of_environ is None:
            return
        with self._learning:
            secrets = self._secrets.union(self._of_environ(environ))
            if secrets != self._secrets:
                self._secrets = secrets
                self._learned()

    def remember(self, values: Iterable[object]) -> bool:
        """Know what a service handed out under a sensitive name (a login's token), wherever the program uses it later.

        Words and short values are not taken; of many the last `_MANY_HANDED` are known. True if one was new.
        """
        new = [value for value in values if is_handed_out(value) and value not in self._handed]
        if new:
            with self._learning:
                self._handed = (*self._handed, *dict.fromkeys(map(str, new)))[-_MANY_HANDED:]
                self._learned()
        return bool(new)

    def _learned(self) -> None:
        self._know()
        self._clean = set()  # after the rules: what is judged by the old ones goes into the old set
        self._plain_names = set()
        self._plain_headers = set()
        self._clean_chars = 0

    def redact(self, value: Json) -> tuple[Json, tuple[Finding, ...]]:
        """`value` without secrets, and where they stood. The very same object, and no findings, where it holds none."""
        if self.is_clean(value):
            return value, ()
        walk = Walk(self)
        redacted = walk.value(value)
        return redacted, tuple(walk.findings)

    def redact_text(self, text: str) -> tuple[str, tuple[Finding, ...]]:
        """One text without secrets. JSON inside it is redacted as JSON and stays JSON."""
        hidden, reasons = self.hide(text, 0)
        return hidden, tuple(Finding("", reason) for reason in reasons)

    def redact_document(self, text: str) -> tuple[str, bool]:
        """A body as it went over the wire (decoded), without secrets, and whether anything changed.

        JSON, server-sent events and JSON lines, form data, multipart and plain text are told apart by their look. Only
        the characters of a secret change. A secret cut over several events of a stream is found in the joined deltas;
        the number of events stays.
        """
        redacted = _settled(text, partial(documents.redact, self))
        return redacted, redacted != text

    def vouched(self, data: bytes, dumped: bytes) -> Vouched | None:
        """That the JSON body `data` is without secrets, None where that is not certain.

        `dumped` is the JSON of its value (orjson's, keys in their order), which `look` has just found clean: what
        `redact_document` would ask of the value is known then.
        """
        rules = self._clean
        if data[:1] not in (b"{", b"[") or not jsontext.spells_each_key_once(data, dumped):
            return None
        return None if self._texts.holds_known(data) else Vouched(rules, data)

    def cleaned(self, data: bytes) -> Vouched:
        """`redact_bytes`, to be kept."""
        rules = self._clean
        return Vouched(rules, self.redact_bytes(data))

    def vouches(self, said: Vouched | None) -> bool:
        """Whether what was said of a body still holds: no secret was learned since."""
        return said is not None and said.rules is self._clean

    def redact_bytes(self, data: bytes) -> bytes:
        """A body that is no UTF-8, without secrets: text parts of a multipart body, text in another encoding, what is
        packed. Where the place of a secret cannot be told, the mark alone stands for the whole."""
        withheld = MARK.encode()
        if data[:2] == b"\x1f\x8b":
            plain = documents.unpacked(data)
            return data if plain is None or not self.holds_secret(plain) else withheld
        wide = documents.wide_text(data)
        if wide is not None and self.redact_document(wide)[1]:
            return withheld
        redacted, changed = self.redact_document(data.decode("latin-1"))
        if changed:
            data = redacted.encode("latin-1")
        return withheld if self._texts.holds_known(data) else data

    def redact_url(self, url: str) -> str:
        """A URL without user information, secret parameters and other secrets in it."""
        return _settled(url, partial(documents.redact_url, self))

    def redact_headers(self, pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Header fields, in order and with their spelling, without the values of those that carry credentials."""
        plain = self._plain_headers
        return [pair if pair in plain else self._redact_header(*pair, plain) for pair in pairs]

    def _redact_header(self, name: str, value: str, plain: set[tuple[str, str]]) -> tuple[str, str]:
        """One field without credentials; one that has none is remembered, since clients send the same ones again."""
        hidden = _settled(value, partial(documents.redact_header, self, name))
        if hidden == value and len(value) <= LONGEST_NAME:
            if len(plain) >= _MANY_HEADERS:
                plain.clear()
            plain.add((name, value))
        return name, hidden

    def describe(self) -> dict[str, Json]:
        """Id and rule names for the bundle's report, with counts of known values; never a value or a pattern."""
        return {
            "id": self._id,
            "rules": ["sensitive-key", *dict.fromkeys(self._texts.names())],
            "known_values": self._known.count,
            "known_values_skipped": self._known.skipped,
        }

    def sensitivity(self, name: str) -> Sensitivity:
        """What `name` (a key, header, parameter or variable) says about its value."""
        kind = self._kinds.get(name)
        if kind is None:
            kind = self._classify(name)
            if len(name) <= LONGEST_NAME:
                if len(self._kinds) >= _MANY_NAMES:
                    self._kinds.clear()
                self._kinds[name] = kind
        return kind

    def _classify(self, name: str) -> Sensitivity:
        plain = normalise(name)
        if plain in REFERENCE_NAMES:
            return Sensitivity.REFERENCE
        if plain in self._custom.keys:
            return Sensitivity.ANY
        return Sensitivity.NONE if plain in self._custom.allow_keys else sensitivity(name)

    def is_allowed(self, value: str) -> bool:
        """Whether the user has declared that `value` is no secret."""
        return value in self._custom.allow_values

    def holds_secret(self, data: bytes) -> bool:
        """Whether `data`, text or not, holds a secret: by the rules for texts where it is UTF-8, else a known value."""
        if self._texts.holds_known(data):
            return True
        try:
            return self.redact_document(data.decode())[1]
        except UnicodeDecodeError:
            return self.redact_bytes(data) != data

    def is_clean(self, value: object) -> bool:
        """Whether `look` finds nothing."""
        look = self.look(value)
        return look is Look.CLEAN or look is Look.CLEAN_WITHOUT_FLOATS

    def holds_nothing(self, text: str, parts: list[Json]) -> bool:
        """Whether `text`, which consists of `parts`, is certainly without secrets.

        Parts that are texts stand there as they are, others as their JSON. Rules look into texts, which are parts; only
        a known value may be spelled by what is between them, such as the JSON of a service account.
        """
        return self.is_clean(parts) and not self._texts.holds_known(text.encode("utf-8", "surrogatepass"))

    def hold_nothing(self, texts: list[str], below: Json) -> bool:
        """Whether `texts` are certainly without secrets wherever they stand in `below`, which `look` has found clean:
        no key there may say anything of what stands under it."""
        if not self._plain_names.issuperset(_keys_of(below)):
            return False
        longer = [text for text in texts if len(text) >= SHORTEST_SECRET]
        return not longer or not self._texts.suspicious(longer)

    def look(self, value: object, room: int = _NO_LIMIT) -> Look:
        """A first look at `value`: is it plain JSON, at most 100 levels deep, and certainly without secrets?

        Only what nobody could mistake is looked at, at memory speed. Lone surrogates, huge ints and floats that are not
        finite are not looked for. `room`: bytes of JSON, roughly and rather too few, beyond which `value` is called
        large. Beside the value there are one list of containers and a batch of its texts in memory.
        """
        fresh: list[str] = []
        clean, plain = self._clean, self._plain_names
        if type(value) is dict and len(value) <= _MANY_ITEMS and plain.issuperset(value):
            # what most calls take and give: texts and numbers under known names; the loops below would say the same
            size, exact = 0, _EXACT
            for item in value.values():
                kind = type(item)
                if kind is str:
                    size += len(item)
                    if item not in clean:
                        fresh.append(item)
                elif kind is float:
                    exact = _CLEAN
                elif kind not in _SCALARS:
                    break
            else:
                if size > room:
                    return Look.LARGE
                return exact if not fresh or self._are_clean(fresh, remember=True) else Look.SUSPICIOUS
            fresh = []
        level: list[Any] = [[value]]
        containers = chars = batch = 0
        floats = False
        for _ in range(MAX_PLAIN_DEPTH + 1):
            below: list[Any] = []
            for container in level:
                known = len(fresh)
                size = len(container)
                if size > _MANY_ITEMS:
                    chars += 4 * size
                    if chars > room:
                        return Look.LARGE
                if type(container) is list:
                    items = container
                elif plain.issuperset(container) or self._has_plain_names(container):
                    if HEADERS in container and not self._has_plain_headers(container[HEADERS]):
                        return Look.SUSPICIOUS
                    items = container.values()
                else:
                    return Look.SUSPICIOUS
                for item in items:
                    kind = type(item)
                    if kind is str:
                        chars += len(item)
                        if item not in clean:
                            fresh.append(item)
                    elif kind is dict or kind is list:
                        below.append(item)
                    elif kind is float:
                        floats = True
                    elif kind not in _SCALARS:
                        return Look.SUSPICIOUS
                if len(fresh) > known and items is container and self._has_named_items(container):
                    return Look.SUSPICIOUS
                if chars > batch:
                    if chars > room:
                        return Look.LARGE
                    if chars > batch + _BATCH_CHARS:
                        if not self._are_clean(fresh, remember=containers < _MANY_CONTAINERS):
                            return Look.SUSPICIOUS
                        fresh, batch = [], chars
            containers += len(below)
            if not below or containers > _TOO_MANY_CONTAINERS:
                break
            level = below
        if below or (fresh and not self._are_clean(fresh, remember=containers < _MANY_CONTAINERS)):
            return Look.SUSPICIOUS
        return _CLEAN if floats else _EXACT

    def _has_plain_names(self, members: dict[Any, Any]) -> bool:
        """Whether no key of `members` hides its value, changes what is done below it, or holds a secret itself."""
        for key, item in members.items():
            if key in self._plain_names:
                continue
            if type(key) is not str:
                return False
            if key in VALUE_KEYS:
                if secret_pair(self, members) is not None:
                    return False
                continue
            kind = self.sensitivity(key)
            if kind and (isinstance(item, dict | list) or hides(self, key, kind, item, members)):
                return False
            if self.hide(key, 0)[0] != key:
                return False
            if not kind and len(key) <= LONGEST_NAME and len(self._plain_names) < _MANY_NAMES:
                self._plain_names.add(key)
        return True

    def _has_plain_headers(self, fields: object) -> bool:
        """Whether header fields, if that is what it is, carry no credentials."""
        if not is_header_list(fields):
            return True
        pairs = [(pair[0], pair[1]) for pair in fields]  # type: ignore[attr-defined]
        return self.redact_headers(pairs) == pairs

    def _has_named_items(self, items: list[Any]) -> bool:
        """Whether an item is named a secret by the one before it: a header pair, a command line option."""
        many = len(items)
        if many < 2:
            return False
        if many == 2 and is_secret_pair(self, items):
            return True
        for place, item in enumerate(items, 1):
            if type(item) is str and item[:1] == "-" and place < many and is_secret_argument(self, item, items[place]):
                return True
        return False

    def _are_clean(self, texts: list[str], *, remember: bool) -> bool:
        longer = texts if len(texts) == 1 else [text for text in texts if len(text) >= SHORTEST_SECRET]
        clean = self._clean
        if longer and self._texts.suspicious(longer):
            return False
        if remember:
            self._remember(texts, clean)
        return True

    def _remember(self, texts: Iterable[str], clean: set[str]) -> None:
        """Keep `texts` as known to be clean wherever they stand; so those that may name the item after them are not."""
        for text in texts:
            size = len(text)
            if size <= _REMEMBERED_TEXT and (size > LONGEST_NAME or not self._may_name(text)) and text[:1] != "-":
                clean.add(text)
                self._clean_chars += size + 64
        if self._clean_chars > _REMEMBERED_CHARS:
            clean.clear()
            self._clean_chars = 0

    def _may_name(self, text: str) -> bool:
        return may_be_name(text) and bool(self.sensitivity(text))

    def hide(self, text: str, nesting: int) -> tuple[str, Sequence[str]]:
        """`text` without secrets and the reasons, each once; `nesting` counts the JSON texts around it.

        For callers outside the policy there are `redact_text` and `redact`.
        """
        clean = self._clean
        if len(text) < SHORTEST_SECRET or text in clean:
            return text, ()
        if not self._texts.suspicious((text,)):
            self._remember((text,), clean)
            return text, ()
        reasons: dict[str, None] = {}
        hidden = text
        for _ in range(_ROUNDS):
            again, why = self._hide_once(hidden, nesting)
            if again == hidden:
                break
            reasons.update(dict.fromkeys(why))
            hidden = again
        else:
            hidden = MARK
        if hidden == text:
            self._remember((text,), clean)
            return text, ()
        return hidden, tuple(reasons)

    def _hide_once(self, text: str, nesting: int) -> tuple[str, list[str]]:
        if nesting < _NESTED_TEXTS and looks_like_json(text):
            value = jsontext.loads(text)
            if value is not None and self.is_clean(value):
                hidden, names = self._texts.hide_by_reference(text)
                return hidden, self._reasons(names)
            if value is not None and jsontext.is_shallow(value):
                return self._hide_in_json(text, value, None, nesting)
            read = jsontext.parse(text)
            if read is not None:
                return self._hide_in_json(text, read[0], read[1], nesting)
        return self._hide_plain(text)

    def _hide_plain(self, text: str) -> tuple[str, list[str]]:
        if self._allowed is None:
            hidden, names = self._texts.hide(text)
            return hidden, self._reasons(names)
        parts = self._allowed.split(text)
        found = [self._texts.hide(part) if number % 2 == 0 else (part, []) for number, part in enumerate(parts)]
        hidden, names = self._texts.hide_by_reference("".join(part for part, _ in found))
        return hidden, self._reasons([*(name for _, part_names in found for name in part_names), *names])

    def _hide_in_json(
        self, text: str, value: Json, place: jsontext.Place | None, nesting: int
    ) -> tuple[str, list[str]]:
        """`text`, whose value is `value`, with its places where it was not read by `jsontext.loads`."""
        walk = Walk(self, nesting + 1)
        redacted = walk.value(value)
        if redacted is not value and place is None:
            text = jsontext.respelled_where_changed(text, value, redacted)
        elif redacted is not value and place is not None:
            text = jsontext.rewritten(text, place, value, redacted)
        text, names = self._texts.hide_by_reference(text)
        return text, [*(finding.reason for finding in walk.findings), *self._reasons(names)]

    def _reasons(self, names: Iterable[str]) -> list[str]:
        """The reason to report for each rule: its name where it is the user's, else what kind of rule it is."""
        return [
            name if name in self._custom.names else KNOWN_VALUE if name == "known-value" else CREDENTIAL_PATTERN
            for name in names
        ]
