# SPDX-License-Identifier: Apache-2.0
"""Recordings without wire data (other tools', or with an overridden answer): the SDK rebuilds what they hold."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest

from sftrace_otel.formats.sidecars import WIRE_FILE

Run = Callable[..., Any]

pytestmark = [  # agents leave clients open
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def without_wire(bundle_path: Path) -> Callable[[], None]:
    """Takes the exchanges out of the bundle, as if somebody else had written it."""

    def strip() -> None:
        (bundle_path / WIRE_FILE).unlink()
        shutil.rmtree(bundle_path / "blobs", ignore_errors=True)
        integrity = bundle_path / "integrity.json"
        listed = orjson.loads(integrity.read_bytes())
        files = listed["files"]
        for name in [name for name in files if name == WIRE_FILE or name.startswith("blobs")]:
            del files[name]
        integrity.write_bytes(orjson.dumps(listed))

    return strip


@pytest.mark.skipif(not hasattr(openai.OpenAI, "responses"), reason="this openai has no Responses API")
@pytest.mark.parametrize(
    "members",
    [
        {},
        {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
    ],
    ids=["completed", "incomplete"],
)
def test_a_streamed_response_is_rebuilt_from_its_event(
    recorded: Run, frozen: Run, openai_server: Any, server_module: Any, without_wire: Run, members: Any
) -> None:
    refusal = {"id": "msg_2", "type": "message", "role": "assistant", "status": "completed",
               "content": [{"type": "refusal", "refusal": "No."}]}  # fmt: skip
    call = {"id": "fc_1", "type": "function_call", "status": "completed", "call_id": "c1", "name": "f",
            "arguments": '{"a":1.0}'}  # fmt: skip
    whole = server_module.response({"model": "m"}, call, server_module.output_message("Fjords."), refusal, **members)
    events = list(server_module.response_events(whole))
    openai_server.replies["POST /v1/responses"] = server_module.sse_reply(events, named=True)

    def program() -> Any:
        client = openai.OpenAI(base_url=openai_server.base_url, api_key="k", max_retries=0)
        with client.responses.stream(model="m", input="?") as stream:
            kinds = {event.type for event in stream}
        raw = client.responses.create(model="m", input="?", stream=True)
        return [{"response.refusal.delta", "response.function_call_arguments.done"} <= kinds,
                list(raw)[-1].to_dict()["response"]]  # fmt: skip

    want = recorded(program)
    openai_server.stop()
    without_wire()
    assert frozen(program) == want
    assert want == [True, whole]


def test_a_streamed_completion_is_rebuilt_from_its_event(
    recorded: Run, frozen: Run, openai_server: Any, server_module: Any, without_wire: Run
) -> None:
    openai_server.answer = lambda body: {**server_module.tool_calls(("c1", "f", {"a": 1})), "content": "one two"}

    def program() -> Any:
        client = openai.OpenAI(base_url=openai_server.base_url, api_key="k", max_retries=0)
        chat = client.chat if hasattr(client.chat.completions, "stream") else client.beta.chat
        with chat.completions.stream(model="m", messages=[{"role": "user", "content": "hi"}]) as stream:
            return stream.get_final_completion().to_dict()

    want = recorded(program)
    openai_server.stop()
    without_wire()
    assert frozen(program) == want
