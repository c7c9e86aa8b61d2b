# SPDX-License-Identifier: Apache-2.0
"""Cases C, D and F of the public collection that concern `.sftrace`, its storage and redaction.

What is asked elsewhere already, by the same input and for all of the case's "Right":

| case | test |
|---|---|
| C01 | `otel/test_exporter.py::test_batches_are_in_the_bundle_at_exit`, `::test_a_killed_process_leaves_no_bundle_that_claims_to_be_whole` |
| C03 | `otel/test_runs.py::test_what_is_open_at_exit_is_written_as_unfinished` |
| C04 | `otel/test_exporter.py::test_a_forked_child_writes_its_own_bundle`, `bundle/test_recover.py::test_workers_write_bundles_of_their_own`, `::test_forked_children_share_no_file_with_the_parent`, `::test_a_lock_held_at_the_fork_does_not_hang_the_child` |
| C06 | `otel/test_exporter.py::test_everything_that_the_sdk_lets_through_is_recorded` |
| C07 | `otel/test_exporter.py::test_a_log_handler_that_traces_neither_recurses_nor_hangs`, `::test_no_failure_of_ours_reaches_the_program`; `instrumentation/test_http.py::test_a_full_disk_leaves_the_program_alone` |
| C09 | `otel/test_exporter.py::test_after_shutdown_it_refuses_quietly_and_the_bundle_stays` |
| D01, D10 | `formats/test_canonical.py` (every vector and the bulk doubles, against `rfc8785` and `jcs`) |
| D11 | `flight/test_verify.py::test_row`, `::test_a_good_bundle` |
| D12 | `formats/test_canonical.py::test_rfc8785_vector` (rows `idempotent`); its `.flight` half below |
| F02, F03, F08, F10, F12 | `bundle/test_storage_cases.py` |
| F01 | `bundle/test_storage_cases.py::test_f01_…`, `bundle/test_recover.py` (kills, torn lines, every prefix) |
| F04 to F06, rows `cor-*` | `bundle/test_corrupt.py::test_row`; F06 also `::test_nothing_outside_the_bundle_is_opened`, `bundle/test_hostile.py::test_what_is_no_file_is_refused_at_once` |
| F07 | `bundle/test_read_write.py::test_integrity_is_written_last_and_flushed`, `::test_publish_is_one_rename`, `::test_a_failed_save_leaves_nothing`; `bundle/test_recover.py::test_a_full_disk_stops_the_recording_and_not_the_program` |
| F11 | `bundle/test_pack.py` (names, links, devices, bombs by what they say and by what they hold) |
"""  # noqa: E501

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from case_helpers import (
    U,
    ask,
    blob,
    calls,
    check,
    child,
    cli,
    diverging,
    ends,
    events,
    frozen,
    n_http,
    n_llm,
    oa,
    rec,
    recorded_messages,
    tool,
    tool_inputs,
    tool_results,
    wire_bodies,
)
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.instrumentation.utils import suppress_http_instrumentation, suppress_instrumentation
from opentelemetry.sdk.trace import SpanLimits, TracerProvider

from sftrace_otel import ReplayError, SftraceSpanProcessor
from sftrace_otel.flight import FlightWriter, open_flight
from sftrace_otel.formats import canonical

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


# --- C ----------------------------------------------------------------------------------------------------------------

OPEN_AT_EXIT = """
import sys
import openai
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from sftrace_otel import instrument

instrument()
trace.set_tracer_provider(TracerProvider())
client = openai.OpenAI(api_key="k", base_url=sys.argv[1] + "/v1", max_retries=0)
client.chat.completions.create(model="m", messages=[{"role": "user", "content": "whole"}])
stream = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "WAIT"}], stream=True)
next(iter(stream))
KEEP = [stream, trace.get_tracer("t").start_span("never ended")]
"""


