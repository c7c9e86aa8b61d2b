# SPDX-License-Identifier: Apache-2.0
"""What the fast paths of canonical JSON rest on, asked of itself: NFC without ASCII, counted colons, seals."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sftrace_otel.errors import FormatError, SftraceError
from sftrace_otel.flight import FlightWriter, verify_flight
from sftrace_otel.formats import canonical, flight

quick = settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow], deadline=None)
MANY = 10_000 if os.environ.get("SFTRACE_AT_LENGTH") else 2_000
at_length = settings(
    max_examples=10_000 if os.environ.get("SFTRACE_AT_LENGTH") else 2_000,
    suppress_health_check=[HealthCheck.too_slow],
    deadline=None,
)


@pytest.mark.parametrize(
    "text", ["e\u0301", "\u0344", "a\u0300b", "\u212b", "\u1100\u1161", "\uac00\u11a8", "か\u3099"]
)
def test_what_nfc_changes_is_seen(text: str) -> None:
    for data in (text, f"plain {text} plain", f"é{text}", f"日本{text}"):
        assert not canonical.is_nfc(json.dumps([data], ensure_ascii=False).encode())


words = st.sampled_from(["a", "b", ":", "a:b", '"', "\\", "\\u003a", ":::", "é", "", "u003a"])
finite = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.one_of(words, st.none(), st.booleans(), st.integers(-(2**70), 2**70), finite)


@st.composite
def texts(draw: st.DrawFn, depth: int = 0) -> str:
    """JSON in any spelling, keys twice or escaped included."""
    kind = draw(st.integers(0, 3 if depth < 3 else 1))
    if kind < 2:
        return json.dumps(draw(scalars), ensure_ascii=draw(st.booleans()))
    space = draw(st.sampled_from(["", " ", "\n"]))
    parts = [draw(texts(depth + 1)) for _ in range(draw(st.integers(0, 4)))]
    if kind == 2:
        return f"[{space}{f'{space},'.join(parts)}]"
    names = [json.dumps(draw(words), ensure_ascii=draw(st.booleans())) for _ in parts]
    names = [name.replace(":", "\\u003a") if draw(st.booleans()) else name for name in names]
    members = (f"{name}{space}:{space}{part}" for name, part in zip(names, parts, strict=True))
    return f"{{{space}{f'{space},'.join(members)}{space}}}"


def read(reader: Any, data: bytes) -> tuple[str, object]:
    try:
        return "value", repr(reader(data))
    except FormatError as error:
        return "refused", error.reason


def reads_as_strictly(text: str) -> None:
    """`loads` takes and refuses what the reader of the standard library with hooks does, in the same words."""
    data = text.encode()
    assert read(canonical.loads, data) == read(canonical._loads_slowly, data)


@quick
@given(texts())
def test_reading_fast_is_reading_strictly(text: str) -> None:
    reads_as_strictly(text)


@pytest.mark.full
@at_length
@given(texts())
def test_reading_fast_is_reading_strictly_at_length(text: str) -> None:
    reads_as_strictly(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"a":2}',
        '{"x":{"a":1,"a":1}}',
        '[{"a":":::","a":1}]',
        '{"a":1,"\\u0061":2}',
        '{"a\\u003a":1,"a:":2}',
        '{"a":"\\u003A","a":1}',  # as many colons as written again
        '{"a":"\\u003a","b":1,"b":1}',
    ],
)
def test_a_key_twice_is_refused_however_colons_are_spelled(text: str) -> None:
    with pytest.raises(FormatError, match="duplicate key"):
        canonical.loads(text.encode())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"seq":1,', '"seq":1,"seq":1,'),
        ('"seq":1,', '"seq":9,"seq":1,'),
        ('"body":{', '"body":{"text":"other",'),
        ('"text":"a:b"', '"text":"a\\u003ab","n":1'),  # the colon that is hidden makes up for the member that is twice
        ('"n":1', '"n":1.0,"n":1'),
        ('"parents":[0]', '"parents":[],"parents":[0]'),
        ('"seq":1', '"seq":1.0'),
        ('"v":1', '"v":1e0'),
        ('"v":1', '"v":true'),
    ],
)
def test_a_line_that_another_reader_would_see_otherwise_does_not_verify(old: str, new: str, tmp_path: Any) -> None:
    """Its digests are right by what the last member of each name says: only a strict reader sees it."""
    with FlightWriter(tmp_path / "a.flight", run_id="r") as chain:
        chain.append("run.start", {})
        chain.append("tool.call", {"text": "a:b", "n": 1}, parents=(0,))
    events = tmp_path / "a.flight" / "events.jsonl"
    text = events.read_text()
    for spell in (lambda line: line, lambda line: line.replace(',"', ' ,"')):
        first, second, _ = text.split("\n")
        changed = spell(second).replace(old, new) if old in spell(second) else spell(second.replace(old, new))
        assert changed != spell(second)
        events.write_text(f"{first}\n{changed}\n")
        (finding, *_) = verify_flight(events.parent).findings
        assert (finding.code, finding.seq) in {("invalid_json", 1), ("invalid_event", 1)}
    events.write_text(text)
    assert verify_flight(events.parent).valid


def test_other_spellings_of_a_line_verify_and_only_they_are_odd(tmp_path: Any) -> None:
    with FlightWriter(tmp_path / "a.flight", run_id="r") as chain:
        for number in range(3):
            chain.append("tool.call", {"text": "a:b é", "n": number, "x": [1.5, 1.0, 1e21]})
    events = tmp_path / "a.flight" / "events.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()]

    def verified(spelled: str) -> tuple[bool, bool]:
        events.write_bytes(spelled.encode())
        result = verify_flight(events.parent)
        return result.valid, result.canonical

    canonical_lines = [canonical.rfc8785_nfc(line).decode() for line in lines]
    assert verified("".join(f"{line}\n" for line in canonical_lines)) == (True, True)
    compact = [json.dumps(dict(reversed(line.items())), separators=(",", ":")) for line in lines]
    for spelled in (map(json.dumps, lines), compact, (f" {line}\r" for line in canonical_lines)):
        assert verified("".join(f"{line}\n" for line in spelled)) == (True, False)


@quick
@given(
    st.dictionaries(words, st.recursive(scalars, lambda inner: st.lists(inner, max_size=3), max_leaves=5), max_size=3),
    st.integers(0, 2**60),
    words,
)
def test_sealing_is_what_the_format_says(body: dict[str, Any], moment: int, kind: str) -> None:
    """§3: `hash` = sha256(JCS(envelope without `hash`)), of the same values read back."""
    try:
        sealed = flight.seal(
            seq=3,
            run_id="r",
            type=kind,
            body=body,
            prev_hash=flight.GENESIS,
            t_wall=kind,
            t_mono_ns=moment,
            parents=[0, 2],
        )
    except SftraceError:
        return  # an int beyond a double
    envelope = json.loads(sealed.line)
    assert envelope.pop("hash") == sealed.hash == "sha256:" + canonical.sha256(canonical.rfc8785_nfc(envelope))
    content = {"type": kind, "v": 1, "body": {name: item for name, item in body.items() if name not in flight.VOLATILE}}
    assert envelope["body_hash"] == sealed.body_hash == "sha256:" + canonical.sha256(canonical.rfc8785_nfc(content))
    assert sealed.line == b'{"hash":"%b",%b\n' % (sealed.hash.encode(), canonical.rfc8785_nfc(envelope)[1:])


@pytest.mark.parametrize(
    "fields", [{"parents": [True]}, {"parents": [0, True]}, {"t_mono_ns": True}, {"v": True}, {"t_mono_ns": 2**60}]
)
def test_numbers_of_another_kind_are_written_as_digits(fields: dict[str, Any], tmp_path: Any) -> None:
    with FlightWriter(tmp_path / "a.flight", run_id="r") as chain:
        chain.append("run.start", {})
        chain.append("run.start", {})
        chain.append("tool.call", {}, **fields)
    assert verify_flight(tmp_path / "a.flight").findings == ()


@pytest.mark.parametrize("fields", [{"parents": [1.0]}, {"parents": [0, 1.0]}, {"t_mono_ns": 1.5}, {"v": 2.5}])
def test_a_number_that_is_not_whole_is_refused_and_the_chain_goes_on(fields: dict[str, Any], tmp_path: Any) -> None:
    with FlightWriter(tmp_path / "a.flight", run_id="r") as chain:
        chain.append("run.start", {})
        chain.append("run.start", {})
        with pytest.raises((ValueError, TypeError)):
            chain.append("tool.call", {}, **fields)
        assert chain.append("run.end", {}) == 2
    assert verify_flight(tmp_path / "a.flight").findings == ()
