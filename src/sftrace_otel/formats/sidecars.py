# SPDX-License-Identifier: Apache-2.0
"""The sidecars of a `.sftrace` bundle, version 1 (format page `sidecars-v1`): what lies beside the four files.

Decision: rows stay plain JSON objects and the types here say what they hold. Reading checks the members it knows and
leaves the others alone, so that rows of a later version pass through a fork or a copy untouched. Rejected: structs as
for events; rows are written once, read seldom, and grow a member with every library that gets a boundary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, Literal, NotRequired, TypedDict, TypeVar, cast

import msgspec

from sftrace_otel.errors import TraceStorageError
from sftrace_otel.formats import Json, canonical

VERSION = "1"
CALLS_FILE = "calls.jsonl"
WIRE_FILE = "wire.jsonl"
SPANS_FILE = "spans.jsonl"
RUN_FILE = "run.json"
PROVENANCE_FILE = "provenance.json"
NONDETERMINISM_FILE = "nondeterminism.jsonl"
FILES = (CALLS_FILE, WIRE_FILE, SPANS_FILE, RUN_FILE, PROVENANCE_FILE, NONDETERMINISM_FILE)
BLOBS_FOLDER = "blobs"
CODE = "invalid_sidecar"
"""Reason code of everything that is wrong with a sidecar; a bundle loads without it."""

BlobRef = TypedDict("BlobRef", {"$blob": str, "media_type": NotRequired[str], "size": NotRequired[int]}, total=False)
"""A body that is stored beside the rows, named by the digest of its redacted bytes: `sha256:` and 64 hex digits."""

Body = str | BlobRef | None


class Recorded(TypedDict, total=False):
    """An exception: where its class lives, and its text or its arguments and simple members. `tags` are the type tags
    of these two: JSON Pointer, such as `/args/0` or `/state/code`, to tag."""

    module: str
    qualname: str
    message: str
    args: list[Any]
    state: dict[str, Any]
    tags: dict[str, str]


class Returned(TypedDict, total=False):
    """What a generator returned after its items, with type tags (JSON Pointer to tag)."""

    value: Any
    tags: dict[str, str]


class CallRow(TypedDict, total=False):
    """One call of `calls.jsonl`. Times in ns since the run began, on a clock that does not step back.

    `awaitable` is "coroutine" or "future" where a plain function gave one and the result is what that came to.
    `progress` holds what an MCP server told of a request while it was at it: [progress, total, message] each.
    """

    call: int
    kind: Literal["llm", "tool", "http"]
    request: str
    response: str | None
    error: str | None
    trace_id: str | None
    span_id: str | None
    span: str
    lineage: str | None
    start_ns: int
    end_ns: int | None
    end: str
    tags: dict[str, str]
    exception: Recorded
    tool_call_ids: list[str]
    truncated: bool
    awaitable: str
    returned: Returned
    progress: list[list[Any]]


class WireRequest(TypedDict, total=False):
    """What was sent: headers as pairs in order, and the body, or only its beginning (`truncated`)."""

    headers: list[list[str]]
    body: Body
    truncated: bool


class WireRow(TypedDict, total=False):
    """One HTTP attempt of `wire.jsonl`. `chunks` are [bytes, ns since the attempt began] of the decoded body.

    `full` is there for an answer of which only the beginning was kept: size and SHA-256 of it all, as it came; without
    the digest where a secret was found in what was kept.
    """

    event_id: str
    call: int
    attempt: int
    module: str
    method: str
    url: str
    http_version: str | None
    request: WireRequest
    status: int | None
    reason: str | None
    headers: list[list[str]]
    body: Body
    encoding_removed: str | None
    chunks: list[list[int]]
    start_ns: int
    end_ns: int | None
    end: str
    exception: Recorded | None
    redacted: bool
    truncated: bool
    full: dict[str, Any]


class Obstacle(TypedDict, total=False):
    """Why a bundle does not replay offline, and what to do about it."""

    kind: str
    what: str
    do: str


class Verdict(TypedDict, total=False):
    """Whether a bundle replays with the network off."""

    offline: bool
    obstacles: list[Obstacle]


class RunInfo(TypedDict, total=False):
    """`run.json`: losses, verdict, origin, the redaction policy (never a value), settings."""

    schema_version: str
    agent: str
    agents: list[dict[str, str]]
    kind: str
    losses: dict[str, Any]
    verdict: Verdict
    trace_ids: list[str]
    origin: Any
    policy: dict[str, Any]
    settings: dict[str, Any]
    command: list[str] | None
    connections: list[dict[str, Any]]
    programs: list[dict[str, Any]]


class DrawRow(TypedDict, total=False):
    """One row of `nondeterminism.jsonl`: the program read the clock or drew a random value, in the order of the rows.

    `source` is the function; `lineage` the path of the place, None where it is not known; `index` counts the reads of
    one source at one place. `value`: a number where the function gives a float; else text: whole numbers in decimal,
    UUIDs, and times in RFC 3339 without a zone as local time, ";fold=1" added the second time that they come. `bits`:
    the argument of `getrandbits`. `start_ns`: ns since the run began.
    """

    kind: Literal["clock", "rng"]
    source: str
    lineage: str | None
    index: int
    value: float | int | str
    bits: int
    start_ns: int


class Parent(TypedDict, total=False):
    """A bundle that another one was made of."""

    run_id: str
    name: str | None
    events_sha256: str


class ForkPointRow(TypedDict, total=False):
    """The last step of the parent that a fork kept."""

    step: int
    event_id: str


class OverrideRow(TypedDict, total=False):
    """An output that a fork replaced; digests only."""

    step: int
    event_id: str
    was: str | None
    now: str


class Resumed(TypedDict, total=False):
    """How a resumed run went on past its fork: event ids of this bundle."""

    policies: list[str]
    went_live: str
    stubbed: list[str]
    reused: list[str]


class Provenance(TypedDict, total=False):
    """`provenance.json`: how the bundle came to be."""

    schema_version: str
    origin: str
    tool: str
    created_at: str
    parents: list[Parent]
    fork_point: ForkPointRow
    overrides: list[OverrideRow]
    resumed: Resumed


_Row = TypeVar("_Row", CallRow, WireRow, DrawRow, RunInfo, Provenance)


def header(sidecar: str) -> bytes:
    """First line of a sidecar of rows, without its newline."""
    return canonical.dumps({"schema_version": VERSION, "sidecar": sidecar})


def parse_calls(lines: Iterable[bytes]) -> Iterator[CallRow]:
    """The rows of `calls.jsonl`. Raises TraceStorageError with the line as its place."""
    return (_checked(row, CallRow, number) for number, _, row in _rows(lines, "calls"))


def parse_wire(lines: Iterable[bytes]) -> Iterator[WireRow]:
    """The rows of `wire.jsonl`. Raises TraceStorageError with the line as its place."""
    return (_checked(row, WireRow, number) for number, _, row in _rows(lines, "wire"))


def parse_spans(lines: Iterable[bytes]) -> Iterator[dict[str, Json]]:
    """The rows of `spans.jsonl`. Raises TraceStorageError with the line as its place."""
    return (row for _, _, row in _rows(lines, "spans"))


def parse_draws(lines: Iterable[bytes]) -> Iterator[DrawRow]:
    """The rows of `nondeterminism.jsonl`. Raises TraceStorageError with the line as its place."""
    for number, _, row in _rows(lines, "nondeterminism"):
        if not {"source", "index", "value"} <= row.keys():
            raise TraceStorageError("a row lacks source, index or value", where=f":{number}", code=CODE)
        yield _checked(row, DrawRow, number)


def parse_run(data: bytes) -> RunInfo:
    """The object of `run.json`. Raises TraceStorageError."""
    return _checked(_object(data), RunInfo)


def parse_provenance(data: bytes) -> Provenance:
    """The object of `provenance.json`. Raises TraceStorageError."""
    return _checked(_object(data), Provenance)


def dump_rows(sidecar: str, rows: Iterable[Mapping[str, Any]]) -> bytes:
    """The bytes of a sidecar of rows: the header, then one row a line."""
    return b"".join(line + b"\n" for line in (header(sidecar), *(canonical.dumps(dict(row)) for row in rows)))


def dump_object(value: Mapping[str, Any]) -> bytes:
    """The bytes of `run.json` or `provenance.json`: indented by two, with a newline at the end."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


