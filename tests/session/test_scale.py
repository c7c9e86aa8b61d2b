# SPDX-License-Identifier: Apache-2.0
"""Many calls and many threads: each call costs the same, and each thread gets its own answers."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sftrace_otel.core.plan import RecordedCall
from sftrace_otel.core.session import LiveCall, Session
from sftrace_otel.errors import ReplayMismatchError

CALLS = 100_000
TENTHS = 10


def seconds_per_tenth(session: Session, lives: list[LiveCall]) -> list[float]:
    times = []
    size = len(lives) // TENTHS
    for tenth in range(TENTHS):
        began = time.process_time()
        for live in lives[tenth * size : (tenth + 1) * size]:
            session.decide(live)
        times.append(time.process_time() - began)
    return times


@pytest.fixture(scope="module")
def recorded(build: Any) -> list[RecordedCall]:
    """100,000 calls in sequence, every tenth of them equal."""
    calls: list[RecordedCall] = build.sequence(*({"q": i if i % 10 else 0} for i in range(CALLS)))
    return calls


@pytest.mark.parametrize(("lineage", "count"), [(True, CALLS), (None, CALLS // 4)], ids=["lineage", "digest"])
def test_the_last_calls_cost_what_the_first_did(
    build: Any, recorded: list[RecordedCall], lineage: bool | None, count: int
) -> None:
    calls = recorded[:count]
    lives = [build.live(call, lineage) for call in calls]
    session = Session(calls)
    session.decide(lives[0])  # builds the index of the rung
    times = seconds_per_tenth(session, lives[1:])
    assert min(times[-3:]) < 3 * min(times[:3])


def test_sixteen_threads_get_their_own_answers(build: Any) -> None:
    """Every thread makes the same calls; only lineage tells whose is whose."""
    threads, each = 16, 200
    calls = []
    for turn in range(each):
        for thread in range(threads):
            index = turn * threads + thread
            calls.append(
                build.tool(
                    index, payload={"turn": turn % 5}, lineage=f"t{thread}/{turn}", span=(turn * 10, turn * 10 + 5)
                )
            )
    session = Session(calls)
    together = threading.Barrier(threads)

    def run(thread: int) -> list[int]:
        together.wait()
        own = [calls[turn * threads + thread] for turn in range(each)]
        return build.serve_all(session, [build.live(call) for call in own])

    with ThreadPoolExecutor(threads) as pool:
        served = list(pool.map(run, range(threads)))
    assert served == [[turn * threads + thread for turn in range(each)] for thread in range(threads)]
    session.verify_complete()


def test_threads_without_lineage_are_served_each_answer_once(build: Any) -> None:
    threads, each = 16, 100
    calls = [build.tool(index, payload={"q": index % 3}) for index in range(threads * each)]
    session = Session(calls)
    together = threading.Barrier(threads)

    def run(thread: int) -> list[int]:
        together.wait()
        return build.serve_all(session, [build.live(calls[thread * each + k]) for k in range(each)])

    with ThreadPoolExecutor(threads) as pool:
        served = [index for part in pool.map(run, range(threads)) for index in part]
    assert sorted(served) == list(range(threads * each))


def test_when_one_thread_diverges_every_thread_is_stopped(build: Any) -> None:
    threads = 16
    calls = [
        build.tool(i, payload=i, lineage=f"t{i % threads}/{i // threads}", span=(i, 10**9)) for i in range(threads * 50)
    ]
    session = Session(calls)
    together = threading.Barrier(threads)
    served: list[int] = []

    def run(thread: int) -> str:
        together.wait()
        try:
            for turn in range(50):
                call = calls[turn * threads + thread]
                wrong = thread == 7 and turn == 20
                served.append(build.serve(session, build.live(call, payload="wrong" if wrong else call.input))[0])
                time.sleep(0)
            while True:  # done with its own part: the next call it tries must be refused too
                session.decide(build.live(calls[thread]))
        except ReplayMismatchError as error:
            return str(error)

    with ThreadPoolExecutor(threads) as pool:
        texts = set(pool.map(run, range(threads)))
    assert len(texts) == 1
    assert len(served) == len(set(served)) < len(calls)
