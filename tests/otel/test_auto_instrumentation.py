# SPDX-License-Identifier: Apache-2.0
"""The real `opentelemetry-instrument`, with the packages of this environment beside us, in either order.

`opentelemetry-distro` is installed here, the gRPC exporter that it takes by default is not. Which distribution the
loader meets first is forced by a copy of its metadata in a folder that comes earlier on the path.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
import venv
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from .conftest import INSTRUMENT, Child

AGENT = """
import json, sys
from opentelemetry import trace
tracer = trace.get_tracer("agent")
CHAT = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "x", "gen_ai.request.model": "m"}
early = [name for name in ("httpx", "httpx2", "openai", "pydantic") if name in sys.modules]
with tracer.start_as_current_span("root") as root:
    with tracer.start_as_current_span("chat m", attributes=CHAT):
        pass
    import httpx2
    httpx2.get(sys.argv[1] if len(sys.argv) > 1 else URL)
attributes = getattr(root, "attributes", None) or {}
print(json.dumps({"early": early, "bundle": attributes.get("sftrace.bundle")}))
"""


def agent(openai_server: Any, source: str = AGENT) -> str:
    openai_server.pages["/weather"] = {"celsius": 7}
    return source.replace("URL", repr(f"{openai_server.url}/weather?city=Oslo"))


def first_on_path(folder: Path, name: str) -> str:
    """A folder for PYTHONPATH in which the loader finds the entry points of `name` before all others."""
    metadata = next(
        Path(str(file.locate())).parent for file in distribution(name).files or () if file.name == "entry_points.txt"
    )
    shutil.copytree(metadata, folder / "first" / metadata.name)
    return str(folder / "first")


def check_recorded(child: Child, stderr: str) -> None:
    """The chat, known from its span, and the GET, from the HTTP boundary; and a quiet start."""
    assert "Failed to auto initialize" not in stderr
    assert "not loaded" not in stderr
    assert "Traceback" not in stderr
    assert [event["model"] for event in child.bundles.events("llm_request")] == ["m"]
    [get] = child.bundles.events("tool_call")
    assert get["name"].startswith("http GET http://127.0.0.1:")
    [result] = child.bundles.events("tool_result")
    assert result["output"]["status_code"] == 200
    [row] = [row for row in child.bundles.lines("calls.jsonl") if row["kind"] == "http"]
    assert row["span"] == "recorded"
    assert child.bundles.spans() == ["root"]


@pytest.mark.parametrize("first", ["sftrace-otel", "opentelemetry-distro"])
def test_no_variable_at_all_in_either_order(child: Child, openai_server: Any, first: str) -> None:
    done = child.run(agent(openai_server), command=INSTRUMENT, PYTHONPATH=first_on_path(child.folder, first))
    check_recorded(child, done.stderr)
    assert f'"bundle": "{child.bundles.one().name}"' in done.stdout
    assert '"early": []' in done.stdout, "our start imports what the program did not import"


def test_another_exporter_gets_the_sampled_spans_and_we_get_all(child: Child, openai_server: Any) -> None:
    done = child.run(
        agent(openai_server),
        command=INSTRUMENT,
        OTEL_TRACES_EXPORTER="console",
        OTEL_METRICS_EXPORTER="none",
        OTEL_LOGS_EXPORTER="none",
        OTEL_TRACES_SAMPLER="always_off",
    )
    check_recorded(child, done.stderr)
    assert '"trace_id"' not in done.stdout


def test_the_exporter_by_name_beside_another(child: Child, openai_server: Any) -> None:
    done = child.run(
        agent(openai_server),
        command=(*INSTRUMENT, "--traces_exporter", "sftrace,console", "--sftrace_dir", "traces"),
        OTEL_METRICS_EXPORTER="none",
        OTEL_LOGS_EXPORTER="none",
    )
    child.bundles.folder = child.folder / "traces"
    check_recorded(child, done.stderr)
    assert done.stdout.count('"trace_id"') >= 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_TRACES_EXPORTER", "none"),
        pytest.param("OTEL_SDK_DISABLED", "true", marks=pytest.mark.full),
        pytest.param("OTEL_SFTRACE_CAPTURE", "off", marks=pytest.mark.full),
    ],
)
def test_off(child: Child, openai_server: Any, name: str, value: str) -> None:
    done = child.run(agent(openai_server), command=INSTRUMENT, **{name: value})
    assert not child.bundles.folder.exists()
    assert "sftrace" not in done.stderr


@pytest.mark.full
def test_another_distro_chosen_by_name(child: Child, openai_server: Any) -> None:
    done = child.run(
        agent(openai_server),
        command=INSTRUMENT,
        OTEL_PYTHON_DISTRO="distro",
        OTEL_PYTHON_CONFIGURATOR="configurator",
        OTEL_TRACES_EXPORTER="console",
        OTEL_METRICS_EXPORTER="none",
        OTEL_LOGS_EXPORTER="none",
    )
    stderr = done.stderr.replace("Configuration of sftrace not loaded because configurator is set by", "")
    check_recorded(child, stderr)
    assert done.stdout.count('"trace_id"') >= 3


CONFIG = """
file_format: "1.0"
tracer_provider:
  processors:
    - {processor}
