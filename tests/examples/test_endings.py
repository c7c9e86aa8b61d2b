# SPDX-License-Identifier: Apache-2.0
"""Programs that do not end well, and places that cannot be written: the program's own behaviour never changes."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import time

import pytest

from .conftest import BIN, Place

AGENT = """
import sys, time
from sftrace_otel import trace_tool

@trace_tool
def divide(a, b):
    return a / b

print(divide(6, 3), flush=True)
"""


@pytest.mark.parametrize(
    ("ending", "code", "failure"),
    [
        ("raise LookupError('no such order')", 1, "LookupError"),
        ("divide(1, 0)", 1, "ZeroDivisionError"),
    ],
    ids=["raises", "tool raises"],
)
def test_a_program_that_fails_is_recorded_as_failed(place: Place, ending: str, code: int, failure: str) -> None:
    (place.folder / "agent.py").write_text(AGENT + ending + "\n")
    done = place.instrumented("python", "agent.py")
    assert done.returncode == code
    assert done.stdout == "2.0\n"
    manifest = place.bundle.manifest
    assert manifest["status"] == "failed"
    assert manifest["failure"]["type"] == failure
    checked = place.run("stepfork", "validate", str(place.bundle.path), "--verify-integrity")
    assert checked.returncode == 0, checked.stdout
    replayed = place.sftrace("replay", "latest", "--", "python", "agent.py")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


@pytest.mark.parametrize(("ending", "code"), [("sys.exit()", 0), ("sys.exit(3)", 3), ("sys.exit('gave up')", 1)])
def test_a_program_that_exits_has_completed_whatever_its_code(place: Place, ending: str, code: int) -> None:
    (place.folder / "agent.py").write_text(AGENT + ending + "\n")
    assert place.instrumented("python", "agent.py").returncode == code
    assert place.bundle.manifest["status"] == "completed"
    replayed = place.sftrace("replay", "latest", "--", "python", "agent.py")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


def test_an_interrupted_program_is_recorded_up_to_there(place: Place) -> None:
    (place.folder / "agent.py").write_text(AGENT + "time.sleep(60)\n")
    environment = {**os.environ, "PATH": os.pathsep.join((str(BIN), os.environ["PATH"]))}
    command = ["opentelemetry-instrument", "python", "agent.py"]
    with subprocess.Popen(
        command,
        cwd=place.folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        # a shell that started the tests in the background has made its children ignore interrupts
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "2.0\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        process.wait(20)
    assert process.returncode in (-signal.SIGINT, 130)
    assert place.bundle.manifest["status"] == "failed"
    assert place.bundle.manifest["failure"]["type"] == "KeyboardInterrupt"
    assert place.bundle.manifest["totals"]["tool_calls"] == 1


def test_an_unwritable_folder_costs_the_recording_only(place: Place) -> None:
    (place.folder / "agent.py").write_text(AGENT)
    (place.folder / "taken").write_text("a file, not a folder")
    done = place.instrumented("python", "agent.py", OTEL_SFTRACE_DIR="taken/bundles")
    assert (done.returncode, done.stdout) == (0, "2.0\n")
    lines = [line for line in done.stderr.splitlines() if "taken" in line]
    assert len(lines) == 1, done.stderr
    assert "nothing" in lines[0] and "record" in lines[0]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "variables",
    [{"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_SDK_DISABLED": "true"}, {"OTEL_SFTRACE_CAPTURE": "off"}],
    ids=lambda variables: next(iter(variables)),
)
def test_off_is_off(place: Place, variables: dict[str, str]) -> None:
    (place.folder / "agent.py").write_text(AGENT)
    done = place.instrumented("python", "agent.py", **variables)
    assert (done.returncode, done.stdout) == (0, "2.0\n")
    assert not (place.folder / "sftraces").exists()


def test_a_program_that_makes_no_call_leaves_nothing(place: Place) -> None:
    done = place.instrumented("python", "-c", "print('hello')")
    assert (done.returncode, done.stdout) == (0, "hello\n")
    assert not (place.folder / "sftraces").exists()


def test_a_wrong_setting_is_one_line_and_nothing_recorded(place: Place) -> None:
    (place.folder / "agent.py").write_text(AGENT)
    done = place.instrumented("python", "agent.py", OTEL_SFTRACE_SCOPE="galaxy")
    assert (done.returncode, done.stdout) == (0, "2.0\n")
    assert len([line for line in done.stderr.splitlines() if "OTEL_SFTRACE_SCOPE" in line]) == 1, done.stderr
    assert not (place.folder / "sftraces").exists()
