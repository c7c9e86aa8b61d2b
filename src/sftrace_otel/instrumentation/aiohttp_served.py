# SPDX-License-Identifier: Apache-2.0
"""Answers of a recording given through aiohttp's own parser, stream and response.

Decision: a served attempt gets a connection that leads nowhere, over aiohttp's own protocol. The recorded head is
parsed, and the recorded chunks are decoded, streamed and raised, by aiohttp itself; each is fed when the program asks
for it, so that it gets the pieces that it got. Errors come back as aiohttp's own classes with their members.
Rejected: making a response by hand (its class may be the program's, and what it looks at differs by version), and
feeding all at once (`iter_any` would give one piece).
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from types import ModuleType
from typing import Any

from sftrace_otel.errors import ReplayError
from sftrace_otel.instrumentation import replaying
from sftrace_otel.instrumentation.exchange import Head, call_name, header
from sftrace_otel.instrumentation.outcomes import Answer, GoesOut
from sftrace_otel.instrumentation.serving import Body, recorded_error, served_answer

__all__ = ["Asked", "connected", "started", "with_methods"]


class Asked:
    """An attempt that is answered from the recording. `known`: its body, if that is in memory; else what is written."""

    __slots__ = ("answer", "connection", "head", "known", "parts", "replay", "streams")

    def __init__(self, replay: replaying.Active, head: Head, known: bytes | None) -> None:
        self.replay = replay
        self.head = head
        self.known = known
        self.streams = known is None
        self.parts: list[bytes] = []
        self.answer: Answer | None = None
        self.connection: Any = None

    def sending(self, chunk: bytes) -> None:
        self.parts.append(chunk)

    def goes_out(self) -> GoesOut | None:
        """Whether the replay lets it out; its body has to be known. Raises a ReplayError as `serve`."""
        found = served_answer(self.replay, self.head, Body(self.known or b""))
        if isinstance(found, GoesOut):
            return found
        self.answer = found
        return None

    def serve(self, error: BaseException | None = None) -> Answer:
        """The recorded answer, looked up once. Raises a ReplayError, or `error` of the program's own body."""
        if self.answer is None:
            body = b"".join(self.parts) if self.known is None else self.known
            found = served_answer(self.replay, self.head, Body(body, error))
            if isinstance(found, GoesOut):  # the boundary asks before, but where the replay ended meanwhile
                raise ReplayError(f"the replay ended while {self.head.method} {self.head.url} was under way")
            self.answer = found
        return self.answer


def with_methods(mixin: type, base: Any) -> Any:
    """`base` with the methods of `mixin`, laid out as `base` is: an object of `base` can become one of it."""
    made = _made_of.get((mixin, base))
    if made is None:
        made = _made_of[mixin, base] = type(
            base.__name__, (mixin, base), {"__slots__": (), "__module__": base.__module__}
        )
    return made


_made_of: dict[tuple[type, type], type] = {}


class _Nowhere(asyncio.Transport):
    """The other side of a served request: takes everything, sends nothing."""

    def write(self, data: Any) -> None:
        """Nothing is sent."""

    def writelines(self, list_of_data: Any) -> None:
        """Nothing is sent."""

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing is open."""

    def abort(self) -> None:
        """Nothing is open."""

    def pause_reading(self) -> None:
        """A chunk comes only when it is asked for."""

    def resume_reading(self) -> None:
        """As `pause_reading`."""

    def get_write_buffer_size(self) -> int:
        return 0


class _Unpooled:
    """A `Connection` that never goes into the connector's pool."""

    def close(self: Any) -> None:
        self._notify_release()
        if self._protocol is not None:
            self._protocol.close()
            self._protocol = None

    def release(self: Any) -> None:
        self.close()

    def __del__(self) -> None:
        """Nothing is open that could be left unclosed."""


class _Patient:
    """A `ResponseHandler` that does not wait for the recording as it would for a server."""

    def set_response_params(self, **params: Any) -> None:
        super().set_response_params(**{**params, "read_until_eof": True, "read_timeout": None})  # type: ignore[misc]


