# SPDX-License-Identifier: Apache-2.0
"""The format `.flight` v0.1.0: the hash-chained record of a run. Envelope, seal, values, manifest and verification.

The normative text is the seed `004`; its sections are quoted as §n. The points it leaves open are on the docs page
"The .flight format".

Decision: a line is the canonical envelope with `hash` spliced in as its first member, so the bytes that were hashed are
a slice of the line, and sealing writes a body once for both digests. A checker proves a line by composing it again from
its fields: where that gives the same bytes, both digests are taken of slices; every other spelling of the same values
is read strictly and made canonical. A break is reported where it is and the walk goes on from what the line says, so
one edit gives one finding and not one for each line after it. Rejected: hashing what is stored without the proof (a
line could hash right and be no canonical form of its values), and models for bodies (hashing is structural; unknown
types and fields are verified and kept like any other).
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256 as _hash
from typing import Any, NamedTuple

import msgspec
import orjson
from msgspec import Struct

from sftrace_otel.errors import CanonicalizationError, FormatError
from sftrace_otel.formats import Json, canonical

SUFFIX = ".flight"
MANIFEST_FILE = "manifest.json"
EVENTS_FILE = "events.jsonl"
BLOBS_FOLDER = "blobs"
SPEC_VERSION = "0.1.0"
HASH_ALG = "sha256"
CANONICALIZATION = "RFC8785+NFC"
GENESIS = "sha256:" + "0" * 64
"""`prev_hash` of the event with seq 0 (§3)."""
VOLATILE = frozenset({"latency_ns", "duration_ns", "truncated", "mono_origin_ns"})
"""Members at the top of a body that `body_hash` leaves out (§3)."""
EVENT_TYPES = (
    "run.start",
    "run.end",
    "http.request",
    "http.response",
    "tool.call",
    "tool.result",
    "clock.read",
    "rng.draw",
    "error",
)
"""The event types of v0.1.0 (§4); others begin with `x-<vendor>.`."""
CAPABILITIES = ("blobs", "redaction-refs", "streams", "nondeterminism", "x-sftrace")
"""What our writer may list in the manifest as used."""

TEXT_MEDIA = "text/plain;charset=utf-8"
"""Media type of a blob that stands for a string."""
BYTES_MEDIA = "application/octet-stream"
"""Media type of a blob that stands for bytes of the program."""
VALUE_MEDIA = "application/vnd.sftrace.value+json"
"""Media type of a blob that stands for a JSON value which was too big, or too deep, for its line."""
MAX_REPR = 4096
"""Characters of `repr` that a surrogate keeps."""
MAX_BODY_DEPTH = canonical.MAX_DEPTH - 8
"""Containers inside containers that `encode_value` leaves in a line; the envelope and our own objects need the rest."""

RESERVED = frozenset({"$blob", "$redacted", "$unrepr", "$literal"})
"""Member names of the objects that stand for something else."""
_FIELDS: tuple[tuple[str, type], ...] = (
    ("v", int),
    ("seq", int),
    ("run_id", str),
    ("id", str),
    ("type", str),
    ("t_wall", str),
    ("t_mono_ns", int),
    ("parents", list),
    ("body", dict),
    ("body_hash", str),
    ("prev_hash", str),
    ("hash", str),
)
_NAMES = frozenset(name for name, _ in _FIELDS)
_SAFE_INT = 2**53 - 1
_MAX_SEEN = 65536  # blobs whose digest a checker remembers
_HEAD = b'{"hash":"'
_BODY = b'{"body":'
_UNREADABLE = frozenset(
    {"missing_file", "invalid_json", "torn_line", "unsupported_schema", "invalid_manifest", "invalid_event"}
)

_HEX = frozenset("0123456789abcdef")
_KINDS = {int: "a whole number", str: "a string", list: "a list", dict: "an object"}

BlobSink = Callable[[bytes, str], dict[str, Json]]
"""Stores bytes with a media type and gives the object that stands for them."""


class FlightEvent(Struct, frozen=True, kw_only=True):
    """One event (§2). `body` is as stored; `decode_value` gives the program's values back.

    Attributes:
        v: Version of the event's schema, from 1.
        seq: Place in the total order, from 0 without gaps.
        run_id, id: The run; `run_id/seq`.
        type: Event type, dotted.
        t_wall: RFC 3339 in UTC, for people only.
        t_mono_ns: ns since run.start.
        parents: seq of events that this one hangs on, each smaller than its own.
        body: What the type says, already redacted.
        body_hash, prev_hash, hash: `sha256:` and 64 hex digits (§3).
        extra: Fields of the envelope that v0.1.0 does not know; they are hashed, and kept on re-emission.
    """

    v: int = 1
    seq: int
    run_id: str
    id: str
    type: str
    t_wall: str
    t_mono_ns: int
    parents: tuple[int, ...]
    body: dict[str, Json]
    body_hash: str
    prev_hash: str
    hash: str
    extra: dict[str, Json] = msgspec.field(default_factory=dict)

    @property
    def envelope(self) -> dict[str, Json]:
        """The event as the object of its line."""
        known: dict[str, Json] = {name: getattr(self, name) for name, _ in _FIELDS}
        known["parents"] = list(self.parents)
        return {**known, **self.extra}


class FlightManifest(Struct, frozen=True, kw_only=True):
    """`manifest.json` (§5). `extra` keeps what v0.1.0 does not know.

    Attributes:
        run_id: The run of every event.
        head_hash: `hash` of the last event; the genesis value where there is none.
        event_count: Number of events.
        capabilities: Optional features that were used; a list of names as we write it.
    """

    spec_version: str = SPEC_VERSION
    hash_alg: str = HASH_ALG
    canonicalization: str = CANONICALIZATION
    run_id: str
    head_hash: str
    event_count: int
    capabilities: Json = None
    extra: dict[str, Json] = msgspec.field(default_factory=dict)


class Finding(Struct, frozen=True, omit_defaults=True):
    """One fault, and where it is.

    Attributes:
        code: Reason, for programs.
        message: One line for people.
        seq: Event, by its place in the file; None where the fault is not of one event.
        field: Field of the envelope or of the manifest.
        expected, found: What it should be and what it is: digests, numbers or text.
        location: `events.jsonl:<line>`, `manifest.json`, or the name of a blob.
    """

    code: str
    message: str
    seq: int | None = None
    field: str | None = None
    expected: Json = None
    found: Json = None
    location: str = EVENTS_FILE


class Sealed(NamedTuple):
    """A sealed event: its line with the newline, and its digests."""

    line: bytes
    hash: str
    body_hash: str


# Sealing


def seal(
    *,
    seq: int,
    run_id: str,
    type: str,  # noqa: A002 (the field's name)
    body: Mapping[str, Any],
    prev_hash: str,
    t_wall: str,
    t_mono_ns: int,
    parents: Sequence[int] = (),
    v: int = 1,
    extra: Mapping[str, Json] | None = None,
) -> Sealed:
    """Make the line of an event from its fields; `body` holds stored values (`encode_value`).

    Args:
        extra: Fields of the envelope that v0.1.0 does not know, to keep on re-emission.

    Raises:
        CanonicalizationError: The body, or a field, has no canonical form.
    """
    stored = canonical.rfc8785_nfc(dict(body))
    content = content_bytes(body, stored)
    if not extra:
        return seal_canonical(stored, content, seq, run_id, type, prev_hash, t_wall, t_mono_ns, parents, v)
    body_hash = _body_hash(content, type, v)
    fields = (v, seq, run_id, f"{run_id}/{seq}", type, t_wall, t_mono_ns, list(parents), dict(body), body_hash)
    envelope: dict[str, Any] = dict(zip((name for name, _ in _FIELDS), (*fields, prev_hash), strict=False))
    envelope |= extra
    return _spliced(canonical.rfc8785_nfc(envelope), body_hash)


def seal_canonical(
    stored: bytes,
    content: bytes,
    seq: int,
    run_id: str,
    type: str,  # noqa: A002
    prev_hash: str,
    t_wall: str,
    t_mono_ns: int,
    parents: Sequence[int] = (),
    v: int = 1,
) -> Sealed:
    """As `seal`, of canonical bytes: the body's, and the body's without its volatile members.

    The members are in order, since no key of v0.1.0 is outside ASCII.
    """
    whole = _hash(_BODY + stored)  # both digests begin with the body: it is hashed once
    part = whole.copy() if content is stored else _hash(_BODY + content)
    content_end, end = _ends(type, v)
    part.update(content_end)
    content_hash = "sha256:" + part.hexdigest()
    run = _text(run_id)
    wall = f'"{t_wall}"' if _is_plain(t_wall) else _text(t_wall)
    prev = f'"{prev_hash}"' if _is_plain(prev_hash) else _text(prev_hash)
    mono = f"{t_mono_ns:d}" if -_SAFE_INT <= t_mono_ns <= _SAFE_INT else _digits_of(t_mono_ns)
    if not 0 <= seq <= _SAFE_INT:
        seq = _digits_of(seq)  # type: ignore[assignment]
    # `:d` refuses what is no whole number before anything of it is in the file.
    numbers = "" if not parents else f"{parents[0]:d}" if len(parents) == 1 else ",".join(map(_digits_of, parents))
    rest = (
        f',"body_hash":"{content_hash}","id":{run[:-1]}/{seq}","parents":[{numbers}],"prev_hash":{prev},"run_id":{run},'
        f'"seq":{seq},"t_mono_ns":{mono},"t_wall":{wall},{end}'
    ).encode()
    whole.update(rest)
    digest = "sha256:" + whole.hexdigest()
    return Sealed(b"".join((_HEAD, digest.encode(), b'","body":', stored, rest, b"\n")), digest, content_hash)


def reseal(event: FlightEvent, prev_hash: str) -> Sealed:
    """The line of an event that was read; with its own `prev_hash`, each digest is as it was."""
    return seal(
        seq=event.seq,
        run_id=event.run_id,
        type=event.type,
        body=event.body,
        prev_hash=prev_hash,
        t_wall=event.t_wall,
        t_mono_ns=event.t_mono_ns,
        parents=event.parents,
        v=event.v,
        extra=event.extra,
    )


def body_hash(body: Mapping[str, Any], type: str, v: int = 1) -> str:  # noqa: A002
    """The digest by which contents are equal (§3): of `type`, `v` and `body` without its volatile members.

    Raises:
        CanonicalizationError: The body has no canonical form.
    """
    return _body_hash(canonical.rfc8785_nfc(_content(body)), type, v)


def content_bytes(body: Mapping[str, Any], stored: bytes) -> bytes:
    """The canonical bytes of a body without its volatile members; `stored` are those with them."""
    return stored if VOLATILE.isdisjoint(body) else canonical.rfc8785_nfc(_content(body))


def _content(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: item for name, item in body.items() if name not in VOLATILE}


def _body_hash(content: bytes, kind: str, v: int) -> str:
    return _sha256(_BODY + content + _ends(kind, v)[0])


@lru_cache(maxsize=256)
def _ends(kind: str, v: int) -> tuple[bytes, str]:
    """How what `body_hash` is over ends behind the body, and how the envelope ends: with the same members."""
    end = f'"type":{_text(kind)},"v":{_digits_of(v)}}}'
    return b"," + end.encode(), end


def _spliced(envelope: bytes, body_hash: str) -> Sealed:
    digest = _sha256(envelope)
    return Sealed(b'{"hash":"%b",%b\n' % (digest.encode(), envelope[1:]), digest, body_hash)


def _sha256(data: bytes) -> str:
    return "sha256:" + _hash(data).hexdigest()


def _digits_of(value: int) -> str:
    return f"{value:d}" if -_SAFE_INT <= value <= _SAFE_INT else canonical.rfc8785_nfc(value).decode()


@lru_cache(maxsize=256)
def _text(text: str) -> str:
    return canonical.rfc8785_nfc(text).decode()


def _is_plain(text: str) -> bool:
    """Whether text is its own JSON between quotes."""
    return text.isascii() and text.isprintable() and '"' not in text and "\\" not in text


# Values


class Stored(dict[str, Json]):
    """An object that is in its stored form already: `encode_value` leaves it and what is in it alone."""


def blob_ref(digest: str, media_type: str, size: int) -> Stored:
    """The object that stands for a blob (§4). `digest` has its `sha256:`."""
    return Stored({"$blob": digest, "media_type": media_type, "size": size})


def redacted(reason: str, ref: str | None = None) -> Stored:
    """The object that stands for a redacted value (§7); `ref` is `hmac-sha256:` and 16 hex digits."""
    return Stored({"$redacted": reason} if ref is None else {"$redacted": reason, "ref": ref})


def unrepr(lang_type: str, text: str) -> Stored:
    """The lossy surrogate of a value that JSON cannot hold (§4)."""
    return Stored({"$unrepr": True, "lang_type": lang_type, "repr": text})


def stored_bytes(body: dict[str, Any]) -> bytes | None:
    """The canonical bytes of a body that is in its stored form as it is; None where `encode_value` must look."""
    try:
        data = _written(body)
    except TypeError:
        return None
    if b'"$' in data or not (data.isascii() or canonical.is_nfc(data)):
        return None
    return data if canonical.is_rfc8785(body, data) else None


def _written(body: dict[str, Any]) -> bytes:
    """What orjson writes of a body. Raises TypeError where the line around it would be deeper than readers go."""
    return orjson.dumps([body], option=canonical.RFC8785_OPTIONS)[1:-1]


def encode_value(value: Any, blob: BlobSink, *, scrub: Callable[[str], str] = str) -> Json:
    """The stored form of a value of the program.

    JSON stays as it is but for: an int outside ±(2**53 - 1), NaN and infinities (a `$unrepr` with their digits); text
    that NFC would change (a blob); an object with a member named like ours, or with a key that NFC would change
    (`$literal`, its pairs); what is deeper than `MAX_BODY_DEPTH` (a blob). Bytes become a blob, tuples lists, and any
    other object a `$unrepr`. `decode_value` is the inverse but for tuples and other objects.

    Args:
        blob: Stores bytes, redacted already, and gives the object for them.
        scrub: Redacts the `repr` of an object, before it is cut.
    """
    try:
        return _encode(value, _Encoding(blob, scrub), 0)
    except RecursionError:
        return _surrogate(value, scrub)


class _Encoding(Struct, frozen=True):
    blob: BlobSink
    scrub: Callable[[str], str]
    path: set[int] = msgspec.field(default_factory=set)


def _encode(value: Any, way: _Encoding, depth: int) -> Json:
    if isinstance(value, Stored):
        return dict(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _encode_text(value, way)
    if isinstance(value, int):
        return int(value) if -_SAFE_INT <= value <= _SAFE_INT else unrepr("int", _digits(int(value)))
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else unrepr("float", repr(float(value)))
    if isinstance(value, bytes | bytearray | memoryview):
        return way.blob(bytes(value), BYTES_MEDIA)
    if isinstance(value, dict | list | tuple) and id(value) not in way.path:
        if depth >= MAX_BODY_DEPTH:
            return _aside(value, way)
        way.path.add(id(value))
        try:
            if not isinstance(value, dict):
                return [_encode(item, way, depth + 1) for item in value]
            if all(isinstance(key, str) for key in value):
                return _encode_object(value, way, depth + 1)
        finally:
            way.path.discard(id(value))
    return _surrogate(value, way.scrub)


def _encode_object(value: dict[str, Any], way: _Encoding, depth: int) -> Json:
    members = {key: _encode(item, way, depth) for key, item in value.items()}
    if RESERVED.isdisjoint(members) and all(key.isascii() or _is_stable(key) for key in members):
        return members
    return {"$literal": [[_encode_text(key, way), item] for key, item in members.items()]}


def _encode_text(text: str, way: _Encoding) -> Json:
    if text.isascii() or _is_stable(text):
        return str(text)
    try:
        return way.blob(text.encode(), TEXT_MEDIA)
    except UnicodeEncodeError:
        return unrepr("str", way.scrub(ascii(text))[:MAX_REPR])


def _is_stable(text: str) -> bool:
    """Whether text has UTF-8 and NFC leaves it as it is."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return unicodedata.is_normalized("NFC", text)


