# SPDX-License-Identifier: Apache-2.0
"""Cases A of the public collection: recording and replaying HTTP.

Each is asked of every client that has a boundary, sync and async; those whose boundary is to come are strict xfails.
What is said of a case in its "Right" is asserted here, also where another test asks it of one client:

- A07 also `instrumentation/test_http.py::test_bodies_of_every_kind_are_exact_and_replay` (HEAD and empty bodies)
- A14 also `instrumentation/test_behaviours.py::test_secrets_do_not_reach_the_bundle`
- A15 also `session/test_session.py::test_the_three_causes_are_told_apart` (the session alone)
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import inspect
import json
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import httpx2
import pytest
from case_clients import CLIENTS, TLS, Client, client
from case_helpers import (
    KEY,
    KEY2,
    TOKEN,
    Divergence,
    U,
    ask,
    blob,
    body_of,
    check,
    cli,
    diverging,
    ends,
    events,
    forked,
    frozen,
    n_http,
    oa,
    rec,
    reexport,
    wire,
    wire_bodies,
)
from case_server import BINARY, JSON, SSE, Scripted

from sftrace_otel import ReplayError, ReplayExhaustedError

MODULES = [httpx, httpx2]

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # streams are left open on purpose


@pytest.mark.parametrize("name", CLIENTS)
def test_the_clients_of_the_cases_work_without_us(name: str, srv: Any) -> None:
    web = client(name)
    reply = web.post(srv.url + "/echo", content=b"\x00\xff", params={"a": "1"}, headers={"X-One": "2"})
    assert (reply.status, reply.json["b64"], reply.json["q"]) == (200, "AP8=", "a=1")
    assert srv.requests[0].headers["x-one"] == "2"
    assert web.post(srv.url + "/echo", json={"a": 1}).json["len"] > 0
    assert web.post(srv.url + "/echo", files={"f": ("a.bin", b"\x00one")}).json["len"] > 4
    assert b'filename="a.bin"' in srv.requests[2].body
    assert web.get(srv.url + "/gzip").json == {"ok": True}
    assert b"".join(web.read(srv.url + "/sse")) == b"".join(SSE)
    assert web.get(srv.url + "/json").all("Set-Cookie") == ["sid=abc; Path=/", "t=1"]
    assert web.read(srv.url + "/slow-sse", take=1) == [b"data: 0\n\n"]


# --- A01 --------------------------------------------------------------------------------------------------------------


def sync_spellings(module: ModuleType) -> list[Callable[[str], bytes]]:
    def function(url: str) -> bytes:
        with module.stream("GET", url, verify=TLS) as answer:
            return b"".join(answer.iter_raw())

    def method(url: str) -> bytes:
        with module.Client(verify=TLS) as http, http.stream("GET", url) as answer:
            return b"".join(answer.iter_raw())

    def positional(url: str) -> bytes:
        with module.Client(verify=TLS) as http:
            answer = http.send(http.build_request("GET", url), stream=True)
            body = b"".join(answer.iter_raw())
            answer.close()
            return body

    def keyword(url: str) -> bytes:
        with module.Client(verify=TLS) as http:
            answer = http.send(request=http.build_request("GET", url), stream=True)
            body: bytes = answer.read()
            answer.close()
            return body

    def transport(url: str) -> bytes:
        with module.HTTPTransport(verify=TLS) as wire:
            answer = wire.handle_request(request=module.Request("GET", url))
            body: bytes = answer.read()
            answer.close()
            return body

    return [function, method, positional, keyword, transport]


def async_spellings(module: ModuleType) -> list[Callable[[str], bytes]]:
    async def method(url: str) -> bytes:
        async with module.AsyncClient(verify=TLS) as http, http.stream("GET", url) as answer:
            return b"".join([part async for part in answer.aiter_raw()])

    async def positional(url: str) -> bytes:
        async with module.AsyncClient(verify=TLS) as http:
            answer = await http.send(http.build_request("GET", url), stream=True)
            body = b"".join([part async for part in answer.aiter_raw()])
            await answer.aclose()
            return body

    async def keyword(url: str) -> bytes:
        async with module.AsyncClient(verify=TLS) as http:
            answer = await http.send(request=http.build_request("GET", url), stream=True)
            body: bytes = await answer.aread()
            await answer.aclose()
            return body

    async def transport(url: str) -> bytes:
        async with module.AsyncHTTPTransport(verify=TLS) as wire:
            answer = await wire.handle_async_request(request=module.Request("GET", url))
            body: bytes = await answer.aread()
            await answer.aclose()
            return body

    def driven(spelling: Any) -> Callable[[str], bytes]:
        return lambda url: asyncio.run(spelling(url))

    return [driven(one) for one in (method, positional, keyword, transport)]


@pytest.mark.parametrize("kind", [sync_spellings, async_spellings])
@pytest.mark.parametrize("module", MODULES)
def test_a01_streamed_calls_in_every_spelling(module: ModuleType, kind: Any, srv: Any, p: Path) -> None:
    spellings = kind(module)
    with rec(p):
        want = [one(srv.url + "/sse") for one in spellings]
    assert want == [b"".join(SSE)] * len(spellings)
    assert n_http(p) == len(spellings) and set(ends(p)) == {"finished"}
    assert wire_bodies(p) == want
    srv.requests.clear()
    with frozen(p):
        assert [one(srv.url + "/sse") for one in spellings] == want
    assert srv.hits == []


def test_a01_streams_of_every_client_keep_their_chunks(client: Client, srv: Any, p: Path) -> None:
    with rec(p):
        want = client.read(srv.url + "/sse")
    assert b"".join(want) == b"".join(SSE)
    srv.requests.clear()
    with frozen(p):
        assert client.read(srv.url + "/sse") == want
    assert srv.hits == []


# --- A03 --------------------------------------------------------------------------------------------------------------


def _in_threads_each_gets_its_own(times: int, srv: Any, p: Path) -> None:
    numbers = range(16)
    model = oa(srv.url)

    def call(number: int) -> str | None:
        return ask(model, [U(str(number))])

    def program() -> list[str | None]:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(call, numbers))

    with rec(p):
        want = program()
    assert len(set(want)) == 16
    watched = [(kind, name) for module in MODULES for kind in (module.Response, module.Client) for name in dir(kind)]
    before = [inspect.getattr_static(*one, None) for one in watched]
    srv.requests.clear()
    for _ in range(times):
        with frozen(p):
            assert program() == want
            assert httpx2.Response(200, content=b"made by hand").read() == b"made by hand"
            during = [inspect.getattr_static(*one, None) for one in watched]
        changed = {name for (_, name), old, new in zip(watched, before, during, strict=True) if old is not new}
        assert not changed, "nothing is patched for the time of a call or of a replay"
    assert srv.hits == []


def test_a03_eight_threads_get_their_own_answers(srv: Any, p: Path) -> None:
    _in_threads_each_gets_its_own(5, srv, p)


@pytest.mark.full
def test_a03_eight_threads_get_their_own_answers_100_times(srv: Any, p: Path) -> None:
    _in_threads_each_gets_its_own(100, srv, p)


def test_a03_calls_recorded_one_by_one_replay_in_threads_where_any_order_is_allowed(srv: Any, p: Path) -> None:
    model = oa(srv.url)

    def call(number: int) -> str | None:
        return ask(model, [U(str(number))])

    with rec(p):
        want = [call(number) for number in range(16)]
    srv.requests.clear()
    for _ in range(5):
        with frozen(p, order="any"), ThreadPoolExecutor(8) as pool:
            assert list(pool.map(call, range(16))) == want
    assert srv.hits == []


# --- A04, A05 ---------------------------------------------------------------------------------------------------------


def test_a04_every_way_to_disk_is_redacted(client: Client, srv: Any, p: Path, q: Path, tmp_path: Path) -> None:
    headers = {"x-api-key": KEY, "Authorization": f"Bearer {TOKEN}"}
    with rec(p):
        client.get(srv.url + "/json", headers=headers)
        client.get(srv.url + "/json", headers=headers)
    assert n_http(p) == 2
    with frozen(p):
        client.get(srv.url + "/json", headers=headers)
        client.get(srv.url + "/json", headers=headers)
    with diverging(p), pytest.raises(ReplayError) as miss:
        client.get(srv.url + "/json", headers=headers, params={"api_key": KEY, "other": TOKEN})
    step = events(p, "tool_result")[0]["step"]
    forked(p, step=step, override={step: {"note": f"use {KEY}", "token": TOKEN}}, to=q)
    spoken = cli("fork", p, "--at-step", step, "-o", tmp_path / "spoken.sftrace", "--override", f'{step}="is {KEY}"')
    again = reexport(p, tmp_path / "again.sftrace")
    packed = cli("pack", p)
    shown = cli("inspect", p, "--events")
    assert spoken.code == packed.code == shown.code == 0
    assert srv.requests[0].headers["x-api-key"] == KEY
    packs = list(tmp_path.glob("*.zip"))
    assert len(packs) == 1
    said = str(miss.value) + "".join(done.out + done.err for done in (spoken, packed, shown))
    for written in (blob(p), blob(q), blob(again), blob(tmp_path / "spoken.sftrace"), blob(packs[0]), said.encode()):
        assert KEY.encode() not in written and TOKEN.encode() not in written
    check(q)
    check(again)


KILLED = """
import os, sys
import httpx
from sftrace_otel import record
key, url = sys.argv[1:]
with record("agent", output="run.sftrace"):
    httpx.get(url + "/json", headers={"x-api-key": key}, params={"api_key": key})
    with httpx.stream("POST", url + "/slow-sse", headers={"x-api-key": key}, json={"password": key}) as answer:
        next(answer.iter_lines())
        print("open", flush=True)
        sys.stdin.read()
