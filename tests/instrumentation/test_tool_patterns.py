# SPDX-License-Identifier: Apache-2.0
"""`OTEL_SFTRACE_TOOLS`: what patterns name, when it is patched, and what is said of the rest."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sftrace_otel.instrumentation import tools

TOOLS = """
import functools, typing
from json import dumps
from posixpath import join as search_join
UserId = typing.NewType("UserId", int)
def search_web(q): return ["web", q]
def search_news(q): return ["news", q]
def other(x): return x
def _search_private(q): return q
class Ranker:
    def __call__(self, q): return len(q)
search_rank = Ranker()
class WebTool:
    def run(self, q): return q
    @classmethod
    def make(cls, q): return [cls.__name__, q]
    @staticmethod
    def plain(q): return q
    def _hidden(self): return 0
class NewsTool(WebTool):
    pass
class Helper:
    def run(self, q): return q
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = "pkg_of_patterns"
    folder = tmp_path / name
    (folder / "deep").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "deep" / "__init__.py").write_text("def search_deep(q): return q\n")
    (folder / "tools.py").write_text(TOOLS)
    (folder / "agent.py").write_text(
        f"from {name}.tools import search_web, search_news as news\nTOOLS = [search_web]\n"
        "def ask(q): return search_web(q)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    tools.uninstall()
    for one in [one for one in sys.modules if one.partition(".")[0] == name]:
        del sys.modules[one]


def is_traced(value: Any) -> bool:
    return hasattr(value, "__sftrace_tool__")


def load(name: str) -> Any:
    return importlib.import_module(name)


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("*", ["other", "search_news", "search_rank", "search_web"]),
        ("search_*", ["search_news", "search_rank", "search_web"]),
        ("search_?e*", ["search_news", "search_web"]),
        ("WebTool.*", ["WebTool.make", "WebTool.plain", "WebTool.run"]),
        ("*Tool.run", ["WebTool.run"]),
        ("NewsTool.run", ["NewsTool.run"]),
        ("search_join", ["search_join"]),
        ("_search_private", ["_search_private"]),
    ],
)
@pytest.mark.parametrize("early", [True, False])
def test_what_a_path_names(path: str, named: list[str], early: bool, package: str) -> None:
    module = load(f"{package}.tools") if early else None
    tools.install([f"{package}.tools:{path}"])
    module = module or load(f"{package}.tools")
    shown = [one if "Tool" in one else f"{package}.tools.{one}" for one in named]
    assert sorted(tools.patched()) == sorted(shown)
    tools.install([f"{package}.tools:{path}"])
    assert sorted(tools.patched()) == sorted(shown)  # twice is once
    before = {name: module.__dict__[name] for name in ("search_web", "WebTool")}
    tools.uninstall()
    assert not any(map(is_traced, vars(module).values())) and not any(map(is_traced, vars(module.WebTool).values()))
    assert "run" not in vars(module.NewsTool) and before["WebTool"] is module.WebTool


def test_methods_of_every_kind_work_and_are_recorded(
    package: str, recorded: Callable[..., Any], read: Callable[[], Any], frozen: Callable[..., Any]
) -> None:
    tools.install([f"{package}.tools:WebTool.*", f"{package}.tools:NewsTool.make"])
    module = load(f"{package}.tools")

    def program() -> list[Any]:
        tool = module.WebTool()
        return [tool.run("a"), module.WebTool.make("b"), tool.make("c"), tool.plain("d"), module.NewsTool.make("e")]

    want = recorded(program)
    assert want == ["a", ["WebTool", "b"], ["WebTool", "c"], "d", ["NewsTool", "e"]]
    calls = [event for event in read().events if event.type == "tool_call"]
    assert [(call.name, call.input) for call in calls][:4] == [
        ("run", {"q": "a"}), ("make", {"q": "b"}), ("make", {"q": "c"}), ("plain", {"q": "d"}),
    ]  # fmt: skip
    assert frozen(program) == want


def test_modules_by_wildcard(package: str, caplog: pytest.LogCaptureFixture) -> None:
    load(f"{package}.tools")
    tools.install([f"{package}.*:search_*"])
    load(f"{package}.deep")
    assert f"{package}.deep.search_deep" in tools.patched()
    assert f"{package}.tools.search_web" in tools.patched()
    load(f"{package}.agent")  # what it imports by name is traced, and it has no search_* of its own to complain about
    assert caplog.text == ""
    meta_path = list(sys.meta_path)
    tools.uninstall()
    assert len(sys.meta_path) == len(meta_path) - 1
    assert not is_traced(load(f"{package}.deep").search_deep)


def test_names_taken_before_are_replaced_and_what_is_not_is_said(
    package: str, caplog: pytest.LogCaptureFixture
) -> None:
    agent = load(f"{package}.agent")
    tools.install([f"{package}.tools:search_*"])
    assert is_traced(agent.search_web) and is_traced(agent.news)
    assert not is_traced(agent.TOOLS[0])
    (line,) = tools.unfollowed()
    assert f"{package}.tools:search_web" in line and "untraced" in line
    assert caplog.text.count("search_web") == 1 and "search_news" not in caplog.text
    tools.uninstall()
    assert not is_traced(agent.search_web) and agent.search_web is agent.TOOLS[0] and not is_traced(agent.news)


def test_names_taken_after_need_nothing(package: str, caplog: pytest.LogCaptureFixture) -> None:
    tools.install([f"{package}.tools:search_*"])
    agent = load(f"{package}.agent")
    assert is_traced(agent.search_web) and is_traced(agent.TOOLS[0]) and tools.unfollowed() == []
    assert caplog.text == ""


def test_what_names_nothing_is_said_once(package: str, caplog: pytest.LogCaptureFixture) -> None:
    patterns = [f"{package}.tools:nothing_*", f"{package}.tools:WebTool", "no-colon", f"{package}.*:nowhere"]
    tools.install(patterns)
    load(f"{package}.tools")
    tools.install(patterns)
    assert caplog.text.count("has no callable nothing_*") == 1
    assert caplog.text.count("is a class: name its methods, for instance WebTool.run") == 1
    assert caplog.text.count("no-colon") == 1 and "nowhere" not in caplog.text
