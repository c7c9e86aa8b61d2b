# SPDX-License-Identifier: Apache-2.0
"""Runs recorded as `.flight`: the chain while it grows, what it holds, what a kill leaves, its way to `.sftrace`."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import stepfork.trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import SpanKind

from sftrace_otel import SftraceExporter, instrumentation, llm_request, record, recorder, trace_tool
from sftrace_otel.bundle import flight as flight_files
from sftrace_otel.bundle.convert import to_flight, to_sftrace
from sftrace_otel.bundle.read import list_bundles, open_bundle, resolve, validate_bundle
from sftrace_otel.errors import TraceStorageError
from sftrace_otel.flight import FlightWriter, open_flight, verify_flight
from sftrace_otel.fork import ForkPoint, fork_trace
from sftrace_otel.replay import ReplaySession
from sftrace_otel.trace import Trace

from .conftest import HERE

Verify = Callable[[Path], str | None]
VECTORS = HERE.parent / "data" / "vectors"


@pytest.fixture(autouse=True)
def _nothing_active(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    recorder.restart_lineage()
    yield
    recorder.release()
    instrumentation.uninstall()


@trace_tool
def price(item: str, *, count: int = 1) -> dict[str, Any]:
    """A tool."""
    if item == "gone":
        raise LookupError("no such item")
    return {"total": 2.0 * count, "item": item, "big": 2**60}


def agent(server: str) -> list[Any]:
    """An LLM call, a stream, an HTTP exchange, tools, an error."""
    seen: list[Any] = []
    key = "sk-aaaabbbbccccddddeeeeffff00001111"
    with openai.OpenAI(base_url=server + "/v1", api_key=key, max_retries=0) as client:
        asked = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Grüße \u200b é"}])
        seen.append(asked.choices[0].message.content)
        chunks = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "s"}], stream=True)
        seen.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))
    seen.append(httpx.get(server + "/v1/models", headers={"authorization": "Bearer abcdefghijklmnop"}).text)
    seen.append(price("lamp", count=3))
    with pytest.raises(LookupError):
        price("gone")
    return seen


@pytest.fixture
def server(openai_server: Any) -> str:
    return str(openai_server.url).rstrip("/").removesuffix("/v1")


def recorded(path: Path, program: Callable[[], Any]) -> Any:
    """The result of `program`, recorded into `path`."""
    instrumentation.install()
    with record("flyer", output=path) as session:
        result = program()
        session.set_output(result)
    assert session.path == path
    return result


def events(path: Path) -> list[Any]:
    return list(open_flight(path).events())


def test_a_run_is_a_chain_that_an_independent_verifier_accepts(tmp_path: Path, server: str, oracle: Verify) -> None:
    path = tmp_path / "run.flight"
    recorded(path, lambda: agent(server))
    assert verify_flight(path).valid
    assert oracle(path) is None
    types = [event.type for event in events(path)]
    assert types[0] == "run.start"
    assert types[-1] == "run.end"
    assert types.count("http.request") == types.count("http.response") == 3
    assert (types.count("tool.call"), types.count("tool.result"), types.count("error")) == (2, 2, 1)
    assert b"sk-aaaa" not in b"".join(one.read_bytes() for one in path.rglob("*") if one.is_file())
    assert b"abcdefghijklmnop" not in (path / "events.jsonl").read_bytes()
    for event in events(path)[1:]:
        assert all(parent < event.seq for parent in event.parents)
        assert event.parents
    answers = [event for event in events(path) if event.type == "http.response"]
    assert all(isinstance(event.body["body"], str) for event in answers)
    assert not list(tmp_path.glob(".*.journal"))


def test_a_chain_replays_as_it_was(tmp_path: Path, server: str) -> None:
    path = tmp_path / "run.flight"
    first = recorded(path, lambda: agent(server))
    with ReplaySession.from_trace(path) as session:
        assert agent(server) == first
        session.verify_complete()


def test_equal_exchanges_have_equal_body_hashes(tmp_path: Path) -> None:
    """What differs from call to call (ids, times, lineage) is outside the body."""
    hashes = []
    for name in ("a", "b"):
        path = tmp_path / f"{name}.flight"
        recorded(path, lambda: [price("lamp"), price("lamp")])
        hashes.append([event.body_hash for event in events(path) if event.type.startswith("tool.")])
    assert hashes[0] == hashes[1]
    assert hashes[0][0] == hashes[0][2] != hashes[0][1]


def test_the_request_is_in_the_chain_before_its_answer(tmp_path: Path) -> None:
    """And whole lines only, with the manifest missing: the chain is live."""
    path, seen = tmp_path / "run.flight", []

    def answer(request: httpx.Request) -> httpx.Response:
        lines = (tmp_path / ".run.flight.journal" / "events.jsonl").read_bytes()
        seen.append(lines.splitlines(keepends=True))
        return httpx.Response(200, json={"ok": True})

    def program() -> Any:
        with httpx.Client(transport=httpx.MockTransport(answer)) as client:
            return client.post("http://shop.test/order", json={"n": 1}).json()

    recorded(path, program)
    assert [json.loads(line)["type"] for line in seen[0]] == ["run.start", "http.request"]
    assert seen[0][-1].endswith(b"\n")
    assert json.loads(seen[0][-1])["body"]["body"] == '{"n":1}'
    assert (path / "events.jsonl").read_bytes().startswith(b"".join(seen[0])), "no line is written again"


def test_threads_and_tasks_share_one_chain(tmp_path: Path, oracle: Verify) -> None:
    path = tmp_path / "run.flight"

    async def gather() -> None:
        await asyncio.gather(*(asyncio.to_thread(price, f"t{n}") for n in range(20)))

    def program() -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(price, map(str, range(60))))
        asyncio.run(gather())

    recorded(path, program)
    assert oracle(path) is None
    found = events(path)
    by_seq = {event.seq: event for event in found}
    assert sum(event.type == "tool.call" for event in found) == 80
    for event in found:
        if event.type == "tool.result":
            call = by_seq[event.parents[0]]
            assert call.type == "tool.call"
            assert call.body["input"]["item"] == event.body["output"]["item"]


def test_both_formats_hold_the_same_run(tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SFTRACE_FORMATS", "sftrace,flight")
    recorded(tmp_path / "run.sftrace", lambda: agent(server))
    assert validate_bundle(tmp_path / "run.sftrace", verify_integrity=True).valid
    assert verify_flight(tmp_path / "run.flight").valid
    made = to_sftrace(tmp_path / "run.flight", tmp_path / "again.sftrace")
    assert (made.path / "events.jsonl").read_bytes() == (tmp_path / "run.sftrace" / "events.jsonl").read_bytes()
    assert [one.path.name for one in list_bundles(tmp_path)].count("run.flight") == 0, "it is the run of the .sftrace"


def test_neither_of_two_bundles_is_put_where_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(tmp_path / "run.flight", lambda: price("lamp"))
    before = (tmp_path / "run.flight" / "events.jsonl").read_bytes()
    monkeypatch.setenv("OTEL_SFTRACE_FORMATS", "sftrace,flight")
    recorder.release()
    with record("flyer", output=tmp_path / "run.sftrace") as session:
        price("desk")
    assert session.path is not None and session.path.name != "run.sftrace"
    assert verify_flight(session.path.with_suffix(".flight")).valid
    assert (tmp_path / "run.flight" / "events.jsonl").read_bytes() == before
    assert not list(tmp_path.glob(".*.journal"))


def test_a_fault_of_the_chain_costs_the_sftrace_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_SFTRACE_FORMATS", "sftrace,flight")

    def full(file: int, line: bytes) -> int:
        raise OSError(28, "No space left on device")

    instrumentation.install()
    with record("flyer", output=tmp_path / "run.sftrace"):
        monkeypatch.setattr(flight_files, "append_to", full)
        price("lamp")
        monkeypatch.undo()
        price("lamp")
    assert validate_bundle(tmp_path / "run.sftrace", verify_integrity=True).valid
    assert open_bundle(tmp_path / "run.sftrace").manifest.totals.tool_calls == 2
    assert "writing .flight" in caplog.text
    assert verify_flight(tmp_path / "run.flight").valid, "what could be appended still verifies"


def test_spans_and_calls_without_wire_have_types_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "run.flight"

    def program() -> None:
        llm_request(call=lambda: {"text": "hi"}, model="m", provider="p", input={"prompt": "x"})

    recorded(path, program)
    kinds = [event.type for event in events(path)]
    assert kinds == ["run.start", "x-sftrace.llm.request", "x-sftrace.llm.response", "run.end"]
    with ReplaySession.from_trace(path):
        program()


def test_a_killed_run_leaves_a_chain_that_verifies(tmp_path: Path, oracle: Verify) -> None:
    program = (
        "import os, time\n"
        "from sftrace_otel import record, trace_tool\n"
        "@trace_tool\n"
        "def tool(n):\n    return n\n"
        "@trace_tool\n"
        "def hangs():\n    print('inside', flush=True); time.sleep(60)\n"
        "with record('a', output='run.flight'):\n"
        "    [tool(n) for n in range(50)]\n"
        "    hangs()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"inside\n"
        process.send_signal(signal.SIGKILL)
    before = (tmp_path / ".run.flight.journal" / "events.jsonl").read_bytes()
    done = subprocess.run(
        [sys.executable, "-m", "sftrace_otel", "recover", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run.flight" / "events.jsonl").read_bytes() == before, "no line is written again"
    assert oracle(tmp_path / "run.flight") is None
    made = to_sftrace(tmp_path / "run.flight", tmp_path / "run.sftrace")
    assert validate_bundle(made.path, strict=False, verify_integrity=True).valid
    assert open_bundle(made.path).manifest.status == "running"
    assert open_bundle(made.path).manifest.totals.tool_calls == 51


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_leaves_its_parents_chain_alone(tmp_path: Path, oracle: Verify) -> None:
    path = tmp_path / "run.flight"

    def program() -> None:
        price("before")
        stop = threading.Event()
        other = threading.Thread(target=lambda: [price("busy") for _ in iter(stop.is_set, True)])
        other.start()
        child = os.fork()
        if child == 0:
            try:
                price("child")
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        stop.set()
        other.join()
        price("after")

    recorded(path, program)
    assert oracle(path) is None
    items = [event.body["input"]["item"] for event in events(path) if event.type == "tool.call"]
    assert (items[0], items[-1]) == ("before", "after")
    assert "child" not in items


# Conversion


@pytest.mark.parametrize("name", ["completed", "failed_tool", "numbers", "parallel", "partial", "secrets", "legacy"])
def test_bundles_of_the_reference_survive_both_ways(name: str, tmp_path: Path, oracle: Verify) -> None:
    source = VECTORS / "sftrace" / f"{name}.sftrace"
    there = to_flight(source, tmp_path / "x.flight")
    assert oracle(there.path) is None
    back = to_sftrace(there.path, tmp_path / "x.sftrace")
    mine = [json.loads(line) for line in (back.path / "events.jsonl").read_bytes().splitlines()]
    theirs = [json.loads(line) for line in (source / "events.jsonl").read_bytes().splitlines()]
    late = {event["id"] for event in theirs if event["type"] == "error"} if there.left else set()
    for one, other in zip(mine, theirs, strict=True):
        dropped = ("duration_ms", "timestamp") if one["id"] in late else ("duration_ms",)
        assert {k: v for k, v in one.items() if k not in dropped} == {
            k: v for k, v in other.items() if k not in dropped
        }
    result = stepfork.trace.validate_bundle(back.path, strict=name != "partial", verify_integrity=True)
    assert result.issues == [], result.issues


def test_conversion_is_deterministic(tmp_path: Path, server: str) -> None:
    recorded(tmp_path / "run.sftrace", lambda: agent(server))
    one, other = (to_flight(tmp_path / "run.sftrace", tmp_path / f"{n}.flight").path for n in (1, 2))
    assert (one / "events.jsonl").read_bytes() == (other / "events.jsonl").read_bytes()
    assert (one / "manifest.json").read_bytes() == (other / "manifest.json").read_bytes()


def test_a_chain_of_another_writer_becomes_calls(tmp_path: Path) -> None:
    path = tmp_path / "theirs.flight"
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    said = {"role": "assistant", "content": "hello " * 5000}
    answer = {
        "id": "c", "object": "chat.completion", "created": 1, "model": "m-1",
        "choices": [{"index": 0, "finish_reason": "stop", "message": said}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
    }  # fmt: skip
    with FlightWriter(path, run_id="run_x") as chain:
        start = chain.append("run.start", {"agent": "theirs", "argv": ["x"]})
        asked = chain.append(
            "http.request",
            {"method": "POST", "url": "https://api.example.test/v1/chat/completions", "headers": {}, "body": body},
            parents=[start],
        )
        chain.append("http.response", {"status": 200, "headers": {}, "body": answer}, parents=[asked])
        call = chain.append("tool.call", {"name": "search", "input": {"q": "x"}}, parents=[start])
        chain.append(
            "tool.result", {"name": "search", "output": {"token": "sk-aaaabbbbccccddddeeeeffff"}}, parents=[call]
        )
        failing = chain.append("tool.call", {"name": "search", "input": {"q": "y"}}, parents=[start])
        chain.append("error", {"error_type": "KeyError", "message": "'y'"}, parents=[failing])
        chain.append("clock.read", {"source": "time.time", "value": 1.5}, parents=[start])
        chain.append("run.end", {"status": "completed"}, parents=[start])
    made = to_sftrace(path, tmp_path / "theirs.sftrace")
    assert made.left == {"clock.read": 1}
    assert validate_bundle(made.path, verify_integrity=True).valid
    trace = Trace.load(made.path)
    assert Counter(event.type for event in trace.events) == {
        "run_start": 1, "llm_request": 1, "llm_response": 1, "tool_call": 2, "tool_result": 2, "error": 1, "run_end": 1,
    }  # fmt: skip
    response = next(event for event in trace.events if event.type == "llm_response")
    assert (response.model, response.total_tokens) == ("m-1", 3)  # type: ignore[union-attr]
    assert response.output["choices"][0]["message"]["content"] == "hello " * 5000, "it was in a blob"  # type: ignore
    assert "sk-aaaa" not in (made.path / "events.jsonl").read_text()


@pytest.mark.parametrize("name", ["valid", "ok_respelled", "ok_more_manifest"])
def test_vectors_that_verify_can_be_read(name: str, tmp_path: Path) -> None:
    made = to_sftrace(VECTORS / "flight" / f"{name}.flight", tmp_path / "v.sftrace")
    assert validate_bundle(made.path, strict=False, verify_integrity=True).valid


def test_what_does_not_verify_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(TraceStorageError, match="does not verify"):
        to_sftrace(VECTORS / "flight" / "body_edited.flight", tmp_path / "v.sftrace")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TraceStorageError):
        open_bundle(VECTORS / "flight" / "body_edited.flight")


# The verbs


def test_every_verb_reads_a_chain(tmp_path: Path, server: str, cli: Callable[..., Any]) -> None:
    path = tmp_path / "run.flight"
    recorded(path, lambda: agent(server))
    assert cli("inspect", str(path), "--json").json["summary"]["run_id"] == open_flight(path).manifest.run_id
    assert cli("ls", str(tmp_path), "--json").json["bundles"][0]["llm_calls"] == 2
    assert resolve("latest", dir=tmp_path) == path
    done = cli("convert", str(path), str(tmp_path / "run.sftrace"), "--json")
    assert done.json["not_carried"] == {}
    assert cli("convert", str(tmp_path / "run.sftrace"), str(tmp_path / "y.flight")).code == 0
    assert cli("convert", str(path), str(tmp_path / "z.flight")).code == 2
    assert cli("fork", str(path), "--at-step", "2").code == 0
    assert validate_bundle(tmp_path / "run-forked.sftrace", verify_integrity=True).valid
    assert cli("fork", str(path), "--at-step", "2", "-o", str(tmp_path / "f.flight")).code == 0
    assert verify_flight(tmp_path / "f.flight").valid
    forked = fork_trace(path, ForkPoint(step=2), output_path=tmp_path / "g.flight")
    assert [event.step for event in forked.trace.events] == [0, 1, 2]
    assert Trace.load(tmp_path / "g.flight").provenance["parents"][0]["run_id"] == open_flight(path).manifest.run_id


def test_draws_are_events_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`clock.read` and `rng.draw`, live and converted; replay gives the same."""
    (tmp_path / "drawing.py").write_text(
        "import random, time, uuid\n"
        "from sftrace_otel import trace_tool\n"
        "@trace_tool\n"
        "def stamp(text):\n    return text\n"
        "def agent():\n"
        "    return [stamp(f'{time.time()!r} {random.random()!r} {uuid.uuid4()}'), random.randint(1, 10**9)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OTEL_SFTRACE_NONDETERMINISM", "record")
    import drawing  # type: ignore[import-not-found]

    path = tmp_path / "run.flight"
    first = recorded(path, drawing.agent)
    kinds = {event.type for event in events(path)}
    assert {"clock.read", "rng.draw"} <= kinds
    assert "nondeterminism" in (open_flight(path).manifest.capabilities or [])
    with ReplaySession.from_trace(path) as session:
        with record("flyer", output=tmp_path / "inert.flight"):
            assert drawing.agent() == first
        session.verify_complete()
    back = to_flight(to_sftrace(path, tmp_path / "x.sftrace").path, tmp_path / "y.flight").path
    draws = [[event.body for event in events(one) if event.type in ("clock.read", "rng.draw")] for one in (path, back)]
    assert draws[0] == draws[1]


