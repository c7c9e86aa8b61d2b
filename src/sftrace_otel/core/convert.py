# SPDX-License-Identifier: Apache-2.0
"""Any Python value as JSON with type tags, and back. Nothing raises, nothing given is changed or consumed.

The forms; a tag in brackets comes back by `restore`:

====================================  ==========================================================================
None, bool, int, float, str           themselves, also of their subclasses
NaN, Infinity, -Infinity              their names as text [NaN]
int of more than 4300 digits          hexadecimal text, `0x…` [int]
str with lone surrogates              text with `\\udxxx` for each and `\\\\` for a backslash [surrogates]
list; dict with text keys             array; object; also of their subclasses
dict with int keys                    object, keys as decimal text [int_keys]
dict with other keys                  array of [key, value], in the order of the keys' canonical bytes [dict]
tuple, also named                     array [tuple]
set, frozenset                        array, in the order of the items' canonical bytes [set, frozenset]
bytes, memoryview; bytearray          base64 text [bytes, bytearray]; the mark where a secret is inside
datetime, date, time                  ISO 8601 text [datetime, date, time]
timedelta                             text `PT<seconds>.<six digits>S` [timedelta]
Decimal, UUID, complex                text [Decimal, UUID, complex]
Path; pure paths                      text [Path; PurePosixPath, PureWindowsPath]
Enum                                  its value, converted [lossy]
exception                             object of type, module, message, args, notes, cause, context [lossy]
what the serializer hook knows        what it returns, converted [lossy]
pydantic model                        what `model_dump` returns, converted [lossy]
dataclass, attrs class, msgspec       object of the fields [lossy]
numpy scalar, array                   number, nested arrays [lossy]
other mappings, sequences, views      object or array [lossy]
iterators, and anything else          the repr without memory addresses, redacted, at most 4096 characters [lossy]
a value inside itself                 text `<cycle: POINTER>` naming the outer one [lossy]
more than 100 containers deep         text `<deeper than 100 levels>`; what is there is dropped [lossy]
====================================  ==========================================================================

Sets and pairs are ordered by their redacted bytes, so that the order tells nothing and survives another secret.
Code of the user runs only where there is no other way: `__repr__`, `__str__` of exceptions, `model_dump`, the
serializer, and the methods of foreign mappings, sequences and arrays. What it raises becomes the text
`<module.Class: no repr (ErrorType)>`. Rejected: pickling and importing by name, which a bundle from a stranger could
abuse.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, ValuesView
from decimal import Decimal
from enum import Enum
from functools import partial
from math import isfinite
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple
from uuid import UUID

from sftrace_otel.core.cut import CUT, at_word
from sftrace_otel.core.redact import MARK, Finding, RedactionPolicy
from sftrace_otel.core.redact.names import Sensitivity
from sftrace_otel.formats import Json, canonical

MAX_DEPTH = 100
"""Containers inside containers that are converted."""
MAX_REPR = 4096
"""Characters of a repr that are kept."""
LOSSY = "lossy"
"""Tag of what cannot come back."""

_BIG = 10**canonical.MAX_INT_DIGITS
_SURROGATE = re.compile("[\ud800-\udfff\\\\]")
_ESCAPE = re.compile(r"\\(u[0-9a-f]{4}|\\)")
_ADDRESS = re.compile(r"(?: at)? 0x[0-9A-Fa-f]{4,16}")
_TIMEDELTA = re.compile(r"(-?)PT(\d+)\.(\d{6})S")
_SCALAR_COST = 8
_CONTAINER_COST = 32
_MANY_NUMBERS = 2_000_000


class _Known(NamedTuple):
    """A container that was converted: it, since its id must stay its own, its form, and what that takes."""

    value: object
    form: Json
    height: int
    cost: int


class Converter:
    """Converts one value.

    Args:
        policy: What bytes, reprs and keys that are no text are checked with; texts are left to the caller.
        serializer: The user's hook: called with each object that has no form of its own; what it returns is converted.
            It declines by returning its argument or raising.
        room: About how many bytes may come out; whole items beyond that are dropped and `cut` is set.

    Attributes:
        tags: JSON Pointer to tag.
        findings: What was redacted on the way.
        cut: Whether items were dropped.
    """

    def __init__(
        self, policy: RedactionPolicy, serializer: Callable[[object], object] | None = None, room: int = 1 << 25
    ) -> None:
        self.tags: dict[str, str] = {}
        self.findings: list[Finding] = []
        self.cut = False
        self._policy = policy
        self._serializer = serializer
        self._room = room
        self._path: list[str] = []
        self._open: dict[int, int] = {}
        self._known: dict[int, _Known] = {}
        self._depth = 0
        self._deepest = 0

    def convert(self, value: Any) -> Json:
        """The JSON form of `value`. Never raises (interrupts pass)."""
        kind = type(value)
        self._room -= _SCALAR_COST
        if kind is str:
            return self._text(value)
        if value is None or kind is bool:
            return value  # type: ignore[no-any-return]
        if kind is int:
            return self._int(value)
        if kind is float:
            return self._float(value)
        return self._container(value, kind)

    def _container(self, value: Any, kind: type) -> Json:
        if self._depth >= MAX_DEPTH and kind not in _LEAVES:
            return self._lossy(f"<deeper than {MAX_DEPTH} levels>")
        if id(value) in self._open:
            outer = self._pointer(self._open[id(value)])
            return self._lossy(f"<cycle: {outer}>")
        known = self._known.get(id(value))
        if known is not None and self._depth + known.height <= MAX_DEPTH:
            self._room -= known.cost
            return known.form
        noted, room, deepest = len(self.tags) + len(self.findings), self._room, self._deepest
        self._room -= _CONTAINER_COST
        self._depth += 1
        self._deepest = self._depth
        self._open[id(value)] = len(self._path)
        try:
            form = self._by_type(value, kind)
        except Exception as error:
            form = self._lossy(f"<{_type_name(kind)}: no repr ({type(error).__name__})>")
        finally:
            self._depth -= 1
            del self._open[id(value)]
        if noted == len(self.tags) + len(self.findings) and not self.cut:
            self._known[id(value)] = _Known(value, form, self._deepest - self._depth, room - self._room)
        self._deepest = max(self._deepest, deepest)
        return form

    def _by_type(self, value: Any, kind: type) -> Json:
        exact = _FORMS.get(kind)
        if exact is not None:
            return exact(self, value)
        for base in kind.__mro__:
            form = _FORMS.get(base)
            if form is not None:
                return form(self, value)
        if issubclass(kind, Enum):
            return self._as_lossy(self.convert(object.__getattribute__(value, "_value_")))
        return self._foreign(value, kind)

    def _text(self, text: str) -> str:
        if len(text) > self._room:
            text = self._shortened(text)
        self._room -= len(text)
        if text.isascii():
            return text
        try:
            text.encode()
        except UnicodeEncodeError:
            self._tag("surrogates")
            return _SURROGATE.sub(lambda found: "\\\\" if found[0] == "\\" else f"\\u{ord(found[0]):04x}", text)
        return text

    def _shortened(self, text: str) -> str:
        self.cut = True
        self._tag(CUT)
        return at_word(text, max(self._room, 0))

    def _int(self, number: int) -> Json:
        if -_BIG < number < _BIG:
            return number
        self._tag("int")
        self._room -= number.bit_length() // 4
        return hex(number)

    def _float(self, number: float) -> Json:
        if isfinite(number):
            return number
        self._tag("NaN")
        return "NaN" if number != number else "Infinity" if number > 0 else "-Infinity"

    def _tagged(self, tag: str, form: Json) -> Json:
        self._tag(tag)
        return form

    def _array(self, items: Iterable[Any]) -> list[Json]:
        converted: list[Json] = []
        for index, item in enumerate(items):
            if self._room < 0:
                self.cut = True
                break
            self._path.append(str(index))
            converted.append(self.convert(item))
            self._path.pop()
        return converted

    def _object(self, pairs: Iterable[tuple[Any, Any]]) -> dict[str, Json]:
        converted: dict[str, Json] = {}
        for key, item in pairs:
            if self._room < 0:
                self.cut = True
                break
            self._room -= len(key)
            self._path.append(key)
            converted[key] = self.convert(item)
            self._path.pop()
        return converted

    def _dict(self, members: dict[Any, Any]) -> Json:
        return self._mapping(list(dict.items(members)))

    def _mapping(self, pairs: list[tuple[Any, Any]]) -> Json:
        kinds = {type(key) for key, _ in pairs}
        if all(issubclass(kind, str) for kind in kinds) and all(map(_is_encodable, (key for key, _ in pairs))):
            return self._object((str.__str__(key), item) for key, item in pairs)
        if kinds == {int} and all(-_BIG < key < _BIG for key, _ in pairs):
            self._tag("int_keys")
            return self._object((str(key), item) for key, item in pairs)
        self._tag("dict")
        return self._in_order([partial(self._pair, key, item) for key, item in pairs])

    def _pair(self, key: Any, item: Any) -> list[Json]:
        self._path.append("0")
        converted: list[Json] = [self.convert(key)]
        self._path[-1] = "1"
        name = key.decode("utf-8", "replace") if isinstance(key, bytes) else key
        if isinstance(name, str) and self._policy.sensitivity(name) and item is not None and not isinstance(item, bool):
            self.findings.append(Finding(self._pointer(), "sensitive_key"))
            converted.append(MARK)
        else:
            converted.append(self.convert(item))
        self._path.pop()
        return converted

    def _named(self, items: tuple[Any, ...]) -> Iterator[Any]:
        """The items of a tuple; of a named one without what a sensitive name hides (aiohttp's BasicAuth is one)."""
        names = getattr(type(items), "_fields", None)
        if not isinstance(names, tuple) or len(names) != tuple.__len__(items):
            yield from tuple.__iter__(items)
            return
        for index, (name, item) in enumerate(zip(names, tuple.__iter__(items), strict=True)):
            kind = self._policy.sensitivity(name) if isinstance(name, str) else Sensitivity.NONE
            shown = (
                item is None or isinstance(item, bool) or (kind is Sensitivity.TEXT and isinstance(item, (int, float)))
            )
            if kind and not shown:
                self.findings.append(Finding(f"{self._pointer()}/{index}", "sensitive_key"))
                yield MARK
            else:
                yield item

    def _set(self, items: Iterable[Any]) -> list[Json]:
        return self._in_order([partial(self.convert, item) for item in items])

    def _in_order(self, parts: Sequence[Callable[[], Json]]) -> list[Json]:
        """The results of `parts` in the order of their redacted canonical bytes, with tags and findings moved along."""
        done = sorted((self._apart(part) for part in parts), key=lambda part: part[0])
        for index, (_, _, tags, findings) in enumerate(done):
            self._path.append(str(index))
            place = self._pointer()
            self._path.pop()
            self.tags.update({place + pointer: tag for pointer, tag in tags.items()})
            self.findings += [Finding(place + finding.pointer, finding.reason) for finding in findings]
        return [form for _, form, _, _ in done]

    def _apart(self, part: Callable[[], Json]) -> tuple[bytes, Json, dict[str, str], list[Finding]]:
        """One converted part as if it stood alone, with the bytes to order it by."""
        outside = self.tags, self.findings, self._path
        self.tags, self.findings, self._path = {}, [], []
        try:
            form = part()
            order = canonical.dumps(self._policy.redact(form)[0])
            return order, form, self.tags, self.findings
        finally:
            self.tags, self.findings, self._path = outside

    def _bytes(self, data: Any, tag: str = "bytes") -> Json:
        view = memoryview(data)
        if view.nbytes > max(self._room, 0):
            self.cut = True
            view, tag = view.cast("B")[: max(self._room, 0)], CUT
        plain = bytes(view)
        self._room -= len(plain) * 4 // 3
        if self._policy.holds_secret(plain):
            self.findings.append(Finding(self._pointer(), "credential_pattern"))
            return MARK
        return self._tagged(tag, base64.b64encode(plain).decode())

    def _path_text(self, path: PurePath) -> Json:
        text = self._text(PurePath.__str__(path))
        if self._pointer() in self.tags:
            return self._lossy(text)
        if isinstance(path, Path):
            return self._tagged("Path", text)
        return self._tagged("PureWindowsPath" if isinstance(path, PureWindowsPath) else "PurePosixPath", text)

    def _exception(self, error: BaseException) -> Json:
        parts: dict[str, Any] = {"type": type(error).__qualname__, "module": type(error).__module__}
        parts["message"] = _try(str, error)
        parts["args"] = list(error.args)
        notes = error.__dict__.get("__notes__") if hasattr(error, "__dict__") else None
        if notes:
            parts["notes"] = notes
        if error.__cause__ is not None:
            parts["cause"] = error.__cause__
        elif error.__context__ is not None and not error.__suppress_context__:
            parts["context"] = error.__context__
        return self._as_lossy(self._object(parts.items()))

    def _foreign(self, value: Any, kind: type) -> Json:
        """An object without a form of its own: the user's hook, then what it says about itself, then its repr."""
        if self._serializer is not None:
            told = _told(self._serializer, value)
            if told is not value:
                return self._as_lossy(self.convert(told))
        if callable(getattr(kind, "model_dump", None)):
            return self._as_lossy(self.convert(_model_dump(value)))
        fields = _fields(value, kind)
        if fields is not None:
            return self._as_lossy(self._object(fields))
        if callable(getattr(kind, "tolist", None)) and hasattr(kind, "dtype") and _size(value) <= _MANY_NUMBERS:
            return self._as_lossy(self.convert(value.tolist()))
        if issubclass(kind, Mapping):
            return self._as_lossy(self._mapping([*value.items()]))
        if issubclass(kind, Set):
            return self._as_lossy(self._set(value))
        if issubclass(kind, Sequence | ValuesView) and _size(value) <= _MANY_NUMBERS:
            return self._as_lossy(self._array(value))
        return self._repr(value)

    def _repr(self, value: Any) -> Json:
        text = _ADDRESS.sub("", repr(value))
        text, findings = self._policy.redact_text(text)
        self.findings += [Finding(self._pointer(), finding.reason) for finding in findings]
        return self._as_lossy(self._text(text if len(text) <= MAX_REPR else f"{text[:MAX_REPR]}…"))

    def _lossy(self, form: Json) -> Json:
        return self._tagged(LOSSY, form)

    def _as_lossy(self, form: Json) -> Json:
        """Mark `form` as lossy unless a tag says already how it comes back."""
        self.tags.setdefault(self._pointer(), LOSSY)
        return form

    def _tag(self, tag: str) -> None:
        self.tags[self._pointer()] = tag

    def _pointer(self, depth: int | None = None) -> str:
        return "".join(f"/{part.replace('~', '~0').replace('/', '~1')}" for part in self._path[:depth])


def restore(value: Json, tags: Mapping[str, str]) -> object:
    """The Python value that `value` is the form of, as far as `tags` say; what they cannot say stays JSON.

    It is a fresh copy throughout: a replayed program may change what it is given without changing the recording.

    Args:
        value: JSON, as `Converter.convert` or `prepare` gave it. It is not changed.
        tags: JSON Pointer to tag. Tags that are unknown, point nowhere, or do not fit the value are passed over.
    """
    tree: dict[str, Any] = {}
    for pointer, tag in tags.items():
        if tag in _BACK:
            node = tree
            for part in pointer.split("/")[1:]:
                node = node.setdefault(f"/{part.replace('~1', '/').replace('~0', '~')}", {})
            node["tag"] = tag
    return _restored(value, tree)


_NO_TAGS: dict[str, Any] = {}


def _restored(value: Json, tree: dict[str, Any]) -> object:
    form: Any = value
    if isinstance(value, dict):
        form = {key: _restored(item, tree.get(f"/{key}", _NO_TAGS)) for key, item in value.items()}
    elif isinstance(value, list):
        form = [_restored(item, tree.get(f"/{place}", _NO_TAGS) if tree else tree) for place, item in enumerate(value)]
    try:
        return _tagged_back(form, tree["tag"]) if "tag" in tree else form
    except (TypeError, ValueError, ArithmeticError, LookupError):  # another shape: the JSON is all there is
        return form


def _tagged_back(form: Any, tag: str) -> object:
    if isinstance(form, str) and tag in _OF_TEXTS:
        return _OF_TEXTS[tag](form)
    if isinstance(form, list) and tag in _OF_LISTS:
        return _OF_LISTS[tag](form)
    if isinstance(form, dict) and tag == "int_keys":
        return {int(key): item for key, item in form.items()}
    return form


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _type_name(kind: type) -> str:
    return f"{type.__getattribute__(kind, '__module__')}.{type.__getattribute__(kind, '__qualname__')}"


def _try(call: Callable[[Any], str], value: Any) -> str:
    try:
        return str.__str__(call(value))
    except Exception as error:
        return f"<{_type_name(type(value))}: no text ({type(error).__name__})>"


def _told(serializer: Callable[[object], object], value: Any) -> Any:
    try:
        return serializer(value)
    except Exception:
        return value


def _size(value: Any) -> int:
    size = getattr(value, "size", None)
    return size if isinstance(size, int) else len(value)


def _model_dump(value: Any) -> Any:
    """What a pydantic model says it is; models of other libraries may not know the arguments."""
    quiet: tuple[dict[str, Any], ...] = ({"mode": "json", "warnings": False}, {"warnings": False})
    for arguments in quiet:
        try:
            return value.model_dump(**arguments)
        except Exception:
            continue
    return value.model_dump()


def _fields(value: Any, kind: type) -> list[tuple[str, Any]] | None:
    """Names and values of the fields of a dataclass, an attrs class or a msgspec Struct; None for other objects."""
    if dataclasses.is_dataclass(kind):
        names = [one.name for one in dataclasses.fields(kind)]
    elif hasattr(kind, "__attrs_attrs__"):
        names = [one.name for one in kind.__attrs_attrs__]
    elif hasattr(kind, "__struct_fields__"):
        names = list(kind.__struct_fields__)
    else:
        return None
    missing = object()
    found = [(name, _attribute(value, name, missing)) for name in names]
    return [(name, item) for name, item in found if item is not missing]


def _attribute(value: Any, name: str, missing: object) -> Any:
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return missing


def _timedelta_text(span: dt.timedelta) -> str:
    micros = (span.days * 86400 + span.seconds) * 1_000_000 + span.microseconds
    seconds, rest = divmod(abs(micros), 1_000_000)
    return f"{'-' if micros < 0 else ''}PT{seconds}.{rest:06d}S"


def _timedelta_back(text: str) -> dt.timedelta:
    found = _TIMEDELTA.fullmatch(text)
    if found is None:
        raise ValueError
    span = dt.timedelta(seconds=int(found[2]), microseconds=int(found[3]))
    return -span if found[1] else span


def _surrogates_back(text: str) -> str:
    return _ESCAPE.sub(lambda found: "\\" if found[1] == "\\" else chr(int(found[1][1:], 16)), text)


_FORMS: dict[type, Callable[[Converter, Any], Json]] = {
    str: lambda to, value: to._text(str.__str__(value)),
    int: lambda to, value: to._int(int.__int__(value)),
    float: lambda to, value: to._float(float.__float__(value)),
    list: lambda to, value: to._array(list.__iter__(value)),
    dict: Converter._dict,
    tuple: lambda to, value: to._tagged("tuple", to._array(to._named(value))),
    set: lambda to, value: to._tagged("set", to._set(set.__iter__(value))),
    frozenset: lambda to, value: to._tagged("frozenset", to._set(frozenset.__iter__(value))),
    bytes: Converter._bytes,
    memoryview: Converter._bytes,
    bytearray: lambda to, value: to._bytes(value, "bytearray"),
    dt.datetime: lambda to, value: to._tagged("datetime", dt.datetime.isoformat(value)),
    dt.date: lambda to, value: to._tagged("date", dt.date.isoformat(value)),
    dt.time: lambda to, value: to._tagged("time", dt.time.isoformat(value)),
    dt.timedelta: lambda to, value: to._tagged("timedelta", _timedelta_text(value)),
    Decimal: lambda to, value: to._tagged("Decimal", Decimal.__str__(value)),
    UUID: lambda to, value: to._tagged("UUID", UUID.__str__(value)),
    complex: lambda to, value: to._tagged("complex", complex.__repr__(value)),
    PurePath: Converter._path_text,
    BaseException: Converter._exception,
}
_LEAVES = frozenset(_FORMS) - {list, dict, tuple, set, frozenset, BaseException}

_OF_LISTS: dict[str, Callable[[Any], object]] = {"dict": dict, "tuple": tuple, "set": set, "frozenset": frozenset}
_OF_TEXTS: dict[str, Callable[[str], object]] = {
    "NaN": lambda form: float({"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}[form]),
    "int": lambda form: int(form, 16),
    "surrogates": _surrogates_back,
    "bytes": lambda form: base64.b64decode(form, validate=True),
    "bytearray": lambda form: bytearray(base64.b64decode(form, validate=True)),
    "datetime": dt.datetime.fromisoformat,
    "date": dt.date.fromisoformat,
    "time": dt.time.fromisoformat,
    "timedelta": _timedelta_back,
    "Decimal": Decimal,
    "UUID": UUID,
    "complex": complex,
    "Path": Path,
    "PurePosixPath": PurePosixPath,
    "PureWindowsPath": PureWindowsPath,
}
_BACK = {"int_keys", *_OF_LISTS, *_OF_TEXTS}
