# SPDX-License-Identifier: Apache-2.0
"""Payloads of many megabytes: clean ones take one look, dirty ones a little more, those too large are cut first."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from sftrace_otel.core import prepare as preparing
from sftrace_otel.core.convert import Converter
from sftrace_otel.core.cut import CUT, Cutter, is_plain
from sftrace_otel.core.prepare import prepare
from sftrace_otel.core.redact import RedactionPolicy
from sftrace_otel.core.redact.policy import Look
from sftrace_otel.core.redact.walk import Walk

SECRET = "sk-abcdefghijklmnop1234567890"


def rows(count: int) -> list[Any]:
    return [{"id": n, "text": f"some words {n} of a document", "tags": ["a", "b"]} for n in range(count)]


def policy() -> RedactionPolicy:
    return RedactionPolicy.default({})


def test_clean_json_of_any_size_takes_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    value = rows(60_000)
    monkeypatch.setattr(Walk, "value", lambda *_: pytest.fail("walked"))
    monkeypatch.setattr(Converter, "convert", lambda *_: pytest.fail("converted"))
    made = policy()
    assert made.look(value) is Look.CLEAN_WITHOUT_FLOATS
    prepared = prepare(value, made)
    assert prepared.value is value and not prepared.truncated and json.loads(prepared.data) == value


def test_one_secret_among_many_rows_leaves_the_others_the_same_objects() -> None:
    value = rows(5_000)
    value[3_333]["text"] = f"my key is {SECRET}"
    redacted, findings = policy().redact(value)
    assert isinstance(redacted, list) and redacted[3_333]["text"] == "my key is [REDACTED]"  # type: ignore[index,call-overload]
    assert [finding.pointer for finding in findings] == ["/3333/text"]
    assert all(new is old for n, (new, old) in enumerate(zip(redacted, value, strict=True)) if n != 3_333)


def test_an_option_and_its_argument_are_seen_wherever_halves_of_a_list_meet() -> None:
    for place in (31, 63, 64, 99, 127):
        words = [f"word number {n}" for n in range(200)]
        words[place : place + 2] = ["--password", "hunter2hunter2"]
        redacted, findings = policy().redact(list(words))
        assert isinstance(redacted, list) and redacted[place + 1] == "[REDACTED]" and len(findings) == 1
        assert redacted[: place + 1] + redacted[place + 2 :] == words[: place + 1] + words[place + 2 :]


@pytest.mark.parametrize(
    "value",
    [
        "word " * 400_000,
        {"a": "word " * 400_000, "b": 1},
        {"body": b"\x00\x01" * 1_000_000},
        [{"deep": ["word " * 100] * 4_000}],
        dict.fromkeys(map(str, range(300_000)), 1),
        [[n] for n in range(300_000)],
        ("word " * 400_000,),
        (bytearray(2_000_000),),
    ],
)  # fmt: skip
def test_what_is_far_too_large_is_cut_before_it_is_looked_at(value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def finished(*args: Any) -> Any:
        seen.append(len(args[1]))
        return original(*args)

    original = preparing._finished
    monkeypatch.setattr(preparing, "_finished", finished)
    redact = RedactionPolicy.redact

    def watched(self: RedactionPolicy, given: Any) -> Any:
        assert len(json.dumps(given)) < 4 * 10_000 + 80_000
        return redact(self, given)

    monkeypatch.setattr(RedactionPolicy, "redact", watched)
    prepared = prepare(value, policy(), max_bytes=10_000)
    assert prepared.truncated and len(prepared.data) <= 10_000 and seen
    assert CUT in prepared.tags.values()


def test_a_cut_uses_most_of_the_room_also_where_much_is_escaped() -> None:
    prepared = prepare({"a": '"\n' * 50_000, "b": 1}, policy(), max_bytes=20_000)
    assert 15_000 < len(prepared.data) <= 20_000


def test_no_half_of_a_secret_survives_a_cut() -> None:
    for before in range(70_000, 70_000 + 40):
        text = "w" * 5_000 + " w" * (before // 2 - 2_500) + f" {SECRET} " + "x " * 100_000
        prepared = prepare({"text": text}, policy(), max_bytes=6_000)
        assert b"sk-" not in prepared.data
    edge = 4_000 + 4_000 // 8 + preparing._SPARE
    for before in range(edge - 40, edge + 4):
        kept = Cutter(edge, at_words=True).cut(("w " * before)[:before] + SECRET + " x" * 1_000)
        assert "sk-" not in kept or SECRET in kept


def test_shared_parts_are_no_trap() -> None:
    value: list[Any] = ["x" * 100]
    for _ in range(90):
        value = [value, value]
    before = time.process_time()
    assert prepare(value, policy(), max_bytes=100_000).truncated
    assert time.process_time() - before < 10


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ([1, "a", None, True, 1.5, {"k": []}], True),
        (float("nan"), False),
        ([{"k": float("inf")}], False),
        ({1: 2}, False),
        (["\ud800"], False),
        ([1 << 70], False),
        ((1,), False),
        ([b"x"], False),
    ],
)
def test_what_is_plain(value: object, plain: bool) -> None:
    assert is_plain(value) is plain


def cost(work: Callable[[], object]) -> float:
    best = 1e9
    for _ in range(2):
        before = time.process_time()
        work()
        best = min(best, time.process_time() - before)
    return best


@pytest.mark.parametrize("dirty", [False, True])
def test_time_grows_with_size_and_no_faster(dirty: bool) -> None:
    def made(count: int) -> Callable[[], object]:
        value = rows(count)
        if dirty:
            value[count // 2]["text"] = SECRET
        return lambda: prepare(value, policy())

    small, large = cost(made(4_000)), cost(made(32_000))
    assert large < 8 * small * 3 + 0.05


def test_an_image_inside_a_message_is_clean_and_kept() -> None:
    image = base64.b64encode(bytes(n * 7919 % 251 for n in range(60_000))).decode()
    value = {"messages": [{"role": "user", "content": [{"image_url": {"url": f"data:image/png;base64,{image}"}}]}]}
    made = policy()
    assert made.look(value) is Look.CLEAN_WITHOUT_FLOATS
    assert made.redact_document(json.dumps(value)) == (json.dumps(value), False)