def test_calls_known_from_spans_alone_are_in_the_chain(tmp_path: Path) -> None:
    """Under an exporter only: what has no wire has types of its own, and an exchange the members of one."""
    exporter = SftraceExporter(formats="sftrace,flight", dir=str(tmp_path), quiet=True)
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("theirs")
    asked = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.provider.name": "openai"}
    got = {"http.request.method": "GET", "url.full": "http://shop.test/x", "http.response.status_code": 200}
    with tracer.start_as_current_span("invoke_agent a", attributes={"gen_ai.operation.name": "invoke_agent"}):
        with tracer.start_as_current_span("chat m", attributes=asked):
            pass
        with tracer.start_as_current_span("GET", kind=SpanKind.CLIENT, attributes=got):
            pass
    provider.shutdown()
    (chain,), (bundle,) = tmp_path.glob("*.flight"), tmp_path.glob("*.sftrace")
    bodies = {event.type: event.body for event in events(chain)}
    assert {"x-sftrace.llm.request", "x-sftrace.llm.response", "x-sftrace.span"} <= bodies.keys()
    assert (bodies["http.request"]["method"], bodies["http.request"]["url"]) == ("GET", "http://shop.test/x")
    assert bodies["http.response"]["status"] == 200
    back = to_sftrace(chain, tmp_path / "back" / "again.sftrace").path
    assert (back / "events.jsonl").read_bytes() == (bundle / "events.jsonl").read_bytes()


