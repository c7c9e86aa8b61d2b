# SPDX-License-Identifier: Apache-2.0
"""Secrets whose value is known: what environment variables with a secret's name hold, in the spellings they take.

A known value is found raw, percent-encoded, escaped for JSON (also with every character as `\\u00xx`), in hexadecimal,
and inside base64 of any alignment and alphabet. Values shorter than eight characters, and a few that are defaults
rather than secrets, are left out: hiding them would hide half of the recording. Longer spellings go before shorter.
"""

from __future__ import annotations

import base64
import functools
import json
import re
from collections.abc import Iterable, Mapping
from urllib.parse import quote, quote_plus, unquote

from sftrace_otel.core.redact.credentials import MARK
from sftrace_otel.core.redact.names import looser_secret_variable, sensitivity

SHORTEST = 8
"""Characters that a known value must have to be searched for."""

_RUN = re.compile(rb"[A-Za-z0-9_-]{15}")
_LONGEST = 64 * 1024
_LONGEST_HANDED = 8 * 1024
_FOLDERS = frozenset({"PWD", "OLDPWD"})
"""Variables of the shell that sound like a password and hold its working folder (POSIX, "Environment Variables")."""
_NOT_SECRETS = frozenset(
    {"password", "postgres", "changeme", "changeit", "disabled", "required", "optional", "localhost", "undefined"}
    | {"anonymous", "placeholder", "redacted", "development", "production", "not-needed", "no-key-required", "test-key"}
)
_PATH = re.compile(r"(?:~|\.{1,2})?/[\w./ -]*\.\w{1,8}|[A-Za-z]:\\.*")
_OPAQUE = re.compile(r"(?=\D*\d)(?=[^A-Za-z]*[A-Za-z])\S{16,}")


def of_environment(environ: Mapping[str, str]) -> list[str]:
    """The values in `environ` that are secrets by the name of their variable, and those of header lists."""
    found: list[str] = []
    for name, value in environ.items():
        if name in _FOLDERS:
            continue
        if name.endswith("_HEADERS"):
            found += _of_headers(value)
            continue
        certain, likely = _judged(name)
        if certain or (likely and _OPAQUE.fullmatch(value)):
            found.append(value)
    return [value for value in found if not _PATH.fullmatch(value)]


@functools.lru_cache(2048)
def _judged(name: str) -> tuple[bool, bool]:
    """Whether a variable of this name holds a secret, and whether it may hold one."""
    return bool(sensitivity(name)), looser_secret_variable(name)


def _of_headers(value: str) -> Iterable[str]:
    """The secret values of `name=value,name=value` (OTLP exporter variables), with and without their scheme."""
    for pair in value.split(","):
        name, _, text = pair.partition("=")
        if sensitivity(name):
            plain = unquote(text.strip())
            yield plain
            yield plain.rpartition(" ")[2]


class KnownValues:
    """A set of known secrets, ready to be searched for.

    Args:
        values: The secrets. Those that are too short, or no secrets, are left out; `skipped` counts them.
        handed: Secrets that a service handed out, looked for as they are and as URLs spell them.
    """

    def __init__(self, values: Iterable[str], handed: Iterable[str] = ()) -> None:
        wanted = {value.strip() for value in values}
        kept = {value for value in wanted if _is_searchable(value)}
        self.count = len(kept)
        self.skipped = len(wanted - kept - {""})
        spellings = {spelling for value in kept for spelling in _spellings(value)}
        for value in handed:
            spellings |= {value, quote(value, safe=""), quote_plus(value)}
        self.any = bool(spellings)
        self._spellings = sorted(spellings, key=lambda spelling: (-len(spelling), spelling))
        encoded = [(text, text.encode("utf-8", "surrogatepass")) for text in self._spellings]
        self._in_runs = tuple(data for _, data in encoded if _RUN.search(data))
        rare: dict[bytes, list[bytes]] = {}
        for _, data in encoded:
            if not _RUN.search(data):
                rare.setdefault(_rarest(data), []).append(data)
        self._anywhere = tuple(rare.items())

    def occur(self, data: bytes, runs: bytes) -> bool:
        """Whether one may be in a text.

        Args:
            data: The text in UTF-8.
            runs: The runs of 15 and more letters, digits, `_` and `-` of `data`, with something between them.
        """
        if runs and any(map(data.__contains__, self._in_runs)):
            return True
        for rare, spellings in self._anywhere:
            if rare in data:
                for spelling in spellings:
                    if spelling in data:
                        return True
        return False

    def hide(self, text: str) -> str:
        """`text` with every spelling replaced."""
        for spelling in self._spellings:
            text = text.replace(spelling, MARK)
        return text


def is_handed_out(value: object) -> bool:
    """Whether a value under a sensitive name is worth remembering: long, of one word, with letters and digits."""
    return isinstance(value, str) and len(value) <= _LONGEST_HANDED and _OPAQUE.fullmatch(value) is not None


def _is_searchable(value: str) -> bool:
    return SHORTEST <= len(value) <= _LONGEST and value.lower() not in _NOT_SECRETS and value not in MARK


def _rarest(data: bytes) -> bytes:
    """The byte of `data` that is least often seen in text: looked for first, since one byte is found fastest."""
    return min((data[i : i + 1] for i in range(len(data))), key=lambda byte: (byte.isalpha() or byte in b" _-", byte))


def _spellings(value: str) -> Iterable[str]:
    raw = value.encode("utf-8", "surrogatepass")
    yield value
    for encoded in (quote(raw, safe=""), quote(raw), quote_plus(raw)):
        yield encoded
        yield re.sub("%[0-9A-F]{2}", lambda found: found[0].lower(), encoded)
    for escaped in (json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]):
        yield escaped
        yield escaped.replace("/", "\\/")
        yield re.sub("[&<>'+]", lambda found: f"\\u{ord(found[0]):04x}", escaped)
    every = "".join(f"\\u{unit:04x}" for unit in _utf16(value))
    yield every
    yield re.sub("[0-9a-f]{4}", lambda found: found[0].upper(), every)
    yield raw.hex()
    for standard in _base64(raw):
        yield standard
        yield standard.replace("+", "-").replace("/", "_")


def _utf16(value: str) -> Iterable[int]:
    data = value.encode("utf-16-be", "surrogatepass")
    return (int.from_bytes(data[i : i + 2], "big") for i in range(0, len(data), 2))


def _base64(raw: bytes) -> Iterable[str]:
    """The parts of base64 that any text holding `raw` shows, one for each place of its first byte modulo three."""
    for before in range(3):
        encoded = base64.b64encode(bytes(before) + raw).decode()
        yield encoded[(0, 2, 3)[before] : (before + len(raw)) * 8 // 6]
