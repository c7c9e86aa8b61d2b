# SPDX-License-Identifier: Apache-2.0
"""What-if a call had failed: `--error` on tools, LLM calls and HTTP exchanges, seen under replay by real clients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from sftrace_otel import ReplaySession, record, trace_tool
from sftrace_otel.bundle.read import open_bundle, validate_bundle
from sftrace_otel.cli.app import main
from sftrace_otel.fork import ForkPoint, OverrideSpec, fork_trace


@trace_tool
def look_up(city: str) -> str:
    return f"rain in {city}"


def ask(url: str) -> str | None:
    with openai.OpenAI(api_key="none", base_url=url, max_retries=0) as client:
        asked = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        return asked.choices[0].message.content


def step_of(path: Path, kind: str) -> int:
    return next(event.step for event in open_bundle(path).events if event.type == kind)


CALLS: dict[str, tuple[Callable[[Any], Any], str, str, type[BaseException], str]] = {
    "tool": (lambda server: look_up("Oslo"), "tool_result", "TimeoutError:no answer", TimeoutError, "no answer"),
    "http": (lambda server: httpx.get(server.url + "/json").text, "tool_result", "httpx.ReadTimeout:slow",
             httpx.ReadTimeout, "slow"),
    "llm": (lambda server: ask(server.base_url), "llm_response", "RateLimitError:too many", openai.RateLimitError,
            "too many"),
    "llm timeout": (lambda server: ask(server.base_url), "llm_response", "APITimeoutError:slow", openai.APITimeoutError,
                    ""),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_failed_instead(name: str, openai_server: Any, tmp_path: Path) -> None:
    act, kind, error, raised, text = CALLS[name]
    path, fork = tmp_path / "a.sftrace", tmp_path / "b.sftrace"
    with record("agent", output=path):
        first = act(openai_server)
        act(openai_server)
    asked = len(openai_server.requests)
    step = step_of(path, kind)
    last = open_bundle(path).events[-1].step
    assert main(["fork", str(path), "--at-step", str(last - 1), "-o", str(fork), "--error", f"{step}={error}"]) == 0
    assert validate_bundle(fork, strict=False, verify_integrity=True).exit_code == 0
    with ReplaySession.from_trace(fork) as replay:
        with pytest.raises(raised, match=text or None):
            act(openai_server)
        assert act(openai_server) == first or name.startswith("llm")
        replay.verify_complete()
    assert len(openai_server.requests) == asked


def test_the_fork_in_memory_and_on_disk_is_the_same_trace(tmp_path: Path) -> None:
    path = tmp_path / "a.sftrace"
    with record("agent", output=path):
        look_up("Oslo")
    options: Any = {"overrides": [OverrideSpec(step=2, output="sun")]}
    kept = fork_trace(path, ForkPoint(step=2), **options).trace
    saved = fork_trace(path, ForkPoint(step=2), output_path=tmp_path / "b.sftrace", **options).trace
    assert [event.replace(run_id="r") for event in kept.events] == [event.replace(run_id="r") for event in saved.events]
    assert kept.events[2].output == "sun" and saved.provenance["origin"] == "forked" == kept.provenance["origin"]


def test_a_status_is_ok_or_error() -> None:
    with pytest.raises(ValueError, match="'ok' or 'error'"):
        OverrideSpec(step=1, output=None, status="failed")
