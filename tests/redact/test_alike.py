# SPDX-License-Identifier: Apache-2.0
"""Streams whose events are alike: read the fast way they give what reading each event by itself gives."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from sftrace_otel.core.mapping import wire
from sftrace_otel.core.redact import RedactionPolicy, documents

WORDS = [
    "It ", "was", " raining", "", "-", "--", 'say "no"', "back\\slash", "\n", "ü", "😀", "\u2028", "\ud83d", "\ude00",
    " sk-", "proj-", "Abcdefghijklmnopqrstuvwx0123456789", "password", "=", "hunter22hunter", " key: ", "known",
    "-secret", "-value-1", "Bearer ", "eyJhbGciOiJIUzI1NiJ9.", "here", "content",
]  # fmt: skip


def chat(word: str, draw: random.Random) -> dict[str, Any]:
    delta: dict[str, Any] = {"content": word}
    if draw.random() < 0.1:
        delta = draw.choice(
            [{"role": "assistant", "content": word}, {"reasoning": word}, {"content": word, "refusal": None}, {},
             {"content": None}, {"content": word, "reasoning": "the same"},
             {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": word}}]}]
        )  # fmt: skip
    choice: dict[str, Any] = {"index": int(draw.random() < 0.05), "delta": delta, "finish_reason": None}
    if draw.random() < 0.05:
        choice |= {"logprobs": {"content": [{"token": word}]}}
    event: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "choices": [choice]}
    if draw.random() < 0.3:
        event["obfuscation"] = "".join(draw.choices("abcXYZ09", k=draw.randrange(9)))
    return event


def response(word: str, draw: random.Random) -> dict[str, Any]:
    kind = draw.choice(["response.output_text.delta"] * 9 + ["response.output_text.done"])
    event = {"type": kind, "item_id": "msg_1", "output_index": 0, "content_index": 0, "delta": word}
    return {**event, "sequence_number": draw.randrange(1, 99), "obfuscation": draw.choice("xyz")}


def stream(seed: int, words: list[str]) -> str:
    draw = random.Random(seed)
    made, compact = draw.choice([chat, chat, response]), draw.random() < 0.5
    ascii_only = draw.random() < 0.3
    lines = []
    for _ in range(40):
        event = made(draw.choice(words), draw)
        separators = (",", ":") if compact else (", ", ": ")
        text = json.dumps(event, separators=separators, ensure_ascii=ascii_only)
        if draw.random() < 0.02:
            text = text.replace('"content":', '"content":"twice","content":', 1)
        lines.append(f"data: {text}")
    return "\n\n".join([*lines, "data: [DONE]", ""]).encode("utf-8", "backslashreplace").decode()


@pytest.fixture
def policy() -> RedactionPolicy:
    return RedactionPolicy.default({"API_KEY": "known-secret-value-1"})


@pytest.mark.parametrize("words", [WORDS, WORDS[:12]], ids=["secrets", "plain"])
def test_a_stream_is_redacted_as_event_by_event(policy: RedactionPolicy, words: list[str]) -> None:
    fast = changed = 0
    for seed in range(25):
        text = stream(seed, words)
        slow = documents._lines_one_by_one(policy, text)
        assert documents._lines(policy, text) == slow, seed
        changed += slow != text
        fast += documents._is_clean_stream(policy, text)
    assert (changed if words is WORDS else fast) > 2


def test_a_secret_cut_over_events_that_are_alike_is_found(policy: RedactionPolicy) -> None:
    pieces = ["use "] * 20 + ["known-", "secret-", "value-", "1 "] + ["now "] * 20
    text = "".join(f'data: {{"choices":[{{"index":0,"delta":{{"content":"{piece}"}}}}]}}\n\n' for piece in pieces)
    redacted, was_changed = policy.redact_document(text)
    assert was_changed and "secret-" not in redacted and redacted.count("data:") == len(pieces)


def test_a_stream_is_put_together_as_event_by_event() -> None:
    joined = 0
    for seed in range(40):
        data = stream(seed, WORDS).encode()
        each = [wire._decoded(text) for _, text in wire.sse_events(data) if text.strip() != "[DONE]"]
        objects = [event for event in each if isinstance(event, dict)]
        expected = wire._completion(objects) if any("choices" in event for event in objects) else each
        assert wire.assemble(data) == expected, seed
        joined += len(wire._chunks(data)) < len(each)
    assert joined > 8
