# SPDX-License-Identifier: Apache-2.0
"""Recording and replaying inside one process: `recorded` runs a program under `record()`, `frozen` runs it again."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sftrace_otel import instrumentation, record, recorder
from sftrace_otel.bundle.read import open_bundle
from sftrace_otel.instrumentation import guard, replaying
from sftrace_otel.replay import ReplaySession


@pytest.fixture(autouse=True)
def _no_recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test begins and ends with nothing active, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    recorder.restart_lineage()
    guard.forget_connections()
    yield
    recorder.release()
    replaying.deactivate()
    instrumentation.uninstall()


@pytest.fixture
def bundle_path(tmp_path: Path) -> Path:
    return tmp_path / "run.sftrace"


@pytest.fixture
def recorded(bundle_path: Path) -> Callable[..., Any]:
    """`recorded(program, *args)` runs `program` in a record() block that writes to bundle_path; gives its result."""
    instrumentation.install()

    def run(program: Callable[..., Any], *args: Any) -> Any:
        with record("agent", output=bundle_path, overwrite=True) as session:
            result = program(*args)
            session.set_output(result)
        assert session.path == bundle_path
        return result

    return run


@pytest.fixture
def frozen(bundle_path: Path) -> Callable[..., Any]:
    """`frozen(program, *args)` runs `program` under frozen replay and checks that every recorded call was used."""

    def run(program: Callable[..., Any], *args: Any) -> Any:
        with ReplaySession.from_trace(bundle_path) as replay:
            with record("agent"):
                result = program(*args)
            replay.verify_complete()
        return result

    return run


@pytest.fixture
def read(bundle_path: Path) -> Callable[[], Any]:
    return lambda: open_bundle(bundle_path)


@pytest.fixture
def load_server() -> Callable[[str], Any]:
    """`load_server(name)` gives the module `tests/servers/<name>.py`."""

    def load(name: str) -> Any:
        path = Path(__file__).resolve().parent.parent / "servers" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def raw(load_server: Callable[[str], Any]) -> Any:
    """The module of the server that sends exactly the bytes it is told to."""
    return load_server("raw_server")


@pytest.fixture
def srv(load_server: Callable[[str], Any]) -> Iterator[Any]:
    """A server with a path for each kind of answer; `hits` holds the requests that came."""
    with load_server("mini_server").MiniServer() as server:
        yield server


@pytest.fixture
def server_module() -> Any:
    return sys.modules["openai_server"]


@pytest.fixture
def exact(recorded: Callable[..., Any], frozen: Callable[..., Any], openai_server: Any) -> Callable[..., Any]:
    """`exact(program, *args)` records `program`, stops the server, replays it frozen: the same result, or it fails.

    Results are compared as values and by their types.
    """

    def run(program: Callable[..., Any], *args: Any) -> Any:
        want = recorded(program, *args)
        openai_server.stop()
        received = len(openai_server.requests)
        assert _typed(frozen(program, *args)) == _typed(want)
        assert len(openai_server.requests) == received
        return want

    return run


@pytest.fixture(autouse=True)
def _left_open(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test of an SDK leaves open is that test's affair: collected here, not in the middle of a later one."""
    yield
    if request.path.name.startswith(("test_openai", "test_anthropic")):
        gc.collect()


def _typed(value: Any) -> Any:
    if isinstance(value, dict):
        return (dict, {key: _typed(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return (type(value), [_typed(item) for item in value])
    return (type(value), value)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[Any]]]:
    """`spans()` are those that ended until now, of a provider that is the global one inside the test."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield lambda: list(exporter.get_finished_spans())
    provider.shutdown()


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    yield