_EVENT_MEMBERS = {"calls": ("request", "response", "error"), "wire": ("event_id",)}


_OF_REQUEST = (
    "call",
    "kind",
    "request",
    "trace_id",
    "span_id",
    "span",
    "scope",
    "lineage",
    "start_ns",
    "tool_call_ids",
)
"""Members of a row of `calls.jsonl` that say how the call began."""


def without_events(
    sidecar: str, lines: Iterable[bytes], gone: Set[str], cut: Set[str] | None = None
) -> Iterator[bytes]:
    """The rows of a sidecar as they are written, without the header and without those about an event in `gone`.

    `cut`: those of `gone` that are not there any more. With it, the row of a call whose request is there stays, as far
    as it says how the call began (`begun`): without lineage and time two equal calls could not be told apart.

    Raises:
        TraceStorageError: A line is no row; with the line as its place.
    """
    members = _EVENT_MEMBERS.get(sidecar, ())
    for _, line, row in _rows(lines, sidecar):
        if gone.isdisjoint(_texts(row, members)):
            yield line
        elif cut is not None and sidecar == "calls" and row.get("request") not in cut:
            yield canonical.dumps(begun(row, cut))


def begun(row: Mapping[str, Any], cut: Set[str]) -> dict[str, Any]:
    """A row of `calls.jsonl` without what it says of a result that was left out (`cut`) or replaced."""
    kept: dict[str, Any] = {name: row[name] for name in _OF_REQUEST if name in row}
    tags = {place: tag for place, tag in row.get("tags", {}).items() if place.startswith("/input")}
    if tags:
        kept["tags"] = tags
    response = row.get("response")
    if response is None or response in cut:
        return {**kept, "response": None, "end_ns": None, "end": "open"}
    kept.update({name: row[name] for name in ("response", "end_ns", "awaitable") if name in row})
    if row.get("error") not in cut:
        kept.update({name: row[name] for name in ("error",) if name in row})
    return {**kept, "end": "finished"}