"""


@pytest.mark.parametrize(
    "processor",
    [
        "simple: {exporter: {sftrace: {dir: ./sftraces, agent: from-yaml}}}",
        pytest.param("batch: {exporter: {console: {}}}", marks=pytest.mark.full),
    ],
    ids=["ours", "another's"],
)
def test_a_configuration_file(child: Child, openai_server: Any, processor: str) -> None:
    (child.folder / "otel.yaml").write_text(CONFIG.replace("{processor}", processor))
    done = child.run(agent(openai_server), command=INSTRUMENT, OTEL_CONFIG_FILE=str(child.folder / "otel.yaml"))
    check_recorded(child, done.stderr)
    assert child.bundles.one().name.startswith("from-yaml-" if "sftrace" in processor else "agent-")


OWN_PROVIDER = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
provider = TracerProvider()
trace.set_tracer_provider(provider)
with provider.get_tracer("mine").start_as_current_span("execute_tool mine") as span:
    span.set_attribute("gen_ai.operation.name", "execute_tool")
    span.set_attribute("gen_ai.tool.name", "mine")
"""


def test_a_provider_that_the_program_makes_itself(child: Child) -> None:
    child.run(OWN_PROVIDER, command=INSTRUMENT)
    assert [event["name"] for event in child.bundles.events("tool_call")] == ["mine"]


HELPER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "print('a helper')"], check=True)
"""


def test_a_helper_process_without_a_call_leaves_nothing(child: Child) -> None:
    done = child.run(HELPER, command=INSTRUMENT)
    assert "a helper" in done.stdout
    assert done.stderr == ""
    assert not child.bundles.folder.exists()


FAMILY = """
import os, subprocess, sys
from sftrace_otel import trace_tool

@trace_tool
def work(who):
    return who

work("parent" if len(sys.argv) == 1 else sys.argv[1])
if len(sys.argv) == 1:
    subprocess.run([sys.executable, __file__, "child"], check=True)
"""


def test_a_python_child_knows_the_run_it_belongs_to(child: Child) -> None:
    child.run(FAMILY, command=INSTRUMENT)
    ids = {event["input"]["who"]: event["run_id"] for event in child.bundles.events("tool_call")}
    assert len(child.bundles.paths()) == 2 and set(ids) == {"parent", "child"}
    origins = [json.loads((path / "run.json").read_bytes())["origin"] for path in child.bundles.paths()]
    assert sorted(origins, key=len) == [{}, {"parent_run": ids["parent"]}]


def test_a_wrong_variable_costs_one_line_and_the_program_runs(child: Child, openai_server: Any) -> None:
    done = child.run(agent(openai_server), command=INSTRUMENT, OTEL_SFTRACE_FSYNC="sometimes")
    assert done.stderr.count("OTEL_SFTRACE_FSYNC") == 1
    assert not child.bundles.folder.exists()


# --- replay -----------------------------------------------------------------------------------------------------------

REPLAYED = """
import httpx2
print(httpx2.get(URL).json())
"""


def test_a_recording_answers_with_the_server_stopped(child: Child, openai_server: Any) -> None:
    program = agent(openai_server, REPLAYED)
    recorded = child.run(program, command=INSTRUMENT)
    openai_server.stop()
    bundle = str(child.bundles.one())
    replayed = child.run(program, command=INSTRUMENT, OTEL_SFTRACE_REPLAY=bundle)
    assert replayed.stdout == recorded.stdout == "{'celsius': 7}\n"
    assert "same" in replayed.stderr
    assert len(child.bundles.paths()) == 1


@pytest.mark.parametrize(
    "environ",
    [
        {"OTEL_SFTRACE_REPLAY": "nowhere"},
        pytest.param({"OTEL_SFTRACE_REPLAY": "x", "OTEL_SFTRACE_FSYNC": "sometimes"}, marks=pytest.mark.full),
        pytest.param({"OTEL_SFTRACE_REPLAY": "x", "OTEL_TRACES_EXPORTER": "no-such"}, marks=pytest.mark.full),
    ],
)
def test_a_replay_that_cannot_start_ends_the_process(child: Child, environ: dict[str, str]) -> None:
    done = child.run("print('ran for real')", command=INSTRUMENT, code=2, **environ)
    assert done.stdout == ""
    assert "replay refused" in done.stderr
    assert "Traceback" not in done.stderr


# --- an OTLP exporter beside us ---------------------------------------------------------------------------------------


class Collector:
    """Counts what an OTLP exporter sends."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                outer.paths.append(self.path)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever)
    thread.start()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()
    thread.join()


