# SPDX-License-Identifier: Apache-2.0
"""What of a call takes part in matching, and when two calls are the same.

`view` leaves out what changes from run to run although the program does the same (trace headers, retry counters,
multipart boundaries) and spells what has several spellings in one way (URLs, queries, header names, form bodies).
`digest` is the key of a view: numbers by exact value (1 = 1.0, NaN = NaN), booleans never numbers, key order and
spelling free, array order and types strict. It is not the stored `input_hash`, which tells 1 from 1.0.
`differences` says where two views part, taking `[REDACTED]` in the recording for "whatever is there".

Rejected: comparing bodies as text (a reordered key would miss), a list of headers that do count (a call that differs
only in a header nobody thought of would be served the wrong answer), and Python's `==` (True == 1, NaN != NaN).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isinf, isnan
from types import MappingProxyType
from typing import Any, Final, TypeAlias
from urllib.parse import unquote_to_bytes

import orjson

from sftrace_otel.errors import CanonicalizationError, SettingsError
from sftrace_otel.formats import Json

REDACTED: Final = "[REDACTED]"
"""What stands for a redacted value (`.sftrace` format page, "Redaction metadata")."""

Rule: TypeAlias = str | Callable[[str, str, Json], Json]
"""What to leave out of matching: a JSON Pointer into the view (`*` stands for any one segment), or a function of
(kind, name, view) that returns the view to compare instead."""

_NO_HOSTS: Final[Mapping[str, str]] = MappingProxyType({})

# fmt: off
_VOLATILE_HEADERS: Final = frozenset(
    {
        "accept-encoding", "api-key", "authorization", "b3", "baggage", "connection", "content-length", "cookie",
        "date", "expect", "grpc-trace-bin", "host", "idempotency-key", "keep-alive", "openai-idempotency-key",
        "proxy-authorization", "request-id", "sentry-trace", "te", "traceparent", "tracestate", "traceresponse",
        "transfer-encoding", "uber-trace-id", "user-agent", "via", "x-amz-date", "x-amz-security-token",
        "x-amzn-trace-id", "x-api-key", "x-client-request-id", "x-cloud-trace-context", "x-correlation-id",
        "x-forwarded-for", "x-goog-api-client", "x-goog-api-key", "x-ms-client-request-id", "x-ms-date",
        "x-request-id",
    }
)
# fmt: on
_VOLATILE_PREFIXES: Final = ("x-stainless-", "x-b3-", "x-datadog-", "uberctx-", "ot-tracer-")
_TRACE_KEYS: Final = frozenset({"traceparent", "tracestate", "baggage"})
_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443", "ws": ":80", "wss": ":443"}

_UNRESERVED: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_ESCAPED: Final = re.compile(r"%([0-9A-Fa-f]{2})")
_NOT_ASCII: Final = re.compile(r"[^\x21-\x7e]")
_MARK: Final = re.compile(r"\[REDACTED(?::[0-9a-f]{16})?\]")
_REF: Final = re.compile(r"hmac-sha256:[0-9a-f]{16}")
_PARAMETER: Final = re.compile(r';\s*([!#$%&\'*+.^_`|~\w-]+)\s*=\s*("(?:[^"\\]|\\.)*"|[^;\s]*)')

_CONTAINERS: Final = frozenset({dict, list})
_EXACT: Final = frozenset({str, int, bool, type(None), dict, list})
_SORTED: Final = orjson.OPT_SORT_KEYS | orjson.OPT_PASSTHROUGH_SUBCLASS


class Missing:
    """The value of a place that does not exist."""

    def __repr__(self) -> str:
        return "(absent)"


MISSING: Final = Missing()
"""Stands in a `Difference` for a side that has nothing at the pointer; null is a value and is not this."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where a recorded and a live view part.

    Attributes:
        pointer: JSON Pointer (RFC 6901) into the view.
        recorded: Value on the recorded side, `MISSING` where there is none.
        live: Value on the live side, likewise.
    """

    pointer: str
    recorded: Json | Missing
    live: Json | Missing


# --- views ------------------------------------------------------------------------------------------------------------


def view(kind: str, payload: Json, *, hosts: Mapping[str, str] = _NO_HOSTS) -> Json:
    """What of `payload` takes part in matching. Never changes `payload`; returns it where all of it does.

    Args:
        kind: "tool", "llm" or "http".
        payload: The prepared input of the call.
        hosts: `host[:port]` or origin, as `normal_origin` spells it → the one to read it as.
    """
    if type(payload) is not dict:
        return payload
    if kind == "http":
        return _http_view(payload, hosts)
    if kind == "llm":
        return _llm_view(payload)
    return _without_trace_context(payload, "params")


def _http_view(payload: dict[str, Json], hosts: Mapping[str, str]) -> Json:
    url = payload.get("url")
    if not isinstance(url, str):
        return payload
    seen = {key: value for key, value in payload.items() if key not in ("method", "url", "headers", "body")}
    seen["method"] = str(payload.get("method", "GET")).upper()
    seen["url"], query = _split_url(url, hosts)
    if query:
        seen["query"] = query
    headers = _pairs(payload.get("headers"))
    seen["headers"] = _header_view(headers)
    seen["body"] = _body_view(payload.get("body"), headers)
    return seen


def _llm_view(payload: dict[str, Json]) -> Json:
    request = payload.get("request")
    if type(request) is not dict:
        return _without_trace_context(payload, "request")
    if "extra_headers" in request:
        request = {**request, "extra_headers": _header_view(_pairs(request["extra_headers"]))}
        payload = {**payload, "request": request}
    return _without_trace_context(payload, "request")


def _without_trace_context(payload: dict[str, Json], inner: str) -> dict[str, Json]:
    """`payload` less the trace context in `_meta` (MCP), at its top and under `inner`."""
    if "_meta" in payload:
        payload = _meta_view(payload)
    below = payload.get(inner)
    if type(below) is dict and "_meta" in below:
        payload = {**payload, inner: _meta_view(below)}
    return payload


def _meta_view(owner: dict[str, Json]) -> dict[str, Json]:
    meta = owner["_meta"]
    if type(meta) is not dict or _TRACE_KEYS.isdisjoint(meta):
        return owner
    kept: dict[str, Json] = {key: value for key, value in meta.items() if key not in _TRACE_KEYS}
    rest = {key: value for key, value in owner.items() if key != "_meta"}
    return {**rest, "_meta": kept} if kept else rest


def _pairs(headers: Json) -> list[tuple[str, str]]:
    """Headers as (lower-case name, value) pairs, from a list of pairs or an object; anything else has none."""
    if isinstance(headers, dict):
        return [
            (name.lower(), value if isinstance(value, str) else json.dumps(value)) for name, value in headers.items()
        ]
    if not isinstance(headers, list):
        return []
    return [
        (pair[0].lower(), pair[1])
        for pair in headers
        if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], str)
    ]


def _header_view(headers: Sequence[tuple[str, str]]) -> dict[str, Json]:
    """Name → its values in order, less what changes per run, client version or machine."""
    seen: dict[str, list[Json]] = {}
    for name, value in headers:
        if name in _VOLATILE_HEADERS or name.startswith(_VOLATILE_PREFIXES):
            continue
        kept = value.partition(";")[0].strip().lower() if name == "content-type" else value.strip()
        seen.setdefault(name, []).append(kept)
    return dict(seen)


# --- bodies -----------------------------------------------------------------------------------------------------------


def _body_view(body: Json, headers: Sequence[tuple[str, str]]) -> Json:
    """`body` by its parts where it is a form, else as it is. A body that breaks its own type is compared as it is."""
    content_type = next((value for name, value in headers if name == "content-type"), "")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type == "application/x-www-form-urlencoded" and isinstance(body, str):
        return {"form": _query_view(body)}
    if media_type.startswith("multipart/"):
        raw = _raw(body)
        boundary = dict(_parameters(content_type)).get("boundary", "")
        parts = _multipart(raw, boundary.encode()) if raw is not None and boundary else None
        if parts is not None:
            return {"multipart": parts}
    return body


def _raw(body: Json) -> bytes | None:
    if isinstance(body, str):
        return body.encode("utf-8", "surrogatepass")
    if isinstance(body, dict) and isinstance(encoded := body.get("base64"), str):
        try:
            return base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            return None
    return None


def _multipart(raw: bytes, boundary: bytes) -> dict[str, Json] | None:
    """The parts of a multipart body by field name (RFC 2046, section 5.1.1), or None where it has no end."""
    pieces = (b"\r\n" + raw).split(b"\r\n--" + boundary)
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        return None
    parts: dict[str, list[Json]] = {}
    for piece in pieces[1:-1]:
        head, _, content = piece.partition(b"\r\n\r\n")
        name, part = _part(head.decode("utf-8", "replace"), content)
        parts.setdefault(name, []).append(part)
    return dict(parts)


def _part(head: str, content: bytes) -> tuple[str, Json]:
    fields = {
        name.strip().lower(): value.strip() for name, _, value in (row.partition(":") for row in head.splitlines())
    }
    disposition = dict(_parameters(fields.get("content-disposition", "")))
    part: dict[str, Json] = {"content": _text(content)}
    filename = disposition.get("filename*", disposition.get("filename"))
    if filename is not None:
        part["filename"] = filename
    if "content-type" in fields:
        part["type"] = fields["content-type"].lower()
    return disposition.get("name", ""), part


def _parameters(header: str) -> Iterator[tuple[str, str]]:
    """The `; name=value` parameters of a header (RFC 9110, section 5.6.6), names in lower case."""
    for match in _PARAMETER.finditer(header):
        name, value = match.groups()
        if value.startswith('"'):
            value = re.sub(r"\\(.)", r"\1", value[1:-1])
        yield name.lower(), value


def _text(data: bytes) -> Json:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


# --- URLs -------------------------------------------------------------------------------------------------------------


def _split_url(url: str, hosts: Mapping[str, str]) -> tuple[str, dict[str, Json]]:
    """One spelling of `url` without query, fragment and user, and its query by name (RFC 3986, section 6.2.2)."""
    head, _, query = url.partition("#")[0].partition("?")
    scheme, mark, rest = head.partition("://")
    if not mark:
        return _normal_path(head), _query_view(query)
    authority, slash, path = rest.partition("/")
    origin = _map_origin(normal_origin(f"{scheme}://{authority}"), hosts)
    return f"{origin}/{_normal_path(path)}" if slash else f"{origin}/", _query_view(query)


def normal_origin(origin: str) -> str:
    """`origin`, with or without a scheme, in lower case, without user and default port."""
    scheme, mark, authority = origin.rpartition("://")
    authority = authority.rpartition("@")[2].lower().rstrip("/")
    authority = authority.removesuffix(_DEFAULT_PORTS.get(scheme.lower(), "\0"))
    return f"{scheme.lower()}{mark}{authority}"


def _map_origin(origin: str, hosts: Mapping[str, str]) -> str:
    if not hosts:
        return origin
    scheme, mark, authority = origin.partition("://")
    if origin in hosts:
        mapped = hosts[origin]
        return mapped if "://" in mapped else f"{scheme}{mark}{mapped}"
    if authority in hosts:
        mapped = hosts[authority]
        return mapped if "://" in mapped else f"{scheme}{mark}{mapped}"
    host, colon, port = authority.rpartition(":")
    if colon and host in hosts and "://" not in hosts[host]:
        return f"{scheme}{mark}{hosts[host]}{colon}{port}"
    return origin


def _normal_path(path: str) -> str:
    """Escapes in one spelling: those of unreserved characters undone, the others in upper case, `%2F` kept."""
    path = _NOT_ASCII.sub(lambda match: _escape(match.group()), path.replace("%5BREDACTED%5D", REDACTED))
    return _ESCAPED.sub(_respell, path) if "%" in path else path


def _escape(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode("utf-8", "surrogatepass"))


def _respell(match: re.Match[str]) -> str:
    byte = int(match.group(1), 16)
    return chr(byte) if byte in _UNRESERVED else f"%{byte:02X}"


def _query_view(query: str) -> dict[str, Json]:
    """Name → its values in order: order between names is free, order within a repeated name counts."""
    seen: dict[str, list[Json]] = {}
    for piece in filter(None, query.split("&")):
        name, equals, value = piece.partition("=")
        key = _text(_unquote(name))
        seen.setdefault(key if isinstance(key, str) else name, []).append(_text(_unquote(value)) if equals else None)
    return dict(seen)


def _unquote(text: str) -> bytes:
    return unquote_to_bytes(text.replace("+", " ").encode("utf-8", "surrogatepass"))


ISO_TIME: Final = re.compile(
    r"[12]\d{3}-[01]\d-[0-3]\d(?:[T ][0-2]\d:[0-5]\d(?::[0-6]\d(?:[.,]\d{1,9})?)?(?:Z|[+-][0-2]\d:?[0-5]\d)?)?"
)
"""A date, or a date and time of day, of ISO 8601: for `normalise_text`."""

UUID: Final = re.compile(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}")
"""A UUID as text (RFC 9562, section 4): for `normalise_text`."""

PATH: Final = re.compile(r"(?<![\w./\\:-])(?:file://)?(?:[A-Za-z]:)?[/\\](?:[\w.@%+~-]+[/\\])+[\w.@%+~-]*")
"""An absolute path of at least two parts, of POSIX or Windows: for `normalise_text`. The path of a URL is none."""

NORMALISERS: Final[Mapping[str, re.Pattern[str]]] = MappingProxyType({"iso_time": ISO_TIME, "uuid": UUID, "path": PATH})
"""Normalisers by the name that settings and options know them by."""

Normaliser: TypeAlias = str | re.Pattern[str] | Callable[[str], str]
"""A name of `NORMALISERS`, a pattern whose matches are left out, or a function from text to text."""


# --- rules ------------------------------------------------------------------------------------------------------------


def apply_rules(rules: Sequence[Rule], kind: str, name: str, seen: Json) -> Json:
    """`seen` (a view) with every rule applied in order; the argument itself stays as it is."""
    for rule in rules:
        seen = _without(seen, _segments(rule)) if isinstance(rule, str) else rule(kind, name, seen)
    return seen


def normalise_text(pattern: str | re.Pattern[str], replacement: str) -> Callable[[str, str, Json], Json]:
    """A rule that replaces what matches `pattern` in every string of a view, for instance times by "<time>"."""
    expression = re.compile(pattern)
    return _each_text(lambda text: expression.sub(replacement, text))


def _each_text(change: Callable[[str], str]) -> Callable[[str, str, Json], Json]:
    """A rule that changes every text of a view."""

    def rewrite(value: Json) -> Json:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, list):
            return [rewrite(item) for item in value]
        if isinstance(value, dict):
            return {key: rewrite(item) for key, item in value.items()}
        return value

    def rule(_kind: str, _name: str, seen: Json) -> Json:
        return rewrite(seen)

    return rule


def normalising(normaliser: Normaliser) -> Callable[[str, str, Json], Json]:
    """The rule that applies a normaliser to every text of a view, keys of objects left alone.

    Raises:
        SettingsError: It is none, or no known name.
    """
    if isinstance(normaliser, str):
        if normaliser not in NORMALISERS:
            raise SettingsError(
                f"normaliser {normaliser!r} is not one of {', '.join(NORMALISERS)}; give a pattern or a function else"
            )
        return normalise_text(NORMALISERS[normaliser], f"<{normaliser}>")
    if isinstance(normaliser, re.Pattern):
        return normalise_text(normaliser, "<normalised>")
    if not callable(normaliser):
        raise SettingsError(f"normaliser {normaliser!r} is neither a name, a pattern nor a function")
    return _each_text(normaliser)


def normaliser_name(normaliser: Normaliser) -> str:
    """How reports name a normaliser."""
    if isinstance(normaliser, str):
        return normaliser
    if isinstance(normaliser, re.Pattern):
        return next((name for name, known in NORMALISERS.items() if known is normaliser), str(normaliser.pattern))
    return str(getattr(normaliser, "__qualname__", type(normaliser).__name__))


def _segments(pointer: str) -> list[str]:
    return [segment.replace("~1", "/").replace("~0", "~") for segment in pointer.split("/")[1:]]


def _without(value: Json, path: Sequence[str]) -> Json:
    """A copy of `value` less the place at `path`; `value` itself where there is no such place."""
    if isinstance(value, dict):
        return _object_without(value, path)
    if isinstance(value, list):
        return _array_without(value, path)
    return value


def _object_without(value: dict[str, Json], path: Sequence[str]) -> Json:
    head, rest = path[0], path[1:]
    if head != "*" and head not in value:
        return value
    if rest:
        return {key: _without(item, rest) if head in ("*", key) else item for key, item in value.items()}
    return {key: item for key, item in value.items() if head not in ("*", key)}


def _array_without(value: list[Json], path: Sequence[str]) -> Json:
    """Without an item its place stays, as null: the places behind it keep their index."""
    head, rest = path[0], path[1:]
    return [
        item if head not in ("*", str(index)) else _without(item, rest) if rest else None
        for index, item in enumerate(value)
    ]


# --- digests ----------------------------------------------------------------------------------------------------------


def digest(seen: Json) -> str:
    """The key of a view: equal for views that are equal by value, 64 hex digits. Not the stored hash.

    Raises:
        CanonicalizationError: The value is nested too deep or is not JSON.
    """
    try:
        data = orjson.dumps(seen, option=_SORTED)
        if not _only_exact(seen) or b"[REDACTED:" in data or b'"$redacted"' in data:
            data = _spell(seen).encode("utf-8", "surrogatepass")
    except (TypeError, RecursionError):
        data = _spell_or_refuse(seen)
    return hashlib.sha256(data).hexdigest()


def spelled_alike(one: Json, other: Json) -> bool:
    """Whether two views are equal, by a cheap test that may miss some that are (1 and 1.0), never the reverse.

    The bytes tell booleans from numbers, `==` tells NaN from the null that orjson writes for it.
    """
    try:
        return one == other and orjson.dumps(one, option=_SORTED) == orjson.dumps(other, option=_SORTED)
    except (TypeError, RecursionError):
        return False


def _only_exact(value: Json) -> bool:
    """Whether `value`, which orjson has accepted, holds no float: then orjson has spelled it by value."""
    level: list[Any] = [value]
    while level:
        kinds = set(map(type, level))
        if not kinds <= _EXACT:
            return False
        level = _members(level) if kinds & _CONTAINERS else []
    return True


def _members(values: list[Any]) -> list[Any]:
    """The items of all containers among `values`, one level down."""
    members: list[Any] = []
    for value in values:
        if type(value) is dict:
            members.extend(value.values())
        elif type(value) is list:
            members.extend(value)
    return members


def _spell_or_refuse(value: Json) -> bytes:
    try:
        return _spell(value).encode("utf-8", "surrogatepass")
    except (RecursionError, TypeError) as error:
        raise CanonicalizationError(f"cannot be matched: {error}") from error


def _spell(value: Json) -> str:
    """One text per value; the same bytes as orjson's for what has no float, large int, surrogate or redaction ref."""
    if isinstance(value, str):
        return json.dumps(_MARK.sub(REDACTED, value), ensure_ascii=False)
    if value is None or isinstance(value, bool):
        return "null" if value is None else "true" if value else "false"
    if isinstance(value, int):
        return str(value) if -(2**63) <= value < 2**64 else hex(value)
    if isinstance(value, float):
        return _spell_float(value)
    if isinstance(value, list):
        return f"[{','.join(map(_spell, value))}]"
    if not isinstance(value, dict):
        raise TypeError(f"a value of type {type(value).__name__} is not JSON")
    if _is_mark(value):
        return json.dumps(REDACTED)
    return "{" + ",".join(f"{json.dumps(key, ensure_ascii=False)}:{_spell(value[key])}" for key in sorted(value)) + "}"


