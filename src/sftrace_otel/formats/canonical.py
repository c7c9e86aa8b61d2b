# SPDX-License-Identifier: Apache-2.0
"""Canonical JSON: the bytes that are hashed, and the strict reader that is their inverse.

Two forms. `dumps` writes the profile `stepfork-json-v0.1` of the `.sftrace` format page: keys by code point, no white
space, UTF-8, numbers and escapes as CPython's `json.dumps` writes them. `rfc8785` writes RFC 8785, which differs in
floats, in keys outside the BMP and in ints beyond 2**53; `rfc8785_nfc` is what the hashes of `.flight` are over.

Decision: orjson writes, and a walk over the value proves that its bytes are right; else the standard library
writes. orjson and CPython agree on strings, escapes, key order, ints of 64 bits and floats that are zero or in
[1e-4, 1e16); orjson differs outside that range, writes NaN as null, and takes tuples, UUIDs and enums for JSON: the
walk looks for exactly these. orjson and RFC 8785 agree on strings, escapes, ints within ±(2**53 - 1), floats that are
no whole number and in [1e-5, 1e16), and on key order unless an object has both keys outside the BMP and keys from
U+E000 on; other floats and such objects are spelled here and spliced in. Rejected: orjson alone (silently wrong), the
standard library or the package `rfc8785` alone (5 to 17 times slower), and looking for floats in the output (cannot
see that a null was a NaN).

`loads` refuses what other readers would take differently: duplicate keys, NaN and infinities, a byte order mark, bytes
that are not UTF-8, lone surrogates, and nesting beyond `MAX_DEPTH`. Its fast path is msgspec, which refuses all of
these but keys that are there twice; that there are none is proven by writing the value again: a member that is gone
takes its colon along.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from math import isfinite
from typing import Any, NoReturn, cast

import msgspec
import orjson

from sftrace_otel.errors import CanonicalizationError, FormatError
from sftrace_otel.formats import Json

PROFILE = "stepfork-json-v0.1"
"""Name of the profile that `dumps` writes and that `.sftrace` hashes are over."""

MAX_DEPTH = 254
"""Containers inside containers that a value may have: what stepfork 0.2.1 can write, and no more."""

MAX_INT_DIGITS = 4300
"""Digits that CPython converts between int and text by default; longer ints have no form in the profile."""

MAX_VALUES = 10_000_000
"""Values in one JSON text: an empty container takes 3 bytes there, and 30 times that in memory."""

_PLAIN = frozenset({str, int, bool, type(None)})
_UNPROVEN: Any = object()
_all_plain = _PLAIN.issuperset
_SPELLING = orjson.OPT_PASSTHROUGH_SUBCLASS | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
_OPTIONS = _SPELLING | orjson.OPT_SORT_KEYS
RFC8785_OPTIONS = _OPTIONS | orjson.OPT_STRICT_INTEGER
"""How orjson is asked for bytes that `is_rfc8785` can prove."""
_SMALL = 1 << 22
_SAFE_INT = 2**53 - 1
_ASCII = bytes(range(128))
_PRIVATE = (b"\xee", b"\xef")  # U+E000 to U+FFFF
_ASTRAL = (b"\xf0", b"\xf1", b"\xf2", b"\xf3", b"\xf4")  # beyond the BMP
# Characters that are in NFC beside any other of them: they neither decompose nor compose, whatever Python's Unicode
# (its stability policy fixes that for assigned ones). Latin, Greek, Cyrillic, punctuation, arrows, boxes, kana, Han,
# Hangul syllables, full width, emoji.
_STABLE = re.compile(
    "[\u0080-\u02ff\u0388-\u0482\u048a-\u0556\u1e00-\u1eff\u2010-\u2027\u2030-\u205e\u20a0-\u20c0\u2190-\u2328"
    "\u232b-\u2a00\u3003-\u3029\u3030-\u3098\u309b-\u30ff\u4e00-\u9fff\uac00-\ud7a3\uff01-\uffdc"
    "\U0001f300-\U0001faff]*"
).fullmatch
_STRUCTURE = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)  # never fails inside a string: linear


def dumps(value: Json) -> bytes:
    """The canonical bytes of `value` in the profile `stepfork-json-v0.1` (format page, "Canonical JSON profile").

    Equal to `json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)` in UTF-8.

    Raises:
        CanonicalizationError: A value that is not JSON, a non-finite float, a key that is not a string, a lone
            surrogate, an int of more than `MAX_INT_DIGITS` digits, nesting beyond `MAX_DEPTH`, or a cycle. `where` is
            its JSON Pointer.
    """
    try:
        data = orjson.dumps(value, option=_OPTIONS)
    except TypeError:  # ints beyond 64 bits, lone surrogates, subclasses, cycles, and what is not JSON
        return _dumps_slowly(value)
    return data if _writes_like_cpython(value) else _dumps_slowly(value)


def digest(value: Json) -> str:
    """SHA-256 of `dumps(value)`, 64 lower-case hex digits: what `input_hash` and `output_hash` hold.

    Raises:
        CanonicalizationError: As `dumps`.
    """
    return sha256(dumps(value))


def sha256(data: bytes) -> str:
    """SHA-256 as 64 lower-case hex digits."""
    import hashlib  # loads OpenSSL: a verb that hashes nothing starts without it

    return hashlib.sha256(data).hexdigest()


def rfc8785(value: Json) -> bytes:
    """The canonical bytes of `value` in RFC 8785 (JCS).

    Raises:
        CanonicalizationError: As `dumps`, and for ints outside ±(2**53 - 1), which RFC 8785 cannot write unrounded.
    """
    data = rfc8785_proven(value)
    return _rfc8785_slowly(value) if data is None else data


def rfc8785_nfc(value: Json) -> bytes:
    """The bytes that hashes of `.flight` are over (§3 there): RFC 8785 with every string and key in NFC.

    An int outside ±(2**53 - 1) is the double it denotes, so that `1e16`, which is written `10000000000000000`, has the
    same bytes when it is read back.

    Raises:
        CanonicalizationError: As `dumps`; an int beyond the range of a double; or two keys of an object that are equal
            after NFC.
    """
    data = rfc8785_proven(value)
    if data is not None and is_nfc(data):
        return data
    _require_json(value)
    return _rfc8785_slowly(_normal(value, ""))


def is_nfc(data: bytes) -> bool:
    """Whether JSON text shows that each string in it is in NFC; False where it does not show.

    The quotes around a string compose with nothing, so the text as a whole can be asked. An escape such as `\\n` before
    a combining mark looks like a letter before it: then this says False of text that is in NFC.
    """
    if data.isascii():
        return True
    # Without its ASCII the text is shorter, and no character of `_STABLE` cares for its neighbours.
    return _STABLE(data.translate(None, _ASCII).decode()) is not None or unicodedata.is_normalized("NFC", data.decode())


def is_rfc8785(value: Json, data: bytes) -> bool:
    """Whether `data`, which orjson wrote of `value` with `RFC8785_OPTIONS`, is RFC 8785; False where it may not be."""
    return _writes_like_ecmascript(value, not data.isascii() and _order_differs(data)) is True


def loads(data: bytes | bytearray | memoryview) -> Json:
    """The value of one JSON text, read strictly. Ints keep all digits; floats are doubles.

    Raises:
        FormatError: Malformed JSON, a duplicate key at any depth, NaN or an infinity, a number beyond the range of a
            double, a byte order mark, bytes that are not UTF-8, a lone surrogate, nesting beyond `MAX_DEPTH`, or more
            than `MAX_VALUES` values. Code `invalid_json`.
    """
    data = bytes(data)
    _require_bounded(data)
    try:
        value: Json = msgspec.json.decode(data)
        if keeps_members(data, orjson.dumps(value, option=_SPELLING)):
            return value
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError):
        pass
    return _loads_slowly(data)


def keeps_members(data: bytes, written: bytes) -> bool:
    """Whether `written`, what was read of the JSON text `data`, has all its members; False where that is not shown.

    A key that is there twice is read once. Each member has a colon, those in strings stay as they are, and JSON never
    escapes one but as `\\u003a`: so equal counts mean that nothing went.
    """
    return written == data or (data.count(b":") == written.count(b":") and b"\\u003" not in data)


def reread(data: bytes | bytearray | memoryview) -> tuple[Json, bytes]:
    """`loads(data)` with `dumps` of it, for the price of one: the value, and the bytes its hash is over.

    Raises:
        FormatError: As `loads`.
    """
    data = bytes(data)
    _require_bounded(data)
    try:
        value: Json = msgspec.json.decode(data)
        canon = orjson.dumps(value, option=_OPTIONS)
        if canon == data or orjson.dumps(value, option=_SPELLING) == data:  # proven, as in `_loads_proven`
            return value, canon if _writes_like_cpython(value) else _dumps_slowly(value)
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError):
        pass
    value = _loads_slowly(data)
    return value, dumps(value)


def printable(value: object, *, limit: int = 80, quote: bool = True) -> str:
    """A piece of a file for one line of text: shortened, control characters escaped, in double quotes."""
    text = value if isinstance(value, str) else repr(value)
    text = text if len(text) <= limit else text[:limit] + "…"
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
    return f'"{escaped}"' if quote and isinstance(value, str) else escaped


def _writes_like_cpython(value: object) -> bool:
    """Whether orjson, which has accepted `value` (so it has an end), wrote the bytes that `json.dumps` would."""
    pending: list[Any] = [value]
    for item in pending:
        kind = type(item)
        if kind is dict:
            if not _all_plain(map(type, item.values())):
                pending += item.values()
        elif kind is list:
            if not _all_plain(map(type, item)):
                pending += item
        elif kind is float:
            if not (1e-4 <= item < 1e16 or -1e16 < item <= -1e-4 or item == 0.0):
                return False
        elif kind not in _PLAIN:
            return False
    return True


def rfc8785_proven(value: Json) -> bytes | None:
    """RFC 8785 bytes of a value whose parts orjson spells alike, or that can be spelled here; else None."""
    try:
        data = orjson.dumps(value, option=RFC8785_OPTIONS)
        order = _order_differs(data)
        alike = _writes_like_ecmascript(value, order)
        if alike is None:
            return None
        return data if alike else orjson.dumps(_spelled(value, order), option=RFC8785_OPTIONS)
    except (TypeError, RecursionError):  # as in `dumps`, and ints beyond 53 bits
        return None


def _order_differs(data: bytes) -> bool:
    """Whether keys of these bytes may sort differently by UTF-16 code unit and by code point."""
    if data.isascii():
        return False
    return any(byte in data for byte in _PRIVATE) and any(byte in data for byte in _ASTRAL)


def _writes_like_ecmascript(value: object, order: bool) -> bool | None:
    """Whether orjson wrote the bytes of RFC 8785; None where `value` holds what is not JSON.

    `order`: whether the order of keys can differ at all.
    """
    alike = True
    pending: list[Any] = [value]
    for item in pending:
        kind = type(item)
        if kind in _PLAIN:
            continue
        if kind is dict:
            if order and not _sorts_alike(item):
                alike = False
            members = item.values()
            if not _all_plain(map(type, members)):
                pending += members
        elif kind is list:
            if not _all_plain(map(type, item)):
                pending += item
        elif kind is float:
            if not (1e-5 <= item < 1e16 or -1e16 < item <= -1e-5) or item.is_integer():
                if not isfinite(item):
                    return None
                alike = False
        else:
            return None
    return alike


def _sorts_alike(item: dict[str, Any]) -> bool:
    """Whether the keys sort by UTF-16 code unit as by code point."""
    return "".join(item).isascii() or sorted(item) == sorted(item, key=_utf16)


def _utf16(key: str) -> bytes:
    return key.encode("utf-16-be")


def _spelled(value: Any, order: bool) -> Any:
    """`value` with each part that orjson spells otherwise replaced by its bytes."""
    kind = type(value)
    if kind is float:
        return orjson.Fragment(_ecmascript(value))
    if kind is list:
        return value if _all_plain(map(type, value)) else [_spelled(item, order) for item in value]
    if kind is dict:
        if order and not _sorts_alike(value):
            members = (
                orjson.dumps(key) + b":" + orjson.dumps(_spelled(value[key], order), option=RFC8785_OPTIONS)
                for key in sorted(value, key=_utf16)
            )
            return orjson.Fragment(b"{" + b",".join(members) + b"}")
        if _all_plain(map(type, value.values())):
            return value
        return {key: _spelled(item, order) for key, item in value.items()}
    return value


def _ecmascript(number: float) -> bytes:
    """A finite double as ECMAScript's Number::toString writes it (RFC 8785, 3.2.2.3).

    `repr` gives the same shortest digits; only their layout differs.
    """
    if -_SAFE_INT <= number <= _SAFE_INT and number.is_integer():
        return b"%d" % number
    text = repr(abs(number))
    digits, _, exponent = text.partition("e")
    whole, _, fraction = digits.partition(".")
    point = len(whole) + int(exponent or 0)
    digits = (whole + fraction).lstrip("0")
    point -= len(whole + fraction) - len(digits)
    digits = digits.rstrip("0")
    count = len(digits)
    if count <= point <= 21:
        text = digits + "0" * (point - count)
    elif 0 < point <= 21:
        text = f"{digits[:point]}.{digits[point:]}"
    elif -6 < point <= 0:
        text = f"0.{'0' * -point}{digits}"
    else:
        mantissa = digits if count == 1 else f"{digits[0]}.{digits[1:]}"
        text = f"{mantissa}e{point - 1:+d}"
    return (text if number > 0 else f"-{text}").encode()


def _rfc8785_slowly(value: Json) -> bytes:
    import rfc8785 as _rfc8785

    _require_json(value, largest_int=_SAFE_INT)
    try:
        return _rfc8785.dumps(value)
    except RecursionError as error:
        raise CanonicalizationError("no room on the stack to write a value this deep", code="too_deep") from error
    except _rfc8785.CanonicalizationError as error:
        raise CanonicalizationError(f"{error}; it has no RFC 8785 form") from error


def _normal(value: Any, pointer: str) -> Any:
    """A JSON value with its text in NFC and its ints as RFC 8785 takes numbers."""
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value)
    if isinstance(value, list):
        return [_normal(item, f"{pointer}/{index}") for index, item in enumerate(value)]
    if isinstance(value, dict):
        members: dict[str, Any] = {}
        for key, item in value.items():
            name = unicodedata.normalize("NFC", key)
            if name in members:
                raise CanonicalizationError(f"two keys are {printable(name)} after NFC", where=pointer)
            members[name] = _normal(item, f"{pointer}/{key}")
        return members
    if isinstance(value, int) and not isinstance(value, bool) and not -_SAFE_INT <= value <= _SAFE_INT:
        try:
            return float(value)
        except OverflowError:
            raise CanonicalizationError("an int beyond the range of a double", where=pointer) from None
    return value


def _dumps_slowly(value: Json) -> bytes:
    _require_json(value)
    try:
        text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return text.encode()
    except RecursionError as error:
        raise CanonicalizationError("no room on the stack to write a value this deep", code="too_deep") from error
    except (TypeError, ValueError) as error:
        raise CanonicalizationError(f"no canonical JSON form: {error}") from error


def _require_json(value: object, *, largest_int: int | None = None) -> None:
    """Refuse what has no canonical form, naming its JSON Pointer. Depth first: a cycle meets the limit at once."""
    path: list[Iterator[tuple[str, object]]] = [iter([("", value)])]
    while path:
        for pointer, item in path[-1]:
            if isinstance(item, dict | list):
                path.append(_children(pointer, item))
                break
            _require_scalar(pointer, item, largest_int)
        else:
            path.pop()
        if len(path) > MAX_DEPTH + 1:
            raise CanonicalizationError(
                f"nested too deep: more than {MAX_DEPTH} levels, or a value that contains itself", code="too_deep"
            )


def _children(pointer: str, container: dict[Any, Any] | list[Any]) -> Iterator[tuple[str, object]]:
    if isinstance(container, dict):
        return ((f"{pointer}/{_segment(key, pointer)}", item) for key, item in container.items())
    return ((f"{pointer}/{index}", item) for index, item in enumerate(container))


def _segment(key: object, pointer: str) -> str:
    """`key` as a segment of a JSON Pointer (RFC 6901, section 3)."""
    if not isinstance(key, str):
        raise CanonicalizationError(f"object key of type {type(key).__name__}; JSON keys are strings", where=pointer)
    _require_text(pointer, key, "an object key")
    return key.replace("~", "~0").replace("/", "~1")


def _require_scalar(pointer: str, item: object, largest_int: int | None) -> None:
    if item is None or isinstance(item, bool):
        return
    if isinstance(item, str):
        _require_text(pointer, item, "a string")
    elif isinstance(item, float):
        if not isfinite(item):
            raise CanonicalizationError(f"{float(item)!r} has no JSON form", where=pointer)
    elif isinstance(item, int):
        _require_int(pointer, item, largest_int)
    else:
        raise CanonicalizationError(f"a value of type {type(item).__name__} is not JSON", where=pointer)


def _require_int(pointer: str, item: int, largest: int | None) -> None:
    if largest is not None and not -largest <= item <= largest:
        raise CanonicalizationError("an int outside ±(2**53 - 1) has no RFC 8785 form", where=pointer)
    if item.bit_length() > 14280 and abs(item) >= 10**MAX_INT_DIGITS:
        raise CanonicalizationError(f"an int of more than {MAX_INT_DIGITS} digits has no JSON form", where=pointer)


def _require_text(pointer: str, text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise CanonicalizationError(f"{what} with a lone surrogate has no UTF-8 form", where=pointer) from None


def _loads_proven(data: bytes, options: int) -> Json:
    """The value, if writing it again gives `data`: then no key was repeated and no digit was lost. Else `_UNPROVEN`."""
    try:
        value: Json = msgspec.json.decode(data)
        if orjson.dumps(value, option=options) == data:
            return value
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError):
        pass
    return cast(Json, _UNPROVEN)


def _loads_slowly(data: bytes) -> Json:
    text = _decode(data)
    _require_shallow(data)
    try:
        value: Json = json.loads(
            text, object_pairs_hook=_pairs, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_bounded_int
        )
    except json.JSONDecodeError as error:
        raise FormatError(f"malformed JSON: {error.msg} (column {error.pos + 1})", code="invalid_json") from None
    except RecursionError as error:
        raise FormatError("no room on the stack to read a value this deep", code="invalid_json") from error
    try:
        _require_json(value)
    except CanonicalizationError as error:
        raise FormatError(error.reason, where=error.where, code="invalid_json") from None
    return value


def _decode(data: bytes) -> str:
    if data.startswith(b"\xef\xbb\xbf"):
        raise FormatError("starts with a byte order mark (BOM); save it as UTF-8 without one", code="invalid_json")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"is not UTF-8 (byte {error.start + 1})", code="invalid_json") from None


def _require_bounded(data: bytes) -> None:
    """Refuse a text of more values than memory should hold, by its commas and brackets."""
    if len(data) > _SMALL and data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_VALUES:
        raise FormatError(f"holds more than {MAX_VALUES} values, more than this reads", code="invalid_json")


def _require_shallow(data: bytes) -> None:
    """Refuse deep nesting before a parser recurses into it; the scan needs no stack."""
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    for token in _STRUCTURE.finditer(data):
        byte = data[token.start()]
        depth += 1 if byte in b"[{" else -1 if byte in b"]}" else 0
        if depth > MAX_DEPTH:
            raise FormatError(f"nested too deep: more than {MAX_DEPTH} levels", code="invalid_json")


def _pairs(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise FormatError(f"duplicate key {printable(twice)}", code="invalid_json")
    return members


def _refuse_constant(name: str) -> NoReturn:
    raise FormatError(f"{name} is not JSON", code="invalid_json")


def _finite(digits: str) -> float:
    number = float(digits)
    if not isfinite(number):
        raise FormatError(f"the number {digits[:40]} is beyond the range of a double", code="invalid_json")
    return number


def _bounded_int(digits: str) -> int:
    if len(digits.lstrip("-")) > MAX_INT_DIGITS:
        raise FormatError(f"an int of more than {MAX_INT_DIGITS} digits", code="invalid_json")
    return int(digits)
