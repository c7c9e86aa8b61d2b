# SPDX-License-Identifier: Apache-2.0
"""uvicorn, gunicorn and celery in processes of their own, started by `opentelemetry-instrument`.

Every request or task that finished has its bundle, a master process that made no call leaves nothing, and a worker that
is killed leaves a journal that `recover` makes a valid bundle of.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Workplace, answers, events, fetch, fetch_aside, fetch_many, run

SERVERS = {
    "uvicorn": ("uvicorn", "apps:asgi", "--port", "PORT"),
    "uvicorn-4": ("uvicorn", "apps:asgi", "--port", "PORT", "--workers", "4"),
    "gunicorn-sync": ("gunicorn", "apps:wsgi", "--bind", "127.0.0.1:PORT", "-w", "4"),
    "gunicorn-threads": ("gunicorn", "apps:wsgi", "--bind", "127.0.0.1:PORT", "-w", "2", "--threads", "4"),
    "gunicorn-preload": ("gunicorn", "apps:wsgi", "--bind", "127.0.0.1:PORT", "-w", "2", "--preload"),
    "gunicorn-asgi": ("gunicorn", "apps:asgi", "--bind", "127.0.0.1:PORT", "-w", "2", "-k", "asgi"),
    "gunicorn-uvicorn": (
        "gunicorn",
        "apps:asgi",
        "--bind",
        "127.0.0.1:PORT",
        "-w",
        "2",
        "-k",
        "uvicorn.workers.UvicornWorker",
    ),
}


def serve(place: Workplace, name: str, port: int) -> tuple[subprocess.Popen[str], str]:
    process = place.start(*(word.replace("PORT", str(port)) for word in SERVERS[name]))
    url = f"http://127.0.0.1:{port}"
    place.until(lambda: answers(url))
    return process, url


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "uvicorn" else pytest.mark.full) for name in SERVERS]
)
def test_every_request_has_its_bundle_after_a_graceful_end(place: Workplace, port: int, name: str) -> None:
    process, url = serve(place, name, port)
    found = fetch_many(url, range(24))
    assert [answer["twice"] for answer in found] == [2 * n for n in range(24)]
    place.stop(process)
    assert place.inputs() == list(range(24))
    assert len(place.paths()) == 24, "the master process, or a worker outside its requests, left a bundle"
    assert place.journals() == []
    assert "Traceback" not in place.log()


@pytest.mark.full
@pytest.mark.parametrize("name", ["uvicorn-4", "gunicorn-sync", "gunicorn-threads"])
def test_a_worker_killed_in_a_request_leaves_a_journal_to_recover(place: Workplace, port: int, name: str) -> None:
    process, url = serve(place, name, port)
    fetch(url, 1)
    place.until(place.paths)  # its bundle is written beside the server, maybe by the worker that is killed
    fetch_aside(url, 7, "/hang")
    pid = int(place.until(lambda: _text(place.folder / "hanging-7")))
    os.kill(pid, signal.SIGKILL)
    place.until(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid))
    place.stop(process)
    [journal] = place.journals()
    done = subprocess.run(
        [sys.executable, "-m", "sftrace_otel", "recover", str(place.bundles)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert place.journals() == []
    recovered = [path for path in place.bundles.glob("*.sftrace") if journal.name.startswith(f".{path.name}")]
    assert len(recovered) == 1
    checked = subprocess.run(
        [sys.executable, "-m", "sftrace_otel", "validate", "--partial", str(recovered[0])],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert events(recovered[0], "run_start")[0]["input"]["body"] == {"n": 7}
    assert [event["input"] for event in events(recovered[0], "tool_call")] == [{"x": 7}, {"x": 7}]
    assert [event["output"]["twice"] for event in events(recovered[0], "tool_result")] == [14]
    assert run(recovered[0])["losses"]["truncated"] is True


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_graceful_end_waits_for_the_request_under_way(place: Workplace, port: int) -> None:
    process, url = serve(place, "uvicorn", port)
    asking = fetch_aside(url, 7, "/slow")
    place.until((place.folder / "slow-7").exists)
    process.send_signal(signal.SIGTERM)
    (place.folder / "go-on").touch()
    asking.join(60)
    process.wait(60)
    assert place.inputs() == [7]
    assert place.journals() == []


# --- celery -----------------------------------------------------------------------------------------------------------

TASKS = """
import os, threading
from pathlib import Path
from celery import Celery
from sftrace_otel import trace_tool

here = Path(__file__).parent
for name in ("queue", "control", "results"):
    (here / name).mkdir(exist_ok=True)
app = Celery("tasks", broker="filesystem://", backend=f"file://{here / 'results'}")
app.conf.broker_transport_options = {
    "data_folder_in": str(here / "queue"),
    "data_folder_out": str(here / "queue"),
    "control_folder": str(here / "control"),
}
app.conf.worker_hijack_root_logger = False

@trace_tool
def double(x):
    return 2 * x

@app.task
def work(n):
    if n == 13:
        double(n)
        raise ValueError("unlucky")
    if n == 99:
        double(n)
        Path(here / "hanging-99").write_text(str(os.getpid()))
        threading.Event().wait()
    return double(n)
"""
SEND = """
import sys
from tasks import work
results = [work.delay(int(n)) for n in sys.argv[1:]]
print([repr(result.get(timeout=60, propagate=False)) for result in results])
"""


def worker(place: Workplace, *options: str) -> subprocess.Popen[str]:
    (place.folder / "tasks.py").write_text(TASKS)
    (place.folder / "send.py").write_text(SEND)
    process = place.start("celery", "-A", "tasks", "worker", "--loglevel", "INFO", *options)
    place.until(lambda: " ready." in place.log())
    return process


def send(place: Workplace, *numbers: int) -> str:
    done = subprocess.run(
        [sys.executable, "send.py", *map(str, numbers)],
        cwd=place.folder,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr + place.log()
    return done.stdout


@pytest.mark.full
@pytest.mark.parametrize(
    "options", [("-P", "solo"), ("-c", "2"), ("-P", "threads", "-c", "2")], ids=["solo", "prefork", "threads"]
)
def test_every_task_has_its_bundle(place: Workplace, options: tuple[str, ...]) -> None:
    process = worker(place, *options)
    assert "ValueError('unlucky')" in send(place, 1, 2, 3, 13)
    place.stop(process)
    assert place.inputs("task") == [1, 2, 3, 13]
    assert len(place.paths()) == 4
    assert place.journals() == []
    failed = [path for path in place.paths() if events(path, "run_end")[0]["run_status"] == "failed"]
    assert [events(path, "run_start")[0]["input"]["args"] for path in failed] == [[13]]
    assert [(event["error_type"], event["message"]) for event in events(failed[0], "error")] == [
        ("ValueError", "unlucky")
    ]
    assert "sftrace:" not in place.log()


@pytest.mark.full
def test_a_pool_process_killed_in_a_task_leaves_a_journal_to_recover(place: Workplace) -> None:
    process = worker(place, "-c", "1")
    send(place, 1)
    subprocess.run([sys.executable, "-c", "from tasks import work; work.delay(99)"], cwd=place.folder, check=True)
    pid = int(place.until(lambda: _text(place.folder / "hanging-99")))
    os.kill(pid, signal.SIGKILL)
    place.until(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid))
    place.stop(process)
    assert len(place.journals()) == 1
    done = subprocess.run(
        [sys.executable, "-m", "sftrace_otel", "recover", str(place.bundles)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    inputs = [events(path, "run_start")[0]["input"]["args"] for path in place.bundles.glob("*.sftrace")]
    assert sorted(inputs) == [[1], [99]]