def _digits(number: int) -> str:
    return str(number) if number.bit_length() < 14280 else hex(number)


def _aside(value: Any, way: _Encoding) -> Json:
    """What is too deep for its line, in a blob of its own; what is too deep for that too is lost, and says so."""
    try:
        stored = _encode(value, _Encoding(_refuse, way.scrub), 0)
        return way.blob(canonical.rfc8785_nfc(stored), VALUE_MEDIA)
    except (CanonicalizationError, RecursionError):
        return _surrogate(value, way.scrub)


def _refuse(data: bytes, media_type: str) -> dict[str, Json]:
    raise CanonicalizationError("a blob inside a blob")


def _surrogate(value: object, scrub: Callable[[str], str]) -> Json:
    kind = type(value)
    try:
        text = scrub(repr(value))
    except Exception:  # a `__repr__` of the program, or nesting beyond the stack
        text = object.__repr__(value)
    if len(text) > MAX_REPR:
        text = text[: MAX_REPR - 1] + "…"
    if not _is_stable(text):
        text = ascii(text)[:MAX_REPR]
    name = f"{kind.__module__}.{kind.__qualname__}"
    return unrepr(name.removeprefix("builtins."), text)


def decode_value(value: Json, blob: Callable[[str], bytes]) -> Any:
    """The program's value of a stored one: literals, ints and floats of surrogates, text and bytes of blobs.

    A number beyond ±(2**53 - 1) is a float; a smaller one that was a whole float comes back as an int, which is equal.

    Blobs of other media types are given as bytes; what is redacted, and surrogates of other objects, as stored.

    Args:
        blob: The bytes of `sha256:<hex>`.

    Raises:
        FormatError: A `$literal` or `$unrepr` that is none. What `blob` raises passes through.
    """
    if isinstance(value, list):
        return [decode_value(item, blob) for item in value]
    if isinstance(value, int) and not -_SAFE_INT <= value <= _SAFE_INT:
        return float(value)  # canonical JSON writes a double such as 1e16 without a point
    if not isinstance(value, dict):
        return value
    if "$literal" in value:
        return {decode_value(key, blob): decode_value(item, blob) for key, item in literal_pairs(value)}
    if "$blob" in value:
        return _decode_blob(value, blob)
    if "$unrepr" in value:
        return _decode_number(value)
    if "$redacted" in value:
        return value
    return {key: decode_value(item, blob) for key, item in value.items()}


