# SPDX-License-Identifier: Apache-2.0
"""`.sftrace` v0.1: the manifest, the eight events, redaction metadata, the integrity record, and their validation.

Decision: models are msgspec structs in the field order that stepfork 0.2.1 writes, so that writing a model again gives
the bytes that were read. Reading uses this: a line is decoded by the type it names and written again; where the bytes
are equal nothing was lost, repeated or unknown, and the event is done. Anything else (unknown keys, other key order,
other spelling, broken input) takes the slow path, which reads strictly, keeps unknown keys, and keeps the source so
that an unchanged model is written back as it was. Payloads stay bytes until asked for; each look decodes anew, so an
event cannot be changed through what it shows.
Annotations are not postponed here: evaluating them from text is half of what importing this module would cost.
Rejected: pydantic (34 times bare Python at start, 10 times slower to load); tagged unions (the tag would come first in
the line); refusing unknown keys while decoding (it cannot keep them).

Source of all rules: the format page `sftrace-v0.1`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeAlias, TypeVar, cast

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from msgspec.structs import replace as _replace

from sftrace_otel.errors import CanonicalizationError, FormatError, PayloadError, TraceStorageError
from sftrace_otel.formats import Json, canonical

FORMAT = "stepfork"
SCHEMA_VERSION = "0.1"
MANIFEST_FILE = "manifest.json"
EVENTS_FILE = "events.jsonl"
REDACTIONS_FILE = "redactions.json"
INTEGRITY_FILE = "integrity.json"
SIGNATURE_FILE = "signature.dsse.json"
"""A signature over the integrity record (`formats.signature`); no record lists it. The same name in `.flight`."""
REQUIRED_FILES = (MANIFEST_FILE, EVENTS_FILE, REDACTIONS_FILE)
"""The files without which a folder is no bundle; `integrity.json` is absent from the oldest ones."""

MANIFEST_ENTRY = "__manifest__"
"""The `event_id` of a redaction in the manifest."""
REPLACEMENT = "[REDACTED]"
RFC8785 = "rfc8785"
"""Name of the other hash profile that is accepted on reading."""
UNSET_TIME = datetime(1970, 1, 1, tzinfo=UTC)
"""Timestamp of an event that was built by hand and not yet added to a trace."""


class EventType(StrEnum):
    """The eight events."""

    RUN_START = "run_start"
    LLM_REQUEST = "llm_request"
    LLM_RESPONSE = "llm_response"
    TOOL_CALL = "tool_call"
    TOOL_RESULT = "tool_result"
    STATE_CHANGE = "state_change"
    ERROR = "error"
    RUN_END = "run_end"


class RunStatus(StrEnum):
    """How a run stands."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"


class EventStatus(StrEnum):
    """How an event ended."""

    OK = "ok"
    ERROR = "error"
    SKIPPED = "skipped"


class ReplayPolicy(StrEnum):
    """What replay does with a call: serve it, let it run, ask, stop, or run it again and compare."""

    FROZEN = "frozen"
    LIVE = "live"
    MANUAL = "manual"
    FORBIDDEN = "forbidden"
    DERIVED = "derived"


Text: TypeAlias = Annotated[str, Meta(min_length=1)]
Count: TypeAlias = Annotated[int, Meta(ge=0)]
Status: TypeAlias = Literal["running", "completed", "failed"]
_ABSENT: Any = UNSET

if TYPE_CHECKING:
    Payload: TypeAlias = Json
    OptionalPayload: TypeAlias = Json
else:
    Payload = Raw
    OptionalPayload = Raw | UnsetType


class Kept(NamedTuple):
    """What a model read from other bytes than it would write remembers: these bytes, and the keys it does not know."""

    source: bytes
    unknown: Mapping[str, Json]


class Model(Struct, frozen=True, kw_only=True, gc=False):
    """Base of what the files hold. Frozen; `replace` gives a changed copy; unknown keys survive both."""

    kept: Any = msgspec.field(default=UNSET, name="\u2063kept")

    def replace(self, **changes: Any) -> Self:
        """A copy with `changes` to its fields."""
        return _replace(self, **changes)