def _is_mark(value: Json) -> bool:
    """Whether `value` stands for a redacted value with its ref (`.flight` format page); no shorter object does."""
    if not isinstance(value, dict) or value.keys() != {"$redacted", "ref"}:
        return False
    return isinstance(ref := value["ref"], str) and _REF.fullmatch(ref) is not None


def _spell_float(value: float) -> str:
    if isnan(value):
        return "NaN"
    if isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return _spell(int(value)) if value.is_integer() else repr(value)


# --- differences ------------------------------------------------------------------------------------------------------


def differences(recorded: Json, live: Json) -> list[Difference]:
    """Every place where two views part, in pointer order; empty when they are equal or `equal_where_redacted`.

    Lists are aligned at both ends, so that one inserted message is one difference.
    """
    return list(iter_differences(recorded, live))


def equal_where_redacted(recorded: Json, live: Json) -> bool:
    """Whether the views are equal once `[REDACTED]` in the recording stands for whatever is live at that place."""
    return next(iter_differences(recorded, live), None) is None


def holds_redaction(value: Json) -> bool:
    """Whether some string of `value` holds a redaction mark, or some object is one."""
    if isinstance(value, str):
        return _MARK.search(value) is not None
    if isinstance(value, list):
        return any(map(holds_redaction, value))
    if isinstance(value, dict):
        return _is_mark(value) or any(map(holds_redaction, value.values()))
    return False