"""


def test_a04_what_a_killed_process_leaves_and_its_recovery_are_redacted(srv: Any, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(KILLED)
    command = [sys.executable, "agent.py", KEY, srv.url]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"open\n"
        os.kill(process.pid, signal.SIGKILL)
    (tmp_path / "agent.py").unlink()
    (journal,) = tmp_path.glob(".*.journal")
    assert KEY.encode() not in blob(journal) and b"x-api-key" in blob(journal)
    done = cli("recover", journal)
    assert done.code == 0, done.err
    assert n_http(tmp_path / "run.sftrace") == 2
    assert KEY.encode() not in blob(tmp_path)


def test_a05_answers_and_cookies_are_redacted_and_the_program_sees_the_real_ones(
    client: Client, srv: Any, p: Path
) -> None:
    with rec(p):
        reply = client.post(srv.url + "/login?u=" + TOKEN)
    assert reply.json["access_token"] == TOKEN and TOKEN in reply.all("set-cookie")[0]
    assert n_http(p) == 1
    stored = blob(p)
    assert TOKEN.encode() not in stored
    for kept in (b"expires_in", b"access_token", b"session=", b"HttpOnly"):
        assert kept in stored
    srv.requests.clear()
    with frozen(p):
        again = client.post(srv.url + "/login?u=" + TOKEN)
    assert again.json == {**reply.json, "access_token": "[REDACTED]"} and srv.hits == []


# --- A07, A08, A09 ----------------------------------------------------------------------------------------------------


def test_a07_packed_answers_are_stored_unpacked_and_say_so(client: Client, srv: Any, p: Path) -> None:
    def program() -> list[Any]:
        return [
            client.get(srv.url + "/gzip").json,
            client.get(srv.url + "/deflate").json,
            b"".join(client.read(srv.url + "/gzip-sse")),
        ]

    with rec(p):
        want = program()
    assert want == [{"ok": True}, {"ok": True}, b"".join(SSE)]
    assert [row["encoding_removed"] for row in wire(p)] == ["gzip", "deflate", "gzip"]
    assert wire_bodies(p) == [b'{"ok": true}', b'{"ok": true}', b"".join(SSE)]
    srv.requests.clear()
    with frozen(p):
        assert program() == want
    assert srv.hits == []


@pytest.mark.parametrize("module", MODULES)
def test_a07_headers_and_raw_bytes_of_a_replayed_answer_fit_together(module: ModuleType, srv: Any, p: Path) -> None:
    def raw(path: str) -> bytes:
        with module.stream("GET", srv.url + path, verify=TLS) as answer:
            body = b"".join(answer.iter_raw())
            encoding = answer.headers.get("content-encoding")
            if "content-length" in answer.headers:
                assert int(answer.headers["content-length"]) == len(body)
        unpack = {"gzip": gzip.decompress, "deflate": zlib.decompress, None: bytes}
        return unpack[encoding](body)

    with rec(p):
        want = [raw(path) for path in ("/gzip", "/deflate", "/json", "/binary")]
    with frozen(p):
        assert [raw(path) for path in ("/gzip", "/deflate", "/json", "/binary")] == want
    assert want[:2] == [b'{"ok": true}'] * 2


@pytest.mark.parametrize("other", CLIENTS)
@pytest.mark.parametrize("one", ["httpx", "httpx2-async"])
def test_a07_a_bundle_of_one_client_replays_on_another(one: str, other: str, srv: Any, p: Path) -> None:
    def program(web: Client) -> list[Any]:
        # what clients say of themselves has to be said alike: a header that only one sends is a difference
        alike = {"accept": "*/*", "accept-encoding": "gzip"}
        return [web.get(srv.url + path, headers=alike).body for path in ("/gzip", "/json", "/binary")]

    with rec(p):
        want = program(client(one))
    srv.requests.clear()
    with frozen(p):
        assert program(client(other)) == want
    assert srv.hits == []


def test_a08_binary_bodies_both_ways(client: Client, srv: Any, p: Path) -> None:
    data = bytes(range(256))
    with rec(p):
        sent = client.post(srv.url + "/echo", content=data)
        got = client.get(srv.url + "/binary")
    assert base64.b64decode(sent.json["b64"]) == data and got.body == BINARY
    call, answer = events(p, "tool_call")[0], events(p, "tool_result")[1]
    assert base64.b64decode(call["input"]["body"]["base64"]) == data
    assert base64.b64decode(answer["output"]["body"]["base64"]) == BINARY
    assert body_of(p, wire(p)[0]["request"]["body"]) == data and wire_bodies(p)[1] == BINARY
    check(p)
    srv.requests.clear()
    with frozen(p):
        assert client.post(srv.url + "/echo", content=data) == sent
        assert client.get(srv.url + "/binary").body == BINARY
    with diverging(p), pytest.raises(Divergence):
        client.post(srv.url + "/echo", content=data[::-1])
    assert srv.hits == []


Part = tuple[str, tuple[str, bytes, str]]
RECORDED: Part = ("f", ("a.bin", b"\x00one\r\n--", "application/x-one"))
OTHERS: list[Part] = [
    ("f", ("a.bin", b"\x00two\r\n--", "application/x-one")),
    ("g", ("a.bin", b"\x00one\r\n--", "application/x-one")),
    ("f", ("b.bin", b"\x00one\r\n--", "application/x-one")),
    ("f", ("a.bin", b"\x00one\r\n--", "application/x-two")),
]


def upload(web: Client, url: str, *parts: Part) -> Any:
    return web.post(url + "/echo", files=dict(parts)).json["n"]


def test_a09_multipart_bodies_compare_by_their_parts(client: Client, srv: Any, p: Path) -> None:
    with rec(p):
        upload(client, srv.url, RECORDED)
    assert n_http(p) == 1
    first = srv.requests.pop().body
    with frozen(p):
        upload(client, srv.url, RECORDED)
    assert srv.hits == []
    upload(client, srv.url, RECORDED)
    assert srv.requests.pop().body != first, "the boundary is a random one"


@pytest.mark.parametrize("other", OTHERS, ids=["content", "name", "filename", "type"])
def test_a09_another_part_is_another_body(other: Part, client: Client, srv: Any, p: Path) -> None:
    with rec(p):
        upload(client, srv.url, RECORDED)
    srv.requests.clear()
    with diverging(p), pytest.raises(Divergence):
        upload(client, srv.url, other)
    assert srv.hits == []


# --- A10, A11, A12 ----------------------------------------------------------------------------------------------------


def test_a10_equal_requests_are_answered_in_recorded_order(client: Client, srv: Any, p: Path) -> None:
    def wait() -> int:
        for turn in range(10):
            if client.get(srv.url + "/poll").json["state"] == "ready":
                return turn
        raise AssertionError("never ready")

    with rec(p):
        assert wait() == 2
    srv.requests.clear()
    with frozen(p):
        assert wait() == 2
    with diverging(p):
        assert wait() == 2
        with pytest.raises(Divergence):
            client.get(srv.url + "/poll")  # nothing is served twice
    assert srv.hits == []


def test_a11_every_replayed_call_has_a_stream_of_its_own(client: Client, srv: Any, p: Path) -> None:
    with rec(p):
        whole = b"".join(client.read(srv.url + "/sse"))
        assert b"".join(client.read(srv.url + "/sse")) == whole
    assert n_http(p) == 2
    with frozen(p):
        assert b"".join(client.read(srv.url + "/sse", take=1)) == SSE[0]  # left half read
        assert b"".join(client.read(srv.url + "/sse")) == whole
    with frozen(p):
        assert b"".join(client.read(srv.url + "/sse")) == whole
        assert client.read(srv.url + "/sse", take=2) == list(SSE[:2])


CHAT = {"model": "m", "stream": False, "n": 1, "list": ["a", "b"], "none": None, "text": "é"}


def same_value(web: Client, url: str, content: bytes) -> Any:
    return web.post(url + "/echo", content=content, headers={"content-type": "application/json"}).status


@pytest.mark.parametrize(
    "spelling",
    [
        b'{ "stream": false, "model": "\\u006d", "list": ["a","b"], "none": null, "n": 1, "text": "\\u00e9" }',
        json.dumps(CHAT, indent=2, ensure_ascii=False).encode(),
        json.dumps(dict(reversed(CHAT.items())), separators=(",", ":")).encode(),
        json.dumps({**CHAT, "n": 1.0}).encode(),
    ],
    ids=["escapes", "indented", "reordered", "whole-float"],
)
def test_a12_json_bodies_compare_as_values(spelling: bytes, client: Client, srv: Any, p: Path) -> None:
    with rec(p):
        same_value(client, srv.url, json.dumps(CHAT).encode())
    assert events(p, "tool_call")[0]["input"]["body"] == CHAT
    srv.requests.clear()
    with frozen(p):
        assert same_value(client, srv.url, spelling) == 200
    assert srv.hits == []


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"stream": 0}, "/body/stream"),
        ({"n": "1"}, "/body/n"),
        ({"n": True}, "/body/n"),
        ({"list": ["b", "a"]}, "/body/list"),
        ({"none": ...}, "/body/none"),
        ({"text": "e"}, "/body/text"),
    ],
    ids=["0-is-not-false", "text", "true-is-not-1", "order", "absent-is-not-null", "accent"],
)
def test_a12_another_value_diverges_and_nothing_goes_out(
    change: dict[str, Any], pointer: str, client: Client, srv: Any, p: Path
) -> None:
    with rec(p):
        same_value(client, srv.url, json.dumps(CHAT).encode())
    changed = {key: value for key, value in {**CHAT, **change}.items() if value is not ...}
    srv.requests.clear()
    with diverging(p), pytest.raises(Divergence, match=pointer):
        same_value(client, srv.url, json.dumps(changed).encode())
    assert srv.hits == []


# --- A14, A15, A16 ----------------------------------------------------------------------------------------------------


def test_a14_a_machine_with_other_keys_replays(client: Client, srv: Any, p: Path) -> None:
    def program(key: str, user: str = "kim") -> None:
        client.get(srv.url + "/json", params={"api_key": key, "q": "1"})
        client.get(
            srv.url + "/json", headers={"X-Api-Key": key, "Authorization": f"Bearer {key}", "Cookie": f"s={key}"}
        )
        client.post(srv.url + "/echo", json={"user": user, "password": key, "note": f"with {key} inside"})

    with rec(p):
        program(KEY)
    assert n_http(p) == 3 and KEY.encode() not in blob(p)
    srv.requests.clear()
    with frozen(p):
        program(KEY2)
    with frozen(p):
        program(KEY)
    with diverging(p), pytest.raises(Divergence, match="/body/user"):  # the rest of the body still counts
        program(KEY2, user="lee")
    assert srv.hits == []


def test_a15_the_three_causes_of_a_miss_are_told_apart(client: Client, srv: Any, p: Path) -> None:
    with rec(p):
        client.get(srv.url + "/json")
        client.post(srv.url + "/echo", json={"n": 1})
    srv.requests.clear()
    with diverging(p):
        client.get(srv.url + "/json")
        with pytest.raises(Divergence, match=r"already (used|served)") as used:
            client.get(srv.url + "/json")
    with diverging(p):
        client.get(srv.url + "/json")
        with pytest.raises(Divergence, match="/body/n") as differs:
            client.post(srv.url + "/echo", json={"n": 2})
    with diverging(p), pytest.raises(Divergence) as never:
        client.get(srv.url + "/never-recorded")
    assert "1" in str(used.value) and "2" in str(used.value)  # recorded once, asked twice
    assert "never-recorded" in str(never.value)
    for other in (differs, never):
        assert "already" not in str(other.value)
    codes = {miss.value.miss.reason for miss in (used, differs, never)}
    assert len(codes) == 3
    assert srv.hits == []


def test_a16_streams_arrive_while_they_are_sent_and_may_be_left(client: Client, srv: Any, p: Path) -> None:
    with rec(p):
        assert client.read(srv.url + "/slow-sse", take=1) == [b"data: 0\n\n"]
        assert not srv.gate.is_set()  # the server has not sent the rest
    (result,) = events(p, "tool_result")
    assert result["output"]["body"] == "data: 0\n\n"
    assert ends(p) == ["closed"] and wire(p)[0]["end"] == "closed"
    srv.requests.clear()
    with frozen(p):
        assert client.read(srv.url + "/slow-sse", take=1) == [b"data: 0\n\n"]
    assert srv.hits == []


def test_a16_a_replay_does_not_pass_off_half_a_stream_as_a_whole_one(client: Client, srv: Any, p: Path) -> None:
    with rec(p):
        client.read(srv.url + "/slow-sse", take=1)
    srv.requests.clear()
    with pytest.raises(ReplayExhaustedError), frozen(p):
        client.read(srv.url + "/slow-sse")
    assert srv.hits == []


@pytest.mark.parametrize("module", MODULES)
def test_a16_a_stream_nobody_ends_is_kept_as_far_as_it_came(module: ModuleType, srv: Any, p: Path) -> None:
    with rec(p):
        http = module.Client(verify=TLS)
        answer = http.send(http.build_request("GET", srv.url + "/slow-sse"), stream=True)
        assert next(answer.iter_lines()) == "data: 0"
        del answer
    http.close()
    (row,) = wire(p)
    assert row["end"] in ("abandoned", "closed") and row["body"] == "data: 0\n\n"


# --- A18, A19 ---------------------------------------------------------------------------------------------------------


def test_a18_header_names_have_no_case(client: Client, srv: Any, p: Path) -> None:
    with rec(p):
        first = client.get(srv.url + "/json", headers={"aUTHORIZATION": "Bearer " + KEY, "X-KIND": "one"})
    assert n_http(p) == 1 and KEY.encode() not in blob(p)
    srv.requests.clear()
    with frozen(p):
        again = client.get(srv.url + "/json", headers={"authorization": "Bearer other", "x-kind": "one"})
    assert srv.hits == []
    cookies = again.all("SET-COOKIE")
    assert [one.partition("=")[0] for one in cookies] == ["sid", "t"]  # repeated, in order
    assert again.all("x-twice") == first.all("x-twice") == ["one", "two"]
    kept = [name for name, _ in wire(p)[0]["headers"]]
    assert kept == [name.lower() for name in kept] and kept.count("set-cookie") == 2
    with diverging(p), pytest.raises(Divergence, match="x-kind"):
        client.get(srv.url + "/json", headers={"x-kind": "two"})


@pytest.mark.parametrize("module", MODULES)
def test_a18_a_replayed_answer_is_asked_without_case(module: ModuleType, srv: Any, p: Path) -> None:
    with rec(p):
        module.get(srv.url + "/json", verify=TLS)
    with frozen(p):
        answer = module.get(srv.url + "/json", verify=TLS)
    assert answer.headers["SET-COOKIE"] == answer.headers["set-cookie"]
    assert len(answer.headers.get_list("Set-Cookie")) == 2 and list(answer.cookies) == ["sid", "t"]
    assert isinstance(answer, module.Response) and isinstance(answer.headers, module.Headers)


def test_a19_replayed_bytes_are_the_wire_s(client: Client, srv: Any, p: Path) -> None:
    paths = ("/json", "/huge-number", "/binary")
    with rec(p):
        raw = [client.get(srv.url + path).body for path in paths]
    assert raw[0] == JSON and wire_bodies(p) == raw
    check(p)
    srv.requests.clear()
    with frozen(p):
        assert [client.get(srv.url + path).body for path in paths] == raw
    assert srv.hits == []


def test_a19_a_redaction_changes_only_its_own_place(client: Client, srv: Any, p: Path) -> None:
    spelled = '{"z": 1,  "password": "%s", "a": [1, 2.0], "u": "\\u00e9"}'
    srv.script.append(
        Scripted(body=(spelled % "swordfish-17").encode(), headers=[("content-type", "application/json")])
    )
    with rec(p):
        assert b"swordfish-17" in client.get(srv.url + "/json").body
    assert b"swordfish-17" not in blob(p)
    with frozen(p):
        assert client.get(srv.url + "/json").body == (spelled % "[REDACTED]").encode()
