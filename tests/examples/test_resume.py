# SPDX-License-Identifier: Apache-2.0
"""The bug of the quickstart, resumed: forked before it shows, with the fix in the fork or in the code, the agent runs
on to the right end, and the server hears only of what comes after the fork point."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sftrace_otel.bundle.read import validate_bundle

from .conftest import EXAMPLES, Bundle, Place, Recorded

WRONG, RIGHT = "we have refunded 4990.00 EUR", "we have refunded 49.90 EUR"


@pytest.fixture
def counting() -> Iterator[tuple[dict[str, str], list[str]]]:
    """The example's server in this process: the variables it would say to export, and what reached it."""
    spec = importlib.util.spec_from_file_location("quickstart_server", EXAMPLES / "quickstart" / "server.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    heard: list[str] = []

    class Handler(module.Handler):  # type: ignore[misc]
        def parse_request(self) -> bool:
            known: bool = super().parse_request()
            heard.append(f"{self.command} {self.path}")
            return known

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    origin = f"http://127.0.0.1:{server.server_port}"
    yield {"OPENAI_BASE_URL": f"{origin}/v1", "SHOP_URL": origin}, heard
    server.shutdown()
    server.server_close()


def provenance(bundle: Path) -> Any:
    return json.loads((bundle / "provenance.json").read_text())


def results(bundle: Path, name: str) -> list[Any]:
    return [one["output"] for one in Bundle(path=bundle).events if one["type"] == "tool_result" and one["name"] == name]


def host(origin: str) -> str:
    return origin.rpartition("/")[2]


def test_forked_before_its_bug_the_agent_runs_on_to_the_right_end(
    recorded: Recorded, counting: Any, tmp_path: Path
) -> None:
    """The fix is in the data: the order as the fork has it holds euros."""
    variables, heard = counting
    assert WRONG in recorded.stdout
    place = Place(folder=tmp_path, variables=variables)
    place.copy_agent("quickstart")
    parent, was = recorded.decorated.bundle.path, host(recorded.decorated.variables["SHOP_URL"])
    fork = ("fork", str(parent), "--at-step", "6", "--set", "6:/price_cents=49.9", "-o", "fixed.sftrace", "--run")
    options = ("--policy", "tool:refund=live", "--map-host", f"{was}={host(variables['SHOP_URL'])}")
    done = place.sftrace(*fork, *options, "--", "python", "agent.py")
    assert done.returncode == 0, done.stderr
    assert RIGHT in done.stdout and WRONG not in done.stdout
    assert heard == ["POST /v1/chat/completions"] * 5, "neither the policy nor the first question went out again"
    made = tmp_path / "fixed-resumed.sftrace"
    assert [one["refunded"] for one in results(made, "refund")] == [49.9]
    told = provenance(made)
    assert (told["origin"], told["fork_point"]["step"]) == ("resumed", 6)
    assert told["parents"][0]["run_id"] == Bundle(path=tmp_path / "fixed.sftrace").manifest["run_id"]
    assert Bundle(path=made).manifest["status"] == "completed"
    assert validate_bundle(made, strict=True, verify_integrity=True).exit_code == 0


@pytest.mark.full
def test_mended_code_goes_on_from_the_step_before_the_bug(counting: Any, tmp_path: Path) -> None:
    variables, heard = counting
    place = Place(folder=tmp_path, variables=variables)
    agent = place.copy_agent("quickstart")
    assert WRONG in place.sftrace("record", "--", "python", "agent.py").stdout
    assert len(heard) == 7, "the policy, and six questions to the model"

    # Everything up to the model's wish to refund is served, and the mended program goes on.
    agent.write_text(agent.read_text().replace('order["price_cents"]', 'order["price"]'))
    heard.clear()
    assert place.sftrace("fork", "latest", "--at-step", "8", "-o", "before.sftrace").returncode == 0
    resume = ("replay", "before.sftrace", "--mode", "resume", "--policy", "tool:refund=live", "--json")
    done = place.sftrace(*resume, "--", "python", "agent.py")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["served"], report["live"], report["verdict"]) == (4, 5, "resumed")
    assert heard == ["POST /v1/chat/completions"] * 4
    assert [one["refunded"] for one in results(tmp_path / "before-resumed.sftrace", "refund")] == [49.9]

    # What was recorded on the way is valid for others, and replays offline.
    assert place.run("stepfork", "validate", "before-resumed.sftrace").returncode == 0
    heard.clear()
    done = place.sftrace("replay", "before-resumed.sftrace", "--", "python", "agent.py")
    assert (done.returncode, heard) == (0, []), done.stderr
    drawn = place.sftrace("lineage", ".", "sftraces").stdout
    assert "└─ before-resumed.sftrace" in drawn and "resumed after step 8, completed" in drawn


@pytest.mark.full
def test_resume_is_blocked_at_the_first_tool_that_nobody_allowed(counting: Any, tmp_path: Path) -> None:
    variables, heard = counting
    place = Place(folder=tmp_path, variables=variables)
    place.copy_agent("quickstart")
    assert place.sftrace("record", "--", "python", "agent.py").returncode == 0
    heard.clear()
    done = place.sftrace("fork", "latest", "--at-step", "6", "-o", "f.sftrace", "--run", "--", "python", "agent.py")
    assert done.returncode == 4, done.stderr
    assert "tool 'refund' comes after the recording had ended, and its policy is block (the default)" in done.stderr
    assert "--policy 'tool:refund=live'" in done.stderr
    assert heard == ["POST /v1/chat/completions"]
    assert results(tmp_path / "f-resumed.sftrace", "refund") == []
    assert Bundle(path=tmp_path / "f-resumed.sftrace").manifest["status"] == "failed"