def connected(asked: Asked, request: Any, connector: Any) -> Any:
    """A connection that leads nowhere, for a request that will be answered from the recording.

    Raises what the connector raised; some versions of aiohttp try again what is raised later on.
    """
    if not asked.streams:
        answer = asked.serve()
        error = _error(answer.exception, request) if answer.status is None and answer.exception else None
        if isinstance(error, _of_connecting()) and not answer.cancelled:
            raise error
    loop = asyncio.get_running_loop()
    handler: Any = sys.modules["aiohttp.client_proto"].ResponseHandler
    connection: Any = sys.modules["aiohttp.connector"].Connection
    protocol = with_methods(_Patient, handler)(loop)
    protocol.connection_made(_Nowhere())
    asked.connection = with_methods(_Unpooled, connection)(connector, request.connection_key, protocol, loop)
    return asked.connection


def _of_connecting() -> tuple[type[BaseException], ...]:
    module = sys.modules["aiohttp.client_exceptions"]
    return (module.ClientConnectorError, module.ConnectionTimeoutError)


async def started(wrapped: Callable[..., Awaitable[Any]], response: Any, asked: Asked) -> Any:
    """Start `response` with the recorded answer, or raise the recorded error."""
    connection, asked.connection = asked.connection, None
    if response._continue is not None and not response._continue.done():
        response._continue.set_result(True)
    if response._writer is not None:
        await asyncio.wait([response._writer])
    answer = asked.serve(connection.protocol.exception())
    if answer.status is None:
        if answer.cancelled:  # it was cancelled when it was recorded; so it waits until it is cancelled again
            await asyncio.get_running_loop().create_future()
        raise _error(answer.exception or {}, response)
    feed = _Feed(asked, answer, response)
    connection.protocol.data_received(feed.head)
    given = await wrapped(connection)
    stream = response.content
    if not stream.at_eof():
        stream.__class__ = with_methods(_ServedStream, type(stream))
        if feed.whole and not feed.chunks:
            feed.end(stream)
        else:
            feeds[id(stream)] = feed
    return given


class _Feed:
    """What is left of a recorded answer, framed as its headers say."""

    __slots__ = ("chunked", "chunks", "failure", "head", "left", "name", "waits", "whole")

    def __init__(self, asked: Asked, answer: Answer, response: Any) -> None:
        self.name = call_name(asked.head, asked.replay.policy)
        self.chunks = deque(answer.chunks)
        self.waits = answer.cancelled
        self.left = answer.left
        self.failure = _error(answer.exception, response) if answer.exception and not answer.cancelled else None
        self.whole = not (self.waits or self.left or self.failure)
        headers = _framed(answer.headers, sum(map(len, answer.chunks)), str(response.method), self.whole)
        self.chunked = "chunked" in header(headers, "transfer-encoding").lower()
        self.head = _head_bytes(answer, headers)

    async def more(self, stream: Any) -> None:
        """The program waits for more of the body."""
        await asyncio.sleep(0)
        if self.waits and not self.chunks:
            await asyncio.get_running_loop().create_future()
        self.push(stream)

    def push(self, stream: Any) -> None:
        """Feed the next chunk, or the end. Raises the recorded failure; ReplayExhaustedError past one that was left."""
        if self.chunks:
            chunk = self.chunks.popleft()
            stream._protocol.data_received(b"%x\r\n%b\r\n" % (len(chunk), chunk) if self.chunked else chunk)
            if self.whole and not self.chunks:
                self.end(stream)
            return
        feeds.pop(id(stream), None)
        error = replaying.read_beyond(self.name) if self.left else self.failure
        if error is not None:
            stream.set_exception(error)
            raise error

    def end(self, stream: Any) -> None:
        """The body is over, as its framing says it."""
        feeds.pop(id(stream), None)
        if self.chunked:
            stream._protocol.data_received(b"0\r\n\r\n")
        elif not stream.is_eof():
            stream._protocol.connection_lost(None)


feeds: dict[int, _Feed] = {}
"""By the id of the stream, which takes its own entry away when it goes. No entry may lead to its stream."""