def _texts(row: Mapping[str, Json], members: Iterable[str]) -> list[str]:
    return [value for value in map(row.get, members) if isinstance(value, str)]


def _rows(lines: Iterable[bytes], sidecar: str) -> Iterator[tuple[int, bytes, dict[str, Json]]]:
    """Number, line and row of each row; the header is checked and left out."""
    for number, line in enumerate(lines, start=1):
        try:
            row = _object(line)
        except TraceStorageError as error:
            raise TraceStorageError(error.reason, where=f":{number}", code=CODE) from None
        if number > 1:
            yield number, line, row
        elif row.get("sidecar") != sidecar:
            raise TraceStorageError(f"the first line is not the header of {sidecar!r}", where=":1", code=CODE)


def _object(data: bytes) -> dict[str, Json]:
    try:
        value = canonical.loads(data)
    except ValueError as error:
        raise TraceStorageError(str(error), code=CODE) from None
    if not isinstance(value, dict):
        raise TraceStorageError("expected a JSON object", code=CODE)
    return value


def _checked(value: dict[str, Json], kind: type[_Row], number: int | None = None) -> _Row:
    where = "" if number is None else f":{number}"
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise TraceStorageError(canonical.printable(str(error), quote=False), where=where, code=CODE) from None
    return cast(_Row, value)