class _PayloadField:
    """Shows the bytes of a payload slot as a fresh value; the slot itself keeps the bytes."""

    def __init__(self, slot: Any) -> None:
        self.slot = slot

    def __get__(self, event: "EventBase | None", owner: type) -> Self | Json:
        if event is None:
            return self
        raw = self.slot.__get__(event)
        return None if raw is UNSET else canonical.loads(raw)


def _with_payloads(cls: "type[_E]") -> "type[_E]":
    """Give the payload slots of an event class their lazy view. Decoding and encoding use the slots, not the view."""
    for name in cls.__payloads__:
        setattr(cls, name, _PayloadField(cls.__dict__[name]))
    return cls


class EventBase(Model, frozen=True, kw_only=True, gc=False):
    """The fields that all events share, in the order they are written.

    An event built by hand may leave out `id`, `run_id`, `step` and `timestamp`: `Trace.add` sets them. A payload is
    given as a JSON value and kept as canonical bytes; one that is not JSON raises CanonicalizationError.
    """

    __payloads__: ClassVar[tuple[str, ...]] = ()
    """Names of the payload fields."""

    id: Text = ""
    run_id: Text = ""
    parent_id: Text | None = None
    step: Count = 0
    type: str
    timestamp: Annotated[datetime, Meta(tz=True)] = UNSET_TIME
    duration_ms: Count | None = None
    status: Literal["ok", "error", "skipped"] = "ok"
    replay_policy: Literal["frozen", "live", "manual", "forbidden", "derived"] = "frozen"
    input_hash: str | None = None
    output_hash: str | None = None
    redactions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.__payloads__:
            slot = getattr(type(self), name).slot
            value = slot.__get__(self)
            if type(value) is not Raw and value is not UNSET:
                slot.__set__(self, Raw(canonical.dumps(value)))

    def __repr__(self) -> str:
        """Names the event without its payload, which may not have been redacted yet."""
        own = "".join(
            f", {key}={getattr(self, key)!r}" for key in ("name", "model", "error_type") if hasattr(self, key)
        )
        return f"{type(self).__name__}(id={self.id!r}, step={self.step}{own})"


_E = TypeVar("_E", bound=EventBase)


@_with_payloads
class RunStart(EventBase, frozen=True, kw_only=True, gc=False):
    """The run began, with this input."""

    __payloads__ = ("input",)

    type: Literal["run_start"] = "run_start"
    input: OptionalPayload = _ABSENT


@_with_payloads
class LLMRequest(EventBase, frozen=True, kw_only=True, gc=False):
    """A request to a model; `input` is `{"method", "request"}`."""

    __payloads__ = ("input",)

    type: Literal["llm_request"] = "llm_request"
    provider: Text | None = None
    model: Text
    input: Payload


@_with_payloads
class LLMResponse(EventBase, frozen=True, kw_only=True, gc=False):
    """The model's answer; its parent is the request."""

    __payloads__ = ("output",)

    type: Literal["llm_response"] = "llm_response"
    model: Text | None = None
    output: Payload
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    total_tokens: Count | None = None
    cost_usd: Annotated[float, Meta(ge=0)] | None = None


@_with_payloads
class ToolCall(EventBase, frozen=True, kw_only=True, gc=False):
    """A call of a tool."""

    __payloads__ = ("input",)

    type: Literal["tool_call"] = "tool_call"
    name: Text
    input: Payload


@_with_payloads
class ToolResult(EventBase, frozen=True, kw_only=True, gc=False):
    """What a tool returned; a failed one has status error and output `{"error_type", "message"}`."""

    __payloads__ = ("output",)

    type: Literal["tool_result"] = "tool_result"
    name: Text
    output: Payload