def _decode_blob(value: dict[str, Json], blob: Callable[[str], bytes]) -> Any:
    data, media = blob(str(value["$blob"])), value.get("media_type")
    if media == TEXT_MEDIA:
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise FormatError(f"the blob {value['$blob']} is not UTF-8", code="invalid_blob") from None
    return decode_value(canonical.loads(data), blob) if media == VALUE_MEDIA else data


def _decode_number(value: dict[str, Json]) -> Any:
    kind, text = value.get("lang_type"), value.get("repr")
    if kind not in ("int", "float") or not isinstance(text, str):
        return value
    try:
        return float(text) if kind == "float" else int(text, 16 if "x" in text else 10)
    except ValueError:
        raise FormatError(f"{canonical.printable(text)} is no {kind}", code="invalid_value") from None


def literal_pairs(value: Mapping[str, Json]) -> list[tuple[Json, Json]]:
    """The pairs of a `$literal`. Raises FormatError where it is none."""
    pairs = value["$literal"]
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise FormatError("$literal is not a list of pairs", code="invalid_value")
    return [(pair[0], pair[1]) for pair in pairs]  # type: ignore[index]


def blob_refs(body: Json) -> Iterator[dict[str, Json]]:
    """Every object of a stored body that stands for a blob. Raises FormatError for a `$literal` that is none."""
    pending: list[Json] = [body]
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending += reversed(item)
        elif isinstance(item, dict):
            if "$literal" in item:
                pending += [part for pair in reversed(literal_pairs(item)) for part in reversed(pair)]
            elif "$blob" in item:
                yield item
            else:
                pending += reversed(item.values())


