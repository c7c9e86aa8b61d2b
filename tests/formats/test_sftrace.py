# SPDX-License-Identifier: Apache-2.0
"""Models, reading and writing, hashes and validation of `.sftrace` v0.1, on the reference's own bundles."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftrace_otel.errors import CanonicalizationError, FormatError, PayloadError
from sftrace_otel.formats import canonical, sftrace
from sftrace_otel.formats.sftrace import (
    EVENT_CLASSES,
    Checker,
    ErrorEvent,
    Event,
    EventBase,
    EventStatus,
    EventType,
    LLMRequest,
    LLMResponse,
    Manifest,
    RunEnd,
    RunStart,
    StateChange,
    ToolCall,
    ToolResult,
    validate,
)

VECTORS = Path(__file__).parents[1] / "data" / "vectors" / "sftrace"
BUNDLES = sorted(VECTORS.glob("*.sftrace"))
ids = {"ids": lambda path: path.stem}

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
payloads = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
moments = st.datetimes(datetime(1971, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))
common = {
    "id": texts,
    "run_id": texts,
    "parent_id": st.none() | texts,
    "step": st.integers(0, 10**9),
    "timestamp": moments,
    "duration_ms": st.none() | st.integers(0, 10**9),
    "replay_policy": st.sampled_from(["frozen", "live", "manual", "forbidden", "derived"]),
    "redactions": st.lists(texts, max_size=2).map(tuple),
}
tokens = st.none() | st.integers(0, 10**9)
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(RunStart, **common, input=payloads),
    st.builds(RunStart, **common),
    st.builds(LLMRequest, **common, provider=st.none() | texts, model=texts, input=payloads),
    st.builds(
        LLMResponse,
        **common,
        model=st.none() | texts,
        output=payloads,
        prompt_tokens=tokens,
        completion_tokens=tokens,
        total_tokens=tokens,
        cost_usd=st.none() | st.floats(0, 1e6),
    ),
    st.builds(ToolCall, **common, name=texts, input=payloads),
    st.builds(ToolResult, **common, name=texts, output=payloads),
    st.builds(StateChange, **common, key=st.none() | texts, before=payloads, after=payloads),
    st.builds(ErrorEvent, **common, error_type=texts, message=texts, details=payloads),
    st.builds(RunEnd, **common, run_status=st.sampled_from(["running", "completed", "failed"]), output=payloads),
)


def lines_of(bundle: Path) -> list[bytes]:
    return (bundle / "events.jsonl").read_bytes().split(b"\n")[:-1]


def line_of(**members: Any) -> bytes:
    value = {
        "id": "evt_1",
        "run_id": "run_1",
        "step": 0,
        "type": "tool_call",
        "timestamp": "2026-01-01T00:00:00Z",
        "name": "f",
        "input": {},
    }
    return canonical.dumps({key: item for key, item in {**value, **members}.items() if item is not ...})


@pytest.mark.parametrize("bundle", BUNDLES, **ids)
def test_files_of_the_reference_are_written_back_byte_for_byte(bundle: Path) -> None:
    for line in lines_of(bundle):
        event = sftrace.parse_event(line)
        assert sftrace.dump_event(event) == line
        assert event.kept is msgspec.UNSET, "the fast path reads what the reference writes"
    manifest, redactions = ((bundle / name).read_bytes() for name in ("manifest.json", "redactions.json"))
    assert sftrace.dump_manifest(sftrace.parse_manifest(manifest)) == manifest
    assert sftrace.dump_redactions(sftrace.parse_redactions(redactions)) == redactions
    fresh = sftrace.parse_manifest(manifest)
    assert sftrace.dump_manifest(msgspec.structs.replace(fresh, kept=msgspec.UNSET)) == manifest


@pytest.mark.parametrize("bundle", BUNDLES, **ids)
def test_hashes_of_the_reference_are_ours(bundle: Path) -> None:
    for line in lines_of(bundle):
        event = sftrace.parse_event(line)
        hashed = sftrace.with_hashes(event)
        if event.input_hash or event.output_hash:
            assert (hashed.input_hash, hashed.output_hash) == (event.input_hash, event.output_hash)


@settings(max_examples=300)
@given(events)
def test_what_is_written_reads_as_it_was(event: Event) -> None:
    line = sftrace.dump_event(event)
    again = sftrace.parse_event(line)
    assert again == event
    assert type(again) is type(event)
    assert sftrace.dump_event(again) == line
    for name in event.__payloads__:
        assert repr(getattr(again, name)) == repr(getattr(event, name))


@settings(max_examples=150)
@given(events, st.dictionaries(texts.map(lambda key: "x_" + key), payloads, min_size=1, max_size=3), st.randoms())
def test_unknown_keys_and_other_spellings_survive(event: Event, extra: dict[str, Any], random: Any) -> None:
    members = list({**json.loads(sftrace.dump_event(event)), **extra}.items())
    random.shuffle(members)
    line = json.dumps(dict(members)).encode()
    read = sftrace.parse_event(line)
    assert sftrace.dump_event(read) == line
    moved = read.replace(run_id="run_other")
    assert sftrace.parse_event(sftrace.dump_event(moved)) != read
    assert {**json.loads(sftrace.dump_event(moved)), "run_id": event.run_id} == dict(members)


def test_a_key_named_like_our_own_slot_is_only_a_key() -> None:
    for line in (line_of(**{"\u2063kept": [1]}), b'{"\xe2\x81\xa3kept":[1],' + line_of()[1:], line_of(kept=3)):
        event = sftrace.parse_event(line)
        assert sftrace.dump_event(event) == line
        assert b"kept" in sftrace.dump_event(event.replace(step=4))


def test_documents_keep_unknown_keys_at_every_level() -> None:
    value = json.loads((VECTORS / "failed_tool.sftrace" / "manifest.json").read_bytes())
    value["x_top"] = {"a": 1}
    value["environment"]["x_env"] = 2**70
    value["totals"]["x_total"] = 1.5
    value["failure"]["kept"] = "word"
    data = json.dumps(value).encode()
    manifest = sftrace.parse_manifest(data)
    assert sftrace.dump_manifest(manifest) == data
    changed = json.loads(sftrace.dump_manifest(manifest.replace(agent_name="other")))
    assert changed == {**value, "agent_name": "other"}
    entry = {"event_id": "e", "path": "/input", "reason": "r", "replacement": "[REDACTED]", "x": 1}
    data = json.dumps({"schema_version": "0.1", "entries": [entry], "y": 2}).encode()
    redactions = sftrace.parse_redactions(data)
    assert sftrace.dump_redactions(redactions) == data
    assert redactions.entries[0].path == "/input"


def test_events_are_built_as_users_type_them() -> None:
    event = ToolCall(name="get_value", input={"x": 42})
    assert event.type == EventType.TOOL_CALL == "tool_call"
    assert event.input == {"x": 42}
    assert event.input is not event.input, "each look is a fresh value, so an event cannot be changed through it"
    assert StateChange(key="k").before is None
    assert ErrorEvent(error_type="E", message="m").status == EventStatus.ERROR
    with pytest.raises(AttributeError):
        event.name = "other"  # type: ignore[misc]
    with pytest.raises(CanonicalizationError, match="/when"):
        ToolCall(name="f", input={"when": datetime(2026, 1, 1)})  # type: ignore[dict-item]
    assert "42" not in repr(event)


def test_a_payload_is_a_snapshot() -> None:
    given_input = {"x": [1]}
    event = ToolCall(name="f", input=given_input)
    given_input["x"].append(2)
    assert event.input == {"x": [1]}


def test_absent_and_null_payloads_differ() -> None:
    absent, null = RunStart(), RunStart(input=None)
    assert absent.input is None and null.input is None
    assert b'"input"' not in sftrace.dump_event(absent)
    assert sftrace.with_hashes(absent).input_hash is None
    assert sftrace.with_hashes(null).input_hash == hashlib.sha256(b"null").hexdigest()


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        (b"", "invalid_json", "blank"),
        (b"  ", "invalid_json", "blank"),
        (b"[]", "invalid_event", "object"),
        (b'{"type":"tool_call"', "invalid_json", "malformed"),
        (b"\xef\xbb\xbf" + line_of(), "invalid_json", "BOM"),
        (line_of()[:-1] + b',"type":"tool_call"}', "invalid_json", 'duplicate key "type"'),
        (line_of().replace(b"{}", b"NaN"), "invalid_json", "NaN"),
        (line_of().replace(b"{}", b'"\xff"'), "invalid_json", "UTF-8"),
        (line_of().replace(b"{}", b'"\\ud800"'), "invalid_json", "surrogate"),
        (line_of().replace(b"{}", b"[" * 10_000 + b"]" * 10_000), "invalid_json", "deep"),
        (line_of() + line_of(), "invalid_json", "malformed"),
        (line_of(type="forged"), "invalid_event", "forged"),
        (line_of(type=["tool_call"]), "invalid_event", "type"),
        (line_of(id=...), "invalid_event", "'id'"),
        (line_of(timestamp=...), "invalid_event", "'timestamp'"),
        (line_of(step=-1), "invalid_event", "step"),
        (line_of(step=True), "invalid_event", "step"),
        (line_of(name=""), "invalid_event", "name"),
        (line_of(input=...), "invalid_event", "input"),
        (line_of(timestamp="2026-01-01T00:00:00"), "invalid_event", "timestamp"),
        (line_of(status="fine"), "invalid_event", "status"),
        (line_of(duration_ms=-3), "invalid_event", "duration_ms"),
    ],
)
def test_a_line_that_is_no_event_is_refused_in_one_line(line: bytes, code: str, words: str) -> None:
    with pytest.raises(FormatError, match=words) as caught:
        sftrace.parse_event(line)
    assert caught.value.code == code
    assert str(caught.value).isprintable()


def test_a_duplicate_key_inside_a_payload_is_refused_when_it_is_looked_at() -> None:
    line = sftrace.dump_event(sftrace.parse_event(line_of()).replace(kept=msgspec.UNSET))
    event = sftrace.parse_event(line.replace(b'"input":{}', b'"input":{"k":1,"k":2}'))
    with pytest.raises(FormatError, match="duplicate"):
        _ = event.input


def test_control_characters_of_a_bundle_do_not_reach_the_terminal() -> None:
    with pytest.raises(PayloadError) as caught:
        sftrace.parse_event(line_of(type="\x1b[2J\u202e"))
    assert "\x1b" not in str(caught.value) and "\u202e" not in str(caught.value)


MANIFEST = {
    "format": "stepfork",
    "schema_version": "0.1",
    "run_id": "run_1",
    "agent_name": "a",
    "created_at": "2026-01-01T00:00:00Z",
    "status": "completed",
}


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"schema_version": "999.0"}, "unsupported_schema", r"999\.0.*0\.1"),
        ({"schema_version": ...}, "unsupported_schema", "no schema version"),
        ({"format": "other"}, "invalid_manifest", "format"),
        ({"run_id": ""}, "invalid_manifest", "run_id"),
        ({"created_at": "yesterday"}, "invalid_manifest", "UTC offset"),
        ({"created_at": "2026-01-01T00:00:00"}, "invalid_manifest", "UTC offset"),
        ({"status": "failed"}, "invalid_manifest", "failure"),
        ({"failure": {"type": "E", "message": "m", "step": 0}}, "invalid_manifest", "failure"),
        ({"totals": {"events": -1}}, "invalid_manifest", "events"),
        ({"environment": {"python": 3}}, "invalid_manifest", "python"),
    ],
)
def test_a_manifest_that_breaks_the_format_is_refused(change: dict[str, Any], code: str, words: str) -> None:
    value = {key: item for key, item in {**MANIFEST, **change}.items() if item is not ...}
    with pytest.raises(FormatError, match=words) as caught:
        sftrace.parse_manifest(json.dumps(value).encode())
    assert caught.value.code == code


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "C:\\Windows\\win.ini", "a\0b", "CON", "aux.txt", "a//b", "", "a/.", "x ", "b\n"]
)
def test_names_that_lead_out_of_a_bundle_are_refused(name: str) -> None:
    assert not sftrace.is_inner_name(name)
    digest = "0" * 64
    files = {**dict.fromkeys(sftrace.REQUIRED_FILES, digest), name: digest}
    data = json.dumps({"schema_version": "0.1", "algorithm": "sha256", "files": files}).encode()
    with pytest.raises(FormatError, match="path") as caught:
        sftrace.parse_integrity(data)
    assert caught.value.code == "integrity_metadata_invalid"


def test_names_inside_a_bundle_are_fine() -> None:
    for name in ("events.jsonl", "blobs/ab/cd/" + "0" * 64, "nondeterminism.jsonl", "déjà.json", "console.txt"):
        assert sftrace.is_inner_name(name)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"algorithm": "md5"}, "integrity_algorithm_unsupported"),
        ({"schema_version": "9"}, "integrity_metadata_invalid"),
        ({"files": {}}, "integrity_metadata_invalid"),
        ({"files": dict.fromkeys(sftrace.REQUIRED_FILES, "A" * 64)}, "integrity_metadata_invalid"),
    ],
)
def test_an_integrity_record_that_breaks_the_format_is_refused(change: dict[str, Any], code: str) -> None:
    value = {"schema_version": "0.1", "algorithm": "sha256", "files": dict.fromkeys(sftrace.REQUIRED_FILES, "0" * 64)}
    sftrace.parse_integrity(json.dumps(value).encode())
    with pytest.raises(FormatError) as caught:
        sftrace.parse_integrity(json.dumps({**value, **change}).encode())
    assert caught.value.code == code


# Validation


def run_of(*parts: EventBase, **manifest: Any) -> tuple[Manifest, list[EventBase]]:
    numbered = [
        sftrace.with_hashes(part.replace(step=step, run_id="run_1", id=part.id or f"evt_{step}"))
        for step, part in enumerate(parts)
    ]
    made = Manifest(
        run_id="run_1", agent_name="a", created_at="2026-01-01T00:00:00Z", **{"status": "completed", **manifest}
    )
    return made.replace(totals=sftrace.totals(numbered)), numbered


def good_run() -> tuple[Manifest, list[EventBase]]:
    return run_of(
        RunStart(input={"q": 1}),
        ToolCall(name="f", input={"x": 1.0}, parent_id="evt_0"),
        ToolResult(name="f", output="y", parent_id="evt_1"),
        LLMRequest(model="m", input={}, parent_id="evt_0"),
        RunEnd(run_status="completed", output=None),
    )


def codes(manifest: Manifest, parts: list[EventBase], **options: Any) -> list[str]:
    return [issue.code for issue in validate(manifest, parts, **options)]


def test_a_whole_run_is_valid() -> None:
    assert codes(*good_run(), verify_hashes=True) == []


@pytest.mark.parametrize(
    ("position", "change", "code"),
    [
        (3, {"id": "evt_1"}, "duplicate_event_id"),
        (2, {"run_id": "run_2"}, "run_id_mismatch"),
        (2, {"step": 0}, "step_order"),
        (2, {"parent_id": "evt_9"}, "invalid_parent"),
        (2, {"parent_id": "evt_4"}, "parent_not_earlier"),
        (2, {"parent_id": "evt_2"}, "parent_not_earlier"),
        (2, {"output": "z"}, "payload_hash_mismatch"),
        (2, {"output_hash": "0" * 64}, "payload_hash_mismatch"),
        (1, {"output_hash": "0" * 64}, "payload_hash_mismatch"),
        (2, {"output_hash": "ABC123"}, "payload_hash_mismatch"),
        (2, {"output_hash": None}, "integrity_unverified"),
    ],
)
def test_one_fault_gives_one_issue_that_names_its_place(position: int, change: dict[str, Any], code: str) -> None:
    manifest, parts = good_run()
    parts[position] = parts[position].replace(**change)
    found = validate(manifest, parts, verify_hashes=True)
    assert [issue.code for issue in found if issue.code != "integrity_unverified" or code == issue.code] == [code]
    assert found[0].event_id == parts[position].id
    assert found[0].step == parts[position].step


def test_counts_are_compared() -> None:
    manifest, parts = good_run()
    for name in ("events", "llm_calls", "tool_calls"):
        wrong = manifest.replace(totals=manifest.totals.replace(**{name: 7}))
        (issue,) = validate(wrong, parts)
        assert issue.code == "event_count_mismatch" and name in issue.message and "count" in issue.message


def test_strict_wants_one_run_start_and_an_error_in_a_failed_run() -> None:
    manifest, parts = run_of(ToolCall(name="f", input={}))
    assert codes(manifest, parts) == ["run_start_count"]
    assert codes(manifest, parts, strict=False) == []
    failure = sftrace.Failure(type="E", message="m", step=0)
    manifest, parts = run_of(RunStart(), status="failed", failure=failure)
    assert codes(manifest, parts) == ["missing_error_event"]
    assert codes(manifest, parts, strict=False) == []


def test_all_findings_come_at_once() -> None:
    manifest, parts = good_run()
    parts[1] = parts[1].replace(id="evt_0", parent_id="evt_9")
    parts[3] = parts[3].replace(run_id="x", step=0)
    assert codes(manifest, parts[1:]) == [
        "invalid_parent",
        "invalid_parent",
        "run_id_mismatch",
        "step_order",
        "event_count_mismatch",
        "run_start_count",
    ]


def test_rfc8785_hashes_are_accepted_and_said() -> None:
    manifest, parts = good_run()
    digest = hashlib.sha256(canonical.rfc8785({"x": 1.0})).hexdigest()
    assert digest != parts[1].input_hash
    parts[1] = parts[1].replace(input_hash=digest)
    check = Checker(manifest, hashes=True)
    for part in parts:
        check.add(part)
    assert check.finish() == []
    assert check.profile == "rfc8785"


def test_a_hostile_number_of_faults_is_cut_short() -> None:
    manifest, _ = good_run()
    check = Checker(manifest, strict=False)
    for line in range(3000):
        check.unreadable(FormatError("bad", code="invalid_json"), line)
    found = check.finish()
    assert len(found) < 1100 and "more findings" in found[-1].message


def test_exit_codes() -> None:
    def exits(*found: str) -> int:
        return sftrace.exit_code(sftrace.Issue(code, "") for code in found)

    assert exits() == 0
    assert exits("step_order") == 1
    assert exits("step_order", "invalid_json") == 2
    assert exits("integrity_unverified") == 3
    assert exits("integrity_unverified", "payload_hash_mismatch") == 1
    for code in ("missing_file", "unsupported_schema", "integrity_metadata_invalid", "integrity_algorithm_unsupported"):
        assert exits(code) == 2


def test_every_event_type_has_a_class_and_its_hashes() -> None:
    assert set(EVENT_CLASSES) == set(EventType) == set(sftrace.HASHED)
    for kind, cls in EVENT_CLASSES.items():
        assert tuple(name for name, _ in sftrace.HASHED[kind]) == cls.__payloads__


PARSERS = [sftrace.parse_event, sftrace.parse_manifest, sftrace.parse_redactions, sftrace.parse_integrity]
SEEDS = [
    line_of(),
    *((VECTORS / "failed_tool.sftrace" / name).read_bytes() for name in ("manifest.json", "integrity.json")),
    (VECTORS / "secrets.sftrace" / "redactions.json").read_bytes(),
]


@settings(max_examples=300)
@given(st.sampled_from(SEEDS), st.integers(0, 10**6), st.binary(max_size=6), st.integers(0, 3))
def test_nothing_but_our_own_errors_leaves_a_parser(seed: bytes, at: int, noise: bytes, cut: int) -> None:
    at %= len(seed)
    data = seed[:at] + noise + seed[at + cut :]
    for parse in PARSERS:
        try:
            parse(data)
        except FormatError as error:
            assert str(error).isprintable() and error.code


@settings(max_examples=150)
@given(st.sampled_from(SEEDS), st.lists(st.tuples(st.integers(0, 50), payloads), min_size=1, max_size=3))
def test_members_of_any_type_are_read_or_refused(seed: bytes, changes: list[tuple[int, Any]]) -> None:
    value = json.loads(seed)
    for index, replacement in changes:
        value[list(value)[index % len(value)]] = replacement
    for parse in PARSERS:
        try:
            parse(canonical.dumps(value))
        except FormatError as error:
            assert str(error).isprintable() and error.code
