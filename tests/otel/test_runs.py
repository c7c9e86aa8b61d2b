# SPDX-License-Identifier: Apache-2.0
"""Which span belongs to which run, and when a run ends: the sentences of the design's "Runs", one by one.

The recorder's clock is the test's own; nothing here waits.
"""

from __future__ import annotations

import _thread
import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags

from sftrace_otel import SftraceExporter, SftraceSpanProcessor, record, recorder, set_output, trace_tool
from sftrace_otel.bundle.read import validate_bundle
from sftrace_otel.recorder import Recorder

from .conftest import CHAT, TOOL, Bundles, Child

Provider = Callable[..., TracerProvider]
MINUTE = 60_000_000_000


@trace_tool
def double(x: int) -> int:
    return 2 * x


class Clock:
    """Monotonic ns; only the test moves it."""

    def __init__(self) -> None:
        self.now = 5 * MINUTE

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def tracer(bundles: Bundles, make_provider: Provider, monkeypatch: pytest.MonkeyPatch) -> trace.Tracer:
    provider = make_provider(SftraceSpanProcessor())
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return provider.get_tracer("test")


@pytest.fixture
def active(tracer: trace.Tracer) -> Recorder:
    found = recorder.active()
    assert found is not None
    return found


@pytest.fixture
def clock(active: Recorder) -> Clock:
    active.ticks = clock = Clock()
    return clock


def runs(bundles: Bundles) -> list[dict[str, Any]]:
    """run.json of each bundle, in the order of their first call, with its `id` and the `x` of its `calls`."""
    found = []
    for path in bundles.paths():
        result = validate_bundle(path, verify_integrity=True)
        assert result.valid, result.issues
        document = json.loads((path / "run.json").read_bytes())
        events = [json.loads(line) for line in (path / "events.jsonl").read_bytes().splitlines()]
        document["id"] = events[0]["run_id"]
        document["output"] = events[-1].get("output")
        document["calls"] = [event["input"].get("x", event["type"]) for event in events if event["type"] in CALLS]
        document["name"] = path.name
        document["at"] = events[1]["timestamp"]
        found.append(document)
    return sorted(found, key=lambda document: document["at"])


CALLS = ("tool_call", "llm_request")


def remote(trace_id: int = 0xABC, span_id: int = 0xDEF) -> Any:
    context = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(1))
    return trace.set_span_in_context(NonRecordingSpan(context))


# --- which run --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "attributes", "own"),
    [
        ("GET /", SpanKind.SERVER, {}, True),
        ("receive", SpanKind.CONSUMER, {}, True),
        ("invoke_agent shop", SpanKind.INTERNAL, {"gen_ai.operation.name": "invoke_agent"}, True),
        ("invoke_agent shop", SpanKind.INTERNAL, {}, True),
        ("main", SpanKind.INTERNAL, {}, False),
        ("send", SpanKind.PRODUCER, {}, False),
        ("GET", SpanKind.CLIENT, {}, False),
    ],
)
def test_which_local_roots_are_runs_of_their_own(
    bundles: Bundles, tracer: trace.Tracer, name: str, kind: SpanKind, attributes: dict[str, str], own: bool
) -> None:
    with tracer.start_as_current_span(name, kind=kind, attributes=attributes):
        double(1)
    assert [run["kind"] for run in runs(bundles)] == (["trace"] if own else [])
    recorder.close_all()
    assert [run["kind"] for run in runs(bundles)] == (["trace"] if own else ["process"])


def test_an_agent_inside_a_request_is_no_run_of_its_own(bundles: Bundles, tracer: trace.Tracer) -> None:
    with (
        tracer.start_as_current_span("POST", kind=SpanKind.SERVER),
        tracer.start_as_current_span("invoke_agent", attributes={"gen_ai.operation.name": "invoke_agent"}),
    ):
        double(1)
    assert [run["calls"] for run in runs(bundles)] == [[1]]