def test_c03_what_is_open_at_exit_is_kept_as_unfinished(srv: Any, tmp_path: Path) -> None:
    done = child(tmp_path, OPEN_AT_EXIT, srv.url, OTEL_SFTRACE_QUIET="true")
    assert done.stderr == ""
    (path,) = (tmp_path / "sftraces").glob("*.sftrace")
    check(path)
    assert n_llm(path) == 2 and ends(path, "llm") == ["finished", "cut"]
    assert b"assistant" in wire_bodies(path)[1] and b"[DONE]" not in wire_bodies(path)[1]


def test_c05_one_odd_text_costs_nothing_but_itself(p: Path, provider: TracerProvider) -> None:
    provider.add_span_processor(SftraceSpanProcessor(dir=p.parent / "traces"))
    tracer = trace.get_tracer("t")
    texts = ["cut \ud83e", "\udcff and \ud83d\ude00 apart", "fine \U0001f9ea", "plain"]
    ran: list[str] = []

    def echo(s: str) -> str:
        ran.append(s)
        return s

    with rec(p):
        with tracer.start_as_current_span("a", attributes={"k": "x\udcff"}):
            pass
        for text in texts:
            assert tool(echo)(text) == text
        with tracer.start_as_current_span("outer"), tracer.start_as_current_span("b\ud83e"):
            tool(echo)("inside")
    check(p)
    assert "fine \U0001f9ea".encode() in blob(p)
    with frozen(p):
        assert [tool(echo)(text) for text in [*texts, "inside"]] == [*texts, "inside"]
    assert ran == [*texts, "inside"]


@pytest.mark.parametrize("way", [suppress_instrumentation, suppress_http_instrumentation, "key"])
def test_c08_suppressed_calls_are_not_recorded_and_still_held_back_by_a_replay(way: Any, srv: Any, p: Path) -> None:
    def suppressed() -> None:
        if way == "key":
            token = otel_context.attach(otel_context.set_value("suppress_instrumentation", True))
            try:
                httpx.get(srv.url + "/json")
            finally:
                otel_context.detach(token)
        else:
            with way():
                httpx.get(srv.url + "/json")

    with rec(p):
        suppressed()
        httpx.get(srv.url + "/json")
    assert n_http(p) == 1 and len(srv.hits) == 2
    srv.requests.clear()
    with pytest.raises(ReplayError), frozen(p, all_used=False):
        httpx.get(srv.url + "/json")
        suppressed()
    assert srv.hits == []