@_with_payloads
class StateChange(EventBase, frozen=True, kw_only=True, gc=False):
    """A piece of the agent's state, before and after."""

    __payloads__ = ("before", "after")

    type: Literal["state_change"] = "state_change"
    key: Text | None = None
    before: OptionalPayload = _ABSENT
    after: OptionalPayload = _ABSENT


@_with_payloads
class ErrorEvent(EventBase, frozen=True, kw_only=True, gc=False):
    """An exception; its parent is what failed."""

    __payloads__ = ("details",)

    type: Literal["error"] = "error"
    status: Literal["ok", "error", "skipped"] = "error"
    error_type: Text
    message: Text
    details: OptionalPayload = _ABSENT


@_with_payloads
class RunEnd(EventBase, frozen=True, kw_only=True, gc=False):
    """The run ended, with this output."""

    __payloads__ = ("output",)

    type: Literal["run_end"] = "run_end"
    run_status: Status
    output: OptionalPayload = _ABSENT


Event: TypeAlias = RunStart | LLMRequest | LLMResponse | ToolCall | ToolResult | StateChange | ErrorEvent | RunEnd

EVENT_CLASSES: Mapping[str, type[EventBase]] = {
    "run_start": RunStart,
    "llm_request": LLMRequest,
    "llm_response": LLMResponse,
    "tool_call": ToolCall,
    "tool_result": ToolResult,
    "state_change": StateChange,
    "error": ErrorEvent,
    "run_end": RunEnd,
}


class Failure(Model, frozen=True, kw_only=True, gc=False):
    """Why a run failed: class name, text, and the step of its error event."""

    type: Text
    message: Text
    step: Count


class Environment(Model, frozen=True, kw_only=True, gc=False):
    """Where the run was recorded."""

    python: str | None = None
    os: str | None = None
    stepfork_version: str | None = None


class Totals(Model, frozen=True, kw_only=True, gc=False):
    """Counts of the run; `cost_usd` in US dollars and `duration_ms` in milliseconds where known."""

    events: Count = 0
    llm_calls: Count = 0
    tool_calls: Count = 0
    cost_usd: Annotated[float, Meta(ge=0)] | None = None
    duration_ms: Count | None = None


class Manifest(Model, frozen=True, kw_only=True, gc=False):
    """`manifest.json`. `created_at` is RFC 3339 text with a UTC offset, kept as it is written."""

    format: Literal["stepfork"] = "stepfork"
    schema_version: Literal["0.1"] = "0.1"
    run_id: Text
    agent_name: Text
    created_at: Text
    status: Status
    failure: Failure | None = None
    environment: Environment = Environment()
    totals: Totals = Totals()


class RedactionEntry(Model, frozen=True, kw_only=True, gc=False):
    """One redaction: the event (or `__manifest__`), the RFC 6901 pointer into it, and why. Never what was there."""

    event_id: Text
    path: Text
    reason: Text
    replacement: Literal["[REDACTED]"] = "[REDACTED]"


class Redactions(Model, frozen=True, kw_only=True, gc=False):
    """`redactions.json`."""

    schema_version: Literal["0.1"] = "0.1"
    entries: tuple[RedactionEntry, ...] = ()


class Integrity(Model, frozen=True, kw_only=True, gc=False):
    """`integrity.json`: SHA-256 of the exact bytes of the files it names. A checksum, not a signature."""

    schema_version: Literal["0.1"] = "0.1"
    algorithm: str = "sha256"
    files: dict[str, str] = {}


class TraceData(Struct, frozen=True, kw_only=True):
    """A trace in memory: what the three required files of a bundle say."""

    manifest: Manifest
    events: tuple[EventBase, ...]
    redactions: tuple[RedactionEntry, ...] = ()


_encode = msgspec.json.Encoder().encode
_DECODERS = {kind.encode(): msgspec.json.Decoder(cls).decode for kind, cls in EVENT_CLASSES.items()}
_REQUIRED_KEYS = ("id", "run_id", "step", "type", "timestamp")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_M = TypeVar("_M", bound=Model)


