# SPDX-License-Identifier: Apache-2.0
"""Canonical JSON: the bytes that are hashed, and the strict reader that is their inverse.

Two forms. `dumps` writes the profile `stepfork-json-v0.1` of the `.sftrace` format page: keys by code point, no white
space, UTF-8, numbers and escapes as CPython's `json.dumps` writes them. `rfc8785` writes RFC 8785, which differs in
floats, in keys outside the BMP and in ints beyond 2**53.

Decision: orjson writes, and a walk over the value proves that its bytes are right; else the standard library
writes. orjson and CPython agree on strings, escapes, key order, ints of 64 bits and floats that are zero or in
[1e-4, 1e16); orjson differs outside that range, writes NaN as null, and takes tuples, UUIDs and enums for JSON: the
walk looks for exactly these. Rejected: orjson alone (silently wrong), the standard library alone (5 to 10 times
slower), and looking for floats in the output (cannot see that a null was a NaN).

`loads` refuses what other readers would take differently: duplicate keys, NaN and infinities, a byte order mark, bytes
that are not UTF-8, lone surrogates, and nesting beyond `MAX_DEPTH`. Its fast path is proven by writing the value again:
where the canonical bytes equal the input, nothing can have been lost.
"""

from __future__ import annotations

import json
import re
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

_SMALL = 1 << 22
_PLAIN = frozenset({str, int, bool, type(None)})
_UNPROVEN: Any = object()
_all_plain = _PLAIN.issuperset
_SPELLING = orjson.OPT_PASSTHROUGH_SUBCLASS | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
_OPTIONS = _SPELLING | orjson.OPT_SORT_KEYS
_SAFE_INT = 2**53 - 1
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
    import rfc8785 as _rfc8785

    _require_json(value, largest_int=_SAFE_INT)
    try:
        return _rfc8785.dumps(value)
    except _rfc8785.CanonicalizationError as error:
        raise CanonicalizationError(f"{error}; it has no RFC 8785 form") from error


def loads(data: bytes | bytearray | memoryview) -> Json:
    """The value of one JSON text, read strictly. Ints keep all digits; floats are doubles.

    Raises:
        FormatError: Malformed JSON, a duplicate key at any depth, NaN or an infinity, a number beyond the range of a
            double, a byte order mark, bytes that are not UTF-8, a lone surrogate, nesting beyond `MAX_DEPTH`, or more
            than `MAX_VALUES` values. Code `invalid_json`.
    """
    data = bytes(data)
    _require_bounded(data)
    value = _loads_proven(data, _SPELLING)
    return _loads_slowly(data) if value is _UNPROVEN else value


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