def blob_name(digest: str) -> str:
    """Where a blob is in the bundle. Raises FormatError for what is no `sha256:<64 hex>`."""
    name = digest.removeprefix("sha256:")
    if len(digest) != len(GENESIS) or len(name) != 64 or not set(name) <= _HEX:
        raise FormatError("names no blob", where=canonical.printable(digest, quote=False), code="invalid_blob")
    return f"{BLOBS_FOLDER}/{name[:2]}/{name[2:4]}/{name}"


# Manifest


def parse_manifest(data: bytes) -> FlightManifest:
    """Read `manifest.json`.

    Raises:
        FormatError: Not JSON, a required field missing or of another type (`invalid_manifest`), or a major version,
            digest or canonicalization that this does not know (`unsupported_schema`).
    """
    document = canonical.loads(data)
    if not isinstance(document, dict):
        raise FormatError("is not an object", code="invalid_manifest")
    fields = dict(document)
    known: dict[str, Any] = {}
    for name in ("spec_version", "hash_alg", "canonicalization", "run_id", "head_hash", "event_count"):
        if name not in fields:
            raise FormatError("is missing", where=name, code="invalid_manifest")
        known[name] = fields.pop(name)
    _require_known(known)
    count = known["event_count"]
    if isinstance(count, float) and count.is_integer():  # JSON knows one kind of number
        known["event_count"] = int(count)
    elif not isinstance(count, int) or isinstance(count, bool):
        raise FormatError("is not a number of events", where="event_count", code="invalid_manifest")
    for name in ("run_id", "head_hash"):
        if not isinstance(known[name], str):
            raise FormatError("is not a string", where=name, code="invalid_manifest")
    return FlightManifest(**known, capabilities=fields.pop("capabilities", None), extra=fields)