def marks_in(value: Json, pointer: str = "") -> Iterator[tuple[str, int]]:
    """(JSON Pointer, redaction marks there) for each string of `value` that holds some, and each object that is one."""
    if isinstance(value, str):
        count = len(_MARK.findall(value.replace("%5BREDACTED%5D", REDACTED)))
        if count:
            yield pointer, count
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from marks_in(item, f"{pointer}/{at}")
    elif isinstance(value, dict):
        if _is_mark(value):
            yield pointer, 1
            return
        for key, item in value.items():
            yield from marks_in(item, f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}")


def value_at(value: Json, pointer: str) -> Json:
    """The value at a JSON Pointer, `[REDACTED]` where redaction has taken the way to it."""
    for segment in _segments(pointer):
        if isinstance(value, dict) and segment in value:
            value = value[segment]
        elif isinstance(value, list) and segment.isdecimal() and int(segment) < len(value):
            value = value[int(segment)]
        else:
            return REDACTED
    return value


def iter_differences(recorded: Json, live: Json, pointer: str = "") -> Iterator[Difference]:
    """As `differences`, one at a time."""
    if isinstance(recorded, dict) and isinstance(live, dict) and not _is_mark(recorded):
        yield from _object_differences(recorded, live, pointer)
    elif isinstance(recorded, list) and isinstance(live, list):
        yield from _array_differences(recorded, live, pointer)
    elif not _same(recorded, live):
        yield Difference(pointer, recorded, live)


