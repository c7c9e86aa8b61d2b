# SPDX-License-Identifier: Apache-2.0
"""Programs made at random of tools, tasks, threads, executors and nested tools, asking the same few questions again and
again: each call gets its own recorded answer under any schedule.

The programs run for real, so that what is tried includes how places in them are followed. A tool's answer is its number
among all calls: an answer that went to another call shows in the result.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sftrace_otel import ReplaySession, record, recorder, trace_tool
from sftrace_otel.bundle.read import validate_bundle


def _load() -> ModuleType:
    path = Path(__file__).resolve().parent / "behaviours.py"
    spec = importlib.util.spec_from_file_location("tree_behaviours", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


drawn = _load()
number = itertools.count()
ran: list[int] = []


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    recorder.restart_lineage()
    yield
    drawn.deal(None)
    recorder.release()


def answer() -> int:
    ran.append(next(number))
    return ran[-1]


@trace_tool
def say(question: str) -> int:
    return answer()


@trace_tool
async def asay(question: str) -> int:
    await drawn.apause()
    return answer()


@trace_tool
def around(question: str, inside: list[Any]) -> list[Any]:
    return [answer(), *run(inside)]


@trace_tool
async def aaround(question: str, inside: list[Any]) -> list[Any]:
    return [answer(), *await arun(inside)]


def run(program: list[Any]) -> list[Any]:
    """Run a program in this thread."""
    return [_step(*step) for step in program]


def _step(kind: str, what: Any) -> Any:
    drawn.pause()
    if kind == "call":
        return say(what)
    if kind == "nested":
        return around("nested", what)
    if kind in ("tasks", "beside"):
        return drawn.looped(lambda: _astep(kind, what))
    if kind == "threads":
        return _threads(what)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, what))


def _threads(branches: list[Any]) -> list[Any]:
    found: dict[int, Any] = {}

    def one(place: int) -> None:
        found[place] = run(branches[place])

    threads = [threading.Thread(target=one, args=(place,)) for place in range(len(branches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[place] for place in range(len(branches))]


async def arun(program: list[Any]) -> list[Any]:
    """Run a program in this task."""
    return [await _astep(*step) for step in program]


async def _astep(kind: str, what: Any) -> Any:
    await drawn.apause()
    if kind == "call":
        return await asay(what)
    if kind == "nested":
        return await aaround("nested", what)
    if kind == "tasks":
        return list(await asyncio.gather(*map(arun, what)))
    if kind == "beside":  # one goes on while this task does its own
        tasks = [asyncio.create_task(arun(branch)) for branch in what[1:]]
        return [await arun(what[0]), *[await task for task in tasks]]
    if kind == "threads":
        return list(await asyncio.gather(*(asyncio.to_thread(run, branch) for branch in what)))
    with ThreadPoolExecutor(2) as pool:
        loop = asyncio.get_running_loop()
        return list(await asyncio.gather(*(loop.run_in_executor(pool, run, branch) for branch in what)))


QUESTIONS = st.sampled_from(["a", "b"])
CALLS = st.tuples(st.just("call"), QUESTIONS)


def _deeper(steps: Any) -> Any:
    program = st.lists(steps, min_size=1, max_size=3)
    branches = st.lists(program, min_size=2, max_size=3)
    return st.one_of(
        CALLS,
        st.tuples(st.just("nested"), program),
        st.tuples(st.sampled_from(["tasks", "beside", "threads", "executor"]), branches),
    )


PROGRAMS = st.lists(st.recursive(CALLS, _deeper, max_leaves=12), min_size=1, max_size=4)


def check(program: list[Any], first: int, schedules: list[int]) -> None:
    program = json.loads(json.dumps(program))
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "run.sftrace"
        drawn.deal(first)
        with record("agent", output=bundle):
            want = run(program)
        assert validate_bundle(bundle, verify_integrity=True).exit_code == 0
        for seed in schedules:
            drawn.deal(seed)
            ran.clear()
            with ReplaySession.from_trace(bundle) as replay, record("agent"):
                got = run(program)
            assert got == want
            assert ran == []
            report = replay.report()
            assert report.exit_code == 0, report.text()
            assert report.matched["lineage"] == report.served


SEEDS = st.integers(0, 10**6)

WHOLE = bool(os.environ.get("SFTRACE_AT_LENGTH"))
"""Whether the long tests try as often as they can; `make test-full` has time for a part."""


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(PROGRAMS, SEEDS, st.lists(SEEDS, min_size=2, max_size=2))
def test_each_call_gets_its_own_answer(program: list[Any], first: int, schedules: list[int]) -> None:
    check(program, first, schedules)


@pytest.mark.full
@settings(max_examples=400 if WHOLE else 60, deadline=None, suppress_health_check=list(HealthCheck))
@given(PROGRAMS, SEEDS, st.lists(SEEDS, min_size=4, max_size=4))
def test_each_call_gets_its_own_answer_in_many_programs(program: list[Any], first: int, schedules: list[int]) -> None:
    check(program, first, schedules)
