# SPDX-License-Identifier: Apache-2.0
"""The bytes that hashes are over: equal to `rfc8785` whatever the path, and to `jcs` after NFC."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jcs
import pytest
import rfc8785
from hypothesis import given, settings
from hypothesis import strategies as st

from sftrace_otel.errors import CanonicalizationError
from sftrace_otel.formats import canonical

WHOLE = bool(os.environ.get("SFTRACE_AT_LENGTH"))
"""Whether the long tests try as often as they can; `make test-full` has time for a part."""


CASES = Path(__file__).parents[1] / "data" / "cases"
SAFE = 2**53 - 1

doubles = st.floats(allow_nan=False, allow_infinity=False)
edges = st.sampled_from(
    [0.0, -0.0, 1.0, 1e-5, 9.99e-6, 1e-6, 9.9e-7, 1e-7, 1e15, 1e16, -1e17, 1e20, 1e21, 1e22, 5e-324]
)
wholes = doubles.map(lambda number: float(int(number)) if abs(number) < 1e300 else number)
ints = st.integers(-SAFE, SAFE)
odd_text = st.text(
    st.sampled_from(
        'aZ"\\/\n\x00\x1f\x7f\x85é\u0301\u0338<\u2028\ud7ff\ue000\ufe0f\uffff\U00010000😀ﬁ\u1100\u1161\uac00'
    ),
    max_size=6,
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | odd_text
values = st.recursive(
    st.none() | st.booleans() | ints | doubles | edges | wholes | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=14,
)
strange = (
    st.integers() | st.floats() | st.text(max_size=3) | st.tuples(st.integers()) | st.binary(max_size=2) | st.uuids()
)
strange_values = st.recursive(
    strange | st.none() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts | st.integers(), inner, max_size=3),
    max_leaves=8,
)


def same_as_rfc8785(value: Any) -> None:
    assert canonical.rfc8785(value) == rfc8785.dumps(value)


def same_as_jcs_after_nfc(value: Any) -> None:
    """The sentence of the format, §3: RFC 8785, NFC-normalized strings."""
    nfc = sys.modules["flight_oracle"].nfc
    try:
        expected = jcs.canonicalize(nfc(value))
    except ValueError:
        with pytest.raises(CanonicalizationError, match="after NFC"):
            canonical.rfc8785_nfc(value)
    else:
        assert canonical.rfc8785_nfc(value) == expected


def refused_alike(value: Any) -> None:
    """What `rfc8785` refuses is refused, in our error; what it takes and is not JSON, such as a tuple, may be."""
    try:
        expected = rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, AttributeError):
        with pytest.raises(CanonicalizationError):
            canonical.rfc8785(value)
        return
    try:
        assert canonical.rfc8785(value) == expected
    except CanonicalizationError as error:
        assert "tuple" in str(error)


@settings(max_examples=200)
@given(values)
def test_rfc8785(value: Any) -> None:
    same_as_rfc8785(value)


@settings(max_examples=150)
@given(values)
def test_rfc8785_after_nfc(value: Any) -> None:
    same_as_jcs_after_nfc(value)


@settings(max_examples=200)
@given(strange_values)
def test_what_has_no_form_is_refused(value: Any) -> None:
    refused_alike(value)


@pytest.mark.full
@settings(max_examples=100_000 if WHOLE else 5_000)
@given(values)
def test_rfc8785_at_length(value: Any) -> None:
    same_as_rfc8785(value)


@pytest.mark.full
@settings(max_examples=20_000 if WHOLE else 2_000)
@given(values)
def test_rfc8785_after_nfc_at_length(value: Any) -> None:
    same_as_jcs_after_nfc(value)


@pytest.mark.full
@settings(max_examples=20_000 if WHOLE else 2_000)
@given(strange_values)
def test_what_has_no_form_is_refused_at_length(value: Any) -> None:
    refused_alike(value)


@settings(max_examples=150)
@given(odd_text)
def test_the_quick_check_of_a_whole_text_is_never_wrong(text: str) -> None:
    """`is_nfc` may say False of text in NFC (an escape before a mark), and never True of other text."""
    data = json.dumps([text, text], ensure_ascii=False).encode()
    if canonical.is_nfc(data):
        assert unicodedata.is_normalized("NFC", text)
    elif "\n" not in text and "\\" not in text and not any(ord(c) < 0x20 for c in text):
        assert not unicodedata.is_normalized("NFC", text)


def es6_numbers(count: int) -> Iterator[float]:
    """The numbers of the corpus that RFC 8785 (appendix B) refers to, by its published recipe.

    A list, then 2000 doubles from the smallest normal one up, then the doubles in the SHA-256 of the block before,
    starting with 32 zero bytes; zeros, NaN and infinities are left out there.
    """
    listed = (CASES / "es6_numbers.txt").read_text().split()
    octets = [bytes.fromhex(one) for one in listed]
    octets += [(0x0010000000000000 + step).to_bytes(8) for step in range(2000)]
    for one in octets[:count]:
        yield struct.unpack(">d", one)[0]
    left, block = count - len(octets), bytes(32)
    while left > 0:
        block = hashlib.sha256(block).digest()
        for number in struct.unpack("<4d", block):
            if number != 0 and number - number == 0 and left > 0:
                left -= 1
                yield number


PUBLISHED = {
    1000: "be18b62b6f69cdab33a7e0dae0d9cfa869fda80ddc712221570f9f40a5878687",
    10_000: "b9f7a8e75ef22a835685a52ccba7f7d6bdc99e34b010992cbc5864cd12be6892",
    1_000_000: "49415fee2c56c77864931bd3624faad425c3c577d6d74e89a83bc725506dad16",
}


@pytest.mark.parametrize("count", [1000, 10_000, pytest.param(1_000_000, marks=pytest.mark.full)])
def test_es6_corpus(count: int) -> None:
    """Alone and inside an object: where orjson wrote the number, and where it is spelled by us."""
    found = hashlib.sha256()
    for number in es6_numbers(count):
        text = canonical.rfc8785(number)
        found.update(b"%x,%b\n" % (int.from_bytes(struct.pack(">d", number)), text))
        assert canonical.rfc8785({"n": number, "one": 1.0}) == b'{"n":%b,"one":1}' % text
    assert found.hexdigest() == PUBLISHED[count]


def test_orjson_spells_numbers_as_it_did() -> None:
    """The region of doubles that the fast path takes from orjson: ends and samples, beside our own spelling."""
    draw = [1e-5, 1.5e-5, 0.1, 1 / 3, 123456.789, 9007199254740991.5, 9999999999999998.0, 1e15 + 0.5]
    for number in [*draw, *(-one for one in draw)]:
        assert canonical.rfc8785([number]) == b"[%b]" % rfc8785.dumps(number)


def test_order_of_keys_beyond_the_bmp() -> None:
    value = {"\uffff": 2, "😀": {"\ue000": 1.0, "\U00010000": [{"\ufe0f": 1e-7, "😀": 2, "a": 3}]}, "a": 0}
    same_as_rfc8785(value)
    assert canonical.rfc8785(value).startswith('{"a":0,"😀":{"\U00010000":[{"a":3,"😀":2,'.encode())


def test_the_callers_value_is_not_changed() -> None:
    value = {"b": [1.0, {"e\u0301": 2**60}], "😀": 1, "\ue000": -0.0}
    before = repr(value)
    canonical.rfc8785_nfc(value)
    assert repr(value) == before
    with pytest.raises(CanonicalizationError, match=r"/b/1/.*: an int outside"):
        canonical.rfc8785(value)


def test_characters_that_are_taken_for_stable_are() -> None:
    """None decomposes, none is a mark, and none composes with one before it; so text of them is in NFC."""
    stable = canonical._STABLE
    seconds = set()
    for code in range(0x110000):
        parts = unicodedata.normalize("NFD", chr(code)) if not 0xD800 <= code < 0xE000 else ""
        if len(parts) > 1 and unicodedata.is_normalized("NFC", chr(code)):
            seconds.update(parts[1:])
    assert "\u0301" in seconds and "\u1161" in seconds
    found = [chr(code) for code in range(0x80, 0x110000) if not 0xD800 <= code < 0xE000 and stable(chr(code))]
    assert len(found) > 30_000 and {"é", "ж", "—", "漢", "한", "😀"} <= set(found)
    for one in found:
        assert unicodedata.is_normalized("NFC", one) and not unicodedata.combining(one) and one not in seconds
