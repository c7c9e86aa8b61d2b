# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by all rooms: an environment without the developer's own settings, and a loopback OpenAI server."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def _load(name: str, path: Path) -> ModuleType:
    """A helper module by its path: with `--import-mode=importlib` nothing of `tests/` is importable by name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def pytest_sessionstart(session: pytest.Session) -> None:
    """One authority is enough where all servers are on loopback: to read all of them takes each client 50 ms."""
    if "SSL_CERT_FILE" not in os.environ and importlib.util.find_spec("certifi") is not None:  # not in every cell
        import certifi

        one = Path(certifi.where()).read_text("ascii").partition("-----END CERTIFICATE-----")
        folder = tempfile.mkdtemp(prefix="sftrace-tests-")
        session.config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        file = Path(folder) / "authority.pem"
        file.write_text("".join(one[:2]) + "\n", "ascii")
        os.environ["SSL_CERT_FILE"] = str(file)


def pytest_collection_finish() -> None:
    """What is imported by now stays: a collection in a test need not look at it."""
    gc.collect()
    gc.freeze()


servers = _load("openai_server", ROOT / "tests" / "servers" / "openai_server.py")
llm_servers = _load("llm_server", ROOT / "tests" / "servers" / "llm_server.py")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of the developer's shell must not decide a test."""
    for name in list(os.environ):
        if name.startswith(("OTEL_", "OPENAI_", "ANTHROPIC_", "TRACELOOP_", "LANGFUSE_", "PHOENIX_", "LOGFIRE_")):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _no_boundaries_left() -> Iterator[None]:
    """What a test patched by `record()` or `instrument()` must not be seen by the next."""
    yield
    instrumentation = sys.modules.get("sftrace_otel.instrumentation")
    if instrumentation is not None:
        instrumentation.uninstall()


@pytest.fixture
def root() -> Path:
    """The project's folder."""
    return ROOT


@pytest.fixture
def openai_server() -> Iterator[Any]:
    """A running `OpenAIServer` (tests/servers/openai_server.py); its module is `sys.modules["openai_server"]`."""
    with servers.OpenAIServer() as server:
        yield server


@pytest.fixture
def llm_server() -> Iterator[Any]:
    """A running `LlmServer` (tests/servers/llm_server.py); its module is `sys.modules["llm_server"]`."""
    with llm_servers.LlmServer() as server:
        yield server
