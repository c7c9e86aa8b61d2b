# SPDX-License-Identifier: Apache-2.0
"""Two further policies: the reference's rules alone, and no content at all."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from sftrace_otel.core.redact import jsontext
from sftrace_otel.core.redact.credentials import MARK, REFERENCE
from sftrace_otel.core.redact.names import REFERENCE_NAMES, Sensitivity, normalise
from sftrace_otel.core.redact.policy import Look, RedactionPolicy
from sftrace_otel.core.redact.walk import CREDENTIAL_PATTERN, SENSITIVE_KEY, Finding
from sftrace_otel.formats import Json

WITHHELD = "withheld"
"""Reason: the strictest policy keeps no content."""

_PLAIN_HEADERS = frozenset(
    {"accept", "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "date", "host"}
    | {"retry-after", "server", "transfer-encoding", "user-agent", "vary"}
)
_NAME = re.compile(r"[A-Za-z0-9_.:/@+-]{1,80}")


class ReferencePolicy(RedactionPolicy):
    """What stepfork 0.2.1 redacts (its twelve names, its six patterns), and nothing else."""

    def __init__(self) -> None:
        super().__init__(policy_id="reference")

    def redact(self, value: Json) -> tuple[Json, tuple[Finding, ...]]:
        findings: list[Finding] = []
        return self._value(value, "", findings), tuple(findings)

    def hide(self, text: str, nesting: int) -> tuple[str, Sequence[str]]:
        hidden = text
        for rule in REFERENCE if self._texts.suspicious((text,)) else ():
            hidden = rule.apply(hidden)
        return (text, ()) if hidden == text else (hidden, (CREDENTIAL_PATTERN,))

    def describe(self) -> dict[str, Json]:
        return {"id": "reference", "rules": ["sensitive-key", *(rule.name for rule in REFERENCE)]}

    def _classify(self, name: str) -> Sensitivity:
        return Sensitivity.REFERENCE if normalise(name) in REFERENCE_NAMES else Sensitivity.NONE

    def _value(self, value: Json, pointer: str, findings: list[Finding]) -> Json:
        if isinstance(value, str):
            hidden, reasons = self.hide(value, 0)
            findings += [Finding(pointer, reason) for reason in reasons]
            return hidden
        if isinstance(value, dict):
            members = {key: self._member(key, item, pointer, findings) for key, item in value.items()}
            return value if all(members[key] is item for key, item in value.items()) else members
        if isinstance(value, list):
            items = [self._value(item, f"{pointer}/{place}", findings) for place, item in enumerate(value)]
            return value if all(new is old for new, old in zip(items, value, strict=True)) else items
        return value

    def _member(self, key: str, item: Json, pointer: str, findings: list[Finding]) -> Json:
        place = f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}"
        if not self.sensitivity(key):
            return self._value(item, place, findings)
        if item != MARK:
            findings.append(Finding(place, SENSITIVE_KEY))
            return MARK
        return item


class StrictestPolicy(RedactionPolicy):
    """No content: every text and number becomes the mark. Keys, booleans, null and the structure stay.

    Single texts that look like names (a model, a tool, a class) are kept, so that the recording can be read.
    """

    def __init__(self) -> None:
        super().__init__(policy_id="strictest")

    def look(self, value: object, room: int = 1 << 62) -> Look:
        plain = value is None or isinstance(value, bool)
        return Look.CLEAN_WITHOUT_FLOATS if plain else Look.SUSPICIOUS

    def redact(self, value: Json) -> tuple[Json, tuple[Finding, ...]]:
        findings: list[Finding] = []
        return self._value(value, "", findings), tuple(findings)

    def redact_text(self, text: str) -> tuple[str, tuple[Finding, ...]]:
        if _NAME.fullmatch(text):
            return super().redact_text(text)
        return (text, ()) if text in ("", MARK) else (MARK, (Finding("", WITHHELD),))

    def redact_document(self, text: str) -> tuple[str, bool]:
        lines = [self._line(line) for line in text.split("\n")] if jsontext.parse(text) is None else [self._line(text)]
        redacted = "\n".join(lines)
        return redacted, redacted != text

    def redact_bytes(self, data: bytes) -> bytes:
        return MARK.encode()

    def redact_url(self, url: str) -> str:
        base, question_mark, query = super().redact_url(url.partition("#")[0]).partition("?")
        names = [pair.partition("=")[0] for pair in query.split("&")] if query else []
        return f"{base}{question_mark}{'&'.join(f'{name}={MARK}' for name in names)}"

    def redact_headers(self, pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        return [
            (name, value if name.lower() in _PLAIN_HEADERS and self.hide(value, 0)[0] == value else MARK)
            for name, value in pairs
        ]

    def describe(self) -> dict[str, Json]:
        return {"id": "strictest", "rules": [WITHHELD]}

    def _line(self, line: str) -> str:
        before = next((start for start in ("data: ", "data:", "event: ", "id: ") if line.startswith(start)), "")
        text = line[len(before) :]
        read = jsontext.parse(text)
        if read is not None:
            return before + jsontext.rewritten(text, read[1], read[0], self._value(read[0], "", []))
        return line if before in ("event: ", "id: ") or not text.strip() or text == "[DONE]" else before + MARK

    def _value(self, value: Json, pointer: str, findings: list[Finding]) -> Json:
        if isinstance(value, dict):
            return {
                self.hide(key, 0)[0]: self._value(
                    item, f"{pointer}/{self.hide(key, 0)[0].replace('~', '~0').replace('/', '~1')}", findings
                )
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self._value(item, f"{pointer}/{place}", findings) for place, item in enumerate(value)]
        if value is None or isinstance(value, bool) or value in ("", MARK):
            return value
        findings.append(Finding(pointer, WITHHELD))
        return MARK
