# SPDX-License-Identifier: Apache-2.0
"""Any Python value as redacted JSON with its digest: the same function for recording and for replay.

Decision: every value has a JSON form, and what JSON cannot hold gets a type tag beside the payload, at its JSON
Pointer, so that replay gives the program the types it had. Values of standard types come back exactly; of others the
tag says `lossy:` and the class. Keys keep their order (a replayed dict is often put into the next prompt); only the
digest is over canonical JSON. Plain JSON, the ordinary case, is encoded once in C and looked over once. Rejected:
raising on values that are not JSON (a recorder must not break the program's own call) and pickling (a bundle is read by
others, and must not run code).

| value | form | tag |
|---|---|---|
| tuple, set, frozenset | list; sets sorted by their canonical JSON | `tuple`, `set`, `frozenset` |
| bytes, bytearray, memoryview | base64 | `bytes`, `bytearray`, `bytes` |
| datetime, date, time, timedelta | ISO 8601 | `datetime`, `date`, `time`, `timedelta` |
| Decimal, UUID, Path | text | `Decimal`, `UUID`, `Path` |
| NaN, infinities | `"NaN"`, `"Infinity"`, `"-Infinity"` | `float` |
| ints beyond 4,300 digits | hexadecimal text | `int` |
| text with lone surrogates | escaped | `surrogates` |
| mapping with keys that are no text | list of pairs | `mapping` |
| Enum, dataclass, pydantic model, numpy, exception | value, fields, items, class and message | `lossy:module.Class` |
| anything else | its repr without addresses, at most 4 KiB | `lossy:module.Class` |
| a cycle, nesting beyond 100 | a mark | `lossy:cycle`, `lossy:depth` |
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import enum
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Set
from decimal import Decimal
from pathlib import Path, PurePath
from typing import Any
from uuid import UUID

import msgspec
import orjson

from sftrace_otel.core.redact import Finding, RedactionPolicy
from sftrace_otel.formats import Json, canonical

__all__ = ["Prepared", "prepare", "restore"]

MAX_NESTING = 100
"""Containers inside containers beyond this become a mark."""
MAX_REPR = 4096
"""Characters of a repr that are kept."""
HEAD = 2048
"""Characters of a cut payload that are kept."""

Serializer = Callable[[object], object]


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A payload ready to be stored and compared.

    `value`: redacted JSON. `data`: its JSON text in UTF-8, keys in the program's order. `digest`: SHA-256 over its
    canonical JSON, 64 hex. `findings`: what was redacted, pointers from the payload's root. `tags`: JSON Pointer → type
    tag. `truncated`: the payload was longer than allowed and only its head is here.
    """

    value: Json
    data: bytes
    digest: str
    findings: tuple[Finding, ...] = ()
    tags: dict[str, str] = {}
    truncated: bool = False


def prepare(
    value: object, policy: RedactionPolicy, *, serializer: Serializer | None = None, max_bytes: int = 16 * 1024 * 1024
) -> Prepared:
    """`value` as redacted JSON. Never raises; `serializer` turns values of unknown types into known ones.

    A payload of more than `max_bytes` of JSON is cut: `{"truncated": true, "bytes": n, "head": "…"}`.
    """
    tags: dict[str, str] = {}
    data = _plain_text(value)
    if data is None:
        value = _Conversion(serializer, tags).convert(value, "", 0)
        data = _text(value)
    plain: Any = value
    clean, findings = policy.redact(plain)
    if clean is not plain:
        data = _text(clean)
    if len(data) <= max_bytes:
        return Prepared(value=clean, data=data, digest=_digest(clean), findings=findings, tags=tags)
    head = data[: HEAD * 4].decode("utf-8", "ignore")[:HEAD]
    cut: Json = {"truncated": True, "bytes": len(data), "head": head}
    kept = tuple(finding for finding in findings if not finding.pointer)
    return Prepared(value=cut, data=_text(cut), digest=_digest(cut), findings=kept, truncated=True)


def _digest(value: Json) -> str:
    return hashlib.sha256(canonical.dumps(value)).hexdigest()


