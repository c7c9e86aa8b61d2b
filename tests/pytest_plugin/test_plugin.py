# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin, in test projects of its own: the fixture, the marker, what fails and what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sftrace_otel import record, set_output, trace_tool

pytest_plugins = ["pytester"]

AGENT = """
import asyncio
import pytest
from sftrace_otel import record, set_output, trace_tool

@trace_tool
def search(query, limit=3):
    raise RuntimeError("ran for real")

@trace_tool
def refund(order, amount):
    raise RuntimeError("ran for real")

def agent(amount=20, output="done"):
    found = search("shoes")
    refund(found["order"], amount=amount)
    set_output(output)
    return found
"""


@trace_tool
def search(query: str, limit: int = 3) -> dict[str, int]:
    return {"order": 7}


@trace_tool
def refund(order: int, amount: int) -> str:
    if amount > 100:
        raise PermissionError("too much")
    return "ok"


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A test project with a recorded run beside its tests."""
    folder = pytester.mkdir("checks")
    with record("shop", output=folder / "refund.sftrace"):
        refund(search("shoes")["order"], amount=20)
        set_output("done")
    pytester.makeini(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"
        "addopts = --strict-markers -p no:cacheprovider -p no:hypothesispytest"
    )
    return pytester


def run(project: pytest.Pytester, body: str) -> pytest.RunResult:
    (project.path / "checks" / "test_agent.py").write_text(AGENT + body)
    return project.runpytest_inprocess("-q")


def test_the_block_and_the_marker_replay_and_know_what_was_done(project: pytest.Pytester) -> None:
    result = run(
        project,
        """
def test_block(sftrace_replay):
    with sftrace_replay("refund.sftrace") as replay:
        assert agent() == {"order": 7}
    replay.trajectory.assert_sequence("search", "refund").assert_arguments("refund", {"amount": 20})
    assert replay.report().exit_code == 0

@pytest.mark.sftrace_replay("checks/refund.sftrace", order="strict")
def test_marked(sftrace_replay):
    agent()
    sftrace_replay.trajectory.assert_max_steps(2)

@pytest.mark.sftrace_replay("refund.sftrace")
async def test_async():
    await asyncio.to_thread(agent)

async def test_async_block(sftrace_replay):
    async with sftrace_replay("refund.sftrace"):
        agent()

@pytest.mark.sftrace_replay("refund.sftrace")
class TestAll:
    def test_one(self):
        agent()

def test_none(sftrace_replay):
    with pytest.raises(AttributeError, match="has no marker"):
        sftrace_replay.trajectory
""",
    )
    result.assert_outcomes(passed=6)


DIVERGES = {
    "another argument": ("agent(amount=30)", "*pointer*/amount*"),
    "caught": ("try:\n        agent(amount=30)\n    except Exception:\n        pass", "*/amount*"),
    "missing": ("search('shoes')", "*refund*"),
    "output": ("agent(output='other')", "*other*"),
}


@pytest.mark.parametrize("what", DIVERGES)
@pytest.mark.parametrize("form", ["marker", "block"])
def test_what_is_not_as_recorded_fails_the_test(what: str, form: str, project: pytest.Pytester) -> None:
    act, said = DIVERGES[what]
    if form == "marker":
        body = f"\n@pytest.mark.sftrace_replay('refund.sftrace')\ndef test_it():\n    {act}\n"
    else:
        inner = act.replace("\n", "\n    ")
        body = f"\ndef test_it(sftrace_replay):\n    with sftrace_replay('refund.sftrace'):\n        {inner}\n"
    result = run(project, body)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([said.replace("*pointer*", "*")])
    result.stdout.no_fnmatch_line("*ran for real*")


def test_a_failed_assertion_shows_that_the_replay_had_stopped_before(project: pytest.Pytester) -> None:
    result = run(
        project,
        """
@pytest.mark.sftrace_replay("refund.sftrace")
def test_it():
    try:
        answer = agent(amount=30)
    except Exception:
        answer = None
    assert answer == {"order": 7}
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*assert None == *", "*sftrace*", "*/amount*"])


def test_unused_calls_are_left_to_the_test_where_it_says_so(project: pytest.Pytester) -> None:
    result = run(
        project,
        """
def test_it(sftrace_replay):
    with sftrace_replay("refund.sftrace", check=False) as replay:
        search("shoes")
    with pytest.raises(Exception, match="refund"):
        replay.verify()
""",
    )
    result.assert_outcomes(passed=1)


def test_the_recorded_failure_happens_again(pytester: pytest.Pytester) -> None:
    with pytest.raises(PermissionError), record("shop", output=pytester.path / "failed.sftrace"):
        refund(1, amount=500)
    pytester.makepyfile(
        AGENT
        + """
def test_it(sftrace_replay):
    with pytest.raises(PermissionError, match="too much"), sftrace_replay("failed.sftrace") as replay:
        refund(1, amount=500)
    assert replay.report().exit_code == 0
"""
    )
    pytester.runpytest_inprocess(
        "-q", "-p", "no:hypothesispytest", "-o", "asyncio_default_fixture_loop_scope=function"
    ).assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        ("sftrace_replay('missing.sftrace')", "*missing.sftrace*"),
        ("sftrace_replay()", "*takes one bundle, got 0*"),
        ("sftrace_replay('refund.sftrace', order='odd')", "*odd*"),
    ],
)
def test_a_marker_that_cannot_be_used_says_why(mark: str, said: str, project: pytest.Pytester) -> None:
    result = run(project, f"\n@pytest.mark.{mark}\ndef test_it():\n    agent()\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([said])


def test_the_plugin_imports_nothing_until_a_test_asks(tmp_path: Path) -> None:
    code = "import sftrace_otel.pytest_plugin, sys; print([m for m in sys.modules if m.startswith('sftrace_otel.')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['sftrace_otel.version', 'sftrace_otel.pytest_plugin']"
