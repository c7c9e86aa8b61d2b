# SPDX-License-Identifier: Apache-2.0
"""Programs that work in several processes, under `opentelemetry-instrument` and in a `record()` block: each process
that made a call has its bundle with the run id of its parent, and `merge` makes one run of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import stepfork.trace

from sftrace_otel.bundle.read import Bundle, open_bundle, validate_bundle
from sftrace_otel.replay import ReplaySession

INSTRUMENT = str(Path(sys.executable).with_name("opentelemetry-instrument"))

PROGRAM = """
import multiprocessing, subprocess, sys
from concurrent.futures import ProcessPoolExecutor
from sftrace_otel import record, trace_tool

@trace_tool
def work(x):
    return x * 2

def nested(x):
    import multiprocessing
    process = multiprocessing.get_context("fork").Process(target=work, args=(x,))
    process.start(); process.join()
    return work(x)

@trace_tool
def spread(method, kind):
    context = multiprocessing.get_context(None if method == "subprocess" else method)
    if kind == "executor":
        with ProcessPoolExecutor(2, mp_context=context) as pool:
            return list(pool.map(work, range(4)))
    if kind == "pool":
        with context.Pool(2) as pool:
            found = pool.map(work, range(4), chunksize=1)
            pool.close(); pool.join()
            return found
    if kind == "program":
        return subprocess.run([sys.executable, __file__, "auto", "none", "alone"], check=True).returncode
    process = context.Process(target=nested if kind == "nested" else work, args=(7,))
    process.start(); process.join()
    return process.exitcode

def main(method, kinds):
    for kind in kinds:
        work(3) if kind == "alone" else spread(method, kind)

if __name__ == "__main__":
    how, method, *kinds = sys.argv[1:]
    if how == "record":
        with record("agent", output="run.sftrace"):
            main(method, kinds)
    else:
        main(method, kinds)
"""


def run(folder: Path, *command: str) -> None:
    (folder / "many.py").write_text(PROGRAM)
    keep = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    done = subprocess.run(
        command, cwd=folder, env={**keep, "OTEL_SFTRACE_QUIET": "1"}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


def bundles(folder: Path) -> tuple[Bundle, list[Bundle]]:
    """The run's own bundle and those of its children."""
    found = [open_bundle(path) for path in (*folder.glob("*.sftrace"), *folder.glob("sftraces/*.sftrace"))]
    for one in found:
        assert validate_bundle(one.path, strict=True, verify_integrity=True).exit_code == 0
    assert not list(folder.glob("sftraces/.*"))
    tops = [one for one in found if not one.run["origin"]]
    assert len(tops) == 1, [one.run["origin"] for one in found]
    return tops[0], [one for one in found if one is not tops[0]]


def joined(folder: Path, parts: list[Bundle]) -> Bundle:
    out = folder / "whole.sftrace"
    paths = [str(one.path) for one in parts]
    command = [sys.executable, "-m", "sftrace_otel", "merge", str(out), *paths, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["merged"]) == len(parts)
    assert validate_bundle(out, strict=True, verify_integrity=True).exit_code == 0
    assert stepfork.trace.validate_bundle(out, strict=True, verify_integrity=True).issues == []
    return open_bundle(out)


def below(bundle: Bundle, above: str) -> list[Any]:
    """Inputs of the calls that hang on a call of that name."""
    ids = {event.id for event in bundle.events if event.type == "tool_call" and event.name == above}
    return [event.input for event in bundle.events if event.type == "tool_call" and event.parent_id in ids]


def check_whole(folder: Path) -> None:
    own, children = bundles(folder)
    assert children
    assert all(child.run["origin"]["parent_run"] == own.manifest.run_id for child in children)
    whole = joined(folder, [*children, own])
    assert sorted(one["x"] for one in below(whole, "spread")) == [0, 1, 2, 3]
    assert whole.manifest.totals.tool_calls == 5
    assert whole.run["verdict"]["offline"]


def test_a_pool_under_auto_instrumentation_is_one_run_when_merged(tmp_path: Path) -> None:
    run(tmp_path, INSTRUMENT, sys.executable, "many.py", "auto", "fork", "pool")
    check_whole(tmp_path)
    whole = tmp_path / "whole.sftrace"

    from sftrace_otel import trace_tool

    def spread(method: str, kind: str) -> Any:
        raise AssertionError("the body ran")

    with ReplaySession.from_trace(whole) as replay:  # the workers' calls are skipped with the tool that made them
        assert trace_tool(spread)("fork", "pool") == [0, 2, 4, 6]
        replay.verify_complete()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["pool", "executor"])
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_each_way_to_start_workers(method: str, kind: str, tmp_path: Path) -> None:
    run(tmp_path, INSTRUMENT, sys.executable, "many.py", "auto", method, kind)
    check_whole(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_process_and_one_that_it_starts(method: str, tmp_path: Path) -> None:
    run(tmp_path, INSTRUMENT, sys.executable, "many.py", "auto", method, "nested")
    own, children = bundles(tmp_path)
    by_run = {child.manifest.run_id: child for child in children}
    parents = [child.run["origin"]["parent_run"] for child in children]
    assert len(children) == 2 and set(parents) <= {own.manifest.run_id, *by_run}
    whole = joined(tmp_path, [*children, own])
    assert below(whole, "spread") == [{"x": 7}, {"x": 7}]


@pytest.mark.full
def test_a_program_that_is_started_under_auto_instrumentation(tmp_path: Path) -> None:
    run(tmp_path, INSTRUMENT, sys.executable, "many.py", "auto", "subprocess", "program")
    own, children = bundles(tmp_path)
    (child,) = children
    assert child.run["origin"]["parent_run"] == own.manifest.run_id
    assert below(joined(tmp_path, [own, child]), "spread") == [{"x": 3}]


@pytest.mark.full
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_of_a_record_block_under_auto_instrumentation(method: str, tmp_path: Path) -> None:
    run(tmp_path, INSTRUMENT, sys.executable, "many.py", "record", method, "pool")
    check_whole(tmp_path)


def test_forked_workers_of_a_record_block_belong_to_it(tmp_path: Path) -> None:
    run(tmp_path, sys.executable, "many.py", "record", "fork", "pool")
    check_whole(tmp_path)
