# SPDX-License-Identifier: Apache-2.0
"""Every code block of the field's page on forking (seed `003`, `tests/data/fork_page`) runs, with our names in it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sftrace_otel.trace import Trace, validate_bundle

PAGE = Path(__file__).parents[1] / "data" / "fork_page"
AGENT = """
import sys
from sftrace_otel import record, record_state_change, trace_tool

@trace_tool
def look_up(n: int) -> dict[str, int]:
    if n == 5:
        raise ValueError("no such thing")
    return {"value": n}

def agent(calls: int) -> list[dict[str, int]]:
    record_state_change(key="plan", after=calls)
    return [look_up(n) for n in range(calls)]

def run() -> list[dict[str, int]]:
    return agent(6)

if __name__ == "__main__":
    with record("booking-agent", output="trace.sftrace"):
        agent(3)
        record_state_change(key="plan", before=3)
    with record("booking-agent", output="original.sftrace"):
        agent(2)
    try:
        with record("booking-agent", output="failure.sftrace"):
            run()
    except ValueError:
        pass
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bundles that the page speaks of, recorded by a real agent in a process of its own."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "agent.py").write_text(AGENT)
    subprocess.run([sys.executable, "agent.py"], cwd=folder, check=True, timeout=60)
    return folder


@pytest.fixture
def here(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder, as the working directory."""
    folder = tmp_path / "here"
    shutil.copytree(recorded, folder)
    monkeypatch.chdir(folder)
    return folder


def python(name: str, **placeholders: Any) -> dict[str, Any]:
    """Run a block as it stands, with our name of the package; its names afterwards."""
    source = (PAGE / name).read_text().replace("from stepfork", "from sftrace_otel")
    source = source.replace("[...100 items...]", "list(range(100))").replace("evt_abc123", result_of("failure.sftrace"))
    names = {"__name__": "page", **placeholders}
    exec(compile(source, name, "exec"), names)
    return names


def result_of(path: str) -> str:
    """The id of the tool result at step 5."""
    return Trace.load(path).events[5].id


def shell(name: str, folder: Path) -> list[tuple[int, str]]:
    """Run the commands of a block as processes; exit code and output of each."""
    done = []
    for line in (PAGE / name).read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        words = line.replace("evt_abc123", result_of("trace.sftrace")).split()
        assert words[0] == "stepfork"
        command = [sys.executable, "-m", "sftrace_otel", *words[1:]]
        if "forked.sftrace" in words and Path("forked.sftrace").exists() and words[1] == "fork":
            command.append("--overwrite")  # the page's two commands of one block write to one name
        ran = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=60, check=False,
            env={**os.environ, "PYTHONPATH": str(folder)},
        )  # fmt: skip
        done.append((ran.returncode, ran.stdout + ran.stderr))
    return done


def names_of_the_page() -> dict[str, Any]:
    """What the blocks that import nothing take from those before them."""
    import sftrace_otel.fork as fork

    return {name: getattr(fork, name) for name in ("fork_trace", "ForkPoint", "OverrideSpec")} | {"Trace": Trace}


def test_basic(here: Path) -> None:
    (first, _), (second, _) = shell("01_basic.sh", here)
    assert (first, second) == (0, 0)
    assert len(Trace.load("forked.sftrace").events) == 6
    assert validate_bundle("forked.sftrace", verify_integrity=True).exit_code == 0


def test_overrides(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python("02_overrides.py.txt")
    assert capsys.readouterr().out == "Fork succeeded: True\nOverrides applied: 1\n"
    changed: Any = Trace.load("forked.sftrace").events[5]
    assert changed.output == {"status": "success", "value": 100}


def test_targeting(here: Path) -> None:
    from sftrace_otel.fork import ForkPoint, fork_trace

    overrides = python("03_targeting.py.txt")["overrides"]
    result = fork_trace("failure.sftrace", ForkPoint(step=5), overrides=overrides)
    changed: Any = result.trace.events[5]
    assert changed.output == {"count": 100, "items": ["a", "b"]} and result.overrides_applied == 1


def test_validation(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = names_of_the_page()
    python("04_validation.py.txt", **names, trace_path=Path("trace.sftrace"), fork_point=names["ForkPoint"](step=5))
    (said,) = re.findall(r'# "(.*)"', (PAGE / "04_validation.py.txt").read_text())
    assert capsys.readouterr().out == f"Override validation failed: {said}\n"


def test_complete_and_run_ids(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree("original.sftrace")
    python("05_complete.py.txt")
    assert capsys.readouterr().out == "Original: {'value': 42}\nForked: {'value': 999}\n"
    ids = python("07_run_ids.py.txt", Trace=Trace)
    assert ids["original"].run_id != ids["forked"].run_id


def test_provenance(here: Path) -> None:
    info = python("06_provenance.py.txt", original_trace=Trace.load("original.sftrace"))["fork_info"]
    original = Trace.load("original.sftrace")
    assert (info.parent_run_id, info.parent_trace_path) == (original.run_id, "original.sftrace")
    assert (info.fork_point_step, info.fork_point_event_id) == (5, original.events[5].id)


def test_report(here: Path) -> None:
    ((code, text),) = shell("08_report.sh", here)
    events = len(Trace.load("failure.sftrace").events)
    rows = dict(re.findall(r"│ +(\w[\w ]*?) {2,}(\S+) *│", text))
    assert rows.pop("Fork Point Event").startswith("evt_")
    assert rows == {
        "Original Events": str(events), "Forked Events": "3", "Fork Point Step": "2",
        "Events Excluded": str(events - 3),
    }  # fmt: skip
    assert code == 0 and "✓ Forked trace saved to: failure-forked.sftrace" in text
    assert validate_bundle("failure-forked.sftrace", verify_integrity=True).exit_code == 0


def test_isolating(here: Path) -> None:
    (forked, _), (replayed, text) = shell("09_isolate.sh", here)
    assert forked == 0
    assert replayed == 4 and "no answer in this fork" in text  # step 10 is a call: it is in flight at the fork point


def test_scenarios(here: Path) -> None:
    python("10_scenarios.py.txt", **names_of_the_page())


def test_minimal(here: Path) -> None:
    assert shell("11_minimal.sh", here)[0][0] == 0
    assert len(Trace.load("minimal.sftrace").events) == 9


def test_replay_and_validate(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(here)
    names: dict[str, Any] = {}
    exec(AGENT, names)
    entry: Callable[[], Any] = lambda: names["agent"](2)  # noqa: E731
    assert python("12_replay.py.txt", your_agent_entrypoint=entry)["result"] == [{"value": 0}, {"new": "value"}]
    ((code, text),) = shell("13_validate.sh", here)
    assert code == 0 and "Validation passed." in text


def test_every_block_is_run() -> None:
    here = Path(__file__).read_text()
    assert all(f'"{path.name}"' in here for path in PAGE.iterdir() if path.suffix != ".md")