def test_c10_attribute_limits_cut_nothing_of_a_recording(srv: Any, p: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = SpanLimits(max_attribute_length=100, max_span_attributes=4)
    provider = TracerProvider(shutdown_on_exit=False, span_limits=limits)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    provider.add_span_processor(SftraceSpanProcessor(dir=p.parent / "traces"))
    client = oa(srv.url)
    with rec(p):
        want = ask(client, [U("x" * 5000)])
        tool(lambda text: text)("y" * 5000)
    check(p)
    assert len(recorded_messages(p)[0][0]["content"]) == 5000 and len(tool_results(p)[0]) == 5000
    assert len(calls(p)) == 2
    with frozen(p):
        assert ask(client, [U("x" * 5000)]) == want
        assert tool(lambda text: "")("y" * 5000) == "y" * 5000
    provider.shutdown()


# --- D ----------------------------------------------------------------------------------------------------------------


def test_d01_the_profile_of_the_bundle_is_cpythons_and_rfc8785_is_ecmascripts(p: Path) -> None:
    numbers = [10.0, -0.0, 1e-7, 1e-6, 1e20, 1e21, 5e-324, 1.7976931348623157e308]
    with rec(p):
        tool(lambda x: x)(numbers)
    check(p)
    cpython = json.dumps({"x": numbers}, separators=(",", ":")).encode()
    assert events(p, "tool_call")[0]["input_hash"] == hashlib.sha256(cpython).hexdigest()
    assert tool_inputs(p) == [{"x": numbers}] and all(isinstance(one, float) for one in tool_inputs(p)[0]["x"])
    assert [canonical.rfc8785(one) for one in numbers[:6]] == [
        b"10", b"0", b"1e-7", b"0.000001", b"100000000000000000000", b"1e+21",
    ]  # fmt: skip


def test_d03_digits_of_big_ints_survive(p: Path) -> None:
    user = 1234567890123456789
    plus = tool(lambda user_id: user_id + 1, "f")
    with rec(p):
        assert plus(user) == user + 1
        assert plus(10**40) == 10**40 + 1
    check(p)
    assert b"1234567890123456789" in blob(p)
    never = tool(lambda user_id: 0, "f")
    with frozen(p):
        assert never(user) == user + 1 and never(10**40) == 10**40 + 1
    with diverging(p), pytest.raises(ReplayError):
        never(user - 1)


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def test_d08_depth_cycles_and_shared_parts(p: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SFTRACE_MAX_PAYLOAD_BYTES", "100000")
    cycle: dict[str, Any] = {}
    cycle["self"] = [cycle]
    shared = {"k": list(range(50))}
    for _ in range(40):
        shared = {"a": shared, "b": shared}  # type: ignore[dict-item]
    one = tool(lambda x: 1)
    with rec(p):
        for value in (nested(10_000), cycle, shared, {"a": [shared["a"]] * 2}):
            assert one(value) == 1
    check(p)
    assert len(blob(p)) < 1_000_000 and len(calls(p)) == 4


@pytest.mark.parametrize("verb", ["verify", "validate", "replay"])
def test_d08_a_deep_line_is_refused_in_one_line(verb: str, p: Path) -> None:
    with rec(p):
        tool(lambda x: 1)(1)
    with (p / "events.jsonl").open("ab") as file:
        file.write(b'{"d":' + b"[" * 10_000 + b"]" * 10_000 + b"}\n")
    more = ("--", "true") if verb == "replay" else ()
    done = cli(verb, p, *more)
    assert done.code != 0 and "Traceback" not in done.err
    assert "deep" in done.err + done.out


@pytest.mark.parametrize("verb", ["verify", "validate", "replay"])
def test_d05_a_line_with_two_values_for_a_key_is_refused(verb: str, p: Path) -> None:
    with rec(p):
        tool(lambda x: 1)(1)
    lines = (p / "events.jsonl").read_bytes().split(b"\n")
    lines[1] = b'{"t\\u0079pe":"forged",' + lines[1][1:]
    (p / "events.jsonl").write_bytes(b"\n".join(lines))
    integrity = json.loads((p / "integrity.json").read_bytes())
    integrity["files"]["events.jsonl"] = canonical.sha256((p / "events.jsonl").read_bytes())
    (p / "integrity.json").write_text(json.dumps(integrity))
    more = ("--", "true") if verb == "replay" else ()
    done = cli(verb, p, *more)
    assert done.code != 0 and "duplicate" in done.err + done.out
    if verb != "replay":
        assert "events.jsonl:2" in done.err + done.out or "line 2" in done.err + done.out


def test_d06_an_answer_with_a_number_that_no_double_holds_passes_untouched(srv: Any, p: Path) -> None:
    with rec(p):
        answer = httpx.get(srv.url + "/huge-number")
    assert answer.status_code == 200 and math.isinf(answer.json()["v"])
    check(p)
    (result,) = tool_results(p)
    assert result["body"] == answer.text  # as text, never spelled anew
    with frozen(p):
        assert httpx.get(srv.url + "/huge-number").content == answer.content


def test_d09_not_a_number_is_stored_strictly_and_comes_back(p: Path) -> None:
    ran: list[float] = []

    def spread(x: float) -> Any:
        ran.append(x)
        return {"mean": x, "all": [x, -x]}

    with rec(p):
        for value in (math.nan, math.inf, -math.inf):
            tool(spread)(value)
    check(p)
    for name in ("events.jsonl", "calls.jsonl"):
        text = (p / name).read_text("utf-8")
        assert not any(word in text.replace('"', " ").split(":") for word in ("NaN", "Infinity"))
    with frozen(p):
        nan, inf, minus = (tool(spread)(value) for value in (math.nan, math.inf, -math.inf))
    assert math.isnan(nan["mean"]) and all(math.isnan(one) for one in nan["all"])
    assert inf == {"mean": math.inf, "all": [math.inf, -math.inf]} and minus["all"] == [-math.inf, math.inf]
    assert len(ran) == 3
    with diverging(p), pytest.raises(ReplayError):
        tool(spread)(0.0)


def test_d10_separators_of_unicode_are_written_as_they_are_and_end_no_line(p: Path) -> None:
    text = "a\u2028b\u2029c\x85d\x0be\x1cf"
    with rec(p):
        assert tool(lambda x: x)(text) == text
    check(p)
    data = (p / "events.jsonl").read_bytes()
    assert data.count(b"\n") == len(events(p)) == 4
    assert canonical.dumps(text) == b'"a\xe2\x80\xa8b\xe2\x80\xa9c\xc2\x85d\\u000be\\u001cf"'
    assert canonical.rfc8785(text) == canonical.dumps(text)


def test_d12_canonical_forms_read_back_to_themselves(p: Path) -> None:
    for number in (1e16, 1e20, 9007199254740992.0, -3.5e18):
        data = canonical.dumps(number)
        assert canonical.dumps(canonical.loads(data)) == data
    with rec(p):
        tool(lambda x: x)(1e20)
    check(p)


def test_d12_a_recorded_chain_verifies(p: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SFTRACE_FORMATS", "sftrace,flight")
    with rec(p):
        tool(lambda x: x)(1e20)
    assert cli("verify", p.with_suffix(".flight")).code == 0
    check(p)


def test_d12_a_flight_record_verifies_what_it_wrote(p: Path) -> None:
    place = p.with_suffix(".flight")
    numbers = [1e16, 1e20, 9007199254740992.0, -3.5e18]
    with FlightWriter(place, run_id="r") as chain:
        chain.append("tool.call", {"name": "f", "input": {"x": numbers}})
    done = cli("verify", place)
    assert done.code == 0 and done.err == ""
    assert b"10000000000000000,100000000000000000000,9007199254740992,-3500000000000000000" in blob(place)
    (event,) = open_flight(place).events()
    assert event.body == {"name": "f", "input": {"x": numbers}}


# --- F ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def good(p: Path, srv: Any) -> Path:
    """A bundle with calls of each kind."""
    with rec(p):
        ask(oa(srv.url))
        httpx.get(srv.url + "/binary")
        tool(lambda x: x)(1)
    check(p)
    return p


UNFINISHED = """
import os, sys
from sftrace_otel import record, trace_tool

@trace_tool
def step(number):
    return number

with record("agent", output="run.sftrace"):
    for number in range(20):
        step(number)
    print("done", flush=True)
    os.kill(os.getpid(), 9)
"""


def test_f01_a_killed_recording_is_recovered_whole_and_never_appended_to(tmp_path: Path) -> None:
    child(tmp_path, UNFINISHED, code=-9)
    assert not (tmp_path / "run.sftrace").exists()
    (journal,) = tmp_path.glob(".*.journal")
    for verb in ("verify", "validate"):
        done = cli(verb, tmp_path / "run.sftrace")
        assert done.code != 0 and "Traceback" not in done.err and "recover" in done.err + done.out
    lines = sorted(journal.rglob("*.jsonl"))
    with lines[0].open("ab") as file:
        file.write(b'{"k":"b","n":21,"torn \xc3')
    before = [(one, one.read_bytes()) for one in lines]
    with rec(tmp_path / "run.sftrace"):
        tool(lambda x: x)(1)
    assert [(one, one.read_bytes()) for one in lines] == before
    recovered = cli("recover", journal, "-o", tmp_path / "recovered.sftrace")
    assert recovered.code == 0, recovered.err
    path = tmp_path / "recovered.sftrace"
    assert len(events(path, "tool_result")) == 20
    assert json.loads((path / "manifest.json").read_bytes())["status"] == "running"
    assert cli("validate", "--partial", path).code == 0


@pytest.mark.parametrize("name", ["events.jsonl", "manifest.json", "redactions.json", "integrity.json"])
def test_f04_a_byte_order_mark_is_refused_by_name(name: str, good: Path) -> None:
    (good / name).write_bytes(b"\xef\xbb\xbf" + (good / name).read_bytes())
    for verb in ("verify", "validate", "inspect"):
        done = cli(verb, good)
        if verb == "inspect" and name in ("redactions.json", "integrity.json"):
            continue  # reads neither
        said = done.out + done.err
        assert done.code != 0 and name in said and ("BOM" in said or "byte order mark" in said), verb


def test_f05_rewritten_line_endings_are_recognised(good: Path) -> None:
    lines = good / "events.jsonl"
    lines.write_bytes(lines.read_bytes().replace(b"\n", b"\r\n"))
    done = cli("verify", good)
    said = done.out + done.err
    assert done.code != 0 and "line ending" in said.lower() and ".gitattributes" in said


def test_f05_the_project_keeps_its_own_bundles_as_they_are() -> None:
    assert ".sftrace" in (ROOT / ".gitattributes").read_text("utf-8")


def test_f06_nothing_leads_out_of_a_bundle(good: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("CANARY")

    def linked(name: str) -> Any:
        def make(bundle: Path) -> None:
            (bundle / name).unlink()
            (bundle / name).symlink_to(secret)

        return make

    def fifo(bundle: Path) -> None:
        (bundle / "events.jsonl").unlink()
        os.mkfifo(bundle / "events.jsonl")

    def blobs(bundle: Path) -> None:
        shutil.rmtree(bundle / "blobs")
        (bundle / "blobs").symlink_to(tmp_path)

    def listed(name: str) -> Any:
        def make(bundle: Path) -> None:
            integrity = json.loads((bundle / "integrity.json").read_bytes())
            integrity["files"][name] = "0" * 64
            (bundle / "integrity.json").write_text(json.dumps(integrity))

        return make

    spoil = [linked("events.jsonl"), linked("manifest.json"), linked("calls.jsonl"), fifo, blobs,
             listed("../secret.txt"), listed(str(secret))]  # fmt: skip
    for number, make in enumerate(spoil):
        copy = tmp_path / f"copy{number}.sftrace"
        shutil.copytree(good, copy)
        make(copy)
        done = cli("verify", copy)
        assert done.code != 0 and "CANARY" not in done.out + done.err and "Traceback" not in done.err, number
    (tmp_path / "alias.sftrace").symlink_to(good)
    check(tmp_path / "alias.sftrace")


def test_f06_a_writer_does_not_write_through_a_link(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir()
    (tmp_path / "run.sftrace").symlink_to(target)
    with rec(tmp_path / "run.sftrace") as session:
        tool(lambda x: x)(1)
    assert list(target.iterdir()) == []
    assert session.path is None or session.path.exists()


def test_f10_the_status_of_a_recording_can_be_asked_and_the_command_line_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    bad = tmp_path / "file" / "x.sftrace"
    with rec(bad) as session:
        assert tool(lambda: 7)() == 7
    assert session.path is None and len(caplog.messages) == 1 and str(bad) in caplog.text


def test_f12_foreign_files_are_named_and_not_read(good: Path, tmp_path: Path) -> None:
    for name in (".DS_Store", "events.jsonl~", "notes.txt", "sub/x.json"):
        (good / name).parent.mkdir(exist_ok=True)
        (good / name).write_bytes(b"x")
    done = cli("verify", good)
    assert "notes.txt" in done.out + done.err and done.code == 0
    assert cli("verify", "--strict", good).code == 1
