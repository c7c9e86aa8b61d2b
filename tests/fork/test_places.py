# SPDX-License-Identifier: Apache-2.0
"""Where forks come from and go to: the target appears whole or not at all, the source is never changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sftrace_otel import record, trace_tool
from sftrace_otel.bundle import write
from sftrace_otel.bundle.pack import pack
from sftrace_otel.cli.app import main
from sftrace_otel.errors import TraceStorageError
from sftrace_otel.fork import ForkPoint, OverrideSpec, fork_trace
from sftrace_otel.trace import RunStart, ToolCall, ToolResult, Trace, validate_bundle

VECTORS = Path(__file__).parents[1] / "data" / "vectors" / "sftrace"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Path(shutil.copytree(VECTORS / "completed.sftrace", tmp_path / "a.sftrace"))


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("call", ["write_file", "finish_folder", "publish", "_seal", "sync_folder"])
def test_a_disk_fault_leaves_nothing_behind(call: str, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = content(source)

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write, call, full)
    with pytest.raises(TraceStorageError, match="No space left"):
        fork_trace(source, ForkPoint(step=4), output_path=source.with_name("b.sftrace"))
    monkeypatch.undo()
    assert content(source) == before and (call == "sync_folder" or names(source.parent) == ["a.sftrace"])


def test_a_source_that_changes_meanwhile_is_found_out(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = source / "events.jsonl"
    real = write.write_file

    def meanwhile(path: Path, pieces: Any, **options: Any) -> None:
        if path.name == "events.jsonl":
            events.write_bytes(events.read_bytes() * 2)
        real(path, pieces, **options)

    monkeypatch.setattr(write, "write_file", meanwhile)
    with pytest.raises(TraceStorageError) as caught:
        fork_trace(source, ForkPoint(step=9), output_path=source.with_name("b.sftrace"))
    assert caught.value.code == "integrity_mismatch" and names(source.parent) == ["a.sftrace"]


def test_onto_itself(source: Path) -> None:
    """Without `overwrite` refused; with it the bundle is replaced in one exchange."""
    before = content(source)
    with pytest.raises(TraceStorageError, match="already exists"):
        fork_trace(source, ForkPoint(step=4), output_path=source)
    assert content(source) == before
    fork_trace(source, ForkPoint(step=4), output_path=source, overwrite=True)
    assert len(Trace.load(source).events) == 5
    assert validate_bundle(source, verify_integrity=True).exit_code == 0


@pytest.mark.parametrize("name", [path.name for path in sorted(VECTORS.glob("*.sftrace"))])
def test_a_fork_at_the_last_step_changes_only_run_ids_and_provenance(name: str, tmp_path: Path) -> None:
    out, parent = tmp_path / "b.sftrace", Trace.load(VECTORS / name)
    run_id = fork_trace(VECTORS / name, ForkPoint(step=parent.events[-1].step), output_path=out).trace.run_id
    before, after = content(VECTORS / name), content(out)
    assert after.keys() - before.keys() <= {"provenance.json", "integrity.json"}
    for file in before.keys() - {"integrity.json"}:
        assert after[file].replace(run_id.encode(), parent.run_id.encode()) == before[file]


def test_a_run_id_in_a_payload_or_an_id_stays_as_it_is(tmp_path: Path) -> None:
    """The line is changed in its bytes: what looks like its head must not be taken for it."""
    nested = {"id": "x", "run_id": "run_p", "parent_id": None, "text": '{"id":"x","run_id":"run_p","parent_id":null}'}
    trace = Trace(agent_name="a", run_id="run_p")
    trace.add(RunStart(id='x","run_id":"run_p","parent_id":', input=nested))
    call = trace.add(ToolCall(name="f", input=nested))
    trace.add(ToolResult(name="f", output=nested, parent_id=call.id))
    path, out = trace.save(tmp_path / "a.sftrace"), tmp_path / "b.sftrace"
    forked = fork_trace(path, ForkPoint(step=2), output_path=out).trace
    assert [event.replace(run_id="run_p") for event in forked.events] == list(trace.events)
    assert {event.run_id for event in forked.events} == {forked.run_id} != {"run_p"}
    assert validate_bundle(out, verify_integrity=True).exit_code == 0


def _folder(target: Path) -> None:
    target.mkdir()
    (target / "mine.txt").write_text("x")


def _link(target: Path) -> None:
    target.symlink_to(target.with_name("a.sftrace"))


@pytest.mark.parametrize("make", [_folder, _link, Path.touch])
def test_what_is_no_bundle_is_not_overwritten(make: Callable[[Path], None], source: Path) -> None:
    before, target = content(source), source.with_name("b.sftrace")
    make(target)
    with pytest.raises(TraceStorageError):
        fork_trace(source, ForkPoint(step=4), output_path=target, overwrite=True)
    assert content(source) == before and names(source.parent) == ["a.sftrace", "b.sftrace"]


def test_a_pack_and_odd_names(source: Path) -> None:
    odd = source.with_name("a b'\"é\n*.sftrace")
    source.rename(odd)
    packed = pack(odd, source.with_name("p.sftrace.zip")).path
    outs = [odd.with_name(f"o{number} é\n.sftrace") for number in range(2)]
    for path, out in zip((odd, packed), outs, strict=True):
        fork_trace(path, ForkPoint(step=4), overrides=[OverrideSpec(step=2, output=1)], output_path=out)
        assert validate_bundle(out, verify_integrity=True).exit_code == 0
    one, other = ([event.replace(run_id="r") for event in Trace.load(out).events] for out in outs)
    assert one == other
    assert main(["fork", str(packed), "--at-step", "2"]) == 0
    assert len(Trace.load(source.with_name("p-forked.sftrace")).events) == 3


@trace_tool
def double(n: int) -> int:
    return 2 * n


def test_the_exit_code_of_replay_finds_the_step_that_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 where a fork's prefix matched to its end, 1 where the program went another way: a binary search over steps."""
    path, calls = tmp_path / "a.sftrace", 8
    with record("agent", output=path):
        for n in range(calls):
            double(n)
    (tmp_path / "bisected.py").write_text(
        "from sftrace_otel import trace_tool\n\n"
        "def double(n):\n    raise AssertionError('frozen')\n\n"
        "double = trace_tool(name='double')(double)\n\n"
        f"def run():\n    for n in range({calls}):\n        double(n if n < 5 else n + 100)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    events = Trace.load(path).events
    good, bad = 0, events[-1].step
    while bad - good > 1:
        middle = (good + bad) // 2
        out = tmp_path / f"s{middle}.sftrace"
        assert main(["fork", str(path), "--at-step", str(middle), "-o", str(out)]) == 0
        code = main(["replay", str(out), "--entrypoint", "bisected:run"])
        assert code in (1, 4)
        good, bad = (middle, bad) if code == 4 else (good, middle)
    first = next(event for event in events if event.type == "tool_call" and event.input == {"n": 5})  # type: ignore[attr-defined]
    assert bad == first.step
