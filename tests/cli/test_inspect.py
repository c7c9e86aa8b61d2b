# SPDX-License-Identifier: Apache-2.0
"""`inspect`: summary, verdict, tree and timeline, one step, what was lost or redacted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from .conftest import VECTORS, Cli


def add_run(path: Path, **run: object) -> None:
    """Give a bundle a `run.json`."""
    (path / "run.json").write_text(json.dumps({"schema_version": "1", **run}))


def test_summary(cli: Cli, bundle: Callable[[str], Path]) -> None:
    done = cli("inspect", bundle("failed_tool"))
    assert (done.code, done.err) == (0, "")
    for line in (
        "Agent:    sample-agent",
        "Status:   failed",
        "Failure:  ValueError: bad code 7 (step 6)",
        "Calls:    0 LLM, 2 tool and HTTP; 8 events",
    ):
        assert line in done.out
    assert "no signature" in done.out


def test_the_tree_nests_calls_in_calls(cli: Cli, bundle: Callable[[str], Path]) -> None:
    lines = cli("inspect", bundle("completed")).out.splitlines()
    outer = next(line for line in lines if "'outer'" in line)
    inner = next(line for line in lines if "'inner'" in line)
    assert inner.index("tool") == outer.index("tool") + 2


def test_errors_only(cli: Cli, bundle: Callable[[str], Path]) -> None:
    path = bundle("failed_tool")
    out = cli("inspect", path, "--errors-only").out
    assert "ValueError: bad code 7" in out
    assert "'get_value'" not in out
    document = cli("inspect", path, "--errors-only", "--json").json
    assert [call["title"] for call in document["calls"]] == ["tool 'boom'"]
    assert {event["status"] for event in document["events"]} == {"error"}


def test_events(cli: Cli, bundle: Callable[[str], Path]) -> None:
    out = cli("inspect", bundle("completed"), "--events").out
    kinds = [line.split()[3] for line in out.partition("Events:\n")[2].splitlines()[1:]]
    assert kinds[0] == "run_start"
    assert kinds[-1] == "run_end"
    assert len(kinds) == 10


def test_one_step_with_its_payload(cli: Cli, bundle: Callable[[str], Path]) -> None:
    path = bundle("completed")
    done = cli("inspect", path, "--step", 5)
    assert done.json["input"] == {"q": "née café ☕"}
    assert "née café ☕" in done.out
    assert cli("inspect", path, "--step", 5, "--json").out.isascii()


def test_a_step_that_is_not_there(cli: Cli, bundle: Callable[[str], Path]) -> None:
    done = cli("inspect", bundle("completed"), "--step", 99)
    assert (done.code, done.out) == (1, "")
    assert "step 99 not found" in done.line
    assert "0 to 9" in done.line


def test_json(cli: Cli, bundle: Callable[[str], Path]) -> None:
    document = cli("inspect", bundle("secrets"), "--json").json
    assert document["redacted"] == {"sensitive_key": 4, "credential_pattern": 2}
    assert document["summary"]["agent"] == "secret-agent"
    assert document["integrity"] == "verified"


def test_every_vector_can_be_looked_at(cli: Cli) -> None:
    for path in sorted(VECTORS.glob("*.sftrace")):
        for options in ((), ("--events",), ("--json",)):
            assert cli("inspect", path, *options).code == 0


def test_verdicts(cli: Cli, bundle: Callable[[str], Path]) -> None:
    path = bundle("completed")
    assert "its recorder gave no verdict" in cli("inspect", path).out
    add_run(path, verdict={"offline": True, "obstacles": []}, losses={"dropped_spans": 3, "other": 0})
    out = cli("inspect", path).out
    assert "Replays offline." in out
    assert "dropped spans: 3" in out
    assert "other" not in out
    obstacle = {"kind": "untraced_tool", "what": "the result of pay\x1b[0m went back", "do": "trace pay"}
    add_run(path, verdict={"offline": False, "obstacles": [obstacle]})
    out = cli("inspect", path).out
    assert "Does not replay offline:" in out
    assert r"the result of pay\x1b[0m went back" in out
    assert "trace pay" in out


def test_a_call_without_a_result_is_an_obstacle_and_a_loss(cli: Cli, bundle: Callable[[str], Path]) -> None:
    out = cli("inspect", bundle("partial")).out
    assert "Does not replay offline:" in out
    assert "Lost:" in out


def test_a_tool_without_events_is_an_obstacle_also_in_foreign_bundles(cli: Cli, bundle: Callable[[str], Path]) -> None:
    path = bundle("completed")
    lines = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    call = {"id": "call_1", "type": "function", "function": {"name": "pay", "arguments": "{}"}}
    lines[3]["input"]["request"]["messages"] = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "paid"},
    ]
    (path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    document = cli("inspect", path, "--json").json
    assert document["verdict"] == "obstacles"
    assert document["obstacles"][0]["kind"] == "untraced_tool"
    assert "pay" in document["obstacles"][0]["what"]
    assert document["integrity"] == "mismatch"
    assert "CHANGED" in cli("inspect", path).out


def test_text_of_a_bundle_is_escaped(cli: Cli, bundle: Callable[[str], Path]) -> None:
    path = bundle("completed")
    text = (path / "events.jsonl").read_text().replace("gpt-4o-mini", r"gpt\u001b[2J\u202e")
    (path / "events.jsonl").write_text(text)
    for options in ((), ("--events",), ("--step", 3), ("--json",)):
        done = cli("inspect", path, *options)
        assert done.code == (0 if "--step" in options else 1)
        out = done.out
        assert "\x1b" not in out
        assert "\u202e" not in out
