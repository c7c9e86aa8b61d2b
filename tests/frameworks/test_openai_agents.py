# SPDX-License-Identifier: Apache-2.0
"""Agents of openai-agents under the real `opentelemetry-instrument`: recorded whole, and replayed with no server."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from sftrace_otel.bundle.read import open_bundle, validate_bundle

pytestmark = pytest.mark.full

HERE = Path(__file__).resolve().parent
AGENT = "openai_agents_tools.py"


def _venv() -> Any:
    name = "frameworks_venv"
    spec = importlib.util.spec_from_file_location(name, HERE / "venv.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


venv = _venv()
programs = venv.programs
servers = sys.modules["openai_server"]


def call(call_id: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {
        "id": f"fc_{call_id}", "type": "function_call", "status": "completed", "call_id": call_id, "name": name,
        "arguments": json.dumps(arguments),
    }  # fmt: skip


PLANS: dict[str, list[Any]] = {
    "tools": [[call("c1", "weather", city="Oslo"), call("c2", "measure_place", place="Mars")], "Done."],
    "failing": [[call("c1", "strict", place="Mars")], "never asked"],
    "hand": [[call("c1", "search", q="fjords")], "Done."],
    "guarded": [[call("c1", "delete", path="/")], "Done."],
    "triage": [[call("c1", "transfer_to_spanish")], "never asked"],
    "spanish": [[call("c9", "weather", city="Bergen", days=1)], "Hecho."],
    "boss": [[call("c1", "ask_spanish", input="weather?")], "Done."],
}
"""What the model says to each agent, by its instructions: what it calls, or a text."""


@pytest.fixture
def model(openai_server: Any) -> Any:
    """The server, answering by plan, in either API; `traces` are those that came there."""
    left = {name: list(turns) for name, turns in PLANS.items()}
    openai_server.traces = []

    def responses(received: Any) -> Any:
        body = received.json
        turns = left[body["instructions"]]
        said = turns.pop(0)
        output = [servers.output_message(said)] if isinstance(said, str) else said
        whole = servers.response(body, *output, id=f"resp_{body['instructions']}_{len(turns)}")
        if body.get("stream"):
            return servers.sse_reply(list(servers.response_events(whole)), named=True)
        return servers.json_reply(whole)

    def chat(body: Mapping[str, Any]) -> Any:
        said = left["tools"].pop(0)
        if isinstance(said, str):
            return servers.text(said)
        return servers.tool_calls(*((one["call_id"], one["name"], json.loads(one["arguments"])) for one in said))

    def traces(received: Any) -> Any:
        openai_server.traces.append(received.json)
        return servers.json_reply({})

    openai_server.replies["POST /v1/responses"] = responses
    openai_server.replies["POST /traces"] = traces
    openai_server.answer = chat
    return openai_server


@pytest.fixture
def agent(programs: Path, tmp_path: Path, model: Any) -> Iterator[Callable[..., Any]]:
    """`agent(how)`: a program recorded, checked by us and by stepfork, and replayed without its server."""
    place = venv.Frameworks(programs, tmp_path)

    def both(*arguments: str, code: int = 0, **env: str) -> Any:
        env = {"OPENAI_BASE_URL": model.base_url, "OPENAI_API_KEY": "sk-test", **env}
        recorded = place.record(AGENT, *arguments, **env)
        assert recorded.returncode == code, recorded.stderr
        assert "replays offline" in recorded.stderr, recorded.stderr
        bundle = place.bundle()
        assert validate_bundle(bundle, strict=True, verify_integrity=True).exit_code == 0
        stepfork = [sys.executable, "-m", "stepfork", "validate", str(bundle), "--verify-integrity"]
        checked = subprocess.run(stepfork, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        model.stop()
        (tmp_path / "ran").rename(tmp_path / "recorded") if (tmp_path / "ran").exists() else None
        replayed = place.replay(bundle, AGENT, *arguments, **env)
        assert replayed.returncode == 0, replayed.stdout + replayed.stderr
        assert "replay: same" in replayed.stderr
        assert replayed.stdout == recorded.stdout
        found = open_bundle(bundle)
        found.place, found.env = place, env
        found.said = recorded.stdout
        found.ran_again = (tmp_path / "ran").read_text().split() if (tmp_path / "ran").exists() else []
        return found

    yield both


def tools(bundle: Any) -> list[tuple[str, Any, str, Any]]:
    """(name, input, status, output) of each tool event, by name."""
    results = {event.parent_id: event for event in bundle.events if event.type == "tool_result"}
    calls = [event for event in bundle.events if event.type == "tool_call"]
    found = [(one.name, one.input, results[one.id].status, results[one.id].output) for one in calls]
    return sorted(found, key=lambda one: one[0])


def above(bundle: Any, kind: str) -> dict[str, list[str | None]]:
    """Name → the names (or types) of the events above the calls of `kind`."""
    named = {event.id: getattr(event, "name", event.type) for event in bundle.events}
    found: dict[str, list[str | None]] = {}
    for event in bundle.events:
        if event.type == kind:
            found.setdefault(getattr(event, "name", event.type), []).append(named.get(event.parent_id))
    return found


FAILED = {"error_type": "OutOfRange", "message": "Mars is out of range"}
TWO = [
    ("measure_place", {"place": "Mars"}, "error", FAILED),
    ("weather", {"city": "Oslo", "days": 2}, "ok", "2 days of rain in Oslo of Norway"),
]


@pytest.mark.parametrize(
    ("how", "api"),
    [("sync", "responses"), ("async", "responses"), ("stream", "responses"), ("async", "chat_completions"),
     ("stream", "chat_completions")],
)  # fmt: skip
def test_two_tools_at_once_one_of_which_raises(agent: Any, model: Any, how: str, api: str) -> None:
    """A sync tool with the run's context as its first argument, and an async one that fails."""
    bundle = agent(how, API=api)
    assert "Done." in bundle.said
    assert tools(bundle) == TWO
    assert above(bundle, "tool_call") == {"weather": ["run_start"], "measure_place": ["run_start"]}
    assert above(bundle, "llm_request") == {"llm_request": ["run_start"] * 2}
    assert bundle.ran_again == []
    ids = {row["tool_call_ids"][0] for row in bundle_rows(bundle) if "tool_call_ids" in row}
    assert ids == {"c1", "c2"}
    last = [event for event in bundle.events if event.type == "llm_request"][-1]
    assert "An error occurred while running the tool" in json.dumps(last.input), "the failure function did not run"


