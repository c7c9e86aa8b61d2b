# SPDX-License-Identifier: Apache-2.0
"""Headers of an answer that come twice, empty, folded over two lines or oddly spelled: served as each client had them.

Names of headers are compared in lower case: that is how they are stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import httpx2
import pytest
import requests
import urllib3

from sftrace_otel.bundle.read import validate_bundle

HEADERS = (
    "X-Dup: one", "x-dup: two", "X-Other: between", "X-Dup: one", "X-Empty:", "X-Fold: start\r\n  continued",
    "Via: 1.1 a, 1.1 b", "Link: </a>; rel=next", "Link: </b>; rel=last", "Content-Type: application/json",
    "X-Text: caf\xe9",
)  # fmt: skip
BODY = b'{"z": 1,  "a": [1, 2.0]}'


def lower(pairs: Any) -> list[list[str]]:
    return [[name.lower(), value] for name, value in pairs]


def by_httpx(url: str) -> Any:
    answer = httpx.get(url)
    return [lower(answer.headers.multi_items()), answer.headers["x-dup"], answer.reason_phrase, answer.content]


def by_httpx2(url: str) -> Any:
    answer = httpx2.get(url)
    return [lower(answer.headers.multi_items()), answer.headers.get_list("link"), answer.reason_phrase, answer.content]


def by_httpx_async(url: str) -> Any:
    async def get() -> Any:
        async with httpx.AsyncClient() as client:
            answer = await client.get(url)
            return [lower(answer.headers.multi_items()), answer.reason_phrase, answer.content]

    return asyncio.run(get())


def by_requests(url: str) -> Any:
    answer = requests.get(url, timeout=30)
    raw = answer.raw.headers
    return [lower(answer.headers.items()), lower(raw.items()), raw.getlist("link"), answer.reason, answer.links]


def by_urllib3(url: str) -> Any:
    answer = urllib3.PoolManager().request("GET", url)
    return [lower(answer.headers.items()), answer.headers.getlist("x-dup"), answer.reason, answer.data]


def by_aiohttp(url: str) -> Any:
    async def get() -> Any:
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            pairs = [pair for pair in lower(answer.headers.items()) if pair[0] != "x-text"]  # it takes text for UTF-8
            return [pairs, answer.headers.getall("x-dup"), answer.reason, await answer.read()]

    return asyncio.run(get())


@pytest.mark.parametrize("ask", [by_httpx, by_httpx2, by_httpx_async, by_requests, by_urllib3, by_aiohttp])
def test_headers_of_an_answer_come_back_as_they_were(
    ask: Callable[[str], Any],
    raw: Any,
    recorded: Callable[..., Any],
    frozen: Callable[..., Any],
    bundle_path: Path,
) -> None:
    seen: list[Any] = []

    def program(url: str) -> None:
        seen.append(ask(url))

    with raw.RawServer({"/x": raw.whole(BODY, *HEADERS, status="203 Fine By Me")}) as server:
        recorded(program, f"{server.url}/x")
    assert validate_bundle(bundle_path, verify_integrity=True).exit_code == 0
    frozen(program, f"{server.url}/x")
    assert seen[1] == seen[0]
    assert str(seen[0]).count("two") and "continued" in str(seen[0])
