# SPDX-License-Identifier: Apache-2.0
"""MCP `tools/call` on the client's side.

Source: semantic conventions, MCP spans (development, 2026-11), and the spans of the `mcp` SDK from 2.0, named
`MCP send tools/call <tool>` and without content. The server's span of the same call belongs to the server's run, whose
root it is.
"""

from __future__ import annotations

from sftrace_otel.core.mapping.genai import tool_call
from sftrace_otel.core.mapping.model import MappedCall, SpanRecord
from sftrace_otel.core.mapping.values import Attributes

__all__ = ["is_served", "map_mcp"]


def is_served(record: SpanRecord) -> bool:
    """Whether a span is a server's, of a request that came in: the call is its client's."""
    return record.kind == "SERVER" and "mcp.method.name" in record.attributes


def map_mcp(record: SpanRecord, attributes: Attributes) -> MappedCall | None:
    """A tool call through MCP, None for other methods."""
    if attributes.text("mcp.method.name") != "tools/call":
        return None
    _, _, target = record.name.partition("tools/call ")
    return tool_call(
        record,
        attributes,
        attributes.text("gen_ai.tool.name", "mcp.tool.name") or target.strip(),
        arguments="gen_ai.tool.call.arguments",
        result="gen_ai.tool.call.result",
        dialect="mcp",
    )