@pytest.mark.parametrize("first", [pytest.param("sftrace-otel", marks=pytest.mark.full), "opentelemetry-distro"])
@pytest.mark.parametrize(
    "protocol",
    [{}, pytest.param({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, marks=pytest.mark.full)],
    ids=["", "with protocol"],
)
def test_otlp_goes_on_as_before(
    child: Child, openai_server: Any, collector: Collector, first: str, protocol: dict[str, str]
) -> None:
    done = child.run(
        agent(openai_server),
        command=INSTRUMENT,
        PYTHONPATH=first_on_path(child.folder, first),
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
        **protocol,
    )
    check_recorded(child, done.stderr)
    assert "/v1/traces" in collector.paths


# --- our package alone ------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_our_package_alone_in_an_environment_of_its_own(
    child: Child, root: Path, tmp_path: Path, openai_server: Any
) -> None:
    import subprocess

    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    bin_folder = home / ("Scripts" if sys.platform == "win32" else "bin")
    subprocess.run([bin_folder / "python", "-m", "pip", "install", "-q", str(root), "httpx2"], check=True, timeout=600)
    script = tmp_path / "agent.py"
    script.write_text(agent(openai_server))
    done = subprocess.run(
        [bin_folder / "opentelemetry-instrument", bin_folder / "python", str(script)],
        cwd=tmp_path, env={"PATH": str(bin_folder)}, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    check_recorded(child, done.stderr)


CLAUDE = """
import json, sys
early = "anthropic" in sys.modules
from opentelemetry import trace
import anthropic, httpx, httpx2
ask = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
with trace.get_tracer("agent").start_as_current_span("root"):
    client = anthropic.Anthropic(base_url=URL, api_key="k", max_retries=0)
    client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        stream.get_final_message()
    for module in (httpx, httpx2):
        headers = {"anthropic-version": "2023-06-01"}
        with module.Client() as bare, bare.stream("POST", URL + "/v1/messages", json=ask, headers=headers) as response:
            response.read()
print(json.dumps({"early": early}))
"""


def test_each_call_of_a_model_is_one_call_whatever_makes_spans_of_it(child: Child, llm_server: Any) -> None:
    """The SDK's own span, ours, and that of the HTTP instrumentation around a bare client's exchange."""
    servers = sys.modules["llm_server"]
    message = {"type": "message", "role": "assistant", "model": "m", "content": [], "usage": {"output_tokens": 1}}
    stream = servers.named_events({"type": "message_start", "message": message}, {"type": "message_stop"})
    llm_server.replies.extend([servers.whole(message), stream, servers.whole(message), servers.whole(message)])
    done = child.run(CLAUDE.replace("URL", repr(llm_server.url)), command=INSTRUMENT)
    assert '"early": false' in done.stdout
    assert "failed" not in done.stderr
    assert [event["provider"] for event in child.bundles.events("llm_request")] == ["anthropic"] * 4
    assert child.bundles.events("tool_call") == []
    assert [row["span"] for row in child.bundles.lines("calls.jsonl")] == ["recorded"] * 4
    assert child.bundles.spans() == ["root"]
