# SPDX-License-Identifier: Apache-2.0
"""Websockets of the `websockets` library, which the realtime clients of SDKs use: noted, not recorded.

Decision: wrap the constructor of `ClientProtocol`, which its asyncio, threading and trio clients make for every
connection, however `connect` was imported. The note is the host alone. Under replay nothing is done here: the guard
stops the connection itself. Rejected: recording messages (they are no exchanges, and their order is the network's).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sftrace_otel import recorder as recording
from sftrace_otel.instrumentation import replaying
from sftrace_otel.instrumentation.failopen import fails_open
from sftrace_otel.instrumentation.patching import Patches
from sftrace_otel.recorder import Recorder

__all__ = ["install", "patched", "uninstall"]


def _made(wrapped: Callable[..., Any], protocol: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if recording._active is not None and replaying._active is None:
        _note(recording._active, args[0] if args else kwargs.get("uri", kwargs.get("wsuri")))
    return wrapped(*args, **kwargs)


@fails_open("noting a websocket", None)
def _note(recorder: Recorder, uri: object) -> None:
    recorder.websocket(str(getattr(uri, "host", "an unknown host")))


_patches = Patches("websockets")
_patches.add("websockets.client", "ClientProtocol.__init__", _made)

install = _patches.install
uninstall = _patches.uninstall
patched = _patches.installed
