# SPDX-License-Identifier: Apache-2.0
"""Each case runs in a folder of its own, against a server of its own, with nothing active before and after."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sftrace_otel import instrumentation, recorder
from sftrace_otel.instrumentation import guard, replaying

HERE = Path(__file__).resolve().parent


def _load(name: str, path: Path) -> ModuleType:
    """A helper module under a name of its own: with `--import-mode=importlib` nothing of `tests/` is importable."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


case_server = _load("case_server", HERE.parent / "servers" / "case_server.py")
case_clients = _load("case_clients", HERE / "clients.py")
case_helpers = _load("case_helpers", HERE / "helpers.py")


@pytest.fixture(autouse=True)
def _nothing_active(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OTEL_SFTRACE_QUIET", "true")
    monkeypatch.setenv("OTEL_SFTRACE_FSYNC", "never")  # hundreds of small bundles; flushing is tested with the bundle
    recorder.restart_lineage()
    guard.forget_connections()
    yield
    recorder.release()
    replaying.deactivate()
    instrumentation.uninstall()
    case_helpers.close_clients()


@pytest.fixture
def srv() -> Iterator[Any]:
    with case_server.CaseServer() as server:
        yield server


@pytest.fixture
def p(tmp_path: Path) -> Path:
    """Where the case's bundle goes."""
    return tmp_path / "run.sftrace"


@pytest.fixture
def q(tmp_path: Path) -> Path:
    """Where a second one goes."""
    return tmp_path / "other.sftrace"


@pytest.fixture(params=case_clients.CLIENTS)
def client(request: pytest.FixtureRequest) -> Any:
    """One HTTP client after the other: those that have a boundary, and strict xfails for those to come."""
    return case_clients.client(request.param)


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[TracerProvider]:
    """A tracer provider for the time of the test."""
    made = TracerProvider(shutdown_on_exit=False)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", made)
    yield made
    made.shutdown()


@pytest.fixture
def spans(provider: TracerProvider) -> InMemorySpanExporter:
    """What another exporter of the same provider gets."""
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter
