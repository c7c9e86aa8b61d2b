# SPDX-License-Identifier: Apache-2.0
"""Endpoints of the openai SDK that are no inference: exact bodies and headers, replayed as the SDK's own types."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from sftrace_otel import ReplayMismatchError

Run = Callable[..., Any]

pytestmark = [  # agents leave clients open
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

FILE = {"id": "file-a", "object": "file", "bytes": 3, "created_at": 1, "filename": "a.jsonl", "purpose": "batch",
        "status": "processed"}  # fmt: skip
BINARY = bytes(range(256)) * 40


def sync_client(server: Any) -> OpenAI:
    return OpenAI(base_url=server.base_url, api_key="k", max_retries=0)


def async_client(server: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=server.base_url, api_key="k", max_retries=0)


def scripted(server: Any, module: Any, values: dict[str, Any]) -> None:
    """Answer each `METHOD /path` with its JSON value."""
    for route, value in values.items():
        method, _, path = route.partition(" ")
        server.replies[f"{method} /v1{path}"] = module.json_reply(value, headers={"x-request-id": "req_7"})


def test_a_file_upload_is_matched_by_its_parts(
    exact: Run, frozen: Run, openai_server: Any, server_module: Any, read: Run
) -> None:
    scripted(openai_server, server_module, {"POST /files": FILE})

    def program(content: bytes = b'{"a": 1}\n') -> Any:
        done = sync_client(openai_server).files.create(file=("a.jsonl", content), purpose="batch")
        return [done, done._request_id]

    done, request_id = exact(program)
    assert (done.to_dict(), request_id) == (FILE, "req_7")
    [call] = [event for event in read().events if event.type == "tool_call"]
    assert call.name.startswith("http POST http://127.0.0.1:")
    assert '{"a": 1}' in json.dumps(call.input["body"]).replace("\\\\", "").replace('\\"', '"')
    with pytest.raises(ReplayMismatchError):
        frozen(program, b'{"a": 2}\n')


@pytest.mark.parametrize("form", ["bytes", "file", "path", "binary"])
def test_async_uploads_of_every_form(
    exact: Run, openai_server: Any, server_module: Any, tmp_path: Path, form: str
) -> None:
    scripted(openai_server, server_module, {"POST /files": FILE})
    place = tmp_path / "a.jsonl"
    place.write_bytes(BINARY if form == "binary" else b"abc")

    async def program() -> Any:
        given: Any = {"bytes": b"abc", "file": io.BytesIO(b"abc"), "path": place, "binary": place}[form]
        async with async_client(openai_server) as client:
            return await client.files.create(file=given, purpose="batch")

    assert exact(lambda: asyncio.run(program())).to_dict() == FILE


def test_downloaded_content_comes_back_byte_by_byte(
    exact: Run, openai_server: Any, server_module: Any, tmp_path: Path
) -> None:
    reply = server_module.Reply(body=BINARY, media="application/octet-stream")
    openai_server.replies["GET /v1/files/file-a/content"] = reply

    def program() -> Any:
        content = sync_client(openai_server).files.content("file-a")
        content.write_to_file(tmp_path / "out")
        return [content.read(), type(content).__name__, (tmp_path / "out").read_bytes()]

    assert exact(program) == [BINARY, "HttpxBinaryResponseContent", BINARY]


@pytest.mark.parametrize("streamed", [False, True])
def test_speech_comes_back_byte_by_byte(exact: Run, openai_server: Any, server_module: Any, streamed: bool) -> None:
    parts = [BINARY[at : at + 1000] for at in range(0, len(BINARY), 1000)]
    openai_server.replies["POST /v1/audio/speech"] = server_module.Reply(events=parts, media="audio/mpeg")
    ask: Any = {"model": "tts-1", "voice": "alloy", "input": "Hello"}

    def program() -> Any:
        speech = sync_client(openai_server).audio.speech
        if not streamed:
            return speech.create(**ask).content
        with speech.with_streaming_response.create(**ask) as response:
            return [response.headers["content-type"], *response.iter_bytes(333)]

    got = exact(program)
    assert (b"".join(got[1:]) if streamed else got) == BINARY


def test_async_speech_comes_back_byte_by_byte(exact: Run, openai_server: Any, server_module: Any) -> None:
    openai_server.replies["POST /v1/audio/speech"] = server_module.Reply(body=BINARY, media="audio/mpeg")

    async def program() -> Any:
        async with async_client(openai_server) as client:
            return (await client.audio.speech.create(model="tts-1", voice="alloy", input="Hello")).content

    assert exact(lambda: asyncio.run(program())) == BINARY


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_transcription(exact: Run, openai_server: Any, server_module: Any, form: str) -> None:
    text = server_module.Reply(body="Hallo æøå\n".encode(), media="text/plain; charset=utf-8")
    reply = server_module.json_reply({"text": "Hallo"}) if form == "json" else text
    openai_server.replies["POST /v1/audio/transcriptions"] = reply

    def program() -> Any:
        given: Any = {"file": ("a.wav", BINARY, "audio/wav"), "model": "whisper-1", "response_format": form}
        return sync_client(openai_server).audio.transcriptions.create(**given)

    got = exact(program)
    assert (got.text if form == "json" else got) == ("Hallo" if form == "json" else "Hallo æøå\n")


def test_images_plain_and_edited(exact: Run, openai_server: Any, server_module: Any) -> None:
    image = {"created": 1, "data": [{"b64_json": "iVBORw0KGgo" + "A" * 4000, "revised_prompt": "a fjord"}]}
    scripted(openai_server, server_module, {"POST /images/generations": image, "POST /images/edits": image})

    def program() -> Any:
        images = sync_client(openai_server).images
        made = images.generate(model="gpt-image-1", prompt="a fjord")
        edited = images.edit(image=("a.png", BINARY, "image/png"), prompt="bluer")
        return [made, edited.data[0].b64_json]

    made, edited = exact(program)
    assert made.data[0].b64_json == edited == image["data"][0]["b64_json"]  # type: ignore[index]


def file_page(received: Any, module: Any) -> Any:
    """One file a page, two pages; older SDKs go on until a page is empty."""
    at = 0 if "after=" not in received.path else 1 if "after=file-a" in received.path else 2
    data = [{**FILE, "id": f"file-{name}"} for name in "ab"[at : at + 1]]
    return module.json_reply({"object": "list", "data": data, "has_more": at == 0})


def test_pages_are_fetched_one_by_one(exact: Run, openai_server: Any, server_module: Any, read: Run) -> None:
    openai_server.replies["GET /v1/files"] = lambda received: file_page(received, server_module)
    models = {"object": "list", "data": [{"id": "gpt-5", "object": "model", "created": 1, "owned_by": "openai"}]}
    scripted(openai_server, server_module, {"GET /models": models, "GET /models/gpt-5": models["data"][0]})  # type: ignore[index]

    def program() -> Any:
        client = sync_client(openai_server)
        return [
            [file.id for file in client.files.list(limit=1)],
            [model.id for model in client.models.list()],
            client.models.retrieve("gpt-5"),
            type(client.models.list()).__name__,
        ]

    assert exact(program)[:2] == [["file-a", "file-b"], ["gpt-5"]]
    assert {row["kind"] for row in read().calls} == {"http"}


def test_async_pages_are_fetched_one_by_one(exact: Run, openai_server: Any, server_module: Any) -> None:
    openai_server.replies["GET /v1/files"] = lambda received: file_page(received, server_module)

    async def program() -> Any:
        async with async_client(openai_server) as client:
            return [file.id async for file in client.files.list(limit=1)]

    assert exact(lambda: asyncio.run(program())) == ["file-a", "file-b"]


BATCH = {"id": "batch_1", "object": "batch", "endpoint": "/v1/chat/completions", "input_file_id": "file-a",
         "completion_window": "24h", "status": "validating", "created_at": 1}  # fmt: skip
UPLOAD = {"id": "upload_1", "object": "upload", "bytes": 3, "created_at": 1, "expires_at": 2, "filename": "a",
          "purpose": "batch", "status": "pending"}  # fmt: skip
STORE = {"id": "vs_1", "object": "vector_store", "created_at": 1, "name": "s", "usage_bytes": 0, "status": "completed",
         "file_counts": {"in_progress": 0, "completed": 0, "failed": 0, "cancelled": 0, "total": 0},
         "last_active_at": None, "metadata": {}}  # fmt: skip
MODERATION = {"id": "modr-1", "model": "omni-moderation-latest", "results": [{"flagged": False, "categories": {},
              "category_scores": {}, "category_applied_input_types": {}}]}  # fmt: skip
PART = {"id": "part_1", "object": "upload.part", "created_at": 1, "upload_id": "upload_1"}


def test_moderations_batches_uploads_and_vector_stores(exact: Run, openai_server: Any, server_module: Any) -> None:
    values = {
        "POST /moderations": MODERATION,
        "POST /batches": BATCH,
        "GET /batches/batch_1": {**BATCH, "status": "completed"},
        "POST /uploads": UPLOAD,
        "POST /uploads/upload_1/parts": PART,
        "POST /uploads/upload_1/complete": {**UPLOAD, "status": "completed", "file": FILE},
        "POST /vector_stores": STORE,
        "DELETE /vector_stores/vs_1": {"id": "vs_1", "object": "vector_store.deleted", "deleted": True},
    }
    scripted(openai_server, server_module, values)
    batch: Any = {name: BATCH[name] for name in ("input_file_id", "endpoint", "completion_window")}

    def program() -> list[Any]:
        client = sync_client(openai_server)
        stores = getattr(client, "vector_stores", None) or client.beta.vector_stores
        return [
            client.moderations.create(input="hi").to_dict(),
            client.batches.create(**batch).to_dict(),
            client.batches.retrieve("batch_1").to_dict(),
            client.uploads.create(bytes=3, filename="a", mime_type="text/plain", purpose="batch").to_dict(),
            client.uploads.parts.create("upload_1", data=b"\x00\xff\x80").to_dict(),
            client.uploads.complete("upload_1", part_ids=["part_1"]).to_dict(),
            stores.create(name="s").to_dict(),
            stores.delete("vs_1").to_dict(),
        ]  # fmt: skip

    assert exact(program) == list(values.values())


def test_a_stream_of_the_assistants(exact: Run, openai_server: Any, server_module: Any, read: Run) -> None:
    if not hasattr(OpenAI(api_key="k").beta, "threads"):
        pytest.skip("this openai has no assistants")
    run = {"id": "run_1", "object": "thread.run", "status": "queued", "thread_id": "thread_1", "assistant_id": "asst_1",
           "created_at": 1, "model": "gpt-5", "instructions": "", "tools": [], "metadata": {},
           "parallel_tool_calls": True}  # fmt: skip
    delta = {"id": "msg_1", "object": "thread.message.delta",
             "delta": {"content": [{"index": 0, "type": "text", "text": {"value": "Fjords"}}]}}  # fmt: skip
    events = [("thread.run.created", run), ("thread.message.delta", delta),
              ("thread.run.completed", {**run, "status": "completed"})]  # fmt: skip
    parts = [f"event: {name}\ndata: {json.dumps(data)}\n\n".encode() for name, data in events]
    openai_server.replies["POST /v1/threads/thread_1/runs"] = server_module.Reply(
        events=[*parts, b"event: done\ndata: [DONE]\n\n"], media="text/event-stream"
    )

    def program() -> Any:
        runs = sync_client(openai_server).beta.threads.runs
        stream = runs.create("thread_1", assistant_id="asst_1", stream=True)
        return [(event.event, type(event).__name__) for event in stream]

    assert [name for name, _ in exact(program)] == [name for name, _ in events]
    assert {row["kind"] for row in read().calls} == {"http"}


def test_an_error_of_a_plain_endpoint_comes_back_as_itself(exact: Run, openai_server: Any, server_module: Any) -> None:
    body = {"error": {"message": "no such file", "type": "invalid_request_error", "param": None, "code": None}}
    openai_server.replies["GET /v1/files/file-x"] = server_module.json_reply(body, status=404)

    def program() -> Any:
        try:
            sync_client(openai_server).files.retrieve("file-x")
        except openai.NotFoundError as error:
            return [str(error), error.body]

    assert exact(program)[1] == body["error"]


def test_retries_of_a_plain_endpoint_are_served_in_order(
    exact: Run, openai_server: Any, server_module: Any, read: Run
) -> None:
    scripted(openai_server, server_module, {"GET /files/file-a": FILE})
    openai_server.faults += [
        server_module.Fault(status=500, headers={"retry-after-ms": "1"}),
        server_module.Fault(drop=True),
    ]

    def program() -> Any:
        return OpenAI(base_url=openai_server.base_url, api_key="k", max_retries=2).files.retrieve("file-a")

    assert exact(program).to_dict() == FILE
    assert len(read().calls) == 3
