# SPDX-License-Identifier: Apache-2.0
"""Interop with the reference, stepfork 0.2.1, in both directions: recorded by one, replayed and forked by the other."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import stepfork
import stepfork.fork
import stepfork.replay
import stepfork.trace

import sftrace_otel
from sftrace_otel import recorder
from sftrace_otel.bundle import read
from sftrace_otel.instrumentation import replaying

RAN: list[str] = []


@pytest.fixture(autouse=True)
def _released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    RAN.clear()
    yield
    replaying.deactivate()
    recorder.release()


def agent(library: ModuleType) -> Callable[[], Any]:
    """The same agent under either library: floats, nesting, a failure, parallel calls, an LLM, odd texts and ints."""

    @library.trace_tool(name="inner")  # type: ignore[untyped-decorator]
    def inner(x: float) -> Any:
        RAN.append("inner")
        return {"x": x, "list": [1, 2.5, None, True], "ünï\u2028": {"\U0001f600": 2**70}}

    @library.trace_tool(name="outer")  # type: ignore[untyped-decorator]
    def outer(x: int, *, scale: float = 1.0) -> Any:
        RAN.append("outer")
        return [inner(x * scale), inner(1e-7), inner(1e22), inner(-0.0)]

    @library.trace_tool(name="boom")  # type: ignore[untyped-decorator]
    def boom(why: str) -> Any:
        RAN.append("boom")
        raise LookupError(f"no {why}")

    @library.trace_tool(name="slow")  # type: ignore[untyped-decorator]
    async def slow(number: int) -> Any:
        RAN.append("slow")
        await asyncio.sleep(0.01 * (3 - number))
        return number * 10

    async def parallel() -> list[Any]:
        return list(await asyncio.gather(*(slow(number) for number in range(3))))

    def run() -> Any:
        got = [outer(3, scale=0.5)]
        try:
            boom("luck")
        except Exception as error:
            got.append("no luck" in str(error))  # the reference puts its own words around
        answer = library.llm_request(
            model="m",
            provider="own",
            input={"prompt": "é", "temperature": 0.0},
            call=lambda: {"text": "hello", "n": 1.0},
        )
        return [*got, answer, asyncio.run(parallel())]

    return run


def record_with(library: ModuleType, path: Path) -> Any:
    with library.record("agent", output=path, run_input={"q": 1.5}) as session:
        result = agent(library)()
        session.set_output(result)
    RAN.clear()
    return result


def test_the_reference_replays_and_forks_what_our_recorder_writes(tmp_path: Path) -> None:
    path = tmp_path / "ours.sftrace"
    result = record_with(sftrace_otel, path)
    assert stepfork.trace.validate_bundle(path, strict=True, verify_integrity=True).issues == []
    with stepfork.replay.ReplaySession.from_trace(path) as session:
        assert agent(stepfork)() == result
        session.verify_complete()
    assert RAN == []
    steps = [event.step for event in read.iter_events(path) if event.type == "tool_result"]
    forked = stepfork.fork.fork_trace(
        path,
        stepfork.fork.ForkPoint(event_id=None, step=steps[-1]),
        overrides=[stepfork.fork.OverrideSpec(step=steps[0], output={"changed": True})],
        output_path=tmp_path / "fork.sftrace",
    )
    assert forked.success, forked.error_message
    assert read.validate_bundle(tmp_path / "fork.sftrace", verify_integrity=True).exit_code == 0


@pytest.mark.parametrize("hashes", [True, False], ids=["hashed", "hashless"])
def test_we_replay_what_the_reference_records(hashes: bool, tmp_path: Path) -> None:
    path = tmp_path / "theirs.sftrace"
    result = record_with(stepfork, path)
    if not hashes:
        strip(path)
    with sftrace_otel.ReplaySession.from_trace(path) as session:
        assert agent(sftrace_otel)() == result
        session.verify_complete()
    assert RAN == []


def strip(bundle: Path) -> None:
    """Take the payload hashes and the integrity record away, as older writers left them out."""
    lines = [json.loads(line) for line in (bundle / "events.jsonl").read_text().split("\n")[:-1]]
    for event in lines:
        event["input_hash"] = event["output_hash"] = None
    text = "".join(json.dumps(event, ensure_ascii=False, separators=(",", ":")) + "\n" for event in lines)
    (bundle / "events.jsonl").write_text(text)
    (bundle / "integrity.json").unlink()


def test_a_bundle_of_the_reference_packs_forks_and_replays_through_us(tmp_path: Path) -> None:
    from sftrace_otel.bundle.pack import pack, unpack
    from sftrace_otel.fork import ForkPoint, fork_trace

    path = tmp_path / "theirs.sftrace"
    result = record_with(stepfork, path)
    packed = pack(path).path
    back = unpack(packed, tmp_path / "back.sftrace").path
    shutil.rmtree(path)
    assert stepfork.trace.validate_bundle(back, strict=True, verify_integrity=True).issues == []
    last = max(event.step for event in read.iter_events(packed))
    fork_trace(packed, ForkPoint(step=last), output_path=tmp_path / "fork.sftrace")
    for source in (packed, tmp_path / "fork.sftrace"):
        with sftrace_otel.ReplaySession.from_trace(source) as session:
            assert agent(sftrace_otel)() == result
            session.verify_complete()
    with stepfork.replay.ReplaySession.from_trace(tmp_path / "fork.sftrace") as theirs:
        assert agent(stepfork)() == result
        theirs.verify_complete()
    assert RAN == []
