# SPDX-License-Identifier: Apache-2.0
"""The suites of the clients themselves: every test that passes without us passes with us.

The source distributions of `openai`, `anthropic` and `httpx` hold their tests. They are run twice, in
a venv of their own (`.host-suites/`, built once, pins in `constraints.txt`), without us and with every boundary on and
a recorder active (`sftrace_hosts.py`); the API that two of them want beside them is `api_server.py`.

What is left out, so that all this takes minutes: `httpx` runs whole. Of `openai` and `anthropic` the tests of the
client, its responses and streams run whole (`SUITES`), and of the generated tests of `api_resources` one file in
`share`, chosen by the digest of its path; the rest of `tests/lib` (websockets, browsers, audio, log-ins, thousands
of tests of the SDK's own models) does not run. Each test prints how many tests were compared. Without an index of
packages it skips.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.full

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CACHE = ROOT / ".host-suites"
PINS = HERE / "constraints.txt"
NEEDS = (
    "openai", "anthropic", "httpx", "httpx2", "h2", "brotli", "zstandard", "socksio", "click", "rich", "aiohttp",
    "boto3",
    "botocore", "google-auth", "requests", "mcp", "standardwebhooks", "websockets", "pytest", "pytest-asyncio", "respx",
    "inline-snapshot", "http-snapshot", "dirty-equals", "time-machine", "trio", "trustme", "uvicorn", "chardet",
    "packaging", "importlib-metadata", "hypothesis", "opentelemetry-sdk", "opentelemetry-instrumentation",
    "opentelemetry-instrumentation-httpx", "wrapt", "msgspec", "orjson", "rfc8785",
)  # fmt: skip
"""What the suites import, and what we do."""


@dataclass(frozen=True)
class Suite:
    """One distribution's tests: which run, and at least how many of them must have been compared."""

    name: str
    version: str
    paths: tuple[str, ...]
    share: int
    options: tuple[str, ...]
    least: int
    port: int = 0
    """The port that its own server takes: then its runs follow each other, else they are made at the same time."""


SDK = (
    "tests/test_client.py", "tests/test_streaming.py", "tests/test_response.py", "tests/api_resources",
)  # fmt: skip
SUITES = (
    Suite("httpx", "0.28.1", ("tests",), 1, ("-p", "no:asyncio"), 1300, port=8000),
    Suite(
        "openai", "3.57.0",
        (*SDK, "tests/test_legacy_response.py", "tests/test_httpx_compat.py", "tests/test_sse_framing.py",
         "tests/test_stream_mode.py",
         "tests/test_debug_logging.py", "tests/lib/chat", "tests/lib/responses"),
        24, (), 1000,
    ),
    Suite(
        "anthropic", "2.14.0", (*SDK, "tests/test_middleware.py", "tests/lib/streaming", "tests/lib/tools"),
        24, ("-p", "tests._alias_httpx"), 400,
    ),
)  # fmt: skip


SECONDS = 600
"""After that a run counts as hanging."""


def api_server() -> Any:
    spec = importlib.util.spec_from_file_location("hosts_api_server", HERE / "api_server.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ApiServer()


def pip(*arguments: str) -> None:
    """Run pip; a machine without an index of packages skips."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        pytest.skip(f"pip could not get what the suites need: {(lines or ['?'])[-1][:200]}")


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of the suites' venv."""
    CACHE.mkdir(exist_ok=True)
    ready, found = CACHE / "ready", CACHE / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    stamp = PINS.read_text() + " ".join(NEEDS) + sys.version
    if not ready.exists() or ready.read_text() != stamp:
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", CACHE / "venv"], check=True)
        pip("--python", str(found), "install", "-c", str(PINS), *NEEDS)
        ready.write_text(stamp)
    return found


def unpacked(suite: Suite) -> Path:
    """The folder of the source distribution."""
    folder = CACHE / f"{suite.name}-{suite.version}"
    if not (folder / "tests").is_dir():
        wanted = f"{suite.name}=={suite.version}"
        pip("download", "--no-binary", ":all:", "--no-deps", "-d", str(CACHE / "sdists"), wanted)
        with tarfile.open(CACHE / "sdists" / f"{suite.name}-{suite.version}.tar.gz") as archive:
            archive.extractall(CACHE, filter="data")
    return folder


@contextlib.contextmanager
def started(python: Path, suite: Suite, out: Path, url: str, record: Path | None) -> Iterator[Callable[[], Any]]:
    """The suite, running, and ended with the block. What is given waits for it and gives what the plugin wrote."""
    keep = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    env = {
        **keep,
        "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT / "src")]),
        "TEST_API_BASE_URL": url,
        "SFTRACE_HOSTS_OUT": str(out),
        "SFTRACE_HOSTS_SHARE": str(suite.share),
        **({} if record is None else {"SFTRACE_HOSTS_RECORD": str(record)}),
    }
    command = [
        str(python), "-m", "pytest", "-q", "--tb=line", "-p", "sftrace_hosts", "-p", "no:cacheprovider",
        "-o", "addopts=", "--continue-on-collection-errors", *suite.options, *suite.paths,
    ]  # fmt: skip
    log = out.with_suffix(".log")
    with log.open("w") as stream:
        process = subprocess.Popen(command, cwd=unpacked(suite), env=env, stdout=stream, stderr=subprocess.STDOUT)

    def ended() -> Any:
        process.wait(SECONDS)
        assert out.exists(), log.read_text()[-3000:]
        return json.loads(out.read_text())

    try:
        yield ended
    finally:
        process.kill()
        process.wait()


def both(python: Path, suite: Suite, folder: Path, url: str) -> tuple[Any, Any]:
    """What came of the suite without us and with us."""
    traces = folder / "traces"
    with started(python, suite, folder / "without.json", url, None) as first:
        early = first() if suite.port else None
        with started(python, suite, folder / "with.json", url, traces) as second:
            return early or first(), second()


def alone(python: Path, suite: Suite, folder: Path, url: str, test: str) -> str:
    """The outcome of one test by itself, with us."""
    one = replace(suite, paths=(test,), share=1)
    out = folder / "again.json"
    out.unlink(missing_ok=True)
    with started(python, one, out, url, folder / "traces") as ended:
        return str(ended()["outcomes"].get(test, "missing"))


def taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_what_passes_without_us_passes_with_us(
    suite: Suite, python: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unpacked(suite)
    if suite.port and taken(suite.port):
        pytest.skip(f"the suite of {suite.name} needs port {suite.port}, which another program has")
    with api_server() as server:
        without, with_us = both(python, suite, tmp_path, server.url)
        passed = sorted(test for test, outcome in without["outcomes"].items() if outcome == "passed")
        suspects = [test for test in passed if with_us["outcomes"].get(test) != "passed"]
        # a suite has tests that go by the clock: those that pass by themselves with us were such ones
        lost = [
            test
            for test in suspects
            if len(suspects) > 20 or alone(python, suite, tmp_path, server.url, test) != "passed"
        ]
    with capsys.disabled():
        total, calls = len(without["outcomes"]), with_us["calls"]
        print(f"\n{suite.name} {suite.version}: {len(passed)} of {total} tests pass without us, {calls} calls recorded")
    assert lost == []
    assert len(passed) >= suite.least and with_us["calls"] > 50