def _object_differences(recorded: dict[str, Json], live: dict[str, Json], pointer: str) -> Iterator[Difference]:
    for key in sorted(recorded.keys() | live.keys()):
        place = f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}"
        if key in recorded and key in live:
            yield from iter_differences(recorded[key], live[key], place)
        else:
            yield Difference(place, recorded.get(key, MISSING), live.get(key, MISSING))


def _array_differences(recorded: list[Json], live: list[Json], pointer: str) -> Iterator[Difference]:
    shorter = min(len(recorded), len(live))
    start, end = 0, 0
    if len(recorded) != len(live):
        start = _common(zip(recorded, live, strict=False))
        end = _common(zip(reversed(recorded[start:]), reversed(live[start:]), strict=False))
    for index in range(start, shorter - end):
        yield from iter_differences(recorded[index], live[index], f"{pointer}/{index}")
    surplus = max(start, shorter - end)
    for index in range(surplus, len(recorded) - end):
        yield Difference(f"{pointer}/{index}", recorded[index], MISSING)
    for index in range(surplus, len(live) - end):
        yield Difference(f"{pointer}/{index}", MISSING, live[index])


def _common(pairs: Iterator[tuple[Json, Json]]) -> int:
    count = 0
    for recorded, live in pairs:
        if not equal_where_redacted(recorded, live):
            break
        count += 1
    return count


def _same(recorded: Json, live: Json) -> bool:
    """Whether two values that are not both objects or both lists agree."""
    if isinstance(recorded, str):
        return _covers(recorded, live)
    if _is_mark(recorded):
        return True
    if isinstance(recorded, bool) or isinstance(live, bool):
        return recorded is live
    if isinstance(recorded, int | float) and isinstance(live, int | float):
        return recorded == live or (recorded != recorded and live != live)
    return recorded is None and live is None


def _covers(recorded: str, live: Json) -> bool:
    """Whether `recorded`, its redaction marks taken for any text, is `live`. Linear: each piece is looked for once."""
    pieces = _MARK.split(recorded)
    if len(pieces) == 1:
        return recorded == live
    if pieces == ["", ""]:
        return True
    if not isinstance(live, str) or not live.startswith(pieces[0]):
        return False
    place, end = len(pieces[0]), len(live) - len(pieces[-1])
    for piece in pieces[1:-1]:
        found = live.find(piece, place, max(end, place))
        if found < 0:
            return False
        place = found + len(piece)
    return end >= place and live.endswith(pieces[-1])