def _require_known(fields: dict[str, Any]) -> None:
    version, alg, scheme = fields["spec_version"], fields["hash_alg"], fields["canonicalization"]
    if not isinstance(version, str) or version.partition(".")[0] != "0":
        text = f"version {canonical.printable(version)} is not one that this reads; it reads 0.x"
        raise FormatError(text, where="spec_version", code="unsupported_schema")
    if alg != HASH_ALG:
        text = f"{canonical.printable(alg)} is no digest that this knows; it knows {HASH_ALG}"
        raise FormatError(text, where="hash_alg", code="unsupported_schema")
    if not isinstance(scheme, str) or not scheme.lower().startswith(("rfc8785", "jcs")):
        text = f"{canonical.printable(scheme)} is no canonicalization that this knows; it knows RFC8785"
        raise FormatError(text, where="canonicalization", code="unsupported_schema")


def dump_manifest(manifest: FlightManifest) -> bytes:
    """The bytes of `manifest.json`, indented for people."""
    document: dict[str, Json] = {
        "spec_version": manifest.spec_version,
        "hash_alg": manifest.hash_alg,
        "canonicalization": manifest.canonicalization,
        "run_id": manifest.run_id,
        "head_hash": manifest.head_hash,
        "event_count": manifest.event_count,
    }
    if manifest.capabilities is not None:
        document["capabilities"] = manifest.capabilities
    return orjson.dumps(document | manifest.extra, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


# Reading and checking


def parse_event(line: bytes) -> FlightEvent:
    """Read one line strictly; digests are not looked at.

    Raises:
        FormatError: Malformed JSON, a duplicate key, or a field that is missing or of another type.
    """
    return _event(canonical.loads(line))


def _event(envelope: Json) -> FlightEvent:
    if not isinstance(envelope, dict):
        raise FormatError("is not an object", code="invalid_event")
    for name, kind in _FIELDS:
        if name not in envelope:
            raise FormatError("is missing", where=name, code="invalid_event")
        if not isinstance(envelope[name], kind) or isinstance(envelope[name], bool):
            raise FormatError(f"is not {_KINDS[kind]}", where=name, code="invalid_event")
    if not all(isinstance(seq, int) and not isinstance(seq, bool) for seq in envelope["parents"]):  # type: ignore[union-attr]
        raise FormatError("holds what is no seq", where="parents", code="invalid_event")
    fields: dict[str, Any] = {name: item for name, item in envelope.items() if name in _NAMES}
    fields["parents"] = tuple(fields["parents"])
    return FlightEvent(**fields, extra={name: item for name, item in envelope.items() if name not in _NAMES})


class _Line(Struct, gc=False, forbid_unknown_fields=True):
    """A line without fields that v0.1.0 does not know."""

    v: int
    seq: int
    run_id: str
    id: str
    type: str
    t_wall: str
    t_mono_ns: int
    parents: list[int]
    body: dict[str, Any]
    body_hash: str
    prev_hash: str
    hash: str


def _float(digits: str) -> float:
    """Refuse a number that orjson may write in another way than RFC 8785."""
    number = float(digits)
    if not (1e-5 <= abs(number) < 1e16) or number.is_integer():
        raise ValueError
    return number


_decode_ours = msgspec.json.Decoder(_Line, float_hook=_float).decode
_decode_line = msgspec.json.Decoder(_Line).decode


class ChainChecker:
    """Checks a record one line at a time (§6), in memory that does not grow with it.

    Args:
        run_id: The manifest's run; None takes that of the first event.
        blob: Size and digest (`sha256:<hex>`) of the bytes that are there as the blob of this digest; raises
            FormatError where nothing is, or no file. None: blobs are not looked at.

    Attributes:
        count: Lines so far.
        head: `hash` of the last event; None where the last line could not be read.
        odd: Number of the first line (from 1) whose bytes are not canonical, though its values are right; 0 if none.
        crlf: Whether that line ends in CRLF.
    """

    def __init__(self, run_id: str | None, blob: Callable[[str], tuple[int, str]] | None = None) -> None:
        self.run_id = run_id
        self.count = 0
        self.head: str | None = GENESIS
        self.odd = 0
        self.crlf = False
        self._blob = blob
        self._seen: dict[str, tuple[int, str]] = {}
        self._next = 0

    def line(self, raw: bytes) -> list[Finding]:
        """Check the next line, its newline included; what is wrong with it."""
        if self._holds(raw) or self._holds_respelled(raw):
            self.count += 1
            self._next += 1
            return []
        findings = list(self._slowly(raw))
        self.count += 1
        return findings

    def end(self, manifest: FlightManifest) -> Iterator[Finding]:
        """Check what the manifest commits to, after the last line."""
        if manifest.event_count != self.count:
            if not self.count:
                text = f"{EVENTS_FILE} is empty; the manifest counts {manifest.event_count} events"
            elif self.count < manifest.event_count:
                text = f"the record is truncated: {self.count} events of the {manifest.event_count} in the manifest"
            else:
                text = f"the manifest counts {manifest.event_count} events, {self.count} are there"
            yield _manifest_finding("event_count_mismatch", text, "event_count", manifest.event_count, self.count)
        if self.head is not None and manifest.head_hash != self.head:
            text = "the last event is not the one that the manifest names: events were cut off, added or changed"
            yield _manifest_finding("head_hash_mismatch", text, "head_hash", manifest.head_hash, self.head)

    def copy(self) -> ChainChecker:
        """A checker that stands where this one does; the memory of blobs is shared."""
        other = ChainChecker(self.run_id, self._blob)
        other.count, other.head, other.odd, other.crlf = self.count, self.head, self.odd, self.crlf
        other._seen, other._next = self._seen, self._next
        return other

    def has_seen(self, digest: str) -> bool:
        """Whether an event named the blob `sha256:<hex>`."""
        return digest in self._seen

    @property
    def has_seen_all(self) -> bool:
        """Whether `has_seen` knows every blob that was named."""
        return len(self._seen) < _MAX_SEEN

    def _holds(self, raw: bytes) -> bool:
        """Whether a line is as our writer makes it and everything in it is right; False also where that is unknown.

        Composed again it is the same: so orjson wrote each string, number and key of the body as it stands there, and
        what is left to ask is where orjson and RFC 8785 differ (`canonical`).
        """
        if self.head is None or self.run_id is None or not raw.startswith(_HEAD):
            return False
        try:
            line = _decode_ours(raw)
            stored = _written(line.body)
            if not (stored.isascii() or (canonical.is_nfc(stored) and canonical.is_rfc8785(line.body, stored))):
                return False
            sealed = self._sealed(line, stored)
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
            return False
        return sealed.line == raw and self._accepts(line, stored, sealed)

    def _holds_respelled(self, raw: bytes) -> bool:
        """As `_holds`, of a line that is spelled in another way."""
        if self.head is None or self.run_id is None or not raw.endswith(b"\n"):
            return False
        try:
            line = _decode_line(raw)
            wrapped = canonical.rfc8785_proven([line.body])  # as deep as in its line
            if wrapped is None or not canonical.is_nfc(wrapped):
                return False
            stored = wrapped[1:-1]
            sealed = self._sealed(line, stored)
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
            return False
        if not canonical.keeps_members(raw, sealed.line):
            return False
        right = (line.hash, line.body_hash, line.prev_hash, line.seq, line.run_id, line.id) == (
            sealed.hash, sealed.body_hash, self.head, self._next, self.run_id, f"{self.run_id}/{self._next}"
        )  # fmt: skip
        if not right or not self._accepts(line, stored, sealed):
            return False
        if not self.odd and raw != sealed.line and raw != _in_place(sealed, stored):
            self.odd, self.crlf = self.count + 1, raw.endswith(b"\r\n")
        return True

    def _sealed(self, line: _Line, stored: bytes) -> Sealed:
        """What the line of these fields would be at this place of the chain. Raises as `seal_canonical`."""
        assert self.head is not None
        assert self.run_id is not None
        content = content_bytes(line.body, stored)
        return seal_canonical(
            stored, content, self._next, self.run_id, line.type, self.head, line.t_wall, line.t_mono_ns, line.parents,
            line.v,
        )  # fmt: skip

    def _accepts(self, line: _Line, stored: bytes, sealed: Sealed) -> bool:
        """Whether what digests do not show is right too; then the chain goes on from the line."""
        if line.v < 1 or line.t_mono_ns < 0:
            return False
        if line.parents and not (min(line.parents) >= 0 and max(line.parents) < self._next):
            return False
        if b'"$' in stored and self._blob is not None and next(self._blobs(line.body, self._next), None) is not None:
            return False
        self.head = sealed.hash
        return True

    def _slowly(self, raw: bytes) -> Iterator[Finding]:
        number = self.count
        where = f"{EVENTS_FILE}:{number + 1}"
        prev, self.head = self.head, None
        expected, self._next = self._next, self._next + 1
        if not raw.endswith(b"\n"):
            text = f"line {number + 1}: the last line has no newline: it was cut"
            yield Finding("torn_line", text, number, location=where)
            return
        try:
            event = parse_event(raw)
        except FormatError as error:
            if error.code != "invalid_event":
                yield Finding("invalid_json", f"line {number + 1}: {error}", number, location=where)
            else:
                text = f"line {number + 1}: this is no event: {error}"
                yield Finding("invalid_event", text, number, error.where or None, location=where)
            return
        if self.run_id is None:
            self.run_id = event.run_id
        self.head, self._next = event.hash, max(event.seq, -1) + 1
        found = (
            *self._placed(event, expected),
            *self._linked(event, prev),
            *_digests(event),
            *(self._blobs(event.body, number) if self._blob is not None else ()),
        )
        for finding in found:
            message = f"line {number + 1}: {finding.message}"
            yield msgspec.structs.replace(finding, message=message, seq=number, location=where)
        if not found and not self.odd and not _is_canonical(event, raw):
            self.odd, self.crlf = number + 1, raw.endswith(b"\r\n")

    def _placed(self, event: FlightEvent, expected: int) -> Iterator[Finding]:
        if event.seq != expected:
            text = f"seq is {event.seq} where {expected} comes next; events are missing, or in another order"
            yield Finding("seq_mismatch", text, field="seq", expected=expected, found=event.seq)
        if event.run_id != self.run_id:
            text = "the event is of another run"
            yield Finding("run_id_mismatch", text, field="run_id", expected=self.run_id, found=event.run_id)
        name = f"{event.run_id}/{event.seq}"
        if event.id != name:
            yield Finding("id_mismatch", "id is not run_id/seq", field="id", expected=name, found=event.id)
        if event.v < 1:
            yield Finding("invalid_event", "v is less than 1", field="v", found=event.v)
        if event.t_mono_ns < 0:
            yield Finding("invalid_event", "t_mono_ns is negative", field="t_mono_ns", found=event.t_mono_ns)
        late = [parent for parent in event.parents if not 0 <= parent < event.seq]
        if late:
            text = "parents name events that are not before this one"
            yield Finding("invalid_parent", text, field="parents", found=list(late[:5]))

    def _linked(self, event: FlightEvent, prev: str | None) -> Iterator[Finding]:
        if prev is None or event.prev_hash == prev:
            return
        if not self.count:
            text = "the chain does not start here: prev_hash is not the genesis value, the first events are missing"
        else:
            text = "the chain is broken: prev_hash is not the hash of the event before"
        yield Finding("chain_broken", text, field="prev_hash", expected=prev, found=event.prev_hash)

    def _blobs(self, body: Json, seq: int) -> Iterator[Finding]:
        try:
            for reference in blob_refs(body):
                yield from self._blob_of(reference)
        except FormatError as error:
            yield Finding(error.code, error.reason, seq, "body")

    def _blob_of(self, reference: dict[str, Json]) -> Iterator[Finding]:
        digest = reference["$blob"]
        try:
            if not isinstance(digest, str):
                raise FormatError("names no blob", code="invalid_blob")
            blob_name(digest)
            size, found = self._look_at(digest)
        except FormatError as error:
            code = "invalid_blob" if error.code == "invalid_blob" else "blob_missing"
            yield Finding(code, f"{canonical.printable(digest)}: {error.reason}", field="body", expected=digest)
            return
        if found != digest:
            text = f"the bytes of the blob {digest} do not match its name"
            yield Finding("blob_mismatch", text, field="body", expected=digest, found=found)
            return
        if reference.get("size") != size or isinstance(reference.get("size"), bool):
            text = f"the blob {digest} has {size} bytes, not the size that its reference says"
            yield Finding("blob_mismatch", text, field="body", expected=reference.get("size"), found=size)

    def _look_at(self, digest: str) -> tuple[int, str]:
        """Size and digest of the blob of this name; of the first ones from memory."""
        known = self._seen.get(digest)
        if known is None:
            assert self._blob is not None
            known = self._blob(digest)
            if len(self._seen) < _MAX_SEEN:
                self._seen[digest] = known
        return known


def _digests(event: FlightEvent) -> Iterator[Finding]:
    try:
        content, whole = body_hash(event.body, event.type, event.v), _envelope_hash(event)
    except CanonicalizationError as error:
        yield Finding("invalid_json", f"has no canonical form: {error}")
        return
    if content != event.body_hash:
        text = "the body is not the one that body_hash was taken of"
        yield Finding("body_hash_mismatch", text, field="body_hash", expected=content, found=event.body_hash)
    if whole != event.hash:
        text = "the event is not the one that hash was taken of"
        yield Finding("hash_mismatch", text, field="hash", expected=whole, found=event.hash)


def _envelope_hash(event: FlightEvent) -> str:
    envelope = event.envelope
    del envelope["hash"]
    return _sha256(canonical.rfc8785_nfc(envelope))


def _is_canonical(event: FlightEvent, raw: bytes) -> bool:
    """Whether a line is spelled canonically, with `hash` in its place or as the first member."""
    envelope = event.envelope
    data = canonical.rfc8785_nfc(envelope)
    del envelope["hash"]
    return raw[:-1] in (data, _HEAD + event.hash.encode() + b'",' + canonical.rfc8785_nfc(envelope)[1:])


def _in_place(sealed: Sealed, stored: bytes) -> bytes:
    """The line with `hash` where it sorts: between `body_hash` and `id`."""
    start = len(_HEAD) + len(GENESIS) + len(b'",')
    end = start + len(b'"body":') + len(stored) + len(b',"body_hash":""') + len(GENESIS)
    return b'{%b,"hash":"%b"%b' % (sealed.line[start:end], sealed.hash.encode(), sealed.line[end:])


def _manifest_finding(code: str, text: str, field: str, expected: Json, found: Json) -> Finding:
    return Finding(code, text, field=field, expected=expected, found=found, location=MANIFEST_FILE)


def manifest_findings(error: FormatError) -> Finding:
    """The finding that an error of `parse_manifest` is."""
    return Finding(error.code, str(error), field=error.where or None, location=MANIFEST_FILE)


def exit_code(findings: Iterable[Finding]) -> int:
    """0 valid, 1 invalid, 2 unreadable: what the verbs exit with."""
    codes = {finding.code for finding in findings}
    return 2 if codes & _UNREADABLE else 1 if codes else 0
