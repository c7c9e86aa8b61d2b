# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for a venv that lacks httpx or httpx2: tests that use the missing one are skipped, the rest run.

The same goes for tests of what an SDK of the cell cannot do yet (`ABLE`). Test modules import both clients. While they
are collected the missing one is a stand-in that skips the test which uses it; then it is taken out of `sys.modules`
again, so that neither we nor the SDK take it for installed.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import openai
import pytest

MISSING = [name for name in ("httpx", "httpx2") if importlib.util.find_spec(name) is None]


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        pytest.skip(f"{self.__name__} is not installed in this cell")


def _parses() -> bool:
    return hasattr(openai.resources.chat.completions.Completions, "parse")


def _asks_for_keys() -> bool:
    return "Callable" in str(inspect.signature(openai.OpenAI.__init__).parameters["api_key"].annotation)


ABLE: dict[str, Callable[[], bool]] = {
    "test_every_shape_of_the_sdks_results": _parses,
    "test_a_token_providers_own_request_is_no_attempt": _asks_for_keys,
    "test_installing_twice_is_once_and_uninstalling_restores": lambda: not MISSING,  # it counts those of both clients
}
"""Tests that need something of the SDK, and whether it is there."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        able = ABLE.get(item.name)
        if able is not None and not able():
            item.add_marker(pytest.mark.skip(reason="not with the versions of this cell"))


def pytest_collection(session: pytest.Session) -> None:
    for name in MISSING:
        sys.modules[name] = _StandIn(name)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    for name in MISSING:
        del sys.modules[name]
