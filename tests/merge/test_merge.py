# SPDX-License-Identifier: Apache-2.0
"""`merge`: bundles that real recorders wrote by clocks of the test's own, joined and looked at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import stepfork.trace

from sftrace_otel.analysis.merge import UNRELATED, family, merge
from sftrace_otel.bundle.read import Bundle, open_bundle, validate_bundle
from sftrace_otel.cli.app import main
from sftrace_otel.core.redact import RedactionPolicy
from sftrace_otel.errors import TraceStorageError
from sftrace_otel.recorder import Call, Recorder, Run, Scope
from sftrace_otel.replay import ReplaySession
from sftrace_otel.settings import Settings

SECOND = 1_000_000_000


class Clock:
    """Wall clock of a process: the test's seconds, moved by what this machine's clock is wrong."""

    now = 0.0

    def __init__(self, wrong: float = 0.0) -> None:
        self.wrong = wrong

    def __call__(self) -> int:
        return int((1_800_000_000 + Clock.now + self.wrong) * SECOND)


class Worker:
    """A process that records: a recorder of its own, one run."""

    def __init__(self, folder: Path, parent: str | None = None, *, wrong: float = 0.0, **settings: Any) -> None:
        clock = Clock(wrong)
        self.recorder = Recorder(
            Settings(dir=folder, quiet=True, parent=parent, **settings),
            RedactionPolicy.default({}),
            clock=clock,
            ticks=lambda: int(Clock.now * SECOND),
        )
        self.run: Run = self.recorder.process_run()
        self.run.open()
        self.count = 0

    @property
    def id(self) -> str:
        return self.run.id

    def begin(self, name: str, value: object = None, *, under: Call | None = None, kind: str = "tool") -> Call:
        call = self.recorder.begin(
            kind,
            name,
            self.recorder.prepare(value),
            scope=Scope(parent=None if under is None else under.id, run=self.run),
            lineage=str(self.count),
            run=self.run,
            model="m" if kind == "llm" else None,
            provider="openai" if kind == "llm" else None,
        )
        assert call is not None
        self.count += 1
        return call

    def end(self, call: Call, value: object = None) -> None:
        self.recorder.end(call, self.recorder.prepare(value))

    def call(self, name: str, value: object = None, *, kind: str = "tool", gives: object = None) -> Call:
        call = self.begin(name, value, kind=kind)
        self.end(call, gives)
        return call

    def close(self) -> Path:
        path = self.recorder.close_run(self.run)
        assert path is not None
        return path


@pytest.fixture(autouse=True)
def _zero() -> None:
    Clock.now = 0.0


def at(second: float) -> None:
    Clock.now = second


def checked(path: Path) -> Bundle:
    """The bundle, strictly valid here and for stepfork."""
    found = validate_bundle(path, strict=True, verify_integrity=True)
    assert (found.exit_code, found.issues, found.warnings) == (0, (), ()), found
    theirs = stepfork.trace.validate_bundle(path, strict=True, verify_integrity=True)
    assert theirs.issues == [], theirs
    return open_bundle(path)


def story(bundle: Bundle) -> list[tuple[str, str, str]]:
    """Each event as (type, name, name of what it hangs on)."""
    names = {event.id: str(getattr(event, "name", None) or event.type) for event in bundle.events}
    return [
        (event.type, names[event.id], names.get(event.parent_id or "", "-"))
        for event in bundle.events
        if event.type not in ("tool_result", "llm_response")
    ]


def files(*folders: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for one in folders for path in sorted(one.rglob("*")) if path.is_file()}


def test_a_child_hangs_on_the_call_that_was_in_flight(tmp_path: Path) -> None:
    parent = Worker(tmp_path)
    at(1)
    spread = parent.begin("spread", {"n": 2})
    at(2)
    child = Worker(tmp_path, parent.id)
    inside = child.begin("work", 1)
    grandchild = Worker(tmp_path, child.id)
    at(3)
    grandchild.call("deep", 1)
    at(3.5)
    child.end(inside, "first")
    at(4)
    parent.end(spread, "done")
    at(5)
    child.call("late", 2)
    at(6)
    parent.call("after", 3)
    child.recorder.single(
        child.run, "state_change", {"before": child.recorder.prepare(1)}, parent=child.run.start_id, hashes=["before"]
    )
    paths = [child.close(), grandchild.close(), parent.close()]
    before = files(*paths)

    done = merge(tmp_path / "whole.sftrace", paths)
    bundle = checked(done.path)
    assert files(*paths) == before
    assert story(bundle) == [
        ("run_start", "run_start", "-"),
        ("tool_call", "spread", "run_start"),
        ("tool_call", "work", "spread"),
        ("tool_call", "deep", "work"),
        ("tool_call", "late", "run_start"),
        ("tool_call", "after", "run_start"),
        ("state_change", "state_change", "run_start"),
        ("run_end", "run_end", "-"),
    ]
    assert bundle.manifest.run_id == parent.id == done.run_id
    assert {event.run_id for event in bundle.events} == {parent.id}
    assert [event.step for event in bundle.events] == list(range(len(bundle.events)))
    assert (bundle.manifest.totals.events, bundle.manifest.totals.tool_calls) == (13, 5)
    assert [one["run_id"] for one in bundle.provenance["parents"]] == [parent.id, child.id, grandchild.id]
    assert bundle.provenance["parents"][0]["events_sha256"] == open_bundle(paths[2]).digest("events.jsonl")
    rows = {row["request"]: row for row in bundle.calls}
    assert sorted(row["call"] for row in rows.values()) == [1, 2, 3, 4, 5]
    starts = {getattr(event, "name", ""): rows[event.id]["start_ns"] for event in bundle.events if event.id in rows}
    assert starts == {"spread": SECOND, "work": 2 * SECOND, "deep": 3 * SECOND, "late": 5 * SECOND, "after": 6 * SECOND}
    lineages = {event.name: rows[event.id]["lineage"] for event in bundle.events if event.type == "tool_call"}
    assert lineages == {"spread": "0", "work": None, "deep": None, "late": None, "after": "1"}
    obstacles = bundle.run["verdict"]["obstacles"]
    assert [one["kind"] for one in obstacles] == ["processes"]  # `late` was made outside every tool


def test_what_ran_inside_a_tool_is_skipped_with_it_by_a_replay(tmp_path: Path) -> None:
    parent = Worker(tmp_path)
    spread = parent.begin("spread", {"n": 2})
    child = Worker(tmp_path, parent.id)
    at(1)
    child.call("work", {"x": 1}, gives=2)
    at(2)
    parent.end(spread, [2])
    bundle = checked(merge(tmp_path / "whole.sftrace", [parent.close(), child.close()]).path)
    assert bundle.run["verdict"] == {"offline": True, "obstacles": []}

    from sftrace_otel import trace_tool

    @trace_tool
    def spread_live(n: int) -> list[int]:
        raise AssertionError("the body ran")

    spread_tool = trace_tool(name="spread")(spread_live.__wrapped__)  # type: ignore[attr-defined]
    with ReplaySession.from_trace(bundle.path) as replay:
        assert spread_tool(2) == [2]
        replay.verify_complete()


def test_of_calls_in_flight_beside_each_other_what_encloses_both_is_taken(tmp_path: Path) -> None:
    parent = Worker(tmp_path)
    outer = parent.begin("outer")
    one, other = parent.begin("one", under=outer), parent.begin("other", under=outer)
    model = parent.begin("chat", {"method": "x"}, kind="llm", under=outer)
    at(1)
    child = Worker(tmp_path, parent.id)
    child.call("between")
    at(2)
    parent.end(other)
    parent.end(model)
    at(3)
    child.call("in one")
    at(3.5)
    parent.end(one)
    parent.end(outer)
    first, second = parent.begin("first"), parent.begin("second")
    at(4)
    child.call("in neither")
    at(5)
    parent.end(first)
    parent.end(second)
    bundle = checked(merge(tmp_path / "w.sftrace", [parent.close(), child.close()]).path)
    hangs = {name: above for _, name, above in story(bundle)}
    assert (hangs["between"], hangs["in one"], hangs["in neither"]) == ("outer", "one", "run_start")


@pytest.mark.parametrize("wrong", [-3600.0, -0.5, 3600.0])
def test_a_clock_that_is_wrong_breaks_no_order(wrong: float, tmp_path: Path) -> None:
    parent = Worker(tmp_path)
    spread = parent.begin("spread")
    at(1)
    child = Worker(tmp_path, parent.id, wrong=wrong)
    work = child.begin("work")
    at(2)
    child.end(work, 1)
    parent.end(spread, 1)
    bundle = checked(merge(tmp_path / "w.sftrace", [parent.close(), child.close()]).path)
    assert bundle.events[0].type == "run_start" and bundle.events[-1].type == "run_end"
    rows = {row["request"]: row["start_ns"] for row in bundle.calls}
    calls = {event.name: event for event in bundle.events if event.type == "tool_call"}
    hung_on = calls["work"].parent_id
    assert hung_on in (calls["spread"].id, bundle.events[0].id)
    if hung_on == calls["spread"].id:
        assert rows[calls["work"].id] >= rows[calls["spread"].id]


def test_ids_of_others_are_given_a_number_and_rows_follow(tmp_path: Path) -> None:
    parent = Worker(tmp_path)
    spread = parent.begin("spread", {"password": "hunter2-correct"})
    child = Worker(tmp_path, parent.id)
    child.run._ids = parent.run._ids
    child.run._numbers = iter(range(1, 100))  # type: ignore[assignment]
    at(1)
    work = child.begin("http GET http://h.test/", {"token": "hunter2-correct"})
    row: dict[str, object] = {
        "method": "GET", "url": "http://h.test/", "request": {"headers": []}, "status": 200, "headers": [],
        "start_ns": 0, "end_ns": 5,
    }  # fmt: skip
    body = b"x" * 20_000
    child.recorder.wire(work, row, None, body, "text/plain")
    child.end(work)
    parent.end(spread)
    bundle = checked(merge(tmp_path / "w.sftrace", [parent.close(), child.close()]).path)
    ids = [event.id for event in bundle.events]
    assert len(set(ids)) == len(ids) and any(one.endswith("-2") for one in ids)
    (exchange,) = bundle.wire()
    call = next(event for event in bundle.events if event.type == "tool_call" and event.name.startswith("http "))
    assert exchange["event_id"] == call.id and exchange["call"] == 2
    assert bundle.blob(exchange["body"]["$blob"]) == body  # type: ignore[index]
    entries = json.loads((bundle.path / "redactions.json").read_bytes())["entries"]
    assert [(one["event_id"], one["path"]) for one in entries] == [
        (next(event.id for event in bundle.events if event.type == "tool_call"), "/input/password"),
        (call.id, "/input/token"),
    ]


def test_a_failed_run_names_its_error_where_it_is_now(tmp_path: Path) -> None:
    parent = Worker(tmp_path)
    child = Worker(tmp_path, parent.id)
    at(1)
    child.call("work")
    child.run.failure = ("KeyError", "the child's own")
    path = child.close()
    at(2)
    parent.run.failure = ("ValueError", "no room")
    bundle = checked(merge(tmp_path / "w.sftrace", [path, parent.close()]).path)
    failure = bundle.manifest.failure
    assert failure is not None and (failure.type, failure.message) == ("ValueError", "no room")
    named = bundle.events[failure.step]
    assert named.type == "error" and named.message == "no room"
    assert [event.message for event in bundle.events if event.type == "error"] == ["the child's own", "no room"]


def test_losses_add_up_and_tools_of_a_child_count_as_traced(tmp_path: Path) -> None:
    ask = {"method": "chat.completions.create", "request": {"model": "m", "messages": [
        {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "work"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "[1]"}]}}  # fmt: skip
    parent = Worker(tmp_path)
    child = Worker(tmp_path, parent.id)
    at(1)
    child.call("work", gives=[1])
    at(2)
    parent.call("m", ask, kind="llm", gives={"id": "x"})
    parent.run.answered.answer("c1", "work", ["0" * 64])
    for worker, count in ((parent, 2), (child, 3)):
        worker.run.lost("spans dropped", count)
    paths = [parent.close(), child.close()]
    assert [one["kind"] for one in open_bundle(paths[0]).run["verdict"]["obstacles"]] == ["untraced_tool", "losses"]
    bundle = checked(merge(tmp_path / "w.sftrace", paths).path)
    assert bundle.run["losses"]["spans dropped"] == 5
    assert bundle.run["losses"]["spans_absent"] == 2
    assert "untraced_tool" not in [one["kind"] for one in bundle.run["verdict"]["obstacles"]]


def test_a_merged_bundle_takes_one_more_process_later(tmp_path: Path) -> None:
    parent = Worker(tmp_path)
    child = Worker(tmp_path, parent.id)
    child.call("work")
    grandchild = Worker(tmp_path, child.id)
    grandchild.call("deep")
    paths = [parent.close(), child.close(), grandchild.close()]
    first = merge(tmp_path / "first.sftrace", paths[:2]).path
    second = checked(merge(tmp_path / "second.sftrace", [paths[2], first]).path)
    assert [event.name for event in second.events if event.type == "tool_call"] == ["work", "deep"]
    with pytest.raises(TraceStorageError, match="already") as refused:
        merge(tmp_path / "third.sftrace", [first, paths[1]])
    assert refused.value.code == UNRELATED
    assert family(tmp_path, parent.id).bundles[0] == paths[0]  # not the merged ones


def test_bundles_that_are_not_of_one_run_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    parent, stranger = Worker(tmp_path), Worker(tmp_path)
    orphan = Worker(tmp_path, "run_" + "0" * 32)
    paths = [worker.close() for worker in (parent, stranger, orphan)]
    for others, reason in ((paths[:2], "a run of its own"), ([paths[0], paths[2]], "its parent is run_000")):
        assert main(["merge", str(tmp_path / "w.sftrace"), *map(str, others)]) == 1
        said = capfd.readouterr().err
        assert "not of one run" in said and reason in said and said.count("\n") == 1
    assert main(["merge", str(tmp_path / "w.sftrace"), str(paths[0]), str(paths[0])]) == 1
    assert "already" in capfd.readouterr().err
    assert not (tmp_path / "w.sftrace").exists()


def test_a_changed_or_invalid_bundle_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    parent = Worker(tmp_path)
    child = Worker(tmp_path, parent.id)
    child.call("work")
    paths = [parent.close(), child.close()]
    rows = paths[1] / "calls.jsonl"
    rows.write_bytes(rows.read_bytes() + b"{}\n")
    assert main(["merge", str(tmp_path / "w.sftrace"), *map(str, paths)]) == 2
    assert "calls.jsonl" in capfd.readouterr().err
    assert not (tmp_path / "w.sftrace").exists() and not list(tmp_path.glob(".*.part"))


def test_the_command_finds_the_processes_and_says_who_is_missing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    parent = Worker(tmp_path / "d")
    child = Worker(tmp_path / "d", parent.id)
    child.call("work")
    Worker(tmp_path / "d").close()
    hanging = Worker(tmp_path / "d", child.id)
    hanging.begin("stuck")
    parent_path, _ = parent.close(), child.close()
    out = tmp_path / "w.sftrace"
    assert main(["merge", str(out), str(tmp_path / "d"), "--run", parent.id, "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert [one["run_id"] for one in document["merged"]] == [parent.id, child.id]
    (note,) = document["notes"]
    assert "has not ended" in note and "sftrace recover" in note
    obstacles = checked(out).run["verdict"]["obstacles"]
    assert [one["kind"] for one in obstacles] == ["processes", "missing_process"]
    assert main(["merge", str(out), str(tmp_path / "d"), "--run", parent_path.name]) == 2
    assert "already exists" in capfd.readouterr().err
    assert main(["merge", str(out), str(tmp_path / "d"), "--run", "run_none"]) == 2
    assert main(["merge", str(out), str(parent_path), str(parent_path), "--run", parent.id]) == 2
    assert "one folder" in capfd.readouterr().err.splitlines()[-1]
    assert main(["merge", str(out), str(tmp_path / "d"), "--run", parent.id, "--overwrite"]) == 0
    assert "2 processes" in capfd.readouterr().out
    hanging.close()


def test_a_process_that_was_cut_off_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from sftrace_otel.bundle.recover import find_journals, recover

    parent = Worker(tmp_path)
    child = Worker(tmp_path, parent.id)
    child.begin("stuck")
    assert child.run.journal is not None
    child.run.journal.abandon()
    path = parent.close()
    (journal,) = find_journals(tmp_path)
    left = recover(journal, fsync=False).path
    done = merge(tmp_path / "w.sftrace", [path, left])  # type: ignore[list-item]
    assert any("cut off" in note for note in done.notes)
    assert "truncated" in [one["kind"] for one in checked(done.path).run["verdict"]["obstacles"]]


def test_unknown_sidecars_of_the_run_stay_and_those_of_children_are_named(tmp_path: Path) -> None:
    from sftrace_otel.bundle.write import finish_folder
    from sftrace_otel.formats import sftrace

    parent = Worker(tmp_path)
    child = Worker(tmp_path, parent.id)
    child.call("work")
    paths = [parent.close(), child.close()]
    for path in paths:
        (path / "nondeterminism.jsonl").write_bytes(b'{"sidecar":"nondeterminism","schema_version":"1"}\n')
        bundle = open_bundle(path)
        finish_folder(path, manifest=bundle.manifest, redactions=bundle.trace.redactions, fsync=False)
    done = merge(tmp_path / "w.sftrace", paths)
    assert sftrace.INTEGRITY_FILE in {one.name for one in done.path.iterdir()}
    assert (checked(done.path).path / "nondeterminism.jsonl").exists()
    assert [note for note in done.notes if "nondeterminism.jsonl" in note]


def test_a_packed_bundle_is_merged_in_place(tmp_path: Path) -> None:
    from sftrace_otel.bundle.pack import pack

    parent = Worker(tmp_path)
    child = Worker(tmp_path, parent.id)
    child.call("work")
    packed = pack(child.close()).path
    assert checked(merge(tmp_path / "w.sftrace", [parent.close(), packed]).path).manifest.totals.tool_calls == 1


def test_spans_keep_their_resources_apart(tmp_path: Path) -> None:
    parent = Worker(tmp_path)
    child = Worker(tmp_path, parent.id)
    for worker, service in ((parent, "a"), (child, "b")):
        for number in range(2):
            resource: dict[str, object] = {"id": 0}
            if number == 0:
                resource["attributes"] = {"service.name": service}
            worker.recorder.span_row(worker.run, {"name": service, "resource": resource})
    bundle = checked(merge(tmp_path / "w.sftrace", [parent.close(), child.close()]).path)
    assert [(row["name"], row["resource"]["id"]) for row in bundle.spans()] == [  # type: ignore[index, call-overload]
        ("a", 0), ("a", 0), ("b", 1), ("b", 1),
    ]  # fmt: skip
