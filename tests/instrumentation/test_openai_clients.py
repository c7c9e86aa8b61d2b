# SPDX-License-Identifier: Apache-2.0
"""The clients of the openai SDK: Azure, copies, transports of one's own, low-level calls, the module's own client."""

from __future__ import annotations

import asyncio
import gc
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncAzureOpenAI, AsyncOpenAI, AzureOpenAI, OpenAI
from openai.types.chat import ChatCompletion

from sftrace_otel import ReplayMismatchError

Run = Callable[..., Any]

pytestmark = [  # agents leave clients open
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

http = importlib.import_module(OpenAI.__mro__[1].__init__.__globals__.get("httpx2", httpx).__name__)
"""The HTTP library of this openai: httpx until 2.x, httpx2 since."""

MESSAGES: Any = [{"role": "user", "content": "hi"}]


def ask(client: Any, **members: Any) -> Any:
    return client.chat.completions.create(model="gpt-5", messages=MESSAGES, **members).to_dict()


async def aask(client: Any, **members: Any) -> Any:
    return (await client.chat.completions.create(model="gpt-5", messages=MESSAGES, **members)).to_dict()


def kinds(bundle: Any) -> list[str]:
    return [row["kind"] for row in bundle.calls]


def requests_of(bundle: Any) -> list[Any]:
    return [event for event in bundle.events if event.type == "llm_request"]


# --- Azure ------------------------------------------------------------------------------------------------------------


def azure(server: Any, kind: Any = AzureOpenAI, **members: Any) -> Any:
    return kind(azure_endpoint=server.url, api_version="2025-04-01-preview", max_retries=0, **members)


def test_azure_by_deployment(exact: Run, openai_server: Any, read: Run, spans: Run) -> None:
    def program() -> list[Any]:
        own = azure(openai_server, api_key="k", azure_deployment="my-gpt")
        by_model = azure(openai_server, api_key="k")
        stream = own.chat.completions.create(model="gpt-5", messages=MESSAGES, stream=True)
        return [ask(own), ask(by_model), [chunk.to_dict() for chunk in stream]]

    exact(program)
    paths = sorted(row["url"].partition("/openai/deployments/")[2] for row in read().wire())
    assert paths == [
        "gpt-5/chat/completions?api-version=2025-04-01-preview",
        "my-gpt/chat/completions?api-version=2025-04-01-preview",
        "my-gpt/chat/completions?api-version=2025-04-01-preview",
    ]
    assert {request.provider for request in requests_of(read())} == {"azure.ai.openai"}
    assert spans()[0].attributes["gen_ai.provider.name"] == "azure.ai.openai"


def test_an_azure_token_provider_that_fetches_its_token(
    exact: Run, frozen: Run, openai_server: Any, server_module: Any, read: Run
) -> None:
    openai_server.replies["POST /oauth2/token"] = server_module.json_reply({"token_type": "Bearer", "expires_in": 60})

    def token() -> str:
        got = httpx.post(f"{openai_server.url}/oauth2/token", data={"scope": "cognitive"}).json()
        return f"{got['token_type']}-1"

    def program(text: str = "hi") -> Any:
        return ask(azure(openai_server, azure_ad_token_provider=token), user=text)

    exact(program)
    assert sorted(kinds(read())) == ["http", "llm"]
    assert len(list(read().wire())) == 2
    with pytest.raises(ReplayMismatchError):
        frozen(program, "another")


def test_an_async_azure_token_provider_that_fetches_its_token(
    exact: Run, openai_server: Any, server_module: Any, read: Run
) -> None:
    openai_server.replies["POST /oauth2/token"] = server_module.json_reply({"token_type": "Bearer", "expires_in": 60})

    async def token() -> str:
        async with httpx.AsyncClient() as client:
            got = await client.post(f"{openai_server.url}/oauth2/token", data={"scope": "cognitive"})
            return f"{got.json()['token_type']}-1"

    async def program() -> Any:
        async with azure(openai_server, AsyncAzureOpenAI, azure_ad_token_provider=token) as client:
            return [await aask(client), await aask(client)]

    exact(lambda: asyncio.run(program()))
    assert sorted(kinds(read())) == ["http", "http", "llm", "llm"]


def test_an_unknown_request_of_a_token_provider_stops_the_replay_as_itself(
    recorded: Run, frozen: Run, openai_server: Any
) -> None:
    def program(scope: str) -> Any:
        def token() -> str:
            try:
                httpx.post(f"{openai_server.url}/token", json={"scope": scope})
            except Exception:
                return "fallback"
            return "t"

        return ask(azure(openai_server, azure_ad_token_provider=token))

    recorded(program, "a")
    with pytest.raises(ReplayMismatchError):
        frozen(program, "b")


# --- copies and transports --------------------------------------------------------------------------------------------


def test_copies_of_a_client(exact: Run, openai_server: Any, read: Run) -> None:
    def program() -> list[Any]:
        client = OpenAI(base_url=openai_server.base_url, api_key="k", max_retries=0)
        return [
            ask(client.with_options(timeout=20, max_retries=1)),
            ask(client.copy(default_headers={"x-team": "a"}, default_query={"tenant": "b"})),
        ]

    exact(program)
    assert kinds(read()) == ["llm", "llm"]
    assert openai_server.requests[1].headers["x-team"] == "a"
    assert openai_server.requests[1].path.endswith("?tenant=b")


def test_an_http_client_of_ones_own(exact: Run, openai_server: Any, read: Run) -> None:
    seen: list[str] = []

    def program() -> list[Any]:
        hooks = {"request": [lambda request: seen.append(request.method)]}
        transport = http.HTTPTransport(retries=1)
        with http.Client(transport=transport, event_hooks=hooks, headers={"x-own": "1"}) as own:
            client = OpenAI(base_url=openai_server.base_url, api_key="k", http_client=own, max_retries=0)
            return [ask(client), len(seen) > 0]

    exact(program)
    assert kinds(read()) == ["llm"]
    assert seen == ["POST", "POST"]  # once recorded, once replayed


def test_an_async_http_client_of_ones_own(exact: Run, openai_server: Any, read: Run) -> None:
    async def program() -> Any:
        async with http.AsyncClient(limits=http.Limits(max_connections=1)) as own:
            return await aask(AsyncOpenAI(base_url=openai_server.base_url, api_key="k", http_client=own))

    exact(lambda: asyncio.run(program()))
    assert kinds(read()) == ["llm"]


def test_a_transport_that_answers_by_itself(recorded: Run, frozen: Run, server_module: Any, read: Run) -> None:
    asked: list[str] = []

    def answer(request: Any) -> Any:
        asked.append(request.url.path)
        body = server_module.completion({"model": "gpt-5", "messages": MESSAGES}, server_module.text("own"))
        return http.Response(200, json=body)

    def program() -> Any:
        own = http.Client(transport=http.MockTransport(answer))
        return ask(OpenAI(base_url="http://model.test/v1", api_key="k", http_client=own))

    want = recorded(program)
    assert frozen(program) == want
    assert kinds(read()) == ["llm"]
    assert asked == ["/v1/chat/completions"]


def aiohttp_client() -> Any:
    make = getattr(openai, "DefaultAioHttpClient", None)
    if make is None:
        pytest.skip("this openai has no aiohttp client")
    try:
        return make()
    except RuntimeError as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_the_aiohttp_client(exact: Run, openai_server: Any, read: Run, stream: bool) -> None:
    async def program() -> Any:
        own = aiohttp_client()
        async with AsyncOpenAI(base_url=openai_server.base_url, api_key="k", http_client=own) as client:
            if not stream:
                return await aask(client)
            chunks = await client.chat.completions.create(model="gpt-5", messages=MESSAGES, stream=True)
            return [chunk.to_dict() async for chunk in chunks]

    exact(lambda: asyncio.run(program()))
    assert kinds(read()) == ["llm"]


def test_a_forgotten_client_takes_no_place_in_the_lineage(recorded: Run, openai_server: Any, read: Run) -> None:
    async def one(client: Any) -> Any:
        return await aask(client)

    async def program(forget: bool) -> Any:
        async with AsyncOpenAI(base_url=openai_server.base_url, api_key="k", max_retries=0) as client:
            if forget:
                AsyncOpenAI(base_url=openai_server.base_url, api_key="k")
                gc.collect()  # its `__del__` makes a task
            return await asyncio.gather(one(client), one(client))

    recorded(lambda: asyncio.run(program(False)))
    want = sorted(row["lineage"] for row in read().calls)
    recorded(lambda: asyncio.run(program(True)))
    assert sorted(row["lineage"] for row in read().calls) == want


# --- calls ------------------------------------------------------------------------------------------------------------


def test_extra_body_query_and_headers(exact: Run, openai_server: Any, read: Run, spans: Run) -> None:
    def program() -> Any:
        client = OpenAI(base_url=openai_server.base_url, api_key="k", max_retries=0)
        return ask(
            client,
            extra_body={"top_k": 5, "model": "gpt-5-mini"},
            extra_query={"trace": "1"},
            extra_headers={"x-extra": "yes"},
        )

    exact(program)
    [request] = requests_of(read())
    assert (request.model, request.input["request"]["top_k"]) == ("gpt-5-mini", 5)
    [received] = openai_server.requests
    assert (received.path, received.headers["x-extra"]) == ("/v1/chat/completions?trace=1", "yes")
    assert spans()[0].name == "chat gpt-5-mini"
    assert spans()[0].attributes["gen_ai.request.model"] == "gpt-5-mini"


def test_low_level_calls(exact: Run, openai_server: Any, read: Run) -> None:
    def program() -> list[Any]:
        client = OpenAI(base_url=openai_server.base_url, api_key="k", max_retries=0)
        chat = client.post("/chat/completions", cast_to=ChatCompletion, body={"model": "m", "messages": MESSAGES})
        other: Any = client.post("/custom", cast_to=object, body={"a": [1, 2.5]})
        raw = client.post("/custom/raw", cast_to=http.Response, body={"b": 1})
        return [chat, other, raw.json(), raw.status_code]

    chat, other, _, _ = exact(program)
    assert isinstance(chat, ChatCompletion)
    assert other == {"method": "POST", "path": "/v1/custom", "length": len(b'{"a":[1,2.5]}')}
    assert kinds(read()) == ["llm", "http", "http"]


def test_an_unknown_call_that_is_no_inference_stops_the_replay_as_itself(
    recorded: Run, frozen: Run, openai_server: Any
) -> None:
    def program(path: str) -> Any:
        return OpenAI(base_url=openai_server.base_url, api_key="k").post(path, cast_to=object, body={})

    recorded(program, "/a")
    with pytest.raises(ReplayMismatchError):
        frozen(program, "/b")


def test_an_unknown_async_call_that_is_no_inference_stops_the_replay_as_itself(
    recorded: Run, frozen: Run, openai_server: Any
) -> None:
    async def program(path: str) -> Any:
        async with AsyncOpenAI(base_url=openai_server.base_url, api_key="k") as client:
            return await client.post(path, cast_to=object, body={})

    recorded(lambda: asyncio.run(program("/a")))
    with pytest.raises(ReplayMismatchError):
        frozen(lambda: asyncio.run(program("/b")))


@pytest.fixture
def module_client(openai_server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(openai, "api_key", "k")
    monkeypatch.setattr(openai, "base_url", f"{openai_server.base_url}/")
    monkeypatch.setattr(openai, "max_retries", 0)
    openai._reset_client()
    yield openai
    openai._reset_client()


def test_the_modules_own_client(exact: Run, module_client: Any, read: Run) -> None:
    def program() -> Any:
        return ask(module_client)

    exact(program)
    assert kinds(read()) == ["llm"]


def test_a_prompt_that_changed_is_a_mismatch(recorded: Run, frozen: Run, openai_server: Any) -> None:
    def program(text: str) -> Any:
        return ask(OpenAI(base_url=openai_server.base_url, api_key="k"), user=text)

    recorded(program, "a")
    with pytest.raises(ReplayMismatchError):
        frozen(program, "b")
