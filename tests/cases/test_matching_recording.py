# SPDX-License-Identifier: Apache-2.0
"""The rows of `matching.jsonl` through real clients: what is recorded of each exchange, and that it replays as the row
says. `session/test_matching_rows.py` holds the same rows for the session alone.

`http://h.test` stands for the test's server, which answers as the row's `resp` says.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import socket
import threading
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from case_clients import Client, Reply
from case_helpers import U, ask, body_of, calls, check, diverging, ends, frozen, n_http, oa, rec, tool, wire
from case_server import Scripted

from sftrace_otel import ReplayError
from sftrace_otel.core.match import ISO_TIME, normalise_text

DATA = Path(__file__).resolve().parent.parent / "data" / "cases" / "matching.jsonl"
ROWS = {row["id"]: row for row in map(json.loads, DATA.read_text("utf-8").splitlines()) if "id" in row}
SECRET = "swordfish-17"

ELSEWHERE = {
    "mat-019": "here", "mat-033": "here", "mat-034": "here", "mat-035": "here", "mat-036": "here",
    "mat-037": "test_http_cases.py::test_a16_…", "mat-039": "test_http_cases.py::test_a01_…",
}  # fmt: skip
"""Rows that are about tools, sockets or the time at which a chunk arrives."""

HTTP = {name: row for name, row in ROWS.items() if name not in ELSEWHERE}


def test_every_row_has_its_test() -> None:
    assert len(HTTP) + len(ELSEWHERE) == len(ROWS) == 31


def answer_of(resp: Any) -> Scripted:
    """The server's answer for a row's `resp`."""
    if isinstance(resp, str):
        return Scripted(body=resp.encode())
    headers = list({"content-type": "application/json", **resp.get("headers", {})}.items())
    if "sse" in resp:
        parts = [b"data: %d\n\n" % number for number in range(resp["sse"])]
        return Scripted(headers=[("content-type", "text/event-stream")], parts=parts)
    body = base64.b64decode(resp["body_b64"]) if "body_b64" in resp else resp.get("text", "").encode()
    return Scripted(status=resp.get("status", 200), headers=headers, body=body)


def multipart(boundary: str, parts: list[list[Any]]) -> tuple[bytes, str]:
    raw = b""
    for name, filename, content in parts:
        named = f'; filename="{filename}"' if filename else ""
        raw += f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'.encode()
        raw += base64.b64decode(content) + b"\r\n"
    return raw + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


def send(web: Client, url: str, request: dict[str, Any]) -> Reply:
    """Make the request of a row."""
    headers = dict(request.get("headers", {}))
    content: bytes | None = None
    if "json" in request:
        content = json.dumps(request["json"]).replace("[secret one]", SECRET).encode()
        headers.setdefault("content-type", "application/json")
    elif "text" in request:
        content = request["text"].encode()
    elif "body_b64" in request:
        content = base64.b64decode(request["body_b64"])
    elif "multipart" in request:
        content, headers["content-type"] = multipart(**request["multipart"])
    target = request["url"].replace("http://h.test", url).replace("[secret one]", SECRET)
    options: dict[str, Any] = {"headers": headers, **({} if content is None else {"content": content})}
    return web.send(request["method"], target, **options)


def options_of(row: dict[str, Any]) -> dict[str, Any]:
    option = row.get("option", "")
    if option.startswith("normalise: ISO 8601"):
        return {"ignore": [normalise_text(ISO_TIME, "<time>")]}
    assert option == ""
    return {}


@pytest.mark.parametrize("name", HTTP)
def test_row(name: str, client: Client, srv: Any, p: Path) -> None:
    row = HTTP[name]
    exchanges, live = row["recorded"], row["live"]
    threads = live["threads"] if isinstance(live, dict) else 1

    def record(exchange: dict[str, Any]) -> Reply:
        with one_at_a_time:
            srv.script.append(answer_of(exchange["resp"]))
            return send(client, srv.url, exchange["req"])

    one_at_a_time = threading.Lock()
    with rec(p):
        if threads > 1:
            with ThreadPoolExecutor(threads) as pool:
                replies = list(pool.map(record, exchanges))
        else:
            replies = [record(exchange) for exchange in exchanges]

    # the recording side
    check(p)
    rows = sorted(wire(p), key=lambda one: one["start_ns"])
    assert len(rows) == len(calls(p)) == len(exchanges) and set(ends(p)) == {"finished"}
    secret = "[secret one]" in json.dumps(row)
    for got, kept in zip(srv.requests, rows, strict=True):
        assert kept["method"] == got.method
        if not secret:
            assert kept["url"].startswith(srv.url + got.path) and (got.query in kept["url"])
            assert body_of(p, kept["request"]["body"]) == got.body
        sent = dict(kept["request"]["headers"])
        assert set(sent) - {"transfer-encoding"} <= set(got.headers)
    if threads == 1:
        assert [body_of(p, kept["body"]) for kept in rows] == [reply.body for reply in replies]
        assert [kept["status"] for kept in rows] == [reply.status for reply in replies]

    # and what comes of it
    srv.requests.clear()
    requests = live["calls"] if isinstance(live, dict) else live
    diverges = any(want.get("diverge") for want in row["expect"])
    with diverging(p, **options_of(row)) if diverges else frozen(p, **options_of(row)):
        if threads > 1:
            with ThreadPoolExecutor(threads) as pool:
                served = list(pool.map(lambda request: send(client, srv.url, request), requests))
            assert [one.body for one in served] == [replies[want["serve"]].body for want in row["expect"]]
        for request, want in zip(requests if threads == 1 else (), row["expect"], strict=False):
            if want.get("diverge"):
                with pytest.raises(ReplayError) as miss:
                    send(client, srv.url, request)
                assert all(mention in str(miss.value) for mention in want["mentions"])
                break
            reply = send(client, srv.url, request)
            assert (reply.status, reply.body) == (replies[want["serve"]].status, replies[want["serve"]].body)
    assert srv.hits == []


def test_mat_019_parallel_tools_arrive_in_another_order(p: Path) -> None:
    row = ROWS["mat-019"]
    open_now: list[str] = []

    async def run_all(requests: list[dict[str, Any]], answers: dict[str, Any]) -> list[Any]:
        everyone = asyncio.Event()

        def traced(name: str) -> Any:
            async def call(**arguments: Any) -> Any:
                open_now.append(name)
                if len(open_now) == len(requests):
                    everyone.set()
                await everyone.wait()
                return answers[name]

            return tool(call, name)

        return await asyncio.gather(*(traced(one["tool"])(**one["kwargs"]) for one in requests))

    recorded = [exchange["req"] for exchange in row["recorded"]]
    answers = {exchange["req"]["tool"]: exchange["resp"] for exchange in row["recorded"]}
    with rec(p):
        want = asyncio.run(run_all(recorded, answers))
    open_now.clear()
    with frozen(p):
        got = asyncio.run(run_all(row["live"]["concurrent"], {}))
    assert got == [want[expect["serve"]] for expect in row["expect"]] and open_now == []


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the standard library leaves the refused socket open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("way", ["httpx", "socket", "urllib"])
def test_mat_033_nothing_leaves_a_frozen_replay(way: str, srv: Any, p: Path) -> None:
    with rec(p):
        httpx.get(srv.url + "/x")
    srv.requests.clear()
    ways: dict[str, Callable[[], Any]] = {
        "httpx": lambda: httpx.get(srv.url + "/never-recorded"),
        "socket": lambda: socket.create_connection(("127.0.0.1", srv.port)),
        "urllib": lambda: urllib.request.urlopen(srv.url + "/json"),
    }
    with pytest.raises(ReplayError), frozen(p, all_used=False):
        with pytest.raises(ReplayError) as stopped:
            ways[way]()
        if way == "httpx":
            assert "never-recorded" in str(stopped.value)
        stopped.value.__traceback__ = None
    assert srv.hits == []
    del stopped
    gc.collect()


def test_mat_033_what_cannot_be_blocked_is_said() -> None:
    limits = (Path(__file__).resolve().parents[2] / "docs" / "limits.md").read_text("utf-8").lower()
    assert "child process" in limits or "subprocess" in limits


def test_mat_034_dependent_steps_in_another_order(p: Path) -> None:
    a, b = tool(lambda: 1, "a"), tool(lambda: 2, "b")
    with rec(p):
        a()
        b()
    with diverging(p, order="strict"), pytest.raises(ReplayError) as miss:
        b()
    assert all(name in str(miss.value) for name in ("a", "b"))
    with diverging(p), pytest.raises(ReplayError):  # b started after a had finished
        b()


class OwnError(Exception):
    """A class of this test module."""


def test_mat_035_a_recorded_failure_is_raised_again(p: Path) -> None:
    class Local(Exception):
        pass

    raised = [ValueError("card declined"), OwnError("mine", 7), Local("nobody can import it")]

    def pay(number: int) -> None:
        raise raised[number]

    with rec(p):
        for number in range(3):
            with pytest.raises(type(raised[number])):
                tool(pay)(number)
    with frozen(p):
        for number, name in enumerate(("ValueError", "OwnError", "Local")):
            with pytest.raises(Exception) as again:
                tool(lambda number: None, "pay")(number)
            assert type(again.value).__name__ == name and again.value.args == raised[number].args
            assert again.value is not raised[number]


@dataclass
class Point:
    x: int
    y: int


def test_mat_036_values_come_back_with_their_types_or_are_marked(p: Path) -> None:
    value = {"t": (1, 2), "s": {1}, "d": datetime(2026, 1, 1), "p": Point(1, 2)}
    with rec(p):
        tool(lambda: value, "t")()
    with frozen(p):
        again = tool(lambda: None, "t")()
    for key in ("t", "s", "d"):
        assert again[key] == value[key] and type(again[key]) is type(value[key])
    (row,) = calls(p)
    assert again["p"] == value["p"] or row["tags"]["/output/p"] == "lossy"


def test_mat_022_a_replay_does_not_wait_before_it_tries_again(
    srv: Any, p: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    srv.script.append(
        Scripted(status=429, body=b"{}", headers=[("retry-after-ms", "40"), ("content-type", "application/json")])
    )
    client = oa(srv.url, max_retries=2)
    with rec(p):
        want = ask(client, [U("hi")])
    assert [row["status"] for row in wire(p)] == [429, 200] and n_http(p) == 0
    srv.requests.clear()
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    with frozen(p):
        assert ask(client, [U("hi")]) == want
    assert sum(waited) < 0.03 and srv.hits == []
