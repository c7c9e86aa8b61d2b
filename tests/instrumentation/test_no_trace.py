# SPDX-License-Identifier: Apache-2.0
"""Leaving no trace: what the boundaries patch comes back whole, and clients are what they are without us.

Each comparison is made with the very same program without us, so a library that changes its ways changes both sides.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import importlib
import inspect
import pickle
import pkgutil
import sys
import typing
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest

from sftrace_otel import instrument, instrumentation, record, uninstrument
from sftrace_otel.bundle.read import open_bundle
from sftrace_otel.instrumentation.patching import Patches

pytestmark = [  # clients are left open, and those that are half copied say so when they go
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def all_patches() -> list[Patches]:
    """The patch tables of every boundary."""
    found = []
    for info in pkgutil.iter_modules(instrumentation.__path__, "sftrace_otel.instrumentation."):
        module = importlib.import_module(info.name)
        found += [value for value in vars(module).values() if isinstance(value, Patches)]
    return list({id(table): table for table in found}.values())


def places() -> Iterator[tuple[Any, str]]:
    """(owner, attribute) of all that is to be patched and whose module is imported."""
    for table in all_patches():
        for name, wanted in table._wanted.items():
            for path, _ in wanted if name in sys.modules else ():
                owner: Any = sys.modules[name]
                *parents, attribute = path.split(".")
                for parent in parents:
                    owner = getattr(owner, parent)
                if attribute in vars(owner) or (name, path) not in table._optional:
                    yield owner, attribute


def title(owner: Any) -> str:
    return owner.__name__ if inspect.ismodule(owner) else f"{owner.__module__}.{owner.__qualname__}"


PLACES = {f"{title(owner)}.{attribute}": (owner, attribute) for owner, attribute in places()}


def snapshot() -> dict[str, Any]:
    return {name: vars(owner)[attribute] for name, (owner, attribute) in PLACES.items()}


@pytest.fixture(params=["sync", "async"])
def ask(request: Any) -> Callable[[str], Any]:
    """One call of the openai SDK."""

    def sync(url: str) -> Any:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
            return client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])

    async def run(url: str) -> Any:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
            return await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])

    return sync if request.param == "sync" else lambda url: asyncio.run(run(url))


def requests_in(path: Path) -> list[str]:
    return [event.type for event in open_bundle(path).events if event.type in ("llm_request", "tool_call")]


# --- taking the boundaries off ----------------------------------------------------------------------------------------


def test_uninstalling_restores_every_attribute() -> None:
    assert len(PLACES) >= 11
    before = snapshot()
    instrumentation.install()
    during = snapshot()
    assert [name for name in before if during[name] is before[name]] == []
    instrumentation.uninstall()
    after = snapshot()
    assert [name for name in before if after[name] is not before[name]] == []
    assert [table.installed() for table in all_patches() if table.installed()] == []


def test_instrumenting_twice_is_once(openai_server: Any, ask: Any, bundle_path: Path) -> None:
    before = snapshot()
    for _ in range(2):
        instrument()
        instrumentation.install()
    assert [name for name, found in snapshot().items() if found.__wrapped__ is not before[name]] == []
    with record("agent", output=bundle_path):
        ask(openai_server.url)
    uninstrument()
    assert requests_in(bundle_path) == ["llm_request"]
    instrumentation.uninstall()
    assert snapshot() == before


@pytest.mark.parametrize("place", sorted(PLACES))
def test_uninstalling_after_others_took_our_wrapper_away(place: str) -> None:
    owner, attribute = PLACES[place]
    original = vars(owner)[attribute]
    instrumentation.install()
    setattr(owner, attribute, original)
    instrumentation.uninstall()
    assert vars(owner)[attribute] is original
    instrumentation.install()
    assert vars(owner)[attribute].__wrapped__ is original
    instrumentation.uninstall()
    assert vars(owner)[attribute] is original


@contextmanager
def plain_wrapper(owner: Any, attribute: str) -> Iterator[list[str]]:
    """A wrapper of somebody else, a function that keeps no `__wrapped__`: nobody finds ours beneath it."""
    inner, called = getattr(owner, attribute), []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        called.append(attribute)
        return inner(*args, **kwargs)

    kept = vars(owner)[attribute]
    setattr(owner, attribute, theirs)
    try:
        yield called
    finally:
        setattr(owner, attribute, kept)


OPENAI = [(openai._base_client.SyncAPIClient, "request"), (openai._base_client.AsyncAPIClient, "request")]
TRANSPORTS = [(httpx2.HTTPTransport, "handle_request"), (httpx2.AsyncHTTPTransport, "handle_async_request")]


@pytest.mark.parametrize("pair", [OPENAI, TRANSPORTS], ids=["sdk", "transport"])
def test_a_wrapper_hidden_below_another_passes_through_and_counts_once(
    pair: Any, openai_server: Any, ask: Any, bundle_path: Path
) -> None:
    before = snapshot()
    instrumentation.install()
    with plain_wrapper(*pair[0]) as one, plain_wrapper(*pair[1]) as other:
        instrumentation.uninstall()
        assert ask(openai_server.url).choices and one + other
        with record("agent", output=bundle_path):  # ours is put on again, on top of theirs, and below it is the old one
            assert ask(openai_server.url).choices
        instrumentation.uninstall()
    assert requests_in(bundle_path) == ["llm_request"]
    for name, (owner, attribute) in PLACES.items():
        setattr(owner, attribute, before[name])


# --- what clients are -------------------------------------------------------------------------------------------------


def looks(function: Any) -> list[Any]:
    """What `inspect` and frameworks see of a function."""
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:  # it names what is imported for type checkers only
        hints = {"error": str(error)}
    return [
        inspect.signature(function), inspect.iscoroutinefunction(function), inspect.isfunction(function),
        inspect.isgeneratorfunction(function), hints, function.__name__, function.__qualname__, function.__module__,
        function.__doc__,
    ]  # fmt: skip


@pytest.mark.parametrize("place", sorted(PLACES))
def test_functions_look_as_before(place: str) -> None:
    owner, attribute = PLACES[place]
    before = looks(getattr(owner, attribute))
    instrumentation.install()
    after = looks(getattr(owner, attribute))
    assert [part for part, was in zip(after, before, strict=True) if part != was and part is not False] == []


def clients() -> dict[str, Any]:
    return {
        "httpx": httpx.Client(),
        "httpx async": httpx.AsyncClient(),
        "httpx2": httpx2.Client(),
        "httpx2 async": httpx2.AsyncClient(),
        "transport": httpx2.HTTPTransport(),
        "mock": httpx.Client(transport=httpx.MockTransport(len)),
        "openai": openai.OpenAI(api_key="k"),
        "openai async": openai.AsyncOpenAI(api_key="k"),
        "anthropic": anthropic.Anthropic(api_key="k"),
        "anthropic async": anthropic.AsyncAnthropic(api_key="k"),
        "timeout": openai.Timeout(3),
        "request": httpx.Request("POST", "http://h.test/", content=b"x"),
    }


WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "own copy": lambda value: value.copy() if hasattr(value, "copy") else None,
    "options": lambda value: value.with_options(timeout=3) if hasattr(value, "with_options") else None,
}


def copied(values: dict[str, Any]) -> dict[tuple[str, str], str]:
    """What comes of copying each value in each way: a class, or an exception."""
    found = {}
    for name, value in values.items():
        for way, work in WAYS.items():
            try:
                made = work(value)
                found[name, way] = f"{type(made).__module__}.{type(made).__qualname__}"
            except Exception as error:
                found[name, way] = f"raises {type(error).__name__}"
    return found


def kinds(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: (type(value), type(value).__mro__, type(getattr(value, "_transport", None)), sorted(vars(value)))
        for name, value in values.items()
        if hasattr(value, "__dict__")
    }


def test_clients_are_copied_pickled_and_typed_as_before(bundle_path: Path) -> None:
    values, old = clients(), clients()
    want = copied(values), kinds(values)
    with record("agent", output=bundle_path):
        assert (copied(old), kinds(old)) == want  # made before
        new = clients()
        assert (copied(new), kinds(new)) == want
        assert isinstance(new["transport"], httpx2.BaseTransport) and isinstance(new["openai"], openai.OpenAI)
    assert {way for (_, way), text in want[0].items() if not text.startswith("raises")} == set(WAYS)


def test_results_are_copied_pickled_and_typed_as_before(openai_server: Any, bundle_path: Path) -> None:
    def results() -> dict[str, Any]:
        with openai.OpenAI(base_url=f"{openai_server.url}/v1", api_key="k") as model, httpx.Client() as web:
            chat, messages = model.chat.completions, [{"role": "user", "content": "hi"}]
            left = web.send(web.build_request("GET", f"{openai_server.url}/json"), stream=True)
            left.close()
            posted = web.post(f"{openai_server.url}/form", content=iter([b"x"]), headers={"content-length": "1"})
            return {
                "answer": chat.create(model="m", messages=messages),  # type: ignore[call-overload]
                "raw": chat.with_raw_response.create(model="m", messages=messages),  # type: ignore[call-overload]
                "stream": chat.create(model="m", messages=messages, stream=True),  # type: ignore[call-overload]
                "response": web.get(f"{openai_server.url}/json"),
                "closed": left,
                "request": posted.request,
            }

    def compared(values: dict[str, Any]) -> Any:
        found = copied(values)
        for value in values.values():
            getattr(value, "close", lambda: None)()
        return found, kinds(values)

    want = compared(results())
    instrumentation.install()
    with record("agent", output=bundle_path):
        got = compared(results())
    assert got == want


# --- how long clients live --------------------------------------------------------------------------------------------


def lives(url: str, work: Callable[[str], list[Any]]) -> list[bool]:
    """Of the objects that `work` made: which still live when it is over, without the garbage collector's help."""
    gc.collect()
    gc.disable()
    try:
        references = [weakref.ref(made) for made in work(url)]
        return [reference() is not None for reference in references]
    finally:
        gc.enable()


