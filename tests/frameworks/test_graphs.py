# SPDX-License-Identifier: Apache-2.0
"""Agents of pydantic-ai and langgraph, recorded by `opentelemetry-instrument` and replayed, without a line of ours.

The model is the test's own server: the prompt is a list of rounds of tool calls, it asks for one round after the other,
and says in the end what it was told.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sftrace_otel.trace import validate_bundle

from .venv import AGENTS, Frameworks, built

pytestmark = pytest.mark.full

PYDANTIC_AI, LANGGRAPH = "pydantic_ai_agent.py", "langgraph_agent.py"
STEPFORK = str(Path(sys.executable).with_name("stepfork"))
Calls = list[tuple[str, dict[str, Any]]]


def model(body: Mapping[str, Any]) -> dict[str, Any]:
    """The next round of the prompt, or what came of all of them."""
    servers = sys.modules["openai_server"]
    messages = body["messages"]
    [prompt] = [message["content"] for message in messages if message["role"] == "user"][:1]
    rounds = json.loads(prompt if isinstance(prompt, str) else prompt[0]["text"])
    at = sum(message["role"] == "assistant" for message in messages)
    if at < len(rounds):
        calls = [(f"c{at}{index}", name, arguments) for index, (name, arguments) in enumerate(rounds[at])]
        answer: dict[str, Any] = servers.tool_calls(*calls)
        return answer
    told = [message["content"] for message in messages if message["role"] not in ("assistant", "system")]
    return servers.text(f"told {json.dumps(told[1:])}")


class Run:
    """An agent that is recorded, its server stopped, and replayed."""

    def __init__(self, frameworks: Frameworks, server: Any) -> None:
        self.frameworks = frameworks
        self.server = server
        self.effects = frameworks.folder / "effects"
        self.bundle = Path()
        self.command: tuple[str, ...] = ()
        self.env = {
            "PATH": f"{frameworks.programs}{os.pathsep}{os.environ['PATH']}",
            "EFFECTS": str(self.effects),
        }
        self.printed = ""
        self.own: dict[str, str] = {}

    def record(self, agent: str, mode: str, *rounds: Calls, code: int = 0, **env: str) -> None:
        """Run the agent and keep what it printed; its only bundle is valid."""
        self.command = (agent, self.server.base_url, mode, json.dumps(rounds))
        self.own = env
        done = self.frameworks.record(*self.command, **{**self.env, **env})
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        self.printed = done.stdout
        folder = self.frameworks.folder / "sftraces"
        [self.bundle] = [path for path in folder.iterdir() if not path.name.startswith(".")]
        assert validate_bundle(self.bundle, verify_integrity=True).exit_code == 0
        checked = subprocess.run(
            [STEPFORK, "validate", str(self.bundle), "--verify-integrity"], capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr

    def replay(self, code: int = 0, agent: str = "") -> subprocess.CompletedProcess[str]:
        """Run it, or another agent, with the server stopped; no tool has an effect."""
        self.server.stop()
        self.effects.unlink(missing_ok=True)
        done = self.frameworks.replay(self.bundle, agent or self.command[0], *self.command[1:], **self.env, **self.own)
        assert done.returncode == code, done.stdout + done.stderr
        assert not self.effects.exists(), self.effects.read_text()
        return done

    def check(self, *calls: tuple[str, dict[str, Any], Any]) -> None:
        """The recorded tool calls, in whatever order, are these, and the replay prints what the recording did."""
        assert sorted(map(_text, self.tools())) == sorted(map(_text, calls))
        assert self.printed in self.replay().stdout

    def events(self, kind: str) -> list[dict[str, Any]]:
        rows = map(json.loads, (self.bundle / "events.jsonl").read_text().splitlines())
        return [row for row in rows if row["type"] == kind]

    def tools(self) -> list[tuple[str, Any, Any]]:
        """Name, input and output of each tool call; the class of the error where there was one."""
        found = []
        results = {row["parent_id"]: row for row in self.events("tool_result")}
        for row in self.events("tool_call"):
            result = results[row["id"]]
            failed = result["status"] == "error"
            found.append((row["name"], row["input"], result["output"]["error_type"] if failed else result["output"]))
        return found

    def verdict(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.bundle / "run.json").read_text())["verdict"]
        return found


def _text(call: object) -> str:
    return json.dumps(call, sort_keys=True)


@pytest.fixture
def run(tmp_path: Path, openai_server: Any) -> Run:
    openai_server.answer = model
    return Run(Frameworks(built(), tmp_path), openai_server)


def both(agent: str, mode: str) -> tuple[Calls, list[tuple[str, dict[str, Any], Any]]]:
    """A round of tools for an agent, and what is recorded of them."""
    when = {"when": "2026-01-02", "who": "me"} if agent == PYDANTIC_AI else {"when": "2026"}
    found = ("lookup", {"key": "a", "limit": 3}, {"key": "a", "limit": 3, **when})
    if agent == PYDANTIC_AI:
        return [("lookup", {"key": "a"}), ("weather_get", {"days": 2}), ("shout", {"word": "a"})], [
            found,
            ("weather_get", {"city": "Oslo", "days": 2}, "Oslo 2 for me"),
            ("shout", {"word": "a"}, "A"),
        ]
    first = ("lookup", {"key": "a"}) if mode != "sync" else ("find", {"key": "a"})
    calls = [first, ("get", {"city": "Oslo"}), ("shout", {"word": "a"}), ("louder", {"word": "b", "loud": False})]
    return calls, [
        found if mode != "sync" else ("find", {"key": "a", "limit": 3}, {"key": "a", "limit": 3}),
        ("get", {"city": "Oslo", "days": 1}, "Oslo 1 of 2"),
        ("shout", {"word": "a", "loud": True}, "A"),
        ("louder", {"word": "b", "loud": False}, "b!"),
    ]


@pytest.mark.parametrize("agent", [PYDANTIC_AI, LANGGRAPH])
@pytest.mark.parametrize("mode", ["sync", "async", "stream"])
def test_each_call_is_recorded_once_by_name_and_replayed(run: Run, agent: str, mode: str) -> None:
    calls, recorded = both(agent, mode)
    run.record(agent, mode, calls, [calls[0]])
    assert run.verdict() == {"offline": True, "obstacles": []}
    assert len(run.events("llm_request")) == 3
    assert {row["parent_id"] for row in run.events("tool_call")} == {run.events("run_start")[0]["id"]}
    run.check(*recorded, recorded[0])


@pytest.mark.parametrize("agent", [PYDANTIC_AI, LANGGRAPH])
def test_a_fault_of_a_tool_comes_back_as_its_class(run: Run, agent: str) -> None:
    run.record(agent, "sync", [("broken", {"n": 1})])
    assert run.printed == "OSError 5\n"
    run.check(("broken", {"n": 1}, "OSError"))


def test_pydantic_ai_goes_on_as_it_did_where_a_tool_asks_for_another_try_or_gave_up(run: Run) -> None:
    run.record(PYDANTIC_AI, "sync", [("again", {"n": 1}), ("failed", {"n": 1})], [("again", {"n": 2})])
    assert "1 is too small" in run.printed and "no such thing" in run.printed
    run.check(
        ("again", {"n": 1}, "ModelRetry"), ("again", {"n": 2}, 2), ("failed", {"n": 1}, "ToolFailed")
    )  # fmt: skip


def test_pydantic_ai_gets_its_own_objects_and_the_programs_models(run: Run) -> None:
    run.record(PYDANTIC_AI, "async", [("report", {"city": "Rome"}), ("returned", {"city": "Rome"})])
    assert "see also" in run.printed
    members = {"return_value": "in Rome", "content": ["see also", "Rome"], "metadata": {"private": 1}}
    run.check(
        ("report", {"city": "Rome"}, {"city": "Rome", "day": "2026-01-02"}),
        (
            "returned",
            {"city": "Rome"},
            {"class": "pydantic_ai.messages:ToolReturn", "members": {**members, "kind": "tool-return"}},
        ),
    )


def test_a_call_that_is_deferred_is_no_failure(run: Run) -> None:
    run.record(PYDANTIC_AI, "sync", [("later", {"n": 7})])
    assert run.printed == "[('later', {'c00': {'job': {'id': 7}}})]\n"
    deferred = {"metadata": {"job": {"id": 7}}, "kind": "external"}
    run.check(("later", {"n": 7}, {"raised": "pydantic_ai.exceptions:CallDeferred", "members": deferred}))


def test_langgraph_gets_its_own_objects_and_the_programs_models(run: Run) -> None:
    run.record(
        LANGGRAPH,
        "sync",
        [("report", {"city": "Rome"}), ("update", {"note": "x"}), ("search", {"query": "q"}), ("refused", {"n": 1})],
    )
    assert "city='Rome'" in run.printed and run.printed.endswith(" x ['Document']\n") and "not 1" in run.printed
    tools = {name: (given, output) for name, given, output in run.tools()}
    assert tools["report"] == ({"city": "Rome"}, {"city": "Rome", "day": "2026-01-02"})
    assert tools["update"][0] == {"note": "x"} and tools["update"][1]["class"] == "langgraph.types:Command"
    assert tools["search"][1][1][0]["class"] == "langchain_core.documents:Document"
    assert tools["refused"] == ({"n": 1}, "ToolException")
    assert run.printed in run.replay().stdout


def test_a_tool_that_asks_a_person_asks_again_under_replay(run: Run) -> None:
    run.record(LANGGRAPH, "sync", [("ask", {"question": "sure?"})])
    assert run.printed == "{'question': 'sure?'}\ntold [\"they said yes\"] None []\n"
    [(_, _, first), (_, _, second)] = run.tools()
    assert first["raised"] == "langgraph.errors:GraphInterrupt" and second == "they said yes"
    assert run.events("error") == []
    assert run.printed in run.replay().stdout


@pytest.mark.parametrize("agent", [PYDANTIC_AI, LANGGRAPH])
def test_arguments_that_the_framework_refuses_are_a_failed_call(run: Run, agent: str) -> None:
    refusal = "ToolRetryError" if agent == PYDANTIC_AI else "ValidationError"
    run.record(agent, "async", [("lookup", {"limit": "many"})], [("lookup", {"key": "b", "limit": "x"})])
    assert run.verdict() == {"offline": True, "obstacles": []}
    run.check(
        ("lookup", {"limit": "many"}, refusal), ("lookup", {"key": "b", "limit": "x"}, refusal)
    )  # fmt: skip


@pytest.mark.parametrize("agent", [PYDANTIC_AI, LANGGRAPH])
def test_another_argument_diverges(run: Run, agent: str) -> None:
    run.record(agent, "async", [("lookup", {"key": "a"})])
    source = Path(AGENTS / agent).read_text()
    changed = run.frameworks.folder / agent
    changed.write_text(source.replace("limit: int = 3", "limit: int = 4"))
    assert source != changed.read_text()
    done = run.replay(1, agent=str(changed))
    assert "limit" in done.stdout + done.stderr


def test_spans_of_pydantic_ais_own_instrumentation_are_no_second_events(run: Run) -> None:
    rounds: list[Calls] = [
        [("lookup", {"key": "a"}), ("weather_get", {}), ("shout", {"word": "a"})],
        [("lookup", {"limit": "many"}), ("again", {"n": 1}), ("report", {"city": "R"})],
    ]
    run.record(PYDANTIC_AI, "sync", *rounds, INSTRUMENT="1")
    names = [name for name, _, _ in run.tools()]
    assert sorted(names) == ["again", "lookup", "lookup", "report", "shout", "weather_get"]
    assert len(run.events("llm_request")) == 3
    rows = map(json.loads, (run.bundle / "spans.jsonl").read_text().splitlines()[1:])
    assert any(row["name"].startswith("invoke_agent") for row in rows)
    assert run.printed in run.replay().stdout


def test_a_traced_function_is_recorded_once_and_everything_is_put_back(run: Run, tmp_path: Path) -> None:
    run.bundle = tmp_path / "once.sftrace"
    done = run.frameworks.run("python", str(AGENTS / "once.py"), str(run.bundle))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"recorded": [2, 3, 4, 5], "again": [2, 3, 4, 5], "left": []}
    assert validate_bundle(run.bundle, verify_integrity=True).exit_code == 0
    given: dict[str, Any] = {"n": 1}
    assert run.tools() == [("one", given, 2), ("two", given, 3), ("three", given, 4), ("four", given, 5)]
