# SPDX-License-Identifier: Apache-2.0
"""Assertions about what an agent did: each holds where it should, and fails with what was done instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sftrace_otel.core.trajectory import Step, Trajectory

STEPS = Trajectory(
    [
        Step("llm", "gpt-x", "openai", {"method": "chat.completions.create", "request": {"model": "gpt-x", "n": 1}}),
        Step("tool", "search", None, {"query": "shoes", "filter": {"size": 42, "colour": "red"}, "tags": [1, 2]}),
        Step("http", "http GET https://h.test/stock", None, {"method": "GET", "url": "https://h.test/stock"}),
        Step("tool", "search", None, {"query": "socks", "filter": None, "tags": []}),
        Step("tool", "refund", None, {"order": 7, "urgent": True}),
    ]
)

HOLDS: dict[str, Callable[[Trajectory], Any]] = {
    "called": lambda t: t.assert_called("search"),
    "wildcard": lambda t: t.assert_called("http GET https://h.test/*"),
    "model": lambda t: t.assert_called("gpt-x").assert_called("llm").assert_called("openai/*"),
    "not called": lambda t: t.assert_not_called("delete_*"),
    "count": lambda t: t.assert_count("search", 2).assert_count("search", at_least=2, at_most=2).assert_count("x", 0),
    "arguments": lambda t: t.assert_arguments("search", {"query": "socks"}),
    "inner": lambda t: t.assert_arguments("search", {"filter": {"size": 42}, "tags": [1, 2]}),
    "asked": lambda t: t.assert_arguments("refund", {"order": lambda order: order > 5}),
    "request": lambda t: t.assert_arguments("llm", {"n": 1}),
    "order": lambda t: t.assert_order("llm", "search", "search", "refund"),
    "sequence": lambda t: t.assert_sequence("search", "search", "refund"),
    "kinds": lambda t: t.assert_sequence("gpt-x", "http GET *", kinds=("llm", "http")),
    "steps": lambda t: t.assert_max_steps(5).assert_max_steps(3, kinds=["tool"]),
}

FAILS: dict[str, tuple[Callable[[Trajectory], Any], str]] = {
    "called": (lambda t: t.assert_called("delete"), "delete was not called"),
    "not called": (lambda t: t.assert_not_called("search"), "search was called twice, and must not be"),
    "times": (lambda t: t.assert_count("search", 3), "search was called twice, not 3"),
    "at least": (lambda t: t.assert_count("refund", at_least=2), "refund was called once, not at least 2"),
    "at most": (lambda t: t.assert_count("search", at_most=0), "search was called twice, not at most 0"),
    "never": (lambda t: t.assert_count("x", 1), "x was called never, not 1"),
    "arguments": (lambda t: t.assert_arguments("refund", {"order": 8}), "no call of refund was given"),
    "true is not 1": (lambda t: t.assert_arguments("refund", {"urgent": 1}), "no call of refund was given"),
    "1 is not true": (lambda t: t.assert_arguments("llm", {"n": True}), "no call of llm was given"),
    "missing": (lambda t: t.assert_arguments("refund", {"note": None}), "no call of refund was given"),
    "length": (lambda t: t.assert_arguments("search", {"tags": [1]}), "no call of search was given"),
    "nobody": (lambda t: t.assert_arguments("delete", {}), "delete was not called"),
    "order": (lambda t: t.assert_order("refund", "search"), "search was not called after refund"),
    "first": (lambda t: t.assert_order("delete"), "delete was not called"),
    "twice": (lambda t: t.assert_order("refund", "refund"), "refund was not called after refund"),
    "sequence": (lambda t: t.assert_sequence("search", "refund"), "call 2 was search, not refund"),
    "short": (lambda t: t.assert_sequence("search", "search", "refund", "x"), "x was to be call 4, and there were"),
    "long": (lambda t: t.assert_sequence("search"), "after 1 calls came search"),
    "steps": (lambda t: t.assert_max_steps(4), "there were 5 steps, and at most 4 are wanted"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOLDS)
def test_it_holds(name: str) -> None:
    assert HOLDS[name](STEPS) is STEPS


@pytest.mark.parametrize("name", FAILS)
def test_it_fails_and_shows_the_steps(name: str) -> None:
    act, said = FAILS[name]
    with pytest.raises(AssertionError) as raised:
        act(STEPS)
    first, *shown = str(raised.value).splitlines()
    assert first.startswith(said)
    assert shown[0] == "the steps were:" and len(shown) == 6 and "shoes" in shown[2]


def test_a_trajectory_is_a_sequence_of_steps() -> None:
    assert (
        len(STEPS) == 5 and STEPS[0].provider == "openai" and [step.name for step in STEPS[3:]] == ["search", "refund"]
    )
    assert [step.input for step in STEPS.of("refund")] == [{"order": 7, "urgent": True}]
    with pytest.raises(AssertionError, match="there were no steps"):
        Trajectory([]).assert_called("search")
    with pytest.raises(ValueError, match="needs a number"):
        STEPS.assert_count("search")


def test_control_codes_of_a_recording_do_not_reach_the_terminal() -> None:
    steps = Trajectory([Step("tool", "a\x1b[31m", None, {"x": "\x1b]0;t\x07"})])
    with pytest.raises(AssertionError) as raised:
        steps.assert_called("b\x1b")
    assert "\x1b" not in str(raised.value) and "\x07" not in str(raised.value)