def test_a_block_joins_a_request_and_one_with_a_path_does_not(
    bundles: Bundles, tracer: trace.Tracer, tmp_path: Path
) -> None:
    with tracer.start_as_current_span("POST", kind=SpanKind.SERVER):
        double(0)
        with record("joined") as session:
            double(1)
            session.set_output("of the request")
        with record("own", output=tmp_path / "own.sftrace") as session:
            double(2)
            set_output("its own")
        assert session.path == tmp_path / "own.sftrace"
        double(3)
    assert [(row["calls"], row["output"]) for row in runs(bundles)] == [([0, 1, 3], "of the request")]
    own = Bundles(tmp_path)
    assert [row["calls"] for row in runs(own)] == [[2]]
    assert [row["output"] for row in runs(own)] == ["its own"]


def test_a_trace_is_one_run(bundles: Bundles, tracer: trace.Tracer, active: Recorder) -> None:
    """scope=trace: one run for each trace id, whatever kind the local roots are of."""
    object.__setattr__(active.settings, "scope", "trace")
    first = tracer.start_span("a", context=remote(1))
    second = tracer.start_span("b", context=remote(1))
    other = tracer.start_span("c", context=remote(2))
    for number, span in ((1, first), (2, second), (3, other)):
        with trace.use_span(span):
            double(number)
    first.end()
    assert runs(bundles) == []
    second.end()
    other.end()
    assert [run["calls"] for run in runs(bundles)] == [[1, 2], [3]]
    with tracer.start_as_current_span("d", context=remote(1)):
        double(4)
    found = runs(bundles)
    assert found[2]["calls"] == [4]
    assert found[2]["origin"] == {"continues": found[0]["id"], "remote_parent": found[2]["origin"]["remote_parent"]}


def test_calls_without_context_go_to_the_only_open_run_else_to_the_process(bundles: Bundles, tmp_path: Path) -> None:
    with record("one") as outer:
        _in_thread(lambda: double(1))
        inner = record("two", output=tmp_path / "two.sftrace")
        with inner:
            _in_thread(lambda: double(2))
    recorder.close_all()
    found = {run["kind"]: run["calls"] for run in runs(bundles)}
    assert found == {"record": [1], "process": [2]}
    assert outer.path is not None


def _in_thread(call: Callable[[], object]) -> None:
    """A thread of which nothing is known: one that the threading module did not start."""
    done = threading.Event()

    def run() -> None:
        try:
            call()
        finally:
            done.set()

    _thread.start_new_thread(run, ())
    assert done.wait(30)


# --- its end ----------------------------------------------------------------------------------------------------------


def test_what_comes_after_the_root_is_a_run_linked_to_it(bundles: Bundles, tracer: trace.Tracer) -> None:
    root = tracer.start_span("POST", kind=SpanKind.SERVER)
    with trace.use_span(root):
        double(1)
        child = tracer.start_span("child")
    root.end()
    with trace.use_span(child):
        double(2)
    with trace.use_span(root):
        double(3)
        with tracer.start_as_current_span("chat m", attributes=CHAT):
            pass
    child.end()
    assert len(runs(bundles)) == 1
    recorder.close_all()
    first, second = runs(bundles)
    assert (first["calls"], second["calls"]) == ([1], [2, 3, "llm_request"])
    assert second["origin"] == {"continues": first["id"]}


def test_a_linked_run_ends_after_a_minute_without_a_call(bundles: Bundles, active: Recorder, clock: Clock) -> None:
    async def main() -> None:
        go = asyncio.Event()

        async def stray() -> None:
            await go.wait()
            double(2)

        with record("agent"):
            task = asyncio.create_task(stray())
            await asyncio.sleep(0)
            double(1)
        go.set()
        await task

    asyncio.run(main())
    clock.now += MINUTE - 1
    active.sweep()
    assert [run["calls"] for run in runs(bundles)] == [[1]]
    clock.now += 1
    active.sweep()
    assert [run["calls"] for run in runs(bundles)] == [[1], [2]]


