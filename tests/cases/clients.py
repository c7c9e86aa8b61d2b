# SPDX-License-Identifier: Apache-2.0
"""HTTP clients under one small face, so that a case about recording HTTP is asked of each of them.

Decision: a call is what a program writes (one request in a client that is opened and closed around it), sync and async
clients apart.
"""

from __future__ import annotations

import asyncio
import json as jsonlib
import ssl
import sys
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

TLS = ssl.create_default_context()
"""One for all clients: to load the system's certificates anew is most of what a short-lived client costs."""

CLIENTS = ["httpx", "httpx-async", "httpx2", "httpx2-async", "requests", "urllib3", "aiohttp"]


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An answer: status, headers as (lower-case name, value) in order, and the decoded body."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return jsonlib.loads(self.body)

    def all(self, name: str) -> list[str]:
        """All values of a header."""
        return [value for key, value in self.headers if key == name.lower()]


class Client:
    """`send` makes a whole call; `read` streams a GET and gives the chunks, leaving it after `take` of them."""

    def __init__(self, name: str) -> None:
        self.name = name

    def send(self, method: str, url: str, **options: Any) -> Reply:
        """Options as httpx names them: headers, params, content, json, files."""
        raise NotImplementedError

    def read(self, url: str, take: int | None = None) -> list[bytes]:
        raise NotImplementedError

    def get(self, url: str, **options: Any) -> Reply:
        return self.send("GET", url, **options)

    def post(self, url: str, **options: Any) -> Reply:
        return self.send("POST", url, **options)


def client(name: str) -> Client:
    """A client by its name in `CLIENTS`."""
    base, _, kind = name.partition("-")
    if base in ("httpx", "httpx2"):
        __import__(base)
        return (_AsyncHttpx if kind else _Httpx)(name, sys.modules[base])
    return {"requests": _Requests, "urllib3": _Urllib3, "aiohttp": _Aiohttp}[base](name)


def _pairs(items: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple((key.lower(), value) for key, value in items)


class _Httpx(Client):
    def __init__(self, name: str, module: Any) -> None:
        super().__init__(name)
        self.module = module

    def send(self, method: str, url: str, **options: Any) -> Reply:
        with self.module.Client(verify=TLS) as http:
            answer = http.request(method, url, **options)
        return Reply(status=answer.status_code, headers=_pairs(answer.headers.multi_items()), body=answer.content)

    def read(self, url: str, take: int | None = None) -> list[bytes]:
        chunks: list[bytes] = []
        with self.module.Client(verify=TLS) as http, http.stream("GET", url) as answer:
            for part in answer.iter_bytes():
                chunks.append(part)
                if len(chunks) == take:
                    break
        return chunks


class _AsyncHttpx(_Httpx):
    def send(self, method: str, url: str, **options: Any) -> Reply:
        async def run() -> Reply:
            async with self.module.AsyncClient(verify=TLS) as http:
                answer = await http.request(method, url, **options)
            return Reply(status=answer.status_code, headers=_pairs(answer.headers.multi_items()), body=answer.content)

        return asyncio.run(run())

    def read(self, url: str, take: int | None = None) -> list[bytes]:
        async def run() -> list[bytes]:
            chunks: list[bytes] = []
            async with self.module.AsyncClient(verify=TLS) as http, http.stream("GET", url) as answer:
                parts: AsyncIterator[bytes] = answer.aiter_bytes()
                async for part in parts:
                    chunks.append(part)
                    if len(chunks) == take:
                        break
            return chunks

        return asyncio.run(run())


class _Requests(Client):
    def send(self, method: str, url: str, **options: Any) -> Reply:
        import requests

        if "content" in options:
            options["data"] = options.pop("content")
        with requests.Session() as session:
            answer = session.request(method, url, allow_redirects=False, **options)
            headers = _pairs(answer.raw.headers.items())
        return Reply(status=answer.status_code, headers=headers, body=answer.content)

    def read(self, url: str, take: int | None = None) -> list[bytes]:
        import requests

        chunks: list[bytes] = []
        with requests.Session() as session, session.get(url, stream=True) as answer:
            for part in answer.iter_content(None):
                chunks.append(part)
                if len(chunks) == take:
                    break
        return chunks


class _Urllib3(Client):
    def send(self, method: str, url: str, **options: Any) -> Reply:
        import urllib3

        fields = None
        body = options.get("content")
        headers = dict(options.get("headers") or {})
        if "params" in options:
            url = f"{url}?{urlencode(options['params'])}"
        if "json" in options:
            body = jsonlib.dumps(options["json"]).encode()
            headers.setdefault("content-type", "application/json")
        if "files" in options:
            fields = dict(options["files"])
        more = {"fields": fields} if fields is not None else {"body": body}
        with urllib3.PoolManager() as pool:
            answer = pool.request(method, url, headers=headers, retries=False, redirect=False, **more)
        return Reply(status=answer.status, headers=_pairs(answer.headers.items()), body=answer.data)

    def read(self, url: str, take: int | None = None) -> list[bytes]:
        import urllib3

        chunks: list[bytes] = []
        with urllib3.PoolManager() as pool:
            answer = pool.request("GET", url, preload_content=False, retries=False)
            for part in answer.stream(None, decode_content=True):
                chunks.append(part)
                if len(chunks) == take:
                    break
            answer.close()
        return chunks


class _Aiohttp(Client):
    def send(self, method: str, url: str, **options: Any) -> Reply:
        import aiohttp

        async def run() -> Reply:
            if "content" in options:
                options["data"] = options.pop("content")
            if "files" in options:
                form = aiohttp.FormData()
                for name, (filename, content, *media) in options.pop("files").items():
                    form.add_field(name, content, filename=filename, content_type=media[0] if media else None)
                options["data"] = form
            async with (
                aiohttp.ClientSession() as session,
                session.request(method, url, allow_redirects=False, **options) as answer,
            ):
                body = await answer.read()
                return Reply(status=answer.status, headers=_pairs(answer.headers.items()), body=body)

        return asyncio.run(run())

    def read(self, url: str, take: int | None = None) -> list[bytes]:
        import aiohttp

        async def run() -> list[bytes]:
            chunks: list[bytes] = []
            async with aiohttp.ClientSession() as session, session.get(url) as answer:
                async for part, _ in answer.content.iter_chunks():  # `iter_any` joins what has arrived
                    if part:
                        chunks.append(part)
                    if len(chunks) == take:
                        break
            return chunks

        return asyncio.run(run())
