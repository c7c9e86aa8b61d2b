# SPDX-License-Identifier: Apache-2.0
"""Canonical JSON, both profiles, and the strict reader; rows of the public case collection in `tests/data/cases`."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import jcs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftrace_otel.errors import CanonicalizationError, FormatError
from sftrace_otel.formats import canonical

CASES = Path(__file__).parents[1] / "data" / "cases"
ROWS = [json.loads(line) for line in (CASES / "canonical.jsonl").read_bytes().split(b"\n") if line]

floats = st.floats(allow_nan=False, allow_infinity=False)
edge_floats = st.sampled_from([0.0, -0.0, 1.0, 1e-4, 9.9e-5, 1e-5, 1e-6, 1e-7, 1e15, 1e16, 1e17, 1e21, 5e-324, 1.5e300])
ints = st.integers() | st.integers(min_value=2**62, max_value=2**66) | st.integers(max_value=-(2**62))
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | ints | floats | edge_floats | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


def cpython(value: Any) -> bytes:
    """The sentence of the format page, "Canonical JSON profile stepfork-json-v0.1"."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def rows(*kinds: str) -> list[Any]:
    return [pytest.param(row, id=row["id"]) for row in ROWS if row["kind"] in kinds]


@settings(max_examples=300)
@given(json_values)
def test_dumps_is_what_cpython_writes(value: Any) -> None:
    assert canonical.dumps(value) == cpython(value)
    assert canonical.digest(value) == hashlib.sha256(cpython(value)).hexdigest()


@pytest.mark.full
@settings(max_examples=20_000)
@given(json_values)
def test_dumps_is_what_cpython_writes_at_length(value: Any) -> None:
    assert canonical.dumps(value) == cpython(value)


@settings(max_examples=300)
@given(st.binary(min_size=8, max_size=8))
def test_every_double_is_spelled_as_cpython_does(octets: bytes) -> None:
    (number,) = struct.unpack(">d", octets)
    if number != number or number in (float("inf"), -float("inf")):
        with pytest.raises(CanonicalizationError, match=r"/x: (nan|inf|-inf) has no JSON form"):
            canonical.dumps({"x": number})
    else:
        assert canonical.dumps([number]) == cpython([number])


@settings(max_examples=200)
@given(json_values)
def test_loads_is_the_inverse_of_dumps(value: Any) -> None:
    data = canonical.dumps(value)
    assert canonical.dumps(canonical.loads(data)) == data
    assert repr(canonical.loads(data)) == repr(json.loads(data))


@settings(max_examples=200)
@given(json_values)
def test_loads_reads_any_spelling(value: Any) -> None:
    assert repr(canonical.loads(json.dumps(value, indent=1).encode())) == repr(value)


def test_ints_keep_their_digits() -> None:
    for number in (2**53 + 1, 2**63, 2**64, -(2**70), 10**4299):
        assert canonical.loads(canonical.dumps({"n": number})) == {"n": number}


def test_depth_is_bounded_the_same_way_on_both_sides() -> None:
    deepest: Any = 1
    for _ in range(canonical.MAX_DEPTH):
        deepest = [deepest]
    data = canonical.dumps(deepest)
    assert canonical.loads(data) == deepest
    with pytest.raises(CanonicalizationError, match="too deep"):
        canonical.dumps([deepest])
    with pytest.raises(FormatError, match="too deep"):
        canonical.loads(b"[" + data + b"]")


def test_subclasses_are_written_as_json_writes_them() -> None:
    class Text(str):
        pass

    class Number(int):
        def __repr__(self) -> str:
            return "no"

    assert canonical.dumps({"a": Text("x"), "b": Number(3)}) == b'{"a":"x","b":3}'


@pytest.mark.parametrize("row", rows("vector", "idempotent"))
def test_rfc8785_vector(row: Any) -> None:
    value = json.loads(row["input_json"])
    data = canonical.rfc8785(value)
    assert data.hex() == row["canonical_hex"]
    assert hashlib.sha256(data).hexdigest() == row["sha256"]


@pytest.mark.parametrize("row", rows("vector_ieee754"))
def test_rfc8785_doubles(row: Any) -> None:
    value = [struct.unpack(">d", bytes.fromhex(octets))[0] for octets in row["input_ieee754_be_hex"]]
    assert canonical.rfc8785(value).hex() == row["canonical_hex"]