def _text(value: Any) -> bytes:
    """JSON text in the order of the keys; ints beyond 64 bits whole."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return msgspec.json.encode(value)


# --- the ordinary case ------------------------------------------------------------------------------------------------

_PASS = orjson.OPT_PASSTHROUGH_SUBCLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS
_SCALARS = frozenset({str, int, bool, type(None)})
_TEXT = frozenset({str})


def _plain_text(value: object) -> bytes | None:
    """The JSON text of a value that is JSON already, None for any other."""
    try:
        data = orjson.dumps(value, option=_PASS)
    except TypeError:
        return None
    return data if _is_json(value) and (_is_shallow(data) or _depth(value) <= MAX_NESTING) else None


def _is_json(value: object) -> bool:
    """Whether a value that orjson has accepted (so it ends) holds only what JSON has: no tuple, UUID, Enum or NaN."""
    pending: list[Any] = [value]
    for item in pending:
        kind = type(item)
        if kind is dict:
            if not _TEXT.issuperset(map(type, item)):
                return False
            if not _SCALARS.issuperset(map(type, item.values())):
                pending += item.values()
        elif kind is list:
            if not _SCALARS.issuperset(map(type, item)):
                pending += item
        elif kind is float:
            if not math.isfinite(item):
                return False
        elif kind not in _SCALARS:
            return False
    return True


def _is_shallow(data: bytes) -> bool:
    return data.count(b"{") + data.count(b"[") <= MAX_NESTING


def _depth(value: object) -> int:
    """Levels of containers in JSON."""
    level: list[Any] = [value]
    depth = 0
    while level:
        inside: list[Any] = []
        for item in level:
            if type(item) is dict:
                inside += item.values()
            elif type(item) is list:
                inside += item
        depth += any(type(item) in (dict, list) for item in level)
        level = inside
    return depth


# --- everything else --------------------------------------------------------------------------------------------------

_ADDRESS = re.compile(r"(?: at)? 0x[0-9a-fA-F]{4,16}")
_SURROGATE = re.compile("[\ud800-\udfff\\\\]")
_ESCAPED = re.compile(r"\\(u[0-9a-f]{4}|\\)")


class _Conversion:
    """One value on its way to JSON; notes tags as it goes."""

    def __init__(self, serializer: Serializer | None, tags: dict[str, str]) -> None:
        self._serializer = serializer
        self._tags = tags
        self._open: set[int] = set()

    def convert(self, value: object, pointer: str, depth: int) -> Json:
        kind = type(value)
        if value is None or kind is bool:
            return value  # type: ignore[return-value]
        if kind is str:
            return self._str(str(value), pointer)
        if kind is int:
            return self._int(value, pointer)  # type: ignore[arg-type]
        if kind is float:
            return self._float(value, pointer)  # type: ignore[arg-type]
        if depth >= MAX_NESTING:
            return self._mark("[nested too deeply]", "lossy:depth", pointer)
        if id(value) in self._open:
            return self._mark("[a cycle]", "lossy:cycle", pointer)
        self._open.add(id(value))
        try:
            return self._other(value, pointer, depth)
        except Exception:
            return self._mark(f"<{kind.__qualname__}>", f"lossy:{_class_name(kind)}", pointer)
        finally:
            self._open.discard(id(value))

    def _mark(self, form: Json, tag: str, pointer: str) -> Json:
        self._tags[pointer] = tag
        return form

    def _str(self, value: str, pointer: str) -> str:
        if value.isascii():
            return value
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            self._tags[pointer] = "surrogates"
            return _SURROGATE.sub(lambda found: "\\\\" if found[0] == "\\" else f"\\u{ord(found[0]):04x}", value)
        return value

    def _int(self, value: int, pointer: str) -> Json:
        if value.bit_length() > 14_000:
            return self._mark(hex(value), "int", pointer)
        return value

    def _float(self, value: float, pointer: str) -> Json:
        if math.isfinite(value):
            return value
        return self._mark("NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity", "float", pointer)

    def _other(self, value: object, pointer: str, depth: int) -> Json:
        simple = _simple(value)
        if simple is not None:
            return self._mark(simple[0], simple[1], pointer)
        if isinstance(value, Mapping):
            return self._mapping(value, pointer, depth)
        if isinstance(value, (list, tuple)):
            if isinstance(value, tuple):
                self._tags[pointer] = "tuple"
            return self._items(value, pointer, depth)
        if isinstance(value, Set):
            return self._set(value, pointer, depth)
        return self._unknown(value, pointer, depth)

    def _items(self, items: Iterable[object], pointer: str, depth: int) -> list[Json]:
        return [self.convert(item, f"{pointer}/{index}", depth + 1) for index, item in enumerate(items)]

    def _mapping(self, value: Mapping[Any, Any], pointer: str, depth: int) -> Json:
        if all(type(key) is str and (key.isascii() or _encodes(key)) for key in value):
            return {key: self.convert(value[key], f"{pointer}/{_segment(key)}", depth + 1) for key in value}
        self._tags[pointer] = "mapping"
        return [
            self._items((key, item), f"{pointer}/{index}", depth + 1) for index, (key, item) in enumerate(value.items())
        ]

    def _set(self, value: Set[Any], pointer: str, depth: int) -> Json:
        self._tags[pointer] = "frozenset" if isinstance(value, frozenset) else "set"

        def order(item: object) -> bytes:
            return _text(_Conversion(self._serializer, {}).convert(item, "", depth + 1))

        return self._items(sorted(value, key=order), pointer, depth)

    def _unknown(self, value: object, pointer: str, depth: int) -> Json:
        kind = type(value)
        self._tags[pointer] = f"lossy:{_class_name(kind)}"
        form = self._serialized(value)
        if form is value:
            form = _fields(value)
        if form is value:
            return self._str(_ADDRESS.sub("", repr(value))[:MAX_REPR], f"{pointer}")
        before = dict(self._tags)
        converted = self.convert(form, pointer, depth + 1)
        if pointer in before:
            self._tags[pointer] = before[pointer]
        return converted

    def _serialized(self, value: object) -> object:
        if self._serializer is None:
            return value
        try:
            return self._serializer(value)
        except Exception:
            return value


def _simple(value: object) -> tuple[str, str] | None:
    """Values of standard types that become text, with their tag."""
    if isinstance(value, enum.Enum):
        return None
    if isinstance(value, (bytes, bytearray, memoryview)):
        tag = "bytearray" if isinstance(value, bytearray) else "bytes"
        return base64.b64encode(bytes(value)).decode("ascii"), tag
    if isinstance(value, dt.datetime):
        return value.isoformat(), "datetime"
    if isinstance(value, dt.date):
        return value.isoformat(), "date"
    if isinstance(value, dt.time):
        return value.isoformat(), "time"
    if isinstance(value, dt.timedelta):
        return f"{value.days}D{value.seconds}S{value.microseconds}U", "timedelta"
    if isinstance(value, Decimal):
        return str(value), "Decimal"
    if isinstance(value, UUID):
        return str(value), "UUID"
    if isinstance(value, PurePath):
        return str(value), "Path"
    return None


def _fields(value: Any) -> object:
    """What an object of a known kind holds; the object itself where it is of no known kind."""
    kind = type(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, BaseException):
        return {"error_type": kind.__name__, "message": str(value) or kind.__name__}
    if dataclasses.is_dataclass(kind):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(kind)}
    if isinstance(value, msgspec.Struct):
        return {name: getattr(value, name) for name in value.__struct_fields__}
    if isinstance(value, (str, int, float)):
        return next(base for base in (str, int, float) if isinstance(value, base))(value)
    if kind.__module__.partition(".")[0] == "numpy":
        return value.tolist() if hasattr(value, "tolist") else value
    for method in ("model_dump", "to_dict", "dict"):
        dump = getattr(kind, method, None)
        if callable(dump) and (method == "model_dump" or hasattr(kind, "__fields__")):
            return dump(value)
    return value


def _encodes(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _segment(key: str) -> str:
    """A segment of a JSON Pointer (RFC 6901, section 3)."""
    return key.replace("~", "~0").replace("/", "~1")


# --- and back ---------------------------------------------------------------------------------------------------------


def restore(value: Json, tags: Mapping[str, str]) -> object:
    """`value` with the types that `tags` tell of; a fresh copy that the caller may change.

    Tags that are unknown, lossy, point nowhere, or stand at a redacted value leave the JSON as it is. Never raises.
    """
    copied: Any = _copy(value)
    for pointer in sorted(tags, key=lambda text: -text.count("/")):
        copied = _restored_at(copied, _segments(pointer), tags[pointer])
    return copied


def _copy(value: Json) -> Json:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value


def _segments(pointer: str) -> list[str]:
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]


def _restored_at(root: Any, path: list[str], tag: str) -> Any:
    if not path:
        return _restored(root, tag)
    holder = root
    for part in path[:-1]:
        holder = _member(holder, part)
    last: Any = path[-1]
    if isinstance(holder, list) and last.isdigit() and int(last) < len(holder):
        last = int(last)
    elif not isinstance(holder, dict) or last not in holder:
        return root
    holder[last] = _restored(holder[last], tag)
    return root


def _member(holder: Any, part: str) -> Any:
    if isinstance(holder, dict):
        return holder.get(part)
    if isinstance(holder, list) and part.isdigit() and int(part) < len(holder):
        return holder[int(part)]
    return None


def _restored(form: Any, tag: str) -> Any:
    back = _BACK.get(tag)
    if back is None:
        return form
    try:
        return back(form)
    except Exception:  # redacted, overridden, or of another shape: the JSON is all there is
        return form


def _listed(make: Callable[[list[Any]], object]) -> Callable[[Any], object]:
    def back(form: Any) -> object:
        if not isinstance(form, list):
            raise TypeError
        return make(form)

    return back


def _timedelta(form: str) -> dt.timedelta:
    days, seconds, micros = (int(part) for part in re.split("[DSU]", form)[:3])
    return dt.timedelta(days=days, seconds=seconds, microseconds=micros)


def _unescaped(form: str) -> str:
    return _ESCAPED.sub(lambda found: "\\" if found[1] == "\\" else chr(int(found[1][1:], 16)), form)


def _bytes(form: str) -> bytes:
    return base64.b64decode(form, validate=True)


_BACK: dict[str, Callable[[Any], object]] = {
    "tuple": _listed(tuple),
    "set": _listed(set),
    "frozenset": _listed(frozenset),
    "mapping": _listed(dict),
    "bytes": _bytes,
    "bytearray": lambda form: bytearray(_bytes(form)),
    "datetime": dt.datetime.fromisoformat,
    "date": dt.date.fromisoformat,
    "time": dt.time.fromisoformat,
    "timedelta": _timedelta,
    "Decimal": Decimal,
    "UUID": UUID,
    "Path": Path,
    "float": float,
    "int": lambda form: int(form, 16),
    "surrogates": _unescaped,
}
