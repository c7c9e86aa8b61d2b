# SPDX-License-Identifier: Apache-2.0
"""The boundary of SDKs that Stainless generates (openai, anthropic and others): one seam for all of them.

Decision: `SyncAPIClient.request` and `AsyncAPIClient.request`, around the SDK's retry loop; every typed helper
(`create`, `parse`, `stream`, raw and streaming responses, other hosts of the same API) goes through it, and the SDK's
return types are never touched. A call that is no inference goes the way of any HTTP call. An SDK's own file says only
the package, the scope of its spans and who answers a client. Rejected: wrapping `create` and its kin, a list that grows
with each release and misses the helpers; and one copy of this flow per SDK.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

from sftrace_otel import recorder as recording
from sftrace_otel.core.mapping import dialects
from sftrace_otel.instrumentation import replaying, tracing
from sftrace_otel.instrumentation.exchange import current_llm
from sftrace_otel.instrumentation.failopen import fails_open
from sftrace_otel.instrumentation.llm import LlmCall, ServedLlmCall, attributes_of
from sftrace_otel.instrumentation.patching import Patches
from sftrace_otel.recorder import current_scope

__all__ = ["Sdk", "address_of"]

_under_way: ContextVar[object] = ContextVar("sftrace_sdk_options", default=None)
"""The options of the request that a boundary stands around here."""


class Sdk:
    """The boundary of one SDK.

    `package` is its import name, `scope` the instrumentation scope of its spans, `provider` gives the GenAI name of the
    service that a client talks to; None for a client whose requests have another form on the wire and stay HTTP calls.
    """

    def __init__(self, package: str, scope: str, provider: Callable[[Any], str | None]) -> None:
        self._module = f"{package}._base_client"
        self._scope = scope
        self._provider = provider
        self._patches = Patches(package)
        self._wrappers = {"SyncAPIClient": self._request, "AsyncAPIClient": self._arequest_entry}
        for base, wrapper in self._wrappers.items():
            self._patches.add(self._module, f"{base}.request", wrapper)

    def install(self) -> None:
        """Record and replay the SDK's inference calls, now or once it is imported. Twice is once."""
        self._patches.install()
        module = sys.modules.get(self._module)
        try:
            for base, wrapper in self._wrappers.items():
                for kind in _wrapped_apart(getattr(module, base, None)):
                    self._patches.also(kind, "request", wrapper)
        except Exception as error:
            recording.fault(f"putting the boundary on some clients of {self._module}", error)

    def uninstall(self) -> None:
        """Take the boundary off again."""
        self._patches.uninstall()

    def patched(self) -> list[str]:
        """What is wrapped now."""
        return self._patches.installed()

    def _request(self, wrapped: Callable[..., Any], client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        boundary = self._enter(client, args, kwargs)
        if boundary is None:
            return wrapped(*args, **kwargs) if replaying._active is None else _carried(wrapped, args, kwargs)
        try:
            result = wrapped(*args, **kwargs)
        except replaying.ReplayStop as stop:
            boundary.raised(stop.error)
            raise stop.error from None
        except BaseException as error:
            boundary.raised(error)
            raise
        finally:
            boundary.leave()
        boundary.returned()
        return result

    async def _arequest(
        self, wrapped: Callable[..., Awaitable[Any]], client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        boundary = self._enter(client, args, kwargs)
        if boundary is None:
            return await (wrapped(*args, **kwargs) if replaying._active is None else _acarried(wrapped, args, kwargs))
        try:
            result = await wrapped(*args, **kwargs)
        except replaying.ReplayStop as stop:
            boundary.raised(stop.error)
            raise stop.error from None
        except BaseException as error:
            boundary.raised(error)
            raise
        finally:
            boundary.leave()
        boundary.returned()
        return result

    def _arequest_entry(
        self, wrapped: Callable[..., Awaitable[Any]], client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Awaitable[Any]:
        return self._arequest(wrapped, client, args, kwargs)

    @fails_open("recording an LLM call", None)
    def _enter(self, client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Boundary | None:
        """A boundary if this inference call is recorded or replayed, else None. Fails open while recording."""
        replay = replaying.active()
        recorder = recording.active()
        if (replay is None and recorder is None) or tracing.suppressed():
            return None
        options = kwargs["options"] if "options" in kwargs else args[1]
        if options is _under_way.get():  # the inner of two wrappers of ours, with somebody else's in between
            return None
        endpoint = dialects.endpoint_of(str(options.method), str(options.url))
        provider = None if endpoint is None else self._provider(client)
        if endpoint is None or provider is None:
            return None
        host, port = address_of(client)
        body: dict[str, Any] = {}
        for part in (options.json_data, options.extra_json):
            body.update(part if isinstance(part, Mapping) else {})
        attributes = attributes_of(endpoint, body, provider, host, port)
        name = f"{endpoint.operation} {attributes.get('gen_ai.request.model', '')}".rstrip()
        if replay is not None:
            attributes["sftrace.replay.active"] = True
        span = tracing.start_span(self._scope, name, tracing.CLIENT, attributes)
        if replay is not None:
            return _Boundary(ServedLlmCall(replay, endpoint, provider, host, span, current_scope()), options)
        assert recorder is not None
        return _Boundary(LlmCall(recorder, endpoint, provider, host, span, current_scope()), options)


def _wrapped_apart(base: type | None) -> Iterator[type]:
    """Classes below `base` whose `request` somebody wrapped before us: what they hold is not the one we wrapped."""
    below: list[type] = [] if base is None else base.__subclasses__()
    for kind in below:
        if hasattr(vars(kind).get("request"), "__wrapped__"):
            yield kind
        yield from _wrapped_apart(kind)


def address_of(client: Any) -> tuple[str, int | None]:
    """Host and port that a client's calls go to, the host spelled as in the URLs of its requests."""
    return _address(str(client.base_url))


@functools.lru_cache(256)
def _address(url: str) -> tuple[str, int | None]:
    base = urlsplit(url)
    return base.hostname or "", base.port


def _carried(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call that is no inference, under replay: what stops the replay comes out as it is, not as the SDK's error."""
    token = replaying.in_sdk.set(True)
    try:
        return wrapped(*args, **kwargs)
    except replaying.ReplayStop as stop:
        raise stop.error from None
    finally:
        replaying.in_sdk.reset(token)


async def _acarried(wrapped: Callable[..., Awaitable[Any]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    token = replaying.in_sdk.set(True)
    try:
        return await wrapped(*args, **kwargs)
    except replaying.ReplayStop as stop:
        raise stop.error from None
    finally:
        with contextlib.suppress(ValueError):  # closed from another context
            replaying.in_sdk.reset(token)


class _Boundary:
    """What stands around one `request`: made before it, told how it ended."""

    def __init__(self, call: LlmCall | ServedLlmCall, options: object) -> None:
        self.call = call
        self._span = tracing.attached(call.span)
        self._token = current_llm.set(call)
        self._options = _under_way.set(options)

    @fails_open("leaving an LLM call", None, replay_too=True)
    def leave(self) -> None:
        try:
            current_llm.reset(self._token)
            _under_way.reset(self._options)
        except ValueError:  # a pending request was closed from another context, which has its own value
            pass
        if tracing.is_current(self.call.span):
            tracing.detach(self._span)

    @fails_open("recording an LLM call", None, replay_too=True)
    def returned(self) -> None:
        self._tell(None)

    @fails_open("recording an LLM call", None, replay_too=True)
    def raised(self, error: BaseException) -> None:
        self._tell(error)

    def _tell(self, error: BaseException | None) -> None:
        """Pass on how the request ended."""
        if isinstance(self.call, ServedLlmCall):
            self.call.ended(error)
        elif error is None:
            self.call.returned()
        else:
            self.call.raised(error)
