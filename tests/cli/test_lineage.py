# SPDX-License-Identifier: Apache-2.0
"""`lineage`: trees of forks, missing and changed parents, bundles that lie about where they came from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sftrace_otel.trace import Trace

from .conftest import Cli


@pytest.fixture
def family(cli: Cli, bundle: Callable[[str], Path]) -> Path:
    """A folder with a recording, two forks of it, and a fork of the first."""
    path = bundle("completed")
    folder = path.parent
    assert cli("fork", path, "--at-step", 4, "--override", "2=1", "-o", folder / "a.sftrace").code == 0
    assert cli("fork", path, "--at-step", 6, "-o", folder / "b.sftrace").code == 0
    assert cli("fork", folder / "a.sftrace", "--at-step", 2, "-o", folder / "c.sftrace").code == 0
    return folder


def run_of(path: Path) -> str:
    return Trace.load(path).run_id


def test_the_tree(cli: Cli, family: Path) -> None:
    done = cli("lineage", family)
    assert (done.code, done.err) == (0, "")
    runs = {name: run_of(family / f"{name}.sftrace") for name in ("completed", "a", "b", "c")}
    assert done.out.splitlines() == [
        f"completed.sftrace  {runs['completed']}  recorded, completed",
        f"├─ a.sftrace  {runs['a']}  forked at step 4, 1 override, running",
        f"│  └─ c.sftrace  {runs['c']}  forked at step 2, running",
        f"└─ b.sftrace  {runs['b']}  forked at step 6, running",
    ]
    assert cli("lineage", family / "c.sftrace").out == done.out
    assert cli("lineage", runs["b"], "--dir", family).out == done.out
    assert cli("lineage", "--dir", family).out == done.out


def test_only_the_tree_that_was_asked_for(cli: Cli, family: Path, bundle: Callable[[str], Path]) -> None:
    other = bundle("failed_tool")
    assert other.parent == family
    assert "failed_tool.sftrace" in cli("lineage", family).out
    assert "failed_tool.sftrace" not in cli("lineage", family / "a.sftrace").out
    assert "a.sftrace" not in cli("lineage", other).out


def test_a_missing_parent_stands_where_it_was(cli: Cli, family: Path) -> None:
    run = run_of(family / "completed.sftrace")
    shutil.rmtree(family / "completed.sftrace")
    done = cli("lineage", family)
    assert done.code == 1
    assert done.out.splitlines()[0] == f"completed.sftrace  {run}  MISSING"
    assert f"the parent completed.sftrace ({run}) is not among these bundles" in done.line


@pytest.mark.parametrize("record", ["old", "rewritten"])
def test_a_changed_parent_is_found_out(record: str, cli: Cli, family: Path) -> None:
    parent = family / "a.sftrace"
    if record == "old":
        events = parent / "events.jsonl"
        events.write_bytes(events.read_bytes().replace(b"value is 42", b"value is 43"))
    else:
        trace = Trace.load(parent)
        shorter = Trace(agent_name="sample-agent", run_id=trace.run_id, events=trace.events[:2])
        shorter.save(parent, overwrite=True)
        assert cli("verify", parent).code == 0
    done = cli("lineage", family, "--json")
    assert done.code == 1
    nodes = done.json["trees"]
    for node in nodes:
        nodes += node["children"]
    assert [node["name"] for node in nodes if node["changed"]] == ["a.sftrace"] and len(nodes) == 4
    assert "the events of a.sftrace are not those" in cli("lineage", family).line


def test_a_bundle_that_is_its_own_parent(cli: Cli, family: Path) -> None:
    told = family / "a.sftrace" / "provenance.json"
    document = json.loads(told.read_text())
    document["parents"][0]["run_id"] = run_of(family / "c.sftrace")
    told.write_text(json.dumps(document))
    done = cli("lineage", family)
    lines = done.out.translate(dict.fromkeys(map(ord, "─└├│"), " ")).splitlines()
    assert sorted(line.split()[0] for line in lines) == ["a.sftrace", "b.sftrace", "c.sftrace", "completed.sftrace"]


def test_names_of_strangers_do_not_reach_the_terminal(cli: Cli, family: Path) -> None:
    told = family / "b.sftrace" / "provenance.json"
    document = json.loads(told.read_text())
    document["parents"][0].update(run_id="run_\x1b[31m", name="\x1b]0;x\x07")
    told.write_text(json.dumps(document))
    done = cli("lineage", family)
    assert done.code == 1 and "\x1b" not in done.out + done.err


@pytest.mark.parametrize("what", ["missing", "file"])
def test_what_is_no_bundle(what: str, cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / what
    if what == "file":
        path.write_text("x")
    done = cli("lineage", path)
    assert (done.code, done.out) == (2, "") and what in done.line


def test_an_empty_folder(cli: Cli, tmp_path: Path) -> None:
    done = cli("lineage", tmp_path)
    assert (done.code, done.out) == (0, "") and "no bundle there" in done.line
