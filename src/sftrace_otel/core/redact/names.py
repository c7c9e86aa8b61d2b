# SPDX-License-Identifier: Apache-2.0
"""Which names call for their value to be hidden: keys of objects, header names, query parameters, variables.

Decision: a name is split into words (snake, kebab, camel, digits apart) and its last word, the noun, decides together
with the words before it. So `db_password` and `x-api-key` are sensitive, `max_tokens`, `tokenizer`, `sort_key` and
`secretary` are not. Rejected: searching for a word anywhere in the name (hides token counts and authors), and a list of
exact names (misses every compound). The twelve names of the reference are matched as it does, so that nothing it would
hide is left: lower case, everything but ASCII letters and digits dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import IntEnum


class Sensitivity(IntEnum):
    """What a name says about its value."""

    NONE = 0
    """Nothing: the value is judged by itself."""
    TEXT = 1
    """Texts are hidden; numbers, booleans and null stay (`token`, `auth`, `cookie`)."""
    ANY = 2
    """Texts, numbers and filled containers are hidden; booleans, null and empty values stay (`db_password`)."""
    REFERENCE = 3
    """One of the reference's twelve names: whatever the value is, it is hidden."""


def _set(names: str) -> frozenset[str]:
    return frozenset(names.split())


REFERENCE_NAMES = _set(
    "apikey accesstoken refreshtoken authtoken authorization password passwd secret clientsecret privatekey "
    "sessiontoken bearertoken"
)
"""The names that stepfork 0.2.1 hides, in their normalised form."""

_LONGEST_NAME = 200
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[A-Z]")

_ANY_NOUNS = _set(
    "password passwords passwd passphrase passcode pwd secret secrets credential credentials creds authorization"
)
_TEXT_NOUNS = _set("cookie cookies jwt otp bearer sessid jsessionid phpsessid auth csrf xsrf")
_GLUED_ANY = ("password", "passwd", "passphrase", "secretkey", "privatekey", "secret")
_GLUED_TEXT = tuple(
    _set("apikey apikeys accesskey accesstoken authtoken refreshtoken sessiontoken bearertoken idtoken")
)
_GLUED_NOT = frozenset({"nonsecret", "topsecret"})
_TRAILERS = _set(
    "value val raw plain plaintext cleartext hash hashed header b64 base64 encoded encrypted confirm confirmation "
    "again repeat"
)

_KEY_QUALIFIERS = _set(
    "api secret private access encryption decryption signing master account shared service subscription auth ssh "
    "gpg pgp rsa hmac aes deploy license licence session admin app application client webhook functions bot"
)
_TOKENS_QUALIFIERS = _set("access auth refresh api bearer session secret")
_COUNTED_TOKENS = _set(
    "max min num number total count n avg stop pad eos bos unk sep cls mask next page continuation prev previous "
    "start end begin first last special image audio video text input output prompt completion reasoning cached per "
    "sample target separator delimiter sync sub word top think vocab bpe byte draft speculative cancellation cancel "
    "design paging pagination position embedding media step padding boundary newline whitespace"
)
_SIGNATURE_QUALIFIERS = _set("amz goog hub hmac webhook request sas x oauth")
_PASS_QUALIFIERS = _set(
    "db database smtp user mail email ftp sftp ssh root admin mysql pg postgres redis mongo rabbitmq proxy http"
)

QUERY_NAMES = _set(
    "key sig signature awsaccesskeyid x-amz-credential x-goog-credential sessionid hapikey pass pw otp pin"
)
"""Names that are sensitive as URL parameters, lower case, beyond those that are so everywhere."""

HEADER_NAMES = _set("x-honeycomb-team dpop x-access-code x-jwt-assertion")
"""Header names, lower case, beyond those that `sensitivity` knows."""

_HEADER_ENDS = (
    "-key",
    "_key",
    "token",
    "secret",
    "jwt",
    "password",
    "passwd",
    "credential",
    "credentials",
    "session-id",
)
_PLAIN_HEADERS = _set(
    "idempotency-key x-idempotency-key sec-websocket-key surrogate-key x-surrogate-key x-cache-key cache-key "
    "x-request-key x-ratelimit-key"
)

OPAQUE_QUERY_NAMES = _set("code ticket session sid refresh")
"""Names of URL parameters whose value is a secret if it looks like one: long and of one word."""

PARAMETER_NAMES = QUERY_NAMES | OPAQUE_QUERY_NAMES


def names_secret_header(name: str) -> bool:
    """Whether a header of this name, in any spelling, carries a credential beyond those that `sensitivity` knows."""
    low = name.lower()
    return low in HEADER_NAMES or (low.endswith(_HEADER_ENDS) and low not in _PLAIN_HEADERS)


def normalise(name: str) -> str:
    """The form in which the reference compares names: lower case, ASCII letters and digits only."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def words(name: str) -> list[str]:
    """`name` cut into lower-case words at case changes, digits and everything that is not an ASCII letter."""
    return [word.lower() for word in _WORD.findall(name)]


def sensitivity(name: str) -> Sensitivity:
    """What `name` says about its value, by the rules of this module."""
    if normalise(name) in REFERENCE_NAMES:
        return Sensitivity.REFERENCE
    if len(name) > _LONGEST_NAME:
        return Sensitivity.NONE
    return _of_words(words(name))


def _of_words(parts: list[str]) -> Sensitivity:
    while len(parts) > 1 and parts[-1] in _TRAILERS:
        parts = parts[:-1]
    if not parts:
        return Sensitivity.NONE
    noun, before = parts[-1], parts[:-1]
    if noun in _ANY_NOUNS or (noun.endswith(_GLUED_ANY) and noun not in _GLUED_NOT):
        return Sensitivity.ANY
    if noun == "key" and _is_secret_key(before):
        return Sensitivity.ANY if before[-1] in ("private", "secret") else Sensitivity.TEXT
    return Sensitivity.TEXT if _is_secret_text(noun, before) else Sensitivity.NONE


def _is_secret_key(before: list[str]) -> bool:
    return bool(before) and before[-1] in _KEY_QUALIFIERS and "public" not in before


def _is_secret_text(noun: str, before: list[str]) -> bool:
    if noun in _TEXT_NOUNS or noun.endswith(_GLUED_TEXT):
        return True
    if noun == "token":
        return _COUNTED_TOKENS.isdisjoint(before)
    if noun == "tokens":
        return bool(before) and before[-1] in _TOKENS_QUALIFIERS
    if noun == "keys":
        return _is_secret_key(before)
    if noun == "signature":
        return not _SIGNATURE_QUALIFIERS.isdisjoint(before)
    return noun == "pass" and bool(before) and before[-1] in _PASS_QUALIFIERS


def names_a_secret_variable(name: str) -> bool:
    """Whether an environment variable of this name is expected to hold a secret as its whole value."""
    return sensitivity(name) is not Sensitivity.NONE


def looser_secret_variable(name: str) -> bool:
    """Whether a variable's name ends in KEY, PASS or SIGNATURE: a secret if its value looks like one."""
    parts = words(name)
    return bool(parts) and parts[-1] in ("key", "pass", "signature", "pat", "dsn") and "public" not in parts


def normalised(names: Iterable[str]) -> frozenset[str]:
    """`normalise` of each of `names`, without the empty ones."""
    return frozenset(filter(None, map(normalise, names)))
