# SPDX-License-Identifier: Apache-2.0
"""Pools of processes: each process that made a call leaves a bundle of its own, with the run of its parent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Workplace, run

PROGRAM = """
import multiprocessing, os, sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from sftrace_otel import record, trace_tool

@trace_tool
def double(x):
    return 2 * x

def work(x):
    Path(f"pid-{os.getpid()}").touch()
    return double(x)

def own(x):
    with record(f"worker-{x}"):
        return double(x)

if __name__ == "__main__":
    double(0)
    context = multiprocessing.get_context(sys.argv[1])
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        assert list(pool.map(work, range(1, 9))) == [2 * x for x in range(1, 9)]
    pool = context.Pool(2)
    assert pool.map(own, range(20, 24)) == [40, 42, 44, 46]
    pool.close()
    pool.join()
"""


@pytest.mark.full
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_each_process_of_a_pool_leaves_its_own_bundle(place: Workplace, method: str) -> None:
    (place.folder / "pools.py").write_text(PROGRAM)
    process = place.start("python", "pools.py", method)
    assert process.wait(90) == 0, place.log()
    assert place.journals() == []
    by_kind: dict[str, list[Path]] = {}
    for path in place.paths():
        by_kind.setdefault(run(path)["kind"], []).append(path)
    calls = sorted(
        json.loads(line)["input"]["x"]
        for path in by_kind["process"]
        for line in (path / "events.jsonl").read_text().splitlines()
        if '"tool_call"' in line
    )
    assert calls == [0, *range(1, 9)]
    [main] = [path for path in by_kind["process"] if "parent_run" not in run(path)["origin"]]
    main_run = json.loads((main / "manifest.json").read_text())["run_id"]
    assert len(by_kind["process"]) == 1 + len(list(place.folder.glob("pid-*")))
    assert sorted(run(path)["agent"] for path in by_kind["record"]) == [f"worker-{x}" for x in range(20, 24)]
    children = [path for path in [*by_kind["process"], *by_kind["record"]] if path != main]
    assert {run(path)["origin"]["parent_run"] for path in children} == {main_run}