def test_the_process_ends_its_run_after_a_minute_beside_others(
    bundles: Bundles, tracer: trace.Tracer, active: Recorder, clock: Clock
) -> None:
    double(1)
    clock.now += 2 * MINUTE
    double(2)
    active.sweep()
    assert runs(bundles) == [], "there is no other run yet"
    with tracer.start_as_current_span("POST", kind=SpanKind.SERVER):
        double(3)
    clock.now += MINUTE - 1
    active.sweep()
    assert [run["calls"] for run in runs(bundles)] == [[3]]
    clock.now += 1
    active.sweep()
    assert [run["calls"] for run in runs(bundles)] == [[1, 2], [3]]
    double(4)
    recorder.close_all()
    first, _, last = runs(bundles)
    assert last["calls"] == [4]
    assert last["origin"] == {"continues": first["id"]}


def test_an_open_call_keeps_the_run_of_the_process_open(
    bundles: Bundles, tracer: trace.Tracer, active: Recorder, clock: Clock
) -> None:
    @trace_tool
    def long(x: int) -> int:
        with tracer.start_as_current_span("POST", kind=SpanKind.SERVER):
            pass
        clock.now += 10 * MINUTE
        active.sweep()
        assert runs(bundles) == []
        return x

    with tracer.start_as_current_span("GET", kind=SpanKind.SERVER):
        pass
    long(1)
    recorder.close_all()
    assert [run["calls"] for run in runs(bundles)] == [[1]]


def test_a_closed_bundle_never_changes(bundles: Bundles, tracer: trace.Tracer) -> None:
    root = tracer.start_span("POST", kind=SpanKind.SERVER)
    with trace.use_span(root):
        double(1)
    root.end()
    path = bundles.one()
    before = {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}
    with trace.use_span(root):
        double(2)
    recorder.close_all()
    assert {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()} == before


def test_in_an_event_loop_a_server_span_does_not_wait_for_the_bundle(
    bundles: Bundles, tracer: trace.Tracer, active: Recorder
) -> None:
    closed_in_loop: list[str] = []
    close_run = active.close_run

    def watched(*args: Any, **kwargs: Any) -> Any:
        if asyncio._get_running_loop() is not None:
            closed_in_loop.append(threading.current_thread().name)
        return close_run(*args, **kwargs)

    active.close_run = watched  # type: ignore[method-assign]

    async def main() -> None:
        with tracer.start_as_current_span("POST", kind=SpanKind.SERVER):
            double(1)

    asyncio.run(main())
    active.sweep()  # closes it, or waits for the thread that does
    assert closed_in_loop == []
    assert [run["calls"] for run in runs(bundles)] == [[1]]


# --- whose --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alone", [False, True], ids=["processor", "exporter alone"])
def test_a_remote_parent_is_kept(bundles: Bundles, make_provider: Provider, alone: bool) -> None:
    processor = SimpleSpanProcessor(SftraceExporter()) if alone else SftraceSpanProcessor()
    tracer = make_provider(processor).get_tracer("test")
    with (
        tracer.start_as_current_span("POST", kind=SpanKind.SERVER, context=remote()),
        tracer.start_as_current_span("execute_tool weather", attributes=TOOL),
    ):
        pass
    [run] = runs(bundles)
    assert run["origin"] == {"remote_parent": {"trace_id": f"{0xABC:032x}", "span_id": f"{0xDEF:016x}"}}
    assert run["trace_ids"] == [f"{0xABC:032x}"]


