# SPDX-License-Identifier: Apache-2.0
"""The main job on the quickstart agent, end to end: record, validate, replay offline, diverge, fork."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from .conftest import API_KEY, EXAMPLES, Bundle, Place, Recorded, quickstart_server


def shape(bundle: Bundle) -> list[tuple[Any, ...]]:
    """What must be equal in two recordings of one behaviour.

    All but ids, times and the headers of HTTP (they hold the trace id and the server's date); concurrent calls in any
    order.
    """
    events = bundle.events
    types = {event["id"]: event["type"] for event in events}
    rows = [
        (
            event["type"],
            event.get("name") or event.get("model"),
            types.get(event["parent_id"]),
            event["status"],
            json.dumps([without_headers(event.get(side)) for side in ("input", "output")], sort_keys=True),
        )
        for event in events
    ]
    return sorted(rows, key=repr)


def without_headers(payload: Any) -> Any:
    """A payload without its own `headers`."""
    return {k: v for k, v in payload.items() if k != "headers"} if isinstance(payload, dict) else payload


def test_one_bundle_holds_every_call(recorded: Recorded) -> None:
    bundle = recorded.decorated.bundle
    types = [event["type"] for event in bundle.events]
    assert types[:13] == [
        "run_start",
        "tool_call",
        "tool_result",
        *["llm_request", "llm_response", "tool_call", "tool_result"] * 2,
        "llm_request",
        "llm_response",
    ]
    assert Counter(types[13:17]) == {"llm_request": 2, "llm_response": 2}
    assert types[13:15] == ["llm_request", "llm_request"], "the two calls in flight at once"
    assert types[17:] == ["llm_request", "llm_response", "run_end"]
    names = [event["name"] for event in bundle.events if event["type"] == "tool_call"]
    origin = recorded.decorated.variables["SHOP_URL"]
    assert names == [f"http GET {origin}/policy.json", "find_order", "refund"]


def test_manifest_says_completed(recorded: Recorded) -> None:
    manifest = recorded.decorated.bundle.manifest
    assert manifest["status"] == "completed"
    assert manifest["failure"] is None
    assert manifest["agent_name"] == "agent"
    assert (manifest["totals"]["llm_calls"], manifest["totals"]["tool_calls"]) == (6, 3)


def test_llm_calls_are_in_the_openai_form(recorded: Recorded) -> None:
    events = recorded.decorated.bundle.events
    request, response = (next(e for e in events if e["type"] == kind) for kind in ("llm_request", "llm_response"))
    assert request["provider"] == "openai"
    assert request["model"] == "gpt-5-mini"
    assert request["input"]["method"] == "chat.completions.create"
    assert request["input"]["request"]["messages"][1]["content"].startswith("Please refund")
    assert response["output"]["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "find_order"
    assert response["parent_id"] == request["id"]
    assert response["total_tokens"] > 0


def test_stream_is_recorded_as_the_assembled_completion(recorded: Recorded) -> None:
    *_, request, response, _end = recorded.decorated.bundle.events
    assert request["input"]["request"]["stream"] is True
    letter = response["output"]["choices"][0]["message"]["content"]
    assert letter == json.loads(recorded.stdout[recorded.stdout.index("{") :])["letter"]


def test_http_exchange_is_recorded(recorded: Recorded) -> None:
    call, result = recorded.decorated.bundle.events[1:3]
    assert call["input"]["method"] == "GET"
    assert call["input"]["url"] == recorded.decorated.variables["SHOP_URL"] + "/policy.json"
    assert result["output"]["status_code"] == 200
    assert result["output"]["body"] == {"shop": "Lamps & Co", "currency": "EUR", "refund_days": 30}


def test_the_bug_shows_at_one_step(recorded: Recorded) -> None:
    events = recorded.decorated.bundle.events
    asked = events[8]["output"]["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(asked)["amount"] == 49.9
    assert "4990" in json.dumps(events[9]["input"])


def test_the_key_is_nowhere_in_the_bundle(recorded: Recorded) -> None:
    assert API_KEY.encode() not in recorded.decorated.bundle.everything


def test_last_lines_say_calls_place_verdict_and_next_command(recorded: Recorded) -> None:
    name = recorded.decorated.bundle.path.name
    lines = [line for line in recorded.stderr.splitlines() if "sftrace" in line]
    assert len(lines) >= 2, recorded.stderr
    last = "\n".join(lines[1:])
    assert "6 LLM and 3 tool and HTTP calls, completed, replays offline" in last
    assert f"python -m sftrace_otel inspect sftraces/{name}" in last


@pytest.mark.parametrize("program", ["stepfork", "sftrace"])
def test_validates(recorded: Recorded, program: str) -> None:
    path = str(recorded.decorated.bundle.path)
    done = recorded.decorated.run(program, "validate", path, "--verify-integrity")
    assert done.returncode == 0, done.stdout + done.stderr


def test_tools_by_setting_give_the_same_bundle(recorded: Recorded) -> None:
    decorated, undecorated = recorded.decorated.bundle, recorded.undecorated.bundle
    assert shape(undecorated) == shape(decorated)
    assert undecorated.manifest["agent_name"] == decorated.manifest["agent_name"]
    assert undecorated.manifest["totals"] | {"duration_ms": 0} == decorated.manifest["totals"] | {"duration_ms": 0}


def test_the_variants_differ_in_their_tools_only() -> None:
    tool_code = r"(?s)^# SPDX.*?from openai|^from shop .*?\n|^ORDERS = .*?(?=^def parameters)|^from sftrace_otel .*?\n"
    rest = [
        re.sub(r"\s+", " ", re.sub(tool_code, "", (EXAMPLES / name / "agent.py").read_text(), flags=re.M))
        for name in ("quickstart", "quickstart_undecorated")
    ]
    assert rest[0] == rest[1]
    assert "def work(" in rest[0]


def test_replay_is_offline_and_prints_the_same(recorded: Recorded) -> None:
    address = urlsplit(recorded.decorated.variables["SHOP_URL"])
    with socket.create_server((address.hostname or "", address.port or 0)) as listener:
        done = recorded.decorated.sftrace("replay", str(recorded.decorated.bundle.path), "--", "python", "agent.py")
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert done.returncode == 0, done.stdout + done.stderr
    assert recorded.stdout in done.stdout
    assert len(recorded.decorated.bundles) == 1, "a replay records nothing"


def test_replay_by_entrypoint(recorded: Recorded) -> None:
    done = recorded.decorated.sftrace("replay", str(recorded.decorated.bundle.path), "--entrypoint", "agent:main")
    assert done.returncode == 0, done.stdout + done.stderr
    assert recorded.stdout in done.stdout


def test_replay_of_the_undecorated_agent(recorded: Recorded) -> None:
    path = str(recorded.undecorated.bundle.path)
    done = recorded.undecorated.sftrace(
        "replay", path, "--", "python", "agent.py", OTEL_SFTRACE_TOOLS="shop:find_order,shop:refund"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert recorded.stdout in done.stdout


@pytest.mark.parametrize(
    ("old", "new", "pointer", "values"),
    [
        ("the lamp arrived broken", "the lamp is ugly", "/request/messages/1/content", ("broken", "ugly")),
        ('order["price_cents"]', 'order["price"]', "/amount", ("4990", "49.9")),
    ],
    ids=["prompt", "bug mended"],
)
def test_a_changed_agent_diverges_with_pointer_and_values(
    recorded: Recorded, place: Place, old: str, new: str, pointer: str, values: tuple[str, str]
) -> None:
    place.copy_agent("quickstart", [(old, new)])
    path = str(recorded.decorated.bundle.path)
    done = place.sftrace("replay", path, "--", "python", "agent.py", **recorded.decorated.variables)
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert pointer in said
    assert all(value in said for value in values), said


def test_fork_at_the_step_before_the_bug(recorded: Recorded, place: Place) -> None:
    out = place.folder / "forked.sftrace"
    done = place.sftrace("fork", str(recorded.decorated.bundle.path), "--at-step", "8", "-o", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(Bundle(path=out).events) == 9
    for program in ("stepfork", "sftrace"):
        checked = place.run(program, "validate", str(out), "--verify-integrity")
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_replay_of_a_fork_ends_with_exit_code_4(recorded: Recorded, place: Place) -> None:
    out = str(place.folder / "forked.sftrace")
    assert place.sftrace("fork", str(recorded.decorated.bundle.path), "--at-step", "8", "-o", out).returncode == 0
    done = recorded.decorated.sftrace("replay", out, "--", "python", "agent.py")
    assert done.returncode == 4, done.stdout + done.stderr


def test_changed_byte_is_found(recorded: Recorded, place: Place) -> None:
    copy = place.folder / "copy.sftrace"
    shutil.copytree(recorded.decorated.bundle.path, copy)
    events = copy / "events.jsonl"
    events.write_bytes(events.read_bytes().replace(b"desk lamp", b"desk lump"))
    assert place.sftrace("validate", str(copy), "--verify-integrity").returncode == 1
    assert place.sftrace("replay", str(copy), "--", "python", "-c", "pass").returncode == 2


def test_record_verb_does_the_same(place: Place, recorded: Recorded) -> None:
    with quickstart_server() as addresses:
        place.copy_agent("quickstart")
        done = place.sftrace("record", "--agent", "desk", "--", "python", "agent.py", **addresses)
    assert done.returncode == 0, done.stderr
    assert done.stdout == recorded.stdout
    assert place.bundle.manifest["agent_name"] == "desk"
    assert place.bundle.manifest["totals"]["events"] == recorded.decorated.bundle.manifest["totals"]["events"]


def test_the_root_span_names_the_bundle_and_its_trace_finds_it(place: Place) -> None:
    place.copy_agent("quickstart")
    with quickstart_server() as addresses:
        done = place.instrumented(
            "python", "agent.py", OTEL_TRACES_EXPORTER="console", OTEL_METRICS_EXPORTER="none", **addresses
        )
    assert done.returncode == 0, done.stderr
    name = place.bundle.path.name
    spans = re.findall(r"^\{\n.*?^\}", done.stdout, flags=re.M | re.S)
    root = next(json.loads(span) for span in spans if "sftrace.bundle" in span)
    assert root["attributes"]["sftrace.bundle"].removesuffix(".sftrace") == name.removesuffix(".sftrace")
    trace_id = root["context"]["trace_id"].removeprefix("0x")
    listed = place.sftrace("ls", "--trace", trace_id)
    assert listed.returncode == 0
    assert name in listed.stdout
    assert place.sftrace("inspect", trace_id).returncode == 0
    assert place.sftrace("inspect", "latest").returncode == 0


def test_provider_set_up_by_hand(place: Place) -> None:
    with quickstart_server() as addresses:
        done = place.run("python", str(EXAMPLES / "provider" / "agent.py"), **addresses)
    assert done.returncode == 0, done.stderr
    assert "span: weather report" in done.stdout, "the other exporter goes on"
    assert "It is 22.0 °C." in done.stdout
    bundle = place.bundle
    assert bundle.manifest["agent_name"] == "provider-example"
    types = [event["type"] for event in bundle.events]
    assert types == ["run_start", "tool_call", "tool_result", "llm_request", "llm_response", "run_end"]
    assert place.run("stepfork", "validate", str(bundle.path), "--verify-integrity").returncode == 0


@pytest.mark.full
def test_make_demo(root: Path, place: Place) -> None:
    done = place.run("make", "-C", str(root), "demo")
    assert done.returncode == 0, done.stdout + done.stderr
    commands = re.findall(r"^\$ (.*)$", done.stdout, flags=re.M)
    assert [re.sub(r"\S*\.sftrace\b", "B", command) for command in commands] == [
        "python examples/quickstart/server.py &",
        "opentelemetry-instrument python examples/quickstart/agent.py",
        "python -m sftrace_otel validate --verify-integrity B",
        "python -m sftrace_otel inspect B",
        "python -m sftrace_otel replay B -- python examples/quickstart/agent.py",
        "python -m sftrace_otel fork B --at-step 8 -o B --overwrite",
        "python -m sftrace_otel validate --verify-integrity B",
    ]


def test_a_chain_alone_replays_with_the_server_stopped(tmp_path: Path) -> None:
    """Recorded as `.flight` only; the client gets the same bytes of each body, piece by piece where it streams."""
    with quickstart_server() as addresses:
        place = Place(folder=tmp_path, variables=addresses)
        place.copy_agent(
            "quickstart", [("policy = httpx.get(", "watch()\n    policy = httpx.get("), ("def main()", WATCH)]
        )
        first = place.instrumented("python", "agent.py", OTEL_SFTRACE_FORMATS="flight", SEEN="first.txt")
        assert first.returncode == 0, first.stderr
    assert not list(tmp_path.glob("sftraces/*.sftrace"))
    (chain,) = tmp_path.glob("sftraces/*.flight")
    assert place.sftrace("verify", str(chain)).returncode == 0
    again = place.sftrace("replay", str(chain), "--", "python", "agent.py", SEEN="again.txt")
    assert again.returncode == 0, again.stderr
    assert again.stdout == first.stdout
    seen, replayed = (sorted((tmp_path / name).read_bytes().splitlines()) for name in ("first.txt", "again.txt"))
    assert len(seen) > 7 and replayed == seen, "two of the calls are in flight at once, so in any order"


WATCH = '''def watch() -> None:
    """Write down each body, and each piece of a streamed one, that the HTTP client hands on."""
    import httpx2

    for module in (httpx, httpx2):
        decoded = module.Response.iter_bytes
        late = module.Response.aiter_bytes

        def pieces(self, *args, decoded=decoded, **more):
            for data in decoded(self, *args, **more):
                note(data)
                yield data

        async def late_pieces(self, *args, late=late, **more):
            async for data in late(self, *args, **more):
                note(data)
                yield data

        module.Response.iter_bytes, module.Response.aiter_bytes = pieces, late_pieces


def note(data):
    with open(os.environ["SEEN"], "a") as file:
        file.write(repr(data) + "\\n")


def main()'''
