# SPDX-License-Identifier: Apache-2.0
"""The anthropic boundary: every shape of the SDK's results, tools, thinking, the prompt cache, errors, odd ends."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import pytest
from anthropic import Anthropic, AsyncAnthropic
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sftrace_otel import ReplayMismatchError, ReplaySession, record
from sftrace_otel.fork import ForkPoint, OverrideSpec, fork_trace
from sftrace_otel.instrumentation import tracing

Run = Callable[..., Any]
server = sys.modules["llm_server"]

ASK: dict[str, Any] = {"model": "claude-9", "max_tokens": 64, "messages": [{"role": "user", "content": "hi"}]}
MESSAGE: dict[str, Any] = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": "claude-9-001",
    "content": [
        {"type": "thinking", "thinking": "let me see", "signature": "sig"},
        {"type": "text", "text": "Hello", "citations": None},
        {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
    ],
    "stop_reason": "tool_use", "stop_sequence": None,
    "usage": {
        "input_tokens": 3, "cache_creation_input_tokens": 20, "cache_read_input_tokens": 100, "output_tokens": 7,
        "cache_creation": {"ephemeral_5m_input_tokens": 20, "ephemeral_1h_input_tokens": 0},
    },
}  # fmt: skip
START = {**MESSAGE, "content": [], "stop_reason": None, "usage": {**MESSAGE["usage"], "output_tokens": 1}}
EVENTS: list[dict[str, Any]] = [
    {"type": "message_start", "message": START},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": "", "signature": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "let me"}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": " see"}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "sig"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": "", "citations": None}},
    {"type": "ping"},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Hel"}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "lo"}},
    {"type": "content_block_stop", "index": 1},
    {"type": "content_block_start", "index": 2,
     "content_block": {"type": "tool_use", "id": "t1", "name": "add", "input": {}}},
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"a"'}},
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": ": 1}"}},
    {"type": "content_block_stop", "index": 2},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None},
     "usage": {"output_tokens": 7}},
    {"type": "message_stop"},
]  # fmt: skip
OVERLOADED = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}, "request_id": "r"}


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "key-of-the-test")


@pytest.fixture
def client(llm_server: Any) -> Iterator[Callable[..., Anthropic]]:
    made: list[Anthropic] = []

    def make(max_retries: int = 0) -> Anthropic:
        made.append(Anthropic(base_url=llm_server.url, max_retries=max_retries))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture
def aclient(llm_server: Any) -> Callable[..., AsyncAnthropic]:
    return lambda: AsyncAnthropic(base_url=llm_server.url, max_retries=0)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing.trace, "get_tracer_provider", lambda: provider)
    yield exporter
    provider.shutdown()


def held(reply: Any, at: int) -> Any:
    """`reply`, of which the server keeps back what comes from part `at` on."""
    return server.Reply(parts=reply.parts, media=reply.media, wait_at=at)


def kinds(bundle: Any) -> list[str]:
    return [event.type for event in bundle.events]


def ours(spans: InMemorySpanExporter) -> list[Any]:
    """The spans of our boundary; the SDK makes its own below them."""
    found = [span for span in spans.get_finished_spans() if span.instrumentation_scope is not None]
    return [span for span in found if span.instrumentation_scope.name == "sftrace_otel.anthropic"]


def plain(client: Anthropic) -> Any:
    return client.messages.create(**ASK).to_dict()


def events_of_stream(client: Anthropic) -> Any:
    return [event.to_dict() for event in client.messages.create(**ASK, stream=True)]


def helper(client: Anthropic) -> Any:
    with client.messages.stream(**ASK) as stream:
        return ["".join(stream.text_stream), stream.get_final_message().to_dict()]


def raw(client: Anthropic) -> Any:
    response = client.messages.with_raw_response.create(**ASK)
    return [response.status_code, response.headers["content-type"], response.parse().to_dict()]


def raw_stream(client: Anthropic) -> Any:
    response = client.messages.with_raw_response.create(**ASK, stream=True)
    return [event.to_dict() for event in response.parse()]


def streaming(client: Anthropic) -> Any:
    with client.messages.with_streaming_response.create(**ASK) as response:
        return list(response.iter_lines())


def beta(client: Anthropic) -> Any:
    return client.beta.messages.create(**ASK, betas=["some-beta"]).to_dict()


def beta_helper(client: Anthropic) -> Any:
    with client.beta.messages.stream(**ASK) as stream:
        return stream.get_final_message().to_dict()


async def aplain(client: AsyncAnthropic) -> Any:
    return (await client.messages.create(**ASK)).to_dict()


async def aevents_of_stream(client: AsyncAnthropic) -> Any:
    return [event.to_dict() async for event in await client.messages.create(**ASK, stream=True)]


async def ahelper(client: AsyncAnthropic) -> Any:
    async with client.messages.stream(**ASK) as stream:
        said = "".join([part async for part in stream.text_stream])
        return [said, (await stream.get_final_message()).to_dict()]


async def araw(client: AsyncAnthropic) -> Any:
    response = await client.messages.with_raw_response.create(**ASK)
    return [response.status_code, (await response.parse()).to_dict()]


async def astreaming(client: AsyncAnthropic) -> Any:
    async with client.messages.with_streaming_response.create(**ASK) as response:
        return [line async for line in response.iter_lines()]


async def abeta_helper(client: AsyncAnthropic) -> Any:
    async with client.beta.messages.stream(**ASK) as stream:
        return (await stream.get_final_message()).to_dict()


SHAPES = [plain, events_of_stream, helper, raw, raw_stream, streaming, beta, beta_helper]
ASYNC_SHAPES = [aplain, aevents_of_stream, ahelper, araw, astreaming, abeta_helper]
STREAMED = {events_of_stream, helper, raw_stream, beta_helper, aevents_of_stream, ahelper, abeta_helper}


def reply_to(shape: Any) -> Any:
    return server.named_events(*EVENTS) if shape in STREAMED else server.whole(MESSAGE)


def check_recording(bundle: Any, shape: Any) -> None:
    assert kinds(bundle) == ["run_start", "llm_request", "llm_response", "run_end"]
    _, request, response, _ = bundle.events
    assert request.provider == "anthropic"
    assert request.model == "claude-9"
    asked = {**ASK, "stream": True} if shape in STREAMED else ASK
    assert request.input == {"method": "messages.create", "request": asked}
    assert response.output == MESSAGE
    assert response.model == "claude-9-001"
    assert (response.prompt_tokens, response.completion_tokens, response.total_tokens) == (123, 7, 130)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_every_shape_of_the_sdks_results(
    shape: Run, recorded: Run, frozen: Run, llm_server: Any, client: Any, read: Run
) -> None:
    llm_server.replies.append(reply_to(shape))
    want = recorded(lambda: shape(client()))
    check_recording(read(), shape)
    llm_server.stop()
    assert frozen(lambda: shape(client())) == want
    assert len(llm_server.requests) == 1


@pytest.mark.parametrize("shape", ASYNC_SHAPES, ids=lambda shape: shape.__name__)
def test_every_shape_of_the_sdks_async_results(
    shape: Run, recorded: Run, frozen: Run, llm_server: Any, aclient: Any, read: Run
) -> None:
    async def run() -> Any:
        async with aclient() as client:
            return await shape(client)

    llm_server.replies.append(reply_to(shape))
    want = recorded(lambda: asyncio.run(run()))
    check_recording(read(), shape)
    llm_server.stop()
    assert frozen(lambda: asyncio.run(run())) == want


def test_the_sdks_types_come_back(recorded: Run, frozen: Run, llm_server: Any, client: Any) -> None:
    def program() -> Any:
        message = client().messages.create(**ASK)
        return [type(message).__name__, [type(block).__name__ for block in message.content], message.usage.to_dict()]

    llm_server.replies.append(server.whole(MESSAGE))
    want = recorded(program)
    assert want[1] == ["ThinkingBlock", "TextBlock", "ToolUseBlock"]
    llm_server.stop()
    assert frozen(program) == want


@pytest.mark.parametrize("shape", [plain, helper], ids=lambda shape: shape.__name__)
def test_the_span(shape: Run, recorded: Run, llm_server: Any, client: Any, spans: InMemorySpanExporter) -> None:
    llm_server.replies.append(reply_to(shape))
    recorded(lambda: shape(client()))
    [span] = ours(spans)
    found = dict(span.attributes)
    assert span.name == "chat claude-9"
    assert found.pop("gen_ai.request.stream", None) is (True if shape is helper else None)
    assert (found.pop("gen_ai.response.time_to_first_chunk", None) is not None) is (shape is helper)
    assert {key: value for key, value in found.items() if key.startswith("gen_ai.")} == {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "anthropic", "gen_ai.request.model": "claude-9",
        "gen_ai.request.max_tokens": 64, "gen_ai.response.id": "msg_1", "gen_ai.response.model": "claude-9-001",
        "gen_ai.response.finish_reasons": ("tool_use",), "gen_ai.usage.input_tokens": 123,
        "gen_ai.usage.output_tokens": 7, "gen_ai.usage.cache_read.input_tokens": 100,
        "gen_ai.usage.cache_write.input_tokens": 20,
    }  # fmt: skip


def test_counting_tokens_is_an_http_call(recorded: Run, frozen: Run, llm_server: Any, client: Any, read: Run) -> None:
    def program() -> int:
        counted = client().messages.count_tokens(model="claude-9", messages=ASK["messages"])
        return int(counted.input_tokens)

    llm_server.replies.append(server.whole({"input_tokens": 11}))
    assert recorded(program) == 11
    assert [row["kind"] for row in read().calls] == ["http"]
    llm_server.stop()
    assert frozen(program) == 11


# --- errors -----------------------------------------------------------------------------------------------------------


def test_retries_are_attempts_of_one_call(recorded: Run, frozen: Run, llm_server: Any, client: Any, read: Run) -> None:
    llm_server.replies.extend(
        [
            server.whole(OVERLOADED, status=529, retry_after_ms="1"),
            server.whole(OVERLOADED, status=429, retry_after_ms="1"),
            server.whole(MESSAGE),
        ]
    )
    want = recorded(lambda: plain(client(max_retries=2)))
    assert [(row["attempt"], row["status"]) for row in read().wire()] == [(0, 529), (1, 429), (2, 200)]
    assert [row["kind"] for row in read().calls] == ["llm"]
    llm_server.stop()
    assert frozen(lambda: plain(client(max_retries=2))) == want


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "BadRequestError"), (401, "AuthenticationError"), (429, "RateLimitError"), (529, "OverloadedError")],
)
def test_an_error_comes_back_as_the_sdks_own(
    status: int, kind: str, recorded: Run, frozen: Run, llm_server: Any, client: Any, read: Run
) -> None:
    def program() -> Any:
        try:
            client().messages.create(**ASK)
        except anthropic.APIStatusError as error:
            return [type(error).__name__, error.status_code, str(error), error.body, error.request_id]
        raise AssertionError("no error")

    llm_server.replies.append(server.whole(OVERLOADED, status=status, request_id="req_1"))
    want = recorded(program)
    assert want[0] == kind
    assert want[4] == "req_1"
    assert kinds(read()) == ["run_start", "llm_request", "error", "run_end"]
    llm_server.stop()
    assert frozen(program) == want


def broken(client: Anthropic) -> Any:
    seen = []
    try:
        with client.messages.stream(**ASK) as stream:
            seen.extend(stream.text_stream)
    except anthropic.APIStatusError as error:
        return [seen, type(error).__name__, str(error)]
    raise AssertionError("no error")


async def abroken(client: AsyncAnthropic) -> Any:
    seen = []
    try:
        async with client, client.messages.stream(**ASK) as stream:
            async for part in stream.text_stream:
                seen.append(part)
    except anthropic.APIStatusError as error:
        return [seen, type(error).__name__, str(error)]
    raise AssertionError("no error")


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_overloaded_in_the_middle_of_a_stream(
    asynchronous: bool, recorded: Run, frozen: Run, llm_server: Any, client: Any, aclient: Any, read: Run,
    spans: InMemorySpanExporter,
) -> None:  # fmt: skip
    def program() -> Any:
        return asyncio.run(abroken(aclient())) if asynchronous else broken(client())

    llm_server.replies.append(server.named_events(*EVENTS[:9], OVERLOADED))
    want = recorded(program)
    assert want[0] == ["Hel"]
    events = {event.type: event for event in read().events}
    assert (events["error"].error_type, events["error"].message) == ("overloaded_error", "Overloaded")
    assert events["llm_response"].output["content"][1]["text"] == "Hel"
    assert events["llm_response"].output["error"] == OVERLOADED["error"]
    [span] = ours(spans)
    assert span.attributes["error.type"] == "overloaded_error"
    llm_server.stop()
    assert frozen(program) == want


# --- odd ends ---------------------------------------------------------------------------------------------------------


def left_by_break(client: Anthropic) -> Any:
    stream = client.messages.create(**ASK, stream=True)
    for event in stream:
        stream.close()
        return event.to_dict()
    raise AssertionError("nothing came")


def left_by_the_block(client: Anthropic) -> Any:
    with client.messages.stream(**ASK) as stream:
        for event in stream:
            return event.to_dict()
    raise AssertionError("nothing came")


@pytest.mark.parametrize("left", [left_by_break, left_by_the_block], ids=lambda left: left.__name__)
def test_a_stream_that_is_left_ends_there_again(
    left: Run, recorded: Run, frozen: Run, llm_server: Any, client: Any, read: Run, spans: InMemorySpanExporter
) -> None:
    llm_server.replies.append(held(server.named_events(*EVENTS), 1))
    want = recorded(lambda: left(client()))
    [row] = read().calls
    assert (row["kind"], row["end"]) == ("llm", "closed")
    assert len(ours(spans)) == 1
    llm_server.stop()
    assert frozen(lambda: left(client())) == want


def test_tool_arguments_of_a_stream_that_was_cut_stay_as_they_came(
    recorded: Run, llm_server: Any, client: Any, read: Run
) -> None:
    llm_server.replies.append(held(server.named_events(*EVENTS), 13))

    def program() -> int:
        stream = client().messages.create(**ASK, stream=True)
        for count, event in enumerate(stream):
            if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                stream.close()
                return count
        raise AssertionError("no tool")

    recorded(program)
    response = next(event for event in read().events if event.type == "llm_response")
    assert response.output["content"][2]["input"] == '{"a"'


def test_a_stream_that_is_cancelled_is_cancelled_again(
    recorded: Run, frozen: Run, llm_server: Any, aclient: Any, read: Run
) -> None:
    async def reader(client: AsyncAnthropic, seen: list[str], first: asyncio.Event) -> None:
        async for event in await client.messages.create(**ASK, stream=True):
            seen.append(event.type)
            first.set()

    async def run() -> list[str]:
        seen: list[str] = []
        first = asyncio.Event()
        async with aclient() as client:
            task = asyncio.create_task(reader(client, seen, first))
            await first.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return seen

    llm_server.replies.append(held(server.named_events(*EVENTS), 1))
    want = recorded(lambda: asyncio.run(run()))
    assert want == ["message_start"]
    [row] = read().calls
    assert row["kind"] == "llm"
    assert row["end"] in ("cancelled", "closed")
    llm_server.stop()
    assert frozen(lambda: asyncio.run(run())) == want


def test_a_changed_prompt_stops_the_replay(recorded: Run, frozen: Run, llm_server: Any, client: Any) -> None:
    llm_server.replies.append(server.whole(MESSAGE))
    recorded(lambda: plain(client()))
    with pytest.raises(ReplayMismatchError, match="/request/messages/0/content"):
        frozen(lambda: client().messages.create(**{**ASK, "messages": [{"role": "user", "content": "other"}]}))


@pytest.mark.parametrize("shape", [plain, helper], ids=lambda shape: shape.__name__)
def test_an_overridden_message_is_served(
    shape: Run, recorded: Run, llm_server: Any, client: Any, read: Run, bundle_path: Path, tmp_path: Path
) -> None:
    llm_server.replies.append(reply_to(shape))
    recorded(lambda: shape(client()))
    response = next(event for event in read().events if event.type == "llm_response")
    other = {**MESSAGE, "content": [{"type": "text", "text": "Bye", "citations": None}, MESSAGE["content"][2]]}
    override = OverrideSpec(event_id=response.id, output=other)
    target = tmp_path / "fork.sftrace"
    fork_trace(bundle_path, ForkPoint(step=response.step), output_path=target, overrides=[override])
    llm_server.stop()
    with ReplaySession.from_trace(target), record("agent"):
        answer = shape(client())
    message = answer if shape is plain else answer[1]
    assert {key: message[key] for key in other} == other
    assert shape is plain or answer[0] == "Bye"


# --- clients ----------------------------------------------------------------------------------------------------------


def test_the_same_call_with_and_without_the_sdk_replays_either_way(
    recorded: Run, frozen: Run, llm_server: Any, client: Any, read: Run
) -> None:
    llm_server.replies.append(server.whole(MESSAGE))
    want = recorded(lambda: plain(client()))
    llm_server.stop()
    headers = {"anthropic-version": "2023-06-01"}
    for module in (httpx, httpx2):
        url = llm_server.url + "/v1/messages"
        assert frozen(lambda: module.post(url, json=ASK, headers=headers).json()) == want  # noqa: B023


def test_a_client_for_vertex(recorded: Run, frozen: Run, llm_server: Any, read: Run) -> None:
    def program() -> Any:
        with anthropic.AnthropicVertex(
            base_url=llm_server.url, region="here", project_id="p", access_token="t", max_retries=0
        ) as vertex:
            return [
                vertex.beta.messages.create(**ASK).to_dict(),
                vertex.messages.create(**ASK).to_dict(),
                [event.type for event in vertex.messages.create(**ASK, stream=True)],
            ]

    llm_server.replies.extend([server.whole(MESSAGE), server.whole(MESSAGE), server.named_events(*EVENTS)])
    want = recorded(program)
    requests = [event for event in read().events if event.type == "llm_request"]
    assert [(event.provider, event.model) for event in requests] == [("gcp.vertex_ai", "claude-9")] * 3
    assert {event.input["method"] for event in requests} == {"messages.create"}
    assert [event.type for event in read().events].count("llm_response") == 3
    llm_server.stop()
    assert frozen(program) == want


def test_a_client_for_bedrock_makes_http_calls(recorded: Run, frozen: Run, llm_server: Any, read: Run) -> None:
    def program() -> Any:
        with anthropic.AnthropicBedrock(
            base_url=llm_server.url, api_key="k", aws_region="here", max_retries=0
        ) as bedrock:
            return bedrock.messages.create(**ASK).to_dict()

    llm_server.replies.append(server.whole(MESSAGE))
    want = recorded(program)
    assert [row["kind"] for row in read().calls] == ["http"]
    llm_server.stop()
    assert frozen(program) == want
