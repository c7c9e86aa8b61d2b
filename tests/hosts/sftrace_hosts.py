# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for the suite of another project: writes each test's outcome, and, if asked to, records it all.

`-p sftrace_hosts`, with `SFTRACE_HOSTS_OUT` (a file for the outcome of each test), `SFTRACE_HOSTS_SHARE` (`n`: one in n
files of `api_resources` is collected, by the digest of its path) and `SFTRACE_HOSTS_RECORD` (a folder: our boundaries
are on and a recorder is active, as under `instrument()`).
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

_outcomes: dict[str, str] = {}
_folder = os.environ.get("SFTRACE_HOSTS_RECORD")


def pytest_configure(config: pytest.Config) -> None:
    if _folder:
        from sftrace_otel import instrumentation, recorder
        from sftrace_otel.settings import Settings

        instrumentation.install()
        recorder.acquire(Settings(dir=Path(_folder), quiet=True))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    share = int(os.environ.get("SFTRACE_HOSTS_SHARE", "1"))
    place = collection_path.relative_to(config.rootpath).as_posix()
    if "/api_resources/" in place and collection_path.suffix == ".py" and _number(place) % share:
        return True
    return None


def _number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    before = _outcomes.get(report.nodeid, "passed")
    _outcomes[report.nodeid] = before if report.outcome == "passed" else report.outcome


def pytest_sessionfinish(session: pytest.Session, exitstatus: Any) -> None:
    out = os.environ.get("SFTRACE_HOSTS_OUT")
    if out:
        found: dict[str, Any] = {"outcomes": _outcomes}
        if _folder:
            from sftrace_otel import recorder

            active = recorder.active()
            found["calls"] = 0 if active is None else sum(run.calls for run in active._runs.values())
            recorder.release()
        Path(out).write_text(json.dumps(found))