@pytest.mark.parametrize("row", rows("same", "different"))
def test_rfc8785_digests(row: Any) -> None:
    values = [canonical.loads(text.encode()) for text in row["inputs_json"]]
    assert [hashlib.sha256(canonical.rfc8785(value)).hexdigest() for value in values] == row["sha256"]


@pytest.mark.parametrize("row", rows("bulk"))
def test_rfc8785_bulk_doubles(row: Any) -> None:
    draw = random.Random(8785)
    lines: list[bytes] = []
    while len(lines) < row["count"]:
        (number,) = struct.unpack(">d", struct.pack(">Q", draw.getrandbits(64)))
        if number - number == 0.0:
            lines.append(canonical.rfc8785(number))
    assert [line.decode() for line in lines[:3]] == row["first"]
    assert hashlib.sha256(b"".join(line + b"\n" for line in lines)).hexdigest() == row["sha256"]


def test_rfc8785_agrees_with_another_implementation() -> None:
    inputs = (CASES / "canonical_bulk_inputs.jsonl").read_bytes().split(b"\n")
    assert len(inputs) > 300
    for line in inputs:
        if line:
            value = canonical.loads(line)
            assert canonical.rfc8785(value) == jcs.canonicalize(value)


UNCANONICAL = {
    "rej-001": [float("nan"), float("inf"), -float("inf"), {"a": [float("nan")]}],
    "rej-002": ["\ud83d", "ok\udc00ok", {"\ud83d": 1}, "\ud83d\ude00"],
    "rej-005": [{"a": {1, 2}}, {"a": b"x"}, {"a": object()}, {"a": dict}, Decimal("1.10"), datetime(2026, 1, 1)],
    "shape": [{1: 2}, {None: 1}, (1, 2), {"a": (1,)}, 10**4300],
}


@pytest.mark.parametrize("name", UNCANONICAL)
def test_values_outside_json_are_refused_by_both_profiles(name: str) -> None:
    for value in UNCANONICAL[name]:
        for form in (canonical.dumps, canonical.rfc8785):
            with pytest.raises(CanonicalizationError) as caught:
                form(value)
            if isinstance(value, dict) and "a" in value:
                assert caught.value.where.startswith("/a")


def test_rej_003_rfc8785_never_rounds_an_int() -> None:
    for value in (2**53, 2**53 + 1, -(2**53), 2**64, 10**400):
        with pytest.raises(CanonicalizationError, match="RFC 8785"):
            canonical.rfc8785(value)
    with pytest.raises(CanonicalizationError, match="/args/user_id"):
        canonical.rfc8785({"args": {"user_id": 1234567890123456789}})


def test_rej_006_and_007_cycles_and_depth_end_in_one_typed_error() -> None:
    cycle: list[Any] = []
    cycle += [cycle, cycle]
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    for value in (cycle, deep):
        for form in (canonical.dumps, canonical.rfc8785):
            with pytest.raises(CanonicalizationError, match="too deep"):
                form(value)


def _unreadable() -> list[Any]:
    texts: list[tuple[str, bytes]] = []
    for row in ROWS:
        if row["kind"] == "reject_parse":
            texts += [(row["id"], text.encode("utf-8", "surrogatepass")) for text in row.get("input_texts", ())]
            texts += [(row["id"], bytes.fromhex(octets)) for octets in row.get("input_hex", ())]
    texts += [("par-004", b"[" * 10_000 + b"]" * 10_000), ("par-004", b'{"a":' * 10_000 + b"1" + b"}" * 10_000)]
    texts += [("bom", b"\xef\xbb\xbf{}"), ("digits", b"1" * 4301)]
    return [pytest.param(data, id=f"{name}-{index}") for index, (name, data) in enumerate(texts)]


@pytest.mark.parametrize("data", _unreadable())
def test_what_readers_would_take_differently_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError) as caught:
        canonical.loads(data)
    assert caught.value.code == "invalid_json"
    assert "\n" not in str(caught.value)


def test_a_refusal_says_what_is_wrong() -> None:
    for data, word in [
        (b'{"a":{"k":1,"\\u006b":2}}', 'duplicate key "k"'),
        (b'{"v":NaN}', "NaN"),
        (b"\xef\xbb\xbf1", "BOM"),
        (b'"\xff"', "UTF-8"),
        (b'"\\ud83d"', "surrogate"),
        (b"[" * 300, "deep"),
    ]:
        with pytest.raises(FormatError, match=word):
            canonical.loads(data)