class _ServedStream:
    """A `StreamReader` that gets the next recorded chunk when a read waits for it."""

    __slots__ = ()

    async def _wait(self, func_name: str) -> None:
        feed = feeds.get(id(self))
        if feed is None:
            await super()._wait(func_name)  # type: ignore[misc]
        else:
            await feed.more(self)

    async def wait_eof(self) -> None:
        while (feed := feeds.get(id(self))) is not None:
            if feed.left and not feed.chunks:  # it was read no further; only a read asks for what is not recorded
                return
            await feed.more(self)
        await super().wait_eof()  # type: ignore[misc]

    def read_nowait(self, n: int = -1) -> Any:
        feed = feeds.get(id(self))
        if feed is not None and not self._buffer and not feed.waits:  # type: ignore[attr-defined]
            feed.push(self)
        return super().read_nowait(n)  # type: ignore[misc]

    def __del__(self) -> None:
        feeds.pop(id(self), None)


def _framed(headers: list[tuple[str, str]], size: int, method: str, whole: bool) -> list[tuple[str, str]]:
    """Headers that fit the body: without a length that it does not have."""
    chunked = "chunked" in header(headers, "transfer-encoding").lower()
    length = header(headers, "content-length")
    if method == "HEAD" or not length:
        return headers
    if not chunked and length.isdigit() and (int(length) == size or (int(length) > size and not whole)):
        return headers
    return [pair for pair in headers if pair[0] != "content-length"]


def _head_bytes(answer: Answer, headers: list[tuple[str, str]]) -> bytes:
    version = answer.version if answer.version in ("HTTP/1.0", "HTTP/1.1") else "HTTP/1.1"
    lines = [f"{version} {answer.status} {answer.reason}", *(f"{name}: {value}" for name, value in headers)]
    plain = [line.translate(_ONE_LINE).encode("utf-8", "surrogateescape") for line in lines]
    return b"\r\n".join([*plain, b"", b""])


_ONE_LINE = dict.fromkeys((0, 10, 13), " ")


# --- recorded errors --------------------------------------------------------------------------------------------------


def _error(recorded: Mapping[str, Any], of: Any) -> BaseException:
    """The recorded exception of a request or response as aiohttp's own class, with its members; else its stand-in."""
    name = str(recorded.get("qualname"))
    message = str(recorded.get("message") or name)
    module: ModuleType = sys.modules["aiohttp.client_exceptions"]
    kind = getattr(module, name, None) if str(recorded.get("module")).partition(".")[0] == "aiohttp" else None
    if isinstance(kind, type) and issubclass(kind, module.ClientError):
        try:
            made: BaseException = _made(module, kind, recorded, message, of)
            if str(made) in (message, "") or isinstance(
                made, (module.ClientResponseError, module.ClientConnectorError)
            ):
                return made
        except Exception:  # a class with another constructor, or members that were redacted
            pass
    return recorded_error(recorded, message, str(of.url))


def _made(module: Any, kind: Any, recorded: Mapping[str, Any], message: str, of: Any) -> Any:
    state = recorded.get("state") or {}
    if issubclass(kind, module.ClientConnectorError):
        key, cause = recorded["args"]
        where = sys.modules["aiohttp.client_reqrep"].ConnectionKey(*key)
        arguments = (where, _cause(cause, state))
        return kind(state["_path"], *arguments) if "_path" in state else kind(*arguments)
    if issubclass(kind, module.ClientResponseError):
        text = str(state.get("message", message))
        return kind(of.request_info, (), status=state.get("status", 0), message=text)
    if issubclass(kind, OSError) and "errno" in state:
        return kind(state["errno"], state.get("strerror"))
    return kind() if message == kind.__name__ else kind(message)


def _cause(described: Any, state: Mapping[str, Any]) -> BaseException:
    """The system's error behind a connector's."""
    arguments = described["args"] if isinstance(described, Mapping) else ()
    named = described.get("type") if isinstance(described, Mapping) and described.get("module") == "ssl" else None
    kind = getattr(sys.modules.get("ssl"), str(named), None)
    if isinstance(kind, type) and issubclass(kind, OSError):
        return kind(*arguments)
    return OSError(state.get("errno"), state.get("strerror"))