def deep() -> Any:
    """A list in a list, ten thousand times."""
    value: Any = []
    for _ in range(10_000):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [1e16, 1e20, -0.0, 1.0, 2**53 + 1, 1234567890123456789, 2**70, math.inf, -math.inf, "a\u2028b\x85c\x0b", "e\u0301",
     {"$blob": "mine", "é": 1, "e\u0301": 2}, {"b": 1.0, "a": [1e21]}, (1, {2}), b"\x00\xff", "x" * 20_000],
    ids=lambda value: ascii(value)[:30],
)  # fmt: skip
def test_values_that_a_chain_spells_otherwise_come_back(value: Any, tmp_path: Path, oracle: Verify) -> None:
    """Cases D03, D09, D10 and D12: arguments match, results have their type and order."""

    @trace_tool
    def same(given: Any) -> Any:
        return given

    path = tmp_path / "run.flight"
    recorded(path, lambda: repr(same(value)))
    assert oracle(path) is None
    with ReplaySession.from_trace(path) as session:
        assert repr(same(value)) == repr(value)
        session.verify_complete()
    if value == 1234567890123456789:
        assert b"1234567890123456789" in (path / "events.jsonl").read_bytes()


@pytest.mark.parametrize("made", [lambda: math.nan, deep])
def test_nan_and_what_is_too_deep_are_recorded(made: Callable[[], Any], tmp_path: Path, oracle: Verify) -> None:
    """Cases D08 and D09."""

    @trace_tool
    def count(given: Any) -> int:
        return 1

    path = tmp_path / "run.flight"
    recorded(path, lambda: count(made()))
    assert oracle(path) is None
    with ReplaySession.from_trace(path):
        assert count(made()) == 1