def get(url: str) -> list[Any]:
    client = httpx.Client()
    response = client.get(f"{url}/json")
    client.close()
    return [client, response, response.request]


def left_open(url: str) -> list[Any]:
    client = httpx.Client()
    response = client.send(client.build_request("GET", f"{url}/json"), stream=True)
    next(response.iter_raw())
    return [client, response]


def refused(url: str) -> list[Any]:
    client = httpx.Client()
    try:
        client.get("http://127.0.0.1:9/")
    except httpx.ConnectError as error:
        request = error.request
    return [client, request]


def chat(url: str) -> list[Any]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
    answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    client.close()
    return [client, client._client, answer]


def chat_stream_left(url: str) -> list[Any]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
    stream = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a b c"}], stream=True)
    next(iter(stream))
    return [client, client._client, stream, stream.response]


def chat_refused(url: str) -> list[Any]:
    client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="k", max_retries=0)
    try:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    except openai.APIConnectionError as error:
        request = error.request
    return [client, client._client, request]


def chat_async(url: str) -> list[Any]:
    async def run() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
            answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        return [client, client._client, answer]

    return asyncio.run(run())


_LONG = [pytest.param(work, marks=pytest.mark.full) for work in (left_open, refused, chat_refused, chat_async)]


@pytest.mark.parametrize("work", [get, chat, chat_stream_left, *_LONG])
def test_what_is_dropped_goes_when_it_would_have_gone(work: Any, openai_server: Any, bundle_path: Path) -> None:
    lives(openai_server.url, work)  # caches fill
    want = lives(openai_server.url, work)
    with record("agent", output=bundle_path):
        lives(openai_server.url, work)
        got = lives(openai_server.url, work)
    assert [now for now, then in zip(got, want, strict=True) if now and not then] == [], (got, want)
    assert requests_in(bundle_path)


def test_a_recorder_keeps_no_client_alive(openai_server: Any, bundle_path: Path) -> None:
    works = (get, left_open, refused, chat, chat_stream_left, chat_refused, chat_async)
    with record("agent", output=bundle_path):
        references = [weakref.ref(made) for work in works for made in work(openai_server.url)]
        gc.collect()
        assert [reference() for reference in references if reference() is not None] == []
