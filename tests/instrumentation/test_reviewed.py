# SPDX-License-Identifier: Apache-2.0
"""What a review from outside found: secrets that reached a bundle, programs that were changed, replays that failed."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import httpx2
import pytest
import requests

from sftrace_otel import ReplayError, ReplayMismatchError, ReplayPolicyError, ReplaySession, record
from sftrace_otel.bundle.read import open_bundle

Run = Callable[..., Any]
MODULES = [httpx, httpx2]
KEY = "sk-proj-Ab3dEf6hIj9kLm2nOp5q"


def stored(path: Path) -> bytes:
    """All that a bundle holds."""
    return b"".join(file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file())


def wired(module: ModuleType, answer: Callable[[Any], Any]) -> Any:
    return module.Client(transport=module.MockTransport(answer))


# --- secrets ----------------------------------------------------------------------------------------------------------

CREDENTIALS = [
    "authorization", "x-api-key", "cookie", "x-rapidapi-key", "fastly-key", "x-access-token", "x-csrftoken", "dpop",
    "x-session-id", "x-honeycomb-team", "x-user-key", "x-access-code",
]  # fmt: skip


@pytest.mark.parametrize("name", CREDENTIALS)
@pytest.mark.parametrize("client", [httpx, requests])
def test_a_header_of_one_word_is_hidden_everywhere_and_matches_another(
    name: str, client: Any, load_server: Any, recorded: Run, frozen: Run, bundle_path: Path
) -> None:
    raw = load_server("raw_server")
    with raw.RawServer({"/x": raw.whole(b"{}", f"{name}: Qx7vLw2NabcZ")}) as server:

        def program(secret: str) -> int:
            return int(client.get(server.url + "/x", headers={name: secret, "x-plain": "Hello"}).status_code)

        assert recorded(program, "Rt5mKp8QwertyU") == 200
    held = stored(bundle_path)
    assert b"Rt5mKp8QwertyU" not in held and b"Qx7vLw2NabcZ" not in held
    assert b"Hello" in held
    assert frozen(program, "another0ne") == 200


def test_the_redaction_of_a_header_is_reported(load_server: Any, recorded: Run, read: Run) -> None:
    raw = load_server("raw_server")
    with raw.RawServer({"/x": raw.whole(b"{}")}) as server:
        recorded(lambda: httpx.get(server.url + "/x", headers={"x-api-key": "Rt5mKp8QwertyU"}).status_code)
    redactions = json.loads((read().path / "redactions.json").read_text())
    assert any("/input/headers/" in json.dumps(entry) for entry in redactions["entries"]), redactions


@pytest.mark.parametrize(
    "cookie",
    ["sid=abc; Path=/, session=Qx7vLw2NabcZ", f"sid=abc; Path=/r?token={KEY}", "sid=abc; Qx7vLw2NabcZ", "Qx7vLw2NabcZ"],
)
def test_only_the_name_and_plain_attributes_of_a_cookie_are_kept(
    cookie: str, load_server: Any, recorded: Run, bundle_path: Path
) -> None:
    raw = load_server("raw_server")
    with raw.RawServer(
        {"/x": raw.whole(b"{}", f"Set-Cookie: {cookie}", "Set-Cookie: b=c; Path=/; HttpOnly")}
    ) as server:
        recorded(lambda: httpx.get(server.url + "/x").status_code)
    held = stored(bundle_path)
    assert b"Qx7vLw2NabcZ" not in held and KEY.encode() not in held
    assert b"b=[REDACTED]; Path=/; HttpOnly" in held


BODIES = {
    "gzip": gzip.compress(json.dumps({"password": "Tr0ub4dor", "note": KEY}).encode()),
    "latin-1": f"caf\xe9 {KEY}".encode("latin-1"),
    "utf-16": f"the key is {KEY}".encode("utf-16"),
    "utf-16 without a mark": f"the key is {KEY}".encode("utf-16-le"),
    "binary that begins like UTF-16": b"\xff\xfe\x00\x01" + KEY.encode() + b"\x00\x80",
    "binary": b"\x00\xff\xfe\x80" * 9 + f" key={KEY} ".encode() + b"\x80\xff",
}


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("way", ["sent", "received"])
def test_a_secret_in_a_body_that_is_no_utf8_is_hidden(
    kind: str, way: str, recorded: Run, frozen: Run, bundle_path: Path
) -> None:
    body = BODIES[kind]

    def program() -> int:
        with wired(httpx, lambda request: httpx.Response(200, content=body if way == "received" else b"ok")) as client:
            return int(client.post("http://h.test/x", content=body if way == "sent" else b"ok").status_code)

    recorded(program)
    held = stored(bundle_path)
    assert KEY.encode() not in held and KEY.encode("utf-16-le") not in held
    for encoded in (body, base64.b64encode(body)):
        assert encoded not in held
    assert frozen(program) == 200


@pytest.mark.parametrize("client", [httpx, requests])
def test_a_password_beside_a_binary_file_is_hidden_and_the_file_is_kept(
    client: Any, load_server: Any, recorded: Run, frozen: Run, bundle_path: Path
) -> None:
    raw = load_server("raw_server")
    picture = bytes(range(256)) * 4
    with raw.RawServer({"/x": raw.whole(b"ok")}) as server:

        def program(password: str = "Tr0ub4dor-and-3") -> int:
            data, files = {"password": password, "user": "kim"}, {"f": ("a.png", picture, "image/png")}
            return int(client.post(server.url + "/x", data=data, files=files).status_code)

        assert recorded(program) == 200
    row = next(open_bundle(bundle_path).wire())
    sent = open_bundle(bundle_path).blob(row["request"]["body"]["$blob"])
    assert picture in sent and b"Tr0ub4dor" not in sent and b"kim" in sent and row["redacted"] is True
    assert b"Tr0ub4dor" not in stored(bundle_path)
    assert frozen(program, "another password") == 200


@pytest.mark.parametrize("name", ["pass", "pw", "otp", "code", "ticket", "sid", "user_key", "rapidapi-key"])
def test_parameters_of_a_url_that_carry_credentials(name: str, recorded: Run, frozen: Run, bundle_path: Path) -> None:
    def program(secret: str) -> int:
        with wired(httpx, lambda request: httpx.Response(200)) as client:
            return int(client.get("http://h.test/x", params={name: secret, "page": "2"}).status_code)

    recorded(program, "Qx7vLw2NabcZ90Kl3")
    assert b"Qx7vLw2NabcZ90Kl3" not in stored(bundle_path) and b"page=2" in stored(bundle_path)
    assert frozen(program, "Rt5mKp8QwertyU7654") == 200


def test_a_code_that_is_a_word_is_no_credential(recorded: Run, bundle_path: Path) -> None:
    with wired(httpx, lambda request: httpx.Response(200)) as client:
        recorded(lambda: client.get("http://h.test/x?code=NO&session=42").status_code)
    assert b"code=NO&session=42" in stored(bundle_path)


@pytest.mark.parametrize("how", ["token", "cookie"])
def test_what_a_login_hands_out_is_known_from_then_on(how: str, recorded: Run, frozen: Run, bundle_path: Path) -> None:
    token = "Zq81mNb72Kd03LsPw95x"

    def answer(request: Any) -> Any:
        if request.url.path != "/login":
            return httpx.Response(200, json={"seen": request.url.path})
        if how == "cookie":
            return httpx.Response(200, headers={"set-cookie": f"sid={token}; Path=/"}, json={})
        return httpx.Response(200, json={"access_token": token, "next": f"/users/{token}"})

    def program() -> list[int]:
        with wired(httpx, answer) as client:
            login = client.post("http://h.test/login")
            given = login.json().get("access_token") or login.cookies["sid"]
            again = client.get(f"http://h.test/users/{given}/orders", params={"who": given})
            sent = client.post("http://h.test/form", data={"who": given, "n": "1"})
        return [again.status_code, sent.status_code]

    assert recorded(program) == [200, 200]
    assert token.encode() not in stored(bundle_path)
    assert frozen(program) == [200, 200]


def test_what_a_gateway_counts_visitors_by_pushes_no_login_out(recorded: Run, bundle_path: Path) -> None:
    token, seen = "Zq81mNb72Kd03LsPw95x", []

    def answer(request: Any) -> Any:
        seen.append(request)
        headers = {"set-cookie": f"__cf_bm=Vis1t0r{len(seen):020d}; Path=/"}
        return httpx.Response(200, headers=headers, json={"access_token": token} if len(seen) == 1 else {})

    def program() -> None:
        with wired(httpx, answer) as client:
            for _ in range(80):
                client.get("http://h.test/")
            client.get(f"http://h.test/users/{token}")

    recorded(program)
    assert token.encode() not in stored(bundle_path)


# --- the program is what it was ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", MODULES)
def test_the_workers_of_the_loop_are_the_programs(module: ModuleType, recorded: Run, read: Run) -> None:
    large = b"x" * 200_000

    async def program() -> int:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        transport = module.MockTransport(lambda request: module.Response(200, content=large))
        async with module.AsyncClient(transport=transport) as client:

            async def ask() -> int:
                return len((await client.post("http://h.test/x", content=large)).content)

            def in_worker() -> int:
                return asyncio.run_coroutine_threadsafe(ask(), loop).result(60)

            return await asyncio.wait_for(asyncio.to_thread(in_worker), 60)

    assert recorded(lambda: asyncio.run(program())) == len(large)
    assert [row["end"] for row in read().calls] == ["finished"]


def test_a_large_upload_is_kept_by_its_beginning_and_matched_as_a_whole(
    recorded: Run, frozen: Run, read: Run, bundle_path: Path
) -> None:
    large = b"0123456789abcdef" * (20 * 65536)

    def program(content: bytes = large) -> int:
        with wired(httpx, lambda request: httpx.Response(201)) as client:
            return int(client.post("http://h.test/x", content=content).status_code)

    recorded(program)
    [request] = [event for event in read().events if event.type == "tool_call"]
    assert request.input["body"]["size"] == len(large) and next(read().wire())["request"]["truncated"] is True
    assert sum(file.stat().st_size for file in bundle_path.rglob("*") if file.is_file()) < 5 << 20
    assert frozen(program) == 201
    with pytest.raises(ReplayMismatchError):
        frozen(program, large[:-1] + b"!")
    recorded(program, KEY.encode() + large)
    [request] = [event for event in read().events if event.type == "tool_call"]
    assert "sha256" not in request.input["body"] and KEY.encode() not in stored(bundle_path)


def test_a_small_limit_for_payloads_marks_no_request_as_cut(
    recorded: Run, read: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SFTRACE_MAX_PAYLOAD_BYTES", "1000")
    with wired(httpx, lambda request: httpx.Response(201)) as client:
        recorded(lambda: client.post("http://h.test/x", content=b"x" * 5000).status_code)
    [row] = read().wire()
    assert row["request"]["body"] == "x" * 5000 and "truncated" not in row["request"]


@pytest.mark.parametrize("depth", [300, 900, 2000])
def test_an_answer_however_deep_is_recorded_and_replays(depth: int, recorded: Run, frozen: Run) -> None:
    deep = b"[" * depth + b"1" + b"]" * depth

    def program() -> bytes:
        with wired(httpx, lambda request: httpx.Response(200, content=deep)) as client:
            return bytes(client.get("http://h.test/x").content)

    assert recorded(program) == deep
    assert frozen(program) == deep


@pytest.mark.parametrize("module", MODULES)
def test_a_status_keeps_its_own_phrase(module: ModuleType, recorded: Run, frozen: Run) -> None:
    def program() -> list[str]:
        with wired(module, lambda request: module.Response(404)) as client:
            answer = client.get("http://h.test/x")
        try:
            answer.raise_for_status()
        except module.HTTPStatusError as error:
            return [answer.reason_phrase, str(error)]
        return []

    want = recorded(program)
    assert want[0] == "Not Found"
    assert frozen(program) == want


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("message", ["", "the peer went away"])
def test_the_message_of_a_transport_error(module: ModuleType, message: str, recorded: Run, frozen: Run) -> None:
    def answer(request: Any) -> Any:
        raise module.ReadError(message)

    def program() -> str:
        with wired(module, answer) as client, pytest.raises(module.ReadError) as caught:
            client.get("http://h.test/x")
        return str(caught.value)

    assert recorded(program) == message
    assert frozen(program) == message


# --- nothing is lost, nothing goes out --------------------------------------------------------------------------------


def test_what_an_application_does_in_the_background_is_a_call(
    load_server: Any, recorded: Run, frozen: Run, read: Run
) -> None:
    raw = load_server("raw_server")
    tasks: list[asyncio.Task[Any]] = []
    with raw.RawServer({"/later": raw.whole(b"done")}) as server:

        async def background() -> None:
            async with httpx.AsyncClient() as client:
                await client.get(server.url + "/later")

        async def app(scope: Any, receive: Any, send: Any) -> None:
            tasks.append(asyncio.create_task(background()))
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"ok"})

        async def ask() -> str:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app.test") as client:
                text = (await client.get("/")).text
            await asyncio.gather(*tasks)
            return str(text)

        assert recorded(lambda: asyncio.run(ask())) == "ok"
    assert sorted(str(row["url"]).rpartition("/")[2] for row in read().wire()) == ["", "later"]


@pytest.mark.parametrize("module", MODULES)
def test_a_transport_that_sends_another_request_is_one_exchange(
    module: ModuleType, load_server: Any, recorded: Run, frozen: Run, read: Run
) -> None:
    raw = load_server("raw_server")
    with raw.RawServer({"/token": raw.whole(b"t"), "/real": raw.whole(b"real")}) as server:

        class Rewriting(module.HTTPTransport):  # type: ignore[name-defined,misc]
            def handle_request(self, request: Any) -> Any:
                module.get(server.url + "/token")
                return super().handle_request(module.Request("GET", server.url + "/real"))

        def program() -> str:
            with module.Client(transport=Rewriting()) as client:
                return str(client.get("http://front.test/x").text)

        want = recorded(program)
        server.stop()
        assert frozen(program) == want == "real"
    assert [row["url"] for row in read().wire()] == ["http://front.test/x"]


def test_a_datagram_by_sendmsg_does_not_leave_a_replay(recorded: Run, bundle_path: Path) -> None:
    with wired(httpx, lambda request: httpx.Response(200)) as client:
        recorded(lambda: client.get("http://h.test/x").status_code)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.setblocking(False)
        with pytest.raises(ReplayError), ReplaySession.from_trace(bundle_path) as replay, record("agent"):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender, pytest.raises(ReplayPolicyError):
                sender.sendmsg([b"out"], [], 0, listener.getsockname())
            replay.verify_complete()
        with pytest.raises(BlockingIOError):
            listener.recv(10)
