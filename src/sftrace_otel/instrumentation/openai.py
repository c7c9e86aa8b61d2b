# SPDX-License-Identifier: Apache-2.0
"""The boundary of the openai SDK, 1.x to 3.x.

Decision: one seam, `SyncAPIClient.request` and `AsyncAPIClient.request`, around the SDK's retry loop; every typed
helper (`create`, `parse`, `stream`, raw and streaming responses, Azure) goes through it, and the SDK's return types are
never touched. Endpoints that are no inference go the way of any HTTP call. Rejected: wrapping `Completions.create` and
its kin, a list that grows with each release and misses the helpers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from sftrace_otel import recorder as recording
from sftrace_otel.core.mapping import wire
from sftrace_otel.instrumentation import replaying, tracing
from sftrace_otel.instrumentation.exchange import current_llm
from sftrace_otel.instrumentation.failopen import fails_open
from sftrace_otel.instrumentation.llm import LlmCall, ServedLlmCall, attributes_of
from sftrace_otel.instrumentation.patching import Patches
from sftrace_otel.recorder import current_scope

__all__ = ["install", "patched", "uninstall"]

_SCOPE = "sftrace_otel.openai"


class _Boundary:
    """What stands around one `request`: made before it, told how it ended."""

    def __init__(self, call: LlmCall | ServedLlmCall) -> None:
        self.call = call
        self._span = tracing.attached(call.span)
        self._token = current_llm.set(call)

    @fails_open("leaving an LLM call", None, replay_too=True)
    def leave(self) -> None:
        try:
            current_llm.reset(self._token)
        except ValueError:  # a pending request was closed from another context, which has its own value
            pass
        if tracing.is_current(self.call.span):
            tracing.detach(self._span)

    @fails_open("recording an LLM call", None)
    def returned(self) -> None:
        self._tell(None)

    @fails_open("recording an LLM call", None)
    def raised(self, error: BaseException) -> None:
        self._tell(error)

    def _tell(self, error: BaseException | None) -> None:
        """Pass on how the request ended. Never raises: the program gets its own result or exception."""
        try:
            if isinstance(self.call, ServedLlmCall):
                self.call.ended(error)
            elif error is None:
                self.call.returned()
            else:
                self.call.raised(error)
        except Exception as fault:
            recording.fault("recording an LLM call", fault)


@fails_open("recording an LLM call", None)
def _enter(client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Boundary | None:
    """A boundary if this is an inference call that is recorded or replayed, else None. Fails open while recording."""
    replay = replaying.active()
    recorder = recording.active()
    if (replay is None and recorder is None) or tracing.suppressed():
        return None
    try:
        options = kwargs["options"] if "options" in kwargs else args[1]
        endpoint = wire.endpoint_of(str(options.method), str(options.url))
        if endpoint is None:
            return None
        base = client.base_url
        provider = wire.provider_of(base.host, azure=type(client).__name__.endswith("AzureOpenAI"))
        body = options.json_data if isinstance(options.json_data, Mapping) else {}
        attributes = attributes_of(endpoint, body, provider, base.host, base.port)
        name = f"{endpoint.operation} {attributes.get('gen_ai.request.model', '')}".rstrip()
        if replay is not None:
            attributes["sftrace.replay.active"] = True
        span = tracing.start_span(_SCOPE, name, tracing.CLIENT, attributes)
        if replay is not None:
            return _Boundary(ServedLlmCall(replay, endpoint, provider, base.host, span, current_scope()))
        assert recorder is not None
        return _Boundary(LlmCall(recorder, endpoint, provider, base.host, span, current_scope()))
    except Exception as error:
        if replay is not None:
            raise
        if recorder is not None:
            recorder.fault("recording an LLM call", error)
        return None


def _request(wrapped: Callable[..., Any], client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    boundary = _enter(client, args, kwargs)
    if boundary is None:
        return wrapped(*args, **kwargs)
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
    wrapped: Callable[..., Awaitable[Any]], client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    boundary = _enter(client, args, kwargs)
    if boundary is None:
        return await wrapped(*args, **kwargs)
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
    wrapped: Callable[..., Awaitable[Any]], client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Awaitable[Any]:
    return _arequest(wrapped, client, args, kwargs)


_patches = Patches("openai")
_patches.add("openai._base_client", "SyncAPIClient.request", _request)
_patches.add("openai._base_client", "AsyncAPIClient.request", _arequest_entry)


def install() -> None:
    """Record and replay the openai SDK's inference calls, now or once it is imported. Twice is once."""
    _patches.install()


def uninstall() -> None:
    """Take the boundary off again."""
    _patches.uninstall()


def patched() -> list[str]:
    """What is wrapped now."""
    return _patches.installed()