def bundle_rows(bundle: Any) -> list[Any]:
    [folder] = [path for path in (bundle.place.folder / "sftraces").iterdir() if not path.name.startswith(".")]
    return [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]


def test_another_argument_diverges(agent: Any, programs: Path) -> None:
    """The function gets another city for the same words of the model, to which the same tools are offered."""
    bundle = agent("async")
    replayed = bundle.place.replay(bundle.place.bundle(), AGENT, "async", **{**bundle.env, "SUFFIX": "2"})
    assert replayed.returncode == 1
    assert "the input of tool 'weather' differs" in replayed.stderr, replayed.stderr
    assert not (bundle.place.folder / "ran").exists()


def test_a_tool_that_ends_the_run(agent: Any) -> None:
    """`failure_error_function=None`: its exception is the program's, and the same under replay."""
    bundle = agent("failing", code=1)
    assert tools(bundle) == [("strict", {"place": "Mars"}, "error", FAILED)]
    assert bundle.ran_again == []


def test_a_tool_made_by_hand(agent: Any) -> None:
    bundle = agent("hand")
    assert tools(bundle) == [("search", {"q": "fjords"}, "ok", ['{"q": "fjords"}', "found"])]
    assert bundle.ran_again == []


def test_a_guard_that_refuses_a_call(agent: Any) -> None:
    """The tool never runs; what the guard says instead is what the model gets for it."""
    bundle = agent("guarded")
    assert tools(bundle) == [("delete", {"path": "/"}, "ok", "not allowed here")]
    assert bundle.ran_again == [] and not (bundle.place.folder / "recorded").exists()


def test_a_handoff(agent: Any) -> None:
    """It runs again, since an agent is no value; what the next agent calls is answered."""
    bundle = agent("handoff")
    assert "Hecho." in bundle.said and "Spanish" in bundle.said
    handed, weather = tools(bundle)
    assert handed == ("transfer_to_spanish", {}, "ok", '{"assistant": "Spanish"}')
    assert weather[1] == {"city": "Bergen", "days": 1}
    assert bundle.ran_again == ["on_handoff"]


def test_an_agent_as_a_tool(agent: Any) -> None:
    """Its own calls hang on it; the usage of all of them is the same under replay."""
    bundle = agent("as_tool")
    asked, weather = tools(bundle)
    assert asked == ("ask_spanish", {"input": "weather?"}, "ok", "Hecho.")
    assert weather[0] == "weather"
    assert above(bundle, "tool_call") == {"ask_spanish": ["run_start"], "weather": ["ask_spanish"]}
    assert above(bundle, "llm_request")["llm_request"].count("ask_spanish") == 2
    assert bundle.ran_again == []


@pytest.mark.parametrize("key", ["sk-test", ""])
def test_the_sdks_own_traces_are_no_part_of_the_run(agent: Any, model: Any, key: str) -> None:
    """With a key they go out as ever while recording, and nowhere under replay; without one they are not sent."""
    bundle = agent("async", f"{model.url}/traces", OPENAI_API_KEY=key or "sk-test", **({} if key else NO_KEY))
    assert tools(bundle) == TWO
    assert bool(model.traces) == bool(key)


NO_KEY = {"AGENTS_KEY": "none"}