# Reading and writing


def parse_event(line: bytes) -> Event:
    """The event of one line of `events.jsonl` (without its newline).

    Raises:
        FormatError: Not strict JSON (code `invalid_json`).
        PayloadError: Not an event (code `invalid_event`); the text names the key.
    """
    start = line.find(b'"type":"') + 8
    decode = _DECODERS.get(line[start : line.find(b'"', start)])
    if decode is not None:
        try:
            event = decode(line)
            if _encode(event) == line and event.kept is UNSET and (line.isascii() or line.decode()):
                return cast(Event, event)
        except (msgspec.MsgspecError, RecursionError, ValueError):
            pass
    return _parse_event_slowly(line)


def _parse_event_slowly(line: bytes) -> Event:
    if not line.strip():
        raise FormatError("blank line; a file of events has one event on each line", code="invalid_json")
    value = canonical.loads(line)
    if not isinstance(value, dict):
        raise PayloadError("an event is a JSON object")
    kind = value.get("type")
    cls = EVENT_CLASSES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise PayloadError(f"unknown event type {canonical.printable(kind)}")
    for key in _REQUIRED_KEYS:
        if key not in value:
            raise PayloadError(f"the event has no {key!r}")
    event = _convert(value, cls, code="invalid_event")
    return cast(Event, event.replace(kept=Kept(line, event.kept.unknown)))


def dump_event(event: EventBase) -> bytes:
    """The line of an event, without its newline: its own bytes if it was read and not changed."""
    return _encode(event) if event.kept is UNSET else _dump_kept(event)


def raw_payload(event: EventBase, name: str) -> bytes | None:
    """The JSON bytes of a payload as they are stored, or None where the key is absent."""
    raw = getattr(type(event), name).slot.__get__(event)
    return None if raw is UNSET else bytes(raw)


def parse_manifest(data: bytes) -> Manifest:
    """The model of `manifest.json`.

    Raises:
        FormatError: Codes `invalid_json`, `unsupported_schema` (the text gives both versions), `invalid_manifest`.
    """
    manifest = _parse_document(data, Manifest, code="invalid_manifest")
    if (manifest.status == "failed") != (manifest.failure is not None):
        wanted = "needs a failure" if manifest.failure is None else "has a failure"
        raise TraceStorageError(f"a manifest with status {manifest.status} {wanted}", code="invalid_manifest")
    parse_time(manifest.created_at, code="invalid_manifest")
    return manifest


