# SPDX-License-Identifier: Apache-2.0
"""Credentials that are known by their shape: bearer and basic headers, vendors' keys, JWTs, PEM blocks, URLs.

Every expression here is linear on any input: it starts at a literal, it has a left guard or a bound where a run of its
own characters could hold another start, and it consumes what it accepts. None uses `\\b` (ASCII in one engine, Unicode
in another). The left guards take an escape (`\\n`, `%20`) for a boundary; a JWT glued to a word before it is given up
for linear time. Which of them can apply to a text is decided before, by `texts`; each is compiled when first used.

`REFERENCE` are the six patterns of stepfork 0.2.1. They run last, so that whatever it redacts is redacted here; ours
come first because they also take the rest of a key that its right word boundary would leave standing.
"""

from __future__ import annotations

import base64
import binascii
import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import unquote

from sftrace_otel.core.redact.names import OPAQUE_QUERY_NAMES, QUERY_NAMES, Sensitivity

MARK = "[REDACTED]"
"""What stands in the place of a secret, always."""

_TO_STANDARD = bytes.maketrans(b"-_", b"+/")
_CONTROLS = bytes(set(range(32)) - {9, 10, 13}) + b"\x7f"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule for texts: its name, for reports, and the function that hides what it finds."""

    name: str
    apply: Callable[[str], str]


def decode_base64(token: str | bytes) -> bytes | None:
    """The bytes of standard or URL-safe base64 (RFC 4648), padded or not; None where it is neither."""
    data = token.encode() if isinstance(token, str) else token
    data = data.rstrip(b"=").translate(_TO_STANDARD)
    if len(data) % 4 == 1:
        return None
    try:
        return base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)
    except (binascii.Error, ValueError):
        return None


def printable(data: bytes) -> bool:
    """Whether `data` is text in UTF-8 without control characters other than white space."""
    if data.translate(None, _CONTROLS) != data:
        return False
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def query_rule(sensitivity: Callable[[str], Sensitivity]) -> Rule:
    """The rule for `?name=value` and `&name=value` in URLs and form bodies: the value under a sensitive name goes."""

    def hide(found: re.Match[str]) -> str:
        before, name, value = found.groups()
        return f"{before}{name}={MARK}" if is_secret_parameter(name, value, sensitivity) else found[0]

    return Rule("url-parameter", lambda text: _compiled(_PARAMETER).sub(hide, text))


_OPAQUE = re.compile(r"(?=[^0-9]*[0-9])(?=[^A-Za-z]*[A-Za-z])[A-Za-z0-9._~+/=%-]{16,}")


def is_secret_parameter(name: str, value: str, sensitivity: Callable[[str], Sensitivity]) -> bool:
    """Whether the value of a URL or form parameter is to be hidden; `key` counts only where it is long."""
    plain = unquote(name)
    if not value or value == MARK:
        return False
    if sensitivity(plain):
        return True
    low = plain.lower()
    if low in QUERY_NAMES:
        return len(value) >= 16 or low not in ("key", "signature")
    opaque = low in OPAQUE_QUERY_NAMES or low.endswith(("_key", "-key"))
    return opaque and _OPAQUE.fullmatch(value) is not None


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _guarded(prefix: str) -> str:
    """An expression for `prefix` where no ASCII letter or digit stands before it, or where an escape does."""
    return rf"{prefix}(?:(?<![A-Za-z0-9]{prefix})|(?<=%[0-9A-Fa-f]{{2}}{prefix})|(?<=\\[nrtbf]{prefix}))"


def _substitution(pattern: str, replacement: str = MARK) -> Callable[[str], str]:
    return lambda text: _compiled(pattern).sub(replacement, text)


def _one_after_another(patterns: Iterable[str]) -> Callable[[str], str]:
    def apply(text: str) -> str:
        for pattern in patterns:
            text = _compiled(pattern).sub(MARK, text)
        return text

    return apply


def _hide_basic(text: str) -> str:
    text = _compiled(_BASIC_HEADER).sub(rf"\g<1>{MARK}", text)
    return _compiled(_BASIC).sub(
        lambda found: f"{found[1]}{MARK}" if _is_user_and_password(found[2]) else found[0], text
    )


def _is_user_and_password(token: str) -> bool:
    """Whether `token` is base64 of `user:password` (RFC 7617, section 2), which prose ("basic training") is not."""
    plain = decode_base64(token)
    return plain is not None and b":" in plain and printable(plain)


def _hide_userinfo(text: str) -> str:
    text = _compiled(_USERINFO).sub(lambda found: found[0] if _is_account_name(found[1]) else f"://{MARK}@", text)
    return _compiled(_USERINFO_WITH_SLASH).sub(f"://{MARK}@", text)


def _is_account_name(userinfo: str) -> bool:
    """`git` of `ssh://git@host`: a short plain word without a password."""
    return len(userinfo) <= 12 and userinfo.isalpha() and userinfo.islower()


_BASIC = r"(?i)(basic(?:\s+|%20|\+))([A-Za-z0-9+/_-]{8,}={0,2})"
_BASIC_HEADER = r"(?i)(authorization\\?[\"']?\s{0,8}[:=]\s{0,8}\\?[\"']?basic(?:\s+|%20|\+))([A-Za-z0-9+/_=-]{4,})"
_PARAMETER = r"([?&;])([A-Za-z0-9_.\-\[\]%]{1,64})=([^&#\s\"'<>\\;]*)"
_USERINFO = r"://(?!\[REDACTED\]@)([^\s/?#\"'<>\\`]+)@"
_USERINFO_WITH_SLASH = r"://[^\s:/?#@\"'<>\[\\`]{1,64}:(?!\d{1,5}[/?#])[^\s\"'<>@\\`]{1,256}@(?=[A-Za-z0-9\[])"
_PRIVATE_KEY = r"[A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"

BEARER = Rule("bearer", _substitution(r"(?i)(bearer(?:\s+|%20|\+)\\?[\"']?)[A-Za-z0-9._~+/=-]{8,}", rf"\g<1>{MARK}"))
BASIC = Rule("basic", _hide_basic)
USERINFO = Rule("url-userinfo", _hide_userinfo)
SK_KEY = Rule("sk-key", _substitution(_guarded("sk-") + r"[A-Za-z0-9_-]{8,}"))
GITHUB = Rule(
    "github-token",
    _one_after_another((_guarded("gh[pousr]_") + r"[A-Za-z0-9_]{8,}", _guarded("github_pat_") + r"[A-Za-z0-9_]{8,}")),
)
PEM = Rule(
    "private-key",
    _substitution(
        rf"-----BEGIN {_PRIVATE_KEY}(?:(?!-----)[A-Za-z0-9+/=\s\\:,.-]){{0,65536}}(?:-----END {_PRIVATE_KEY})?"
    ),
)
JWT = Rule(
    "jwt",
    _substitution(
        r"eyJ(?:(?<![A-Za-z0-9_-]eyJ)|(?<=%[0-9A-Fa-f]{2}eyJ)|(?<=\\[nrtbf]eyJ))"
        r"[A-Za-z0-9_-]{12,}\.[A-Za-z0-9_-]{5,}(?:\.[A-Za-z0-9_-]*){1,3}"
    ),
)
VENDORS = Rule(
    "vendor-key",
    _one_after_another(
        [
            _guarded("AIza") + "[A-Za-z0-9_-]{30,}",
            _guarded("GOCSPX-") + "[A-Za-z0-9_-]{20,}",
            _guarded("ya29[.]") + "[A-Za-z0-9_-]{20,}",
            _guarded("AKIA") + "[A-Z0-9]{16,}",
            _guarded("ASIA") + "(?=[A-Z]{0,15}[0-9])[A-Z0-9]{16,}",
            _guarded("hf_") + "[A-Za-z0-9]{20,}",
            _guarded("xox[abeoprs]-") + "[A-Za-z0-9-]{10,}",
            _guarded("xapp-") + "[A-Za-z0-9-]{10,}",
            _guarded("[sr]k_live_") + "[A-Za-z0-9]{10,}",
            _guarded("[sr]k_test_") + "[A-Za-z0-9]{10,}",
            _guarded("whsec_") + "[A-Za-z0-9]{20,}",
            _guarded("sk_") + "[a-f0-9]{40,}",
            _guarded("glpat-") + "[A-Za-z0-9_-]{16,}",
            _guarded("npm_") + "[A-Za-z0-9]{30,}",
            _guarded("pypi-") + "[A-Za-z0-9_-]{40,}",
            _guarded("gsk_") + "[A-Za-z0-9]{20,}",
            _guarded("xai-") + "[A-Za-z0-9]{20,}",
            _guarded("r8_") + "[A-Za-z0-9]{30,}",
            _guarded("pplx-") + "[A-Za-z0-9]{20,}",
            _guarded("nvapi-") + "[A-Za-z0-9_-]{20,}",
            _guarded("tvly-") + "[A-Za-z0-9-]{16,}",
            _guarded("lsv2_[ps][tk]_") + "[A-Za-z0-9_]{20,}",
            _guarded("shp(?:at|ca|pa|ss)_") + "[A-Fa-f0-9]{32,}",
            _guarded("dop_v1_") + "[a-f0-9]{40,}",
            _guarded("dckr_pat_") + "[A-Za-z0-9_-]{20,}",
            _guarded("SG[.]") + "[A-Za-z0-9_-]{16,}[.][A-Za-z0-9_-]{16,}",
            r"hooks[.]slack[.]com/(?:services|workflows)/(?:[A-Za-z0-9]{1,40}/){1,4}[A-Za-z0-9]{15,}",
            r"bot[0-9]{8,10}:[A-Za-z0-9_-]{35}",
        ]
    ),
)
VENDOR_LITERALS: tuple[tuple[bytes, tuple[bytes, ...]], ...] = (
    (b"A", (b"AIza", b"AKIA", b"ASIA")),
    (
        b"-",
        tuple(b"GOCSPX- xoxa- xoxb- xoxe- xoxo- xoxp- xoxr- xoxs- xapp- glpat- pypi- xai- pplx- nvapi- tvly-".split()),
    ),
    (b"_", tuple(b"hf_ k_live_ k_test_ whsec_ sk_ npm_ gsk_ r8_ lsv2_ dop_v1_ dckr_pat_".split())),
    (b"shp", (b"shpat_", b"shpca_", b"shppa_", b"shpss_")),
)
"""By a byte in common: literals that stand in one run of letters, digits, `_` and `-` with a vendor's key."""
VENDOR_LITERALS_OUTSIDE: tuple[bytes, ...] = (b"ya29.", b"SG.", b"hooks.slack.com", b":AA")
"""Literals of the vendor keys that hold a dot, slash or colon."""

REFERENCE = (
    Rule(
        "reference-authorization",
        _substitution(r"(?i)(Authorization:\s*Bearer\s+)[A-Za-z0-9._~+/=-]{8,}", rf"\g<1>{MARK}"),
    ),
    Rule("reference-bearer", _substitution(r"(?i)(Bearer\s+)[A-Za-z0-9._~+/=-]{8,}", rf"\g<1>{MARK}")),
    Rule("reference-sk", _substitution(r"sk-(?<!\wsk-)[A-Za-z0-9_-]{8,}\b")),
    Rule("reference-ghp", _substitution(r"ghp_(?<!\wghp_)[A-Za-z0-9_]{8,}\b")),
    Rule("reference-gho", _substitution(r"gho_(?<!\wgho_)[A-Za-z0-9_]{8,}\b")),
    Rule("reference-github-pat", _substitution(r"github_pat_(?<!\wgithub_pat_)[A-Za-z0-9_]{8,}\b")),
)
"""The reference spells `\b` before the literal; an expression that begins with the literal is found at memory speed."""