def test_the_runs_of_a_child_name_the_run_of_its_parent(
    bundles: Bundles, make_provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SFTRACE_PARENT", "run_parent")
    tracer = make_provider(SftraceSpanProcessor()).get_tracer("test")
    with (
        tracer.start_as_current_span("tools/call", kind=SpanKind.SERVER),
        tracer.start_as_current_span("execute_tool weather", attributes=TOOL),
    ):
        pass
    with record("agent"):
        double(1)
    double(2)
    recorder.close_all()
    assert [run["origin"] for run in runs(bundles)] == [{"parent_run": "run_parent"}] * 3


AGENT = {
    "gen_ai.operation.name": "invoke_agent",
    "gen_ai.agent.name": "travel",
    "gen_ai.agent.id": "asst_1",
    "gen_ai.conversation.id": "conv_7",
}


@pytest.fixture
def told(tracer: trace.Tracer) -> Iterator[Callable[..., Any]]:
    """A request with the agents that are told of."""

    def tell(*agents: dict[str, str], late: bool = False) -> None:
        with tracer.start_as_current_span("POST", kind=SpanKind.SERVER):
            for agent in agents:
                given = {"gen_ai.operation.name": "invoke_agent"} if late else agent
                with tracer.start_as_current_span("invoke_agent", attributes=given) as span:
                    span.set_attributes(agent)
            double(1)

    yield tell


@pytest.mark.parametrize("late", [False, True], ids=["at its start", "at its end"])
def test_agents_name_the_run_and_are_kept(bundles: Bundles, told: Callable[..., None], late: bool) -> None:
    other = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "weather"}
    told(AGENT, other, AGENT, late=late)
    [run] = runs(bundles)
    assert run["agent"] == "travel"
    assert run["agents"] == [{"name": "travel", "id": "asst_1", "conversation_id": "conv_7"}, {"name": "weather"}]
    assert json.loads((bundles.one() / "manifest.json").read_bytes())["agent_name"] == "travel"


def test_an_agent_that_is_the_root_names_the_file(bundles: Bundles, tracer: trace.Tracer) -> None:
    with tracer.start_as_current_span("invoke_agent travel", attributes=AGENT):
        double(1)
    assert bundles.one().name.startswith("travel-")


def test_a_chosen_name_stays(bundles: Bundles, active: Recorder, told: Callable[..., None]) -> None:
    object.__setattr__(active.settings, "agent", "chosen")
    told(AGENT)
    assert [run["agent"] for run in runs(bundles)] == ["chosen"]


def test_no_secret_in_the_names_of_agents(bundles: Bundles, told: Callable[..., None]) -> None:
    secret = "sk-abcdefghijklmnop1234567890"
    told({**AGENT, "gen_ai.agent.name": secret, "gen_ai.conversation.id": f"of {secret}"})
    path = bundles.one()
    assert secret not in path.name
    assert secret not in "".join(file.read_text() for file in path.iterdir() if file.is_file())


def test_spans_that_tell_of_no_agent_are_left_alone(bundles: Bundles, told: Callable[..., None]) -> None:
    told({"gen_ai.operation.name": "invoke_agent"}, {"gen_ai.operation.name": "chat", "gen_ai.agent.name": "no"})
    [run] = runs(bundles)
    assert "agents" not in run


# --- at exit ----------------------------------------------------------------------------------------------------------

OPEN = """
import openai
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
trace.set_tracer_provider(TracerProvider())
from sftrace_otel import instrument
instrument()
stream = openai.OpenAI(api_key="k", base_url=URL + "/v1").chat.completions.create(
    model="m", messages=[{"role": "user", "content": "x"}], stream=True
)
next(iter(stream))
KEEP = [stream, trace.get_tracer("agent").start_span("never ended")]
"""


def test_what_is_open_at_exit_is_written_as_unfinished(child: Child, openai_server: Any) -> None:
    """Case C03."""
    done = child.run(OPEN.replace("URL", repr(openai_server.url)), OTEL_SFTRACE_QUIET="true")
    assert done.stderr == ""
    assert validate_bundle(child.bundles.one(), verify_integrity=True).valid
    assert [event["input"]["request"]["model"] for event in child.bundles.events("llm_request")] == ["m"]
    [row] = child.bundles.lines("calls.jsonl")
    assert row["end"] not in ("finished", "failed")
    assert list(child.folder.glob("sftraces/.*")) == []
