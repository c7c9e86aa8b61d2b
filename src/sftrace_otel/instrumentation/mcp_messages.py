# SPDX-License-Identifier: Apache-2.0
"""MCP requests and results as calls: their names, their payloads, and what their spans say.

Decision: the input of a `tools/call` is the tool's arguments, as of any tool; where more was sent with them, it is the
request's parameters. What names one sending (`progressToken`, trace context) is left out, so that no call differs for
it. Other requests are named `mcp METHOD`. Results are as they stand on the wire, under the protocol's own names.

Source: semantic conventions, MCP client spans.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["CALL", "LIST", "SCOPE", "Asked", "asked", "discovering", "params_of", "raw", "refusal_of"]

SCOPE = "sftrace_otel.mcp"
"""Instrumentation scope of the spans of MCP requests."""
CALL = "tools/call"
LIST = "tools/list"
_PER_RUN = frozenset({"progressToken", "traceparent", "tracestate", "baggage"})


def params_of(params: Mapping[str, Any] | None) -> dict[str, Any]:
    """The parameters of a request without what of `_meta` names this one sending of it."""
    rest = dict(params or {})
    meta = {key: value for key, value in (rest.pop("_meta", None) or {}).items() if key not in _PER_RUN}
    return {**rest, "_meta": meta} if meta else rest


def raw(result: Any) -> Any:
    """A result as it stands on the wire: only what was given, under its own names."""
    dump = getattr(result, "model_dump", None)
    return result if dump is None else dump(by_alias=True, mode="json", exclude_unset=True)


class Asked:
    """A request: the name and input of its call, and what its span says."""

    __slots__ = ("attributes", "input", "method", "name", "span_name")

    def __init__(self, session: Any, method: str, params: Mapping[str, Any]) -> None:
        rest = params_of(params)
        self.method = method
        self.attributes: dict[str, Any] = {"mcp.method.name": method}
        version = getattr(session, "_negotiated_version", None)
        if isinstance(version, str):
            self.attributes["mcp.protocol.version"] = version
        if method == CALL:
            self.name = str(rest.pop("name", ""))
            arguments = rest.pop("arguments", None) or {}
            self.input: Any = {"arguments": arguments, **rest} if rest else arguments
            self.span_name = f"execute_tool {self.name}"
            self.attributes["gen_ai.operation.name"] = "execute_tool"
            self.attributes["gen_ai.tool.name"] = self.name
            return
        self.name, self.input, self.span_name = f"mcp {method}", rest, method
        if method == "prompts/get":
            self.attributes["gen_ai.prompt.name"] = str(rest.get("name", ""))


def asked(session: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Asked:
    """The request of a `send_request`."""
    request = args[0] if args else kwargs["request"]
    data = request.model_dump(by_alias=True, mode="json", exclude_none=True)
    return Asked(session, str(data["method"]), data.get("params") or {})


def discovering(session: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Asked:
    """The request of a `send_discover`."""
    version = args[0] if args else kwargs["version"]
    return Asked(session, "server/discover", {"protocolVersion": version})


def refusal_of(error: BaseException) -> dict[str, Any] | None:
    """Code, message and data of a protocol error, None for another exception."""
    data: Any = getattr(error, "error", None)
    if not type(error).__module__.startswith("mcp.") or not hasattr(data, "code"):
        return None
    return dict(data.model_dump(by_alias=True, mode="json", exclude_unset=True))