def dump_manifest(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`: indented by two, with a newline at the end."""
    return _dump_document(manifest)


def parse_redactions(data: bytes) -> Redactions:
    """The model of `redactions.json`.

    Raises:
        FormatError: Codes `invalid_json`, `unsupported_schema`, `invalid_manifest`.
    """
    return _parse_document(data, Redactions, code="invalid_manifest")


def dump_redactions(redactions: Redactions) -> bytes:
    """The bytes of `redactions.json`."""
    return _dump_document(redactions)


def parse_integrity(data: bytes) -> Integrity:
    """The model of `integrity.json`; its names are relative paths with `/`, inside the bundle.

    Raises:
        FormatError: Codes `integrity_metadata_invalid` and `integrity_algorithm_unsupported`.
    """
    code = "integrity_metadata_invalid"
    try:
        record = _parse_document(data, Integrity, code=code)
    except FormatError as error:
        raise TraceStorageError(error.reason, where=error.where, code=code) from None
    if record.algorithm != "sha256":
        text = f"unsupported algorithm {canonical.printable(record.algorithm)}; this reads sha256"
        raise TraceStorageError(text, code="integrity_algorithm_unsupported")
    for name in REQUIRED_FILES:
        if name not in record.files:
            raise TraceStorageError(f"no digest for {name}", code=code)
    for name, value in record.files.items():
        if not is_inner_name(name):
            raise TraceStorageError(f"{canonical.printable(name)} is not a path inside the bundle", code=code)
        if not is_digest(value):
            text = f"the digest of {canonical.printable(name)} is not a SHA-256 hash of 64 lower-case hex digits"
            raise TraceStorageError(text, code=code)
    return record


def dump_integrity(files: Mapping[str, str]) -> bytes:
    """The bytes of `integrity.json` for these names and digests, names sorted."""
    return _dump_document(Integrity(files=dict(sorted(files.items()))))


def is_inner_name(name: str) -> bool:
    """Whether `name` can only mean a file inside the bundle, on any system."""
    parts = name.split("/")
    return bool(name) and len(name) <= 400 and all(_is_plain_part(part) for part in parts)


def is_digest(text: str) -> bool:
    """Whether `text` is a SHA-256 digest as the format writes it: 64 lower-case hex digits."""
    return _DIGEST.fullmatch(text) is not None


@cache
def _reserved() -> re.Pattern[str]:
    """Names that Windows keeps for devices; compiled when a name is first looked at, which a start need not pay."""
    return re.compile(r"(?i)(con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³]|clock\$|conin\$|conout\$)(\..*)?")


def _is_plain_part(part: str) -> bool:
    return (
        part not in ("", ".", "..")
        and part.isprintable()
        and not set(part) & set('\\:*?"<>|')
        and part == part.rstrip(". ")
        and not _reserved().fullmatch(part)
    )


def parse_time(text: str, *, code: str = "invalid_event") -> datetime:
    """RFC 3339 text with a UTC offset as a datetime.

    Raises:
        TraceStorageError: Not such text.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise TraceStorageError(f"{canonical.printable(text)} is not a time with a UTC offset", code=code)
    return moment


def to_json(model: Model) -> dict[str, Json]:
    """A model as a JSON object, the keys it does not know included (after its own)."""
    members: dict[str, Json] = {}
    for name in model.__struct_fields__:
        value = getattr(model, name)
        if name == "kept" or (name in getattr(model, "__payloads__", ()) and raw_payload(model, name) is None):  # type: ignore[arg-type]
            continue
        members[name] = _value_to_json(value)
    if model.kept is not UNSET:
        members.update(model.kept.unknown)
    return members


def _value_to_json(value: object) -> Json:
    if isinstance(value, Model):
        return to_json(value)
    if isinstance(value, tuple):
        return [_value_to_json(item) for item in value]
    return cast(Json, msgspec.to_builtins(value))


def _convert(value: dict[str, Json], cls: type[_M], *, code: str) -> _M:
    """`value` as a checked model; keys that the model lacks go to `kept`, also those of models inside it."""
    names = set(cls.__struct_fields__) - {"kept"}
    known = {key: member for key, member in value.items() if key in names}
    try:
        model = msgspec.json.decode(canonical.dumps(known), type=cls)
    except msgspec.ValidationError as error:
        error_class = PayloadError if code == "invalid_event" else TraceStorageError
        raise error_class(canonical.printable(str(error), limit=200, quote=False), code=code) from None
    inner = {name: _attach(getattr(model, name), value.get(name)) for name in _MODEL_FIELDS.get(cls, ())}
    return model.replace(kept=Kept(b"", {key: value[key] for key in value if key not in names}), **inner)


_MODEL_FIELDS: Mapping[type[Model], tuple[str, ...]] = {
    Manifest: ("failure", "environment", "totals"),
    Redactions: ("entries",),
}


def _attach(model: object, value: Json) -> object:
    """`model`, an already checked part of a document, with the keys of `value` that it does not know."""
    if isinstance(model, tuple) and isinstance(value, list):
        return tuple(_attach(item, member) for item, member in zip(model, value, strict=True))
    if not isinstance(model, Model) or not isinstance(value, dict):
        return model
    unknown = {key: member for key, member in value.items() if key not in model.__struct_fields__ or key == "kept"}
    return model.replace(kept=Kept(b"", unknown)) if unknown else model


def _dump_kept(event: EventBase) -> bytes:
    source, unknown = event.kept
    if parse_event(source) == event:
        return cast(bytes, source)
    plain = _encode(event.replace(kept=UNSET))
    return plain[:-1] + b"," + canonical.dumps(dict(unknown))[1:] if unknown else plain


def _parse_document(data: bytes, cls: type[_M], *, code: str) -> _M:
    value = canonical.loads(data)
    if not isinstance(value, dict):
        raise TraceStorageError("expected a JSON object", code=code)
    version = value.get("schema_version")
    if version != SCHEMA_VERSION:
        found = "no schema version" if version is None else f"schema version {canonical.printable(version)}"
        raise TraceStorageError(f"{found} where this reads version {SCHEMA_VERSION}", code="unsupported_schema")
    model = _convert(value, cls, code=code)
    return model.replace(kept=Kept(data, model.kept.unknown))


def _dump_document(model: Model) -> bytes:
    if model.kept is not UNSET and _parse_document(model.kept.source, type(model), code="") == model:
        return cast(bytes, model.kept.source)
    return msgspec.json.format(_encode(to_json(model)), indent=2) + b"\n"


# Hashes

HASHED: Mapping[str, tuple[tuple[str, str], ...]] = {
    "run_start": (("input", "input_hash"),),
    "llm_request": (("input", "input_hash"),),
    "llm_response": (("output", "output_hash"),),
    "tool_call": (("input", "input_hash"),),
    "tool_result": (("output", "output_hash"),),
    "state_change": (("before", "input_hash"), ("after", "output_hash")),
    "error": (("details", "output_hash"),),
    "run_end": (("output", "output_hash"),),
}
"""Event type to its payloads, each with the field that holds its hash (format page, table of events)."""

_IDLE_HASHES: Mapping[str, tuple[str, ...]] = {
    kind: tuple(sorted({"input_hash", "output_hash"} - {hash_field for _, hash_field in payloads}))
    for kind, payloads in HASHED.items()
}


def with_hashes(event: _E) -> _E:
    """A copy with the hash of every payload that is there, and of nothing else."""
    hashes: dict[str, str | None] = {"input_hash": None, "output_hash": None}
    for payload, hash_field in HASHED[event.type]:
        raw = raw_payload(event, payload)
        if raw is not None:
            hashes[hash_field] = canonical.sha256(canonical.reread(raw)[1])
    return event.replace(**hashes)


def totals(events: Iterable[EventBase], *, known: Totals | None = None) -> Totals:
    """The counts over `events`; cost and duration as in `known`."""
    counted = llm = tool = 0
    for event in events:
        counted += 1
        llm += event.type == "llm_request"
        tool += event.type == "tool_call"
    return (known or Totals()).replace(events=counted, llm_calls=llm, tool_calls=tool)


# Validation

UNREADABLE = frozenset(
    {
        "missing_file",
        "invalid_json",
        "invalid_manifest",
        "invalid_event",
        "unsupported_schema",
        "integrity_metadata_invalid",
        "integrity_algorithm_unsupported",
    }
)
"""Issue codes after which a bundle counts as unreadable (exit code 2)."""

MAX_ISSUES = 1000
"""Issues listed; a bundle with more says how many were left out."""


class Issue(Struct, frozen=True):
    """One finding: an issue code of the format page, one line for people, and where it is."""

    code: str
    message: str
    event_id: str | None = None
    step: int | None = None
    location: str | None = None

    @classmethod
    def of(cls, error: FormatError, file: str, line: int | None = None) -> Self:
        """The issue that an error of reading `file` is."""
        text = f"{error.where}: {error.reason}" if error.where else error.reason
        if line is None:
            return cls(error.code, text, location=file)
        return cls(error.code, f"line {line}: {text}", location=f"{file}:{line}")


def exit_code(issues: Iterable[Issue]) -> int:
    """0 valid, 1 invalid, 2 unreadable, 3 valid but not verifiable (format page, "Integrity and validation")."""
    codes = {issue.code for issue in issues}
    if codes & UNREADABLE:
        return 2
    if codes - {"integrity_unverified"}:
        return 1
    return 3 if codes else 0


class Checker:
    """Checks a trace one event at a time, in memory that grows with the number of ids only.

    Args:
        manifest: The manifest, or None where it could not be read (what needs it is then not checked).
        strict: Ask for exactly one run_start, and for an error event in a failed run.
        hashes: Compare payload hashes.

    Attributes:
        issues: The findings so far.
        profile: The hash profile that the payload hashes follow.
        hashed, unhashed: Payloads with and without a hash.
    """

    def __init__(self, manifest: Manifest | None, strict: bool = True, hashes: bool = False) -> None:
        self.manifest = manifest
        self.strict = strict
        self.hashes = hashes
        self.issues: list[Issue] = []
        self.profile = canonical.PROFILE
        self.hashed = self.unhashed = 0
        self._run_id = None if manifest is None else manifest.run_id
        self._seen: set[str] = set()
        self._orphans: dict[str, list[int]] = {}
        self._counts = dict.fromkeys(EVENT_CLASSES, 0)
        self._events = self._step = self._left_out = 0

    def unreadable(self, error: FormatError, line: int) -> None:
        """Count a line that is no event."""
        self._events += 1
        self._report(Issue.of(error, EVENTS_FILE, line))

    def add(self, event: EventBase, location: str = EVENTS_FILE) -> None:
        """Check one event against those before it. `location` names its file and line."""
        self._events += 1
        self._counts[event.type] += 1
        if self._orphans or event.id in self._seen or event.run_id != self._run_id:
            self._check_identity(event, location)
        self._seen.add(event.id)
        parent = event.parent_id
        if parent is not None and (parent not in self._seen or parent == event.id):
            self._check_parent(event, parent, location)
        if event.step < self._step:
            self._event_issue(event, "step_order", f"step {event.step} comes after step {self._step}", location)
        self._step = event.step
        for payload, hash_field in HASHED[event.type]:
            self._check_payload(event, payload, hash_field, location)
        if self.hashes:
            self._check_idle_hashes(event, location)

    def finish(self) -> list[Issue]:
        """All findings, those about the whole included."""
        if self.manifest is not None:
            self._check_counts(self.manifest.totals)
        if self.strict:
            self._check_strictly()
        if self._left_out:
            self.issues.append(Issue("invalid_event", f"and {self._left_out} more findings", location=EVENTS_FILE))
        return self.issues

    def _report(self, issue: Issue) -> None:
        if len(self.issues) < MAX_ISSUES:
            self.issues.append(issue)
        else:
            self._left_out += 1

    def _event_issue(self, event: EventBase, code: str, message: str, location: str) -> None:
        self._report(Issue(code, message, event.id, event.step, location))

    def _check_identity(self, event: EventBase, location: str) -> None:
        if event.id in self._seen:
            self._event_issue(event, "duplicate_event_id", f"event {event.id} appears more than once", location)
        for position in self._orphans.pop(event.id, ()):
            found = self.issues[position]
            text = f"the parent {event.id} does not come before its child"
            self.issues[position] = Issue("parent_not_earlier", text, found.event_id, found.step, found.location)
        if self.manifest is not None and event.run_id != self.manifest.run_id:
            text = f"the event's run {event.run_id} is not the manifest's run {self.manifest.run_id}"
            self._event_issue(event, "run_id_mismatch", text, location)

    def _check_parent(self, event: EventBase, parent: str, location: str) -> None:
        if parent == event.id:
            self._event_issue(event, "parent_not_earlier", "the event is its own parent", location)
            return
        if len(self.issues) < MAX_ISSUES:
            self._orphans.setdefault(parent, []).append(len(self.issues))
        self._event_issue(event, "invalid_parent", f"the parent {parent} is not in the trace", location)

    def _check_payload(self, event: EventBase, payload: str, hash_field: str, location: str) -> None:
        stored = getattr(event, hash_field)
        raw = raw_payload(event, payload)
        if stored is not None and not is_digest(stored):
            text = f"{hash_field} is not a hash of 64 lower-case hex digits"
            self._event_issue(event, "payload_hash_mismatch", text, location)
            return
        elif stored is not None:
            self.hashed += 1
        elif raw is not None:
            self.unhashed += 1
        try:
            data = None if raw is None else canonical.reread(raw)[1]
        except FormatError as error:
            self._event_issue(event, error.code, f"/{payload}{error.where}: {error.reason}", location)
            return
        if self.hashes:
            self._compare(event, hash_field, stored, data, location)

    def _check_idle_hashes(self, event: EventBase, location: str) -> None:
        for hash_field in _IDLE_HASHES[event.type]:
            if getattr(event, hash_field) is not None:
                text = f"{hash_field} is set, but a {event.type} has no payload for it"
                self._event_issue(event, "payload_hash_mismatch", text, location)

    def _compare(
        self, event: EventBase, hash_field: str, stored: str | None, data: bytes | None, location: str
    ) -> None:
        if stored is None:
            if data is not None:
                text = f"no {hash_field}, so nothing says whether the payload was changed"
                self._event_issue(event, "integrity_unverified", text, location)
        elif data is None or canonical.sha256(data) != stored:
            if data is not None and _rfc8785_digest(data) == stored:
                self.profile = RFC8785
                return
            text = f"the payload does not have the hash that {hash_field} says"
            self._event_issue(event, "payload_hash_mismatch", text, location)

    def _check_counts(self, said: Totals) -> None:
        found = {
            "events": self._events,
            "llm_calls": self._counts["llm_request"],
            "tool_calls": self._counts["tool_call"],
        }
        for name, count in found.items():
            stated = getattr(said, name)
            if stated != count:
                empty = f"{EVENTS_FILE} is empty: " if not self._events else ""
                text = f"{empty}the manifest's count of {name} is {stated}, the file has {count}"
                self._report(Issue("event_count_mismatch", text, location=f"{MANIFEST_FILE}:totals.{name}"))

    def _check_strictly(self) -> None:
        starts = self._counts["run_start"]
        if starts != 1:
            text = f"a whole run has exactly one run_start, this has {starts}"
            self._report(Issue("run_start_count", text, location=EVENTS_FILE))
        if self.manifest is not None and self.manifest.status == "failed" and not self._counts["error"]:
            text = "a failed run has an error event, this has none"
            self._report(Issue("missing_error_event", text, location=EVENTS_FILE))


def validate(
    manifest: Manifest, events: Iterable[EventBase], *, strict: bool = True, verify_hashes: bool = False
) -> list[Issue]:
    """Every finding about a trace in memory, in the order of its events.

    Args:
        manifest: What the events are checked against.
        events: The events, in order.
        strict: Ask for a whole run (`--strict`); else a part of one is enough (`--partial`).
        verify_hashes: Compare payload hashes too.
    """
    check = Checker(manifest, strict, verify_hashes)
    for event in events:
        check.add(event)
    return check.finish()


def check_integrity(record: Integrity, digests: Mapping[str, str | None]) -> Iterator[Issue]:
    """Compare a record with the digests of the files found; None stands for a file that is not there."""
    for name, expected in record.files.items():
        found = digests.get(name)
        if found is None:
            yield Issue("missing_file", f"{name} is listed in {INTEGRITY_FILE} but is not there", location=name)
        elif found != expected:
            text = f"{name} does not have the SHA-256 hash that {INTEGRITY_FILE} says"
            yield Issue("integrity_mismatch", text, location=name)


def _rfc8785_digest(data: bytes) -> str | None:
    try:
        return canonical.sha256(canonical.rfc8785(canonical.loads(data)))
    except CanonicalizationError:
        return None
