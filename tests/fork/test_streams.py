# SPDX-License-Identifier: Apache-2.0
"""An overridden answer is what real clients get under replay: whole or in chunks, as they ask."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from sftrace_otel import ReplaySession, record
from sftrace_otel.bundle.read import open_bundle, validate_bundle
from sftrace_otel.cli.app import main

ASKED: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def whole(url: str) -> str:
    with openai.OpenAI(api_key="none", base_url=url, max_retries=0) as client:
        return client.chat.completions.create(**ASKED).choices[0].message.content or ""


def streamed(url: str) -> str:
    with openai.OpenAI(api_key="none", base_url=url, max_retries=0) as client:
        chunks = client.chat.completions.create(**ASKED, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def whole_async(url: str) -> str:
    async def ask() -> str:
        async with openai.AsyncOpenAI(api_key="none", base_url=url, max_retries=0) as client:
            return (await client.chat.completions.create(**ASKED)).choices[0].message.content or ""

    return asyncio.run(ask())


def streamed_async(url: str) -> str:
    async def ask() -> str:
        async with openai.AsyncOpenAI(api_key="none", base_url=url, max_retries=0) as client:
            chunks = await client.chat.completions.create(**ASKED, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])

    return asyncio.run(ask())


@pytest.mark.parametrize("ask", [whole, streamed, whole_async, streamed_async])
def test_a_changed_answer_is_what_the_client_gets(
    ask: Callable[[str], str], openai_server: Any, tmp_path: Path
) -> None:
    path, fork = tmp_path / "a.sftrace", tmp_path / "b.sftrace"
    with record("agent", output=path):
        first = ask(openai_server.base_url)
    step = next(event.step for event in open_bundle(path).events if event.type == "llm_response")
    asked = len(openai_server.requests)
    option = f'{step}:/choices/0/message/content="another answer"'
    assert main(["fork", str(path), "--at-step", str(step), "-o", str(fork), "--set", option]) == 0
    assert validate_bundle(fork, verify_integrity=True).exit_code == 0
    with ReplaySession.from_trace(fork) as replay:
        assert ask(openai_server.base_url) == "another answer" != first
        replay.verify_complete()
    assert len(openai_server.requests) == asked
