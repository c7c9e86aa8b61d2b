# SPDX-License-Identifier: Apache-2.0
"""Langfuse: `langfuse.observation.type`, input and output as JSON text.

Source: langfuse/langfuse-python, `_client/attributes.py` (SDK 3 and 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sftrace_otel.core.mapping import messages as form
from sftrace_otel.core.mapping.genai import llm_call, tool_call
from sftrace_otel.core.mapping.model import MappedCall, SpanRecord
from sftrace_otel.core.mapping.values import Attributes

__all__ = ["map_langfuse"]

_INPUT, _OUTPUT = "langfuse.observation.input", "langfuse.observation.output"
_USAGE = {"input": "prompt_tokens", "output": "completion_tokens", "total": "total_tokens"}


def map_langfuse(record: SpanRecord, attributes: Attributes) -> MappedCall | None:
    """A generation, embedding or tool observation; spans, agents, chains and the like are no calls."""
    kind = attributes.text("langfuse.observation.type")
    if kind == "tool":
        return tool_call(record, attributes, record.name, arguments=_INPUT, result=_OUTPUT, dialect="langfuse")
    if kind not in ("generation", "embedding"):
        return None
    given, answer = attributes.value(_INPUT), attributes.value(_OUTPUT)
    request = _request(given, attributes, kind)
    response = answer if isinstance(answer, Mapping) and "choices" in answer else None
    usage = _usage(attributes.value("langfuse.observation.usage_details"))
    return llm_call(
        record,
        Attributes({**usage, **attributes.raw}),
        "chat" if kind == "generation" else "embeddings",
        request=request,
        response=response,
        outputs=answer if response is None else None,
        model=attributes.text("langfuse.observation.model.name"),
        provider=attributes.text("gen_ai.provider.name", "gen_ai.system"),
        dialect="langfuse",
    )


def _request(given: object, attributes: Attributes, kind: str) -> dict[str, Any] | None:
    if given is None:
        return None
    parameters = attributes.value("langfuse.observation.model.parameters")
    body: dict[str, Any] = {"model": attributes.text("langfuse.observation.model.name")}
    body.update(parameters if isinstance(parameters, Mapping) else {})
    if isinstance(given, Mapping) and ("messages" in given or "input" in given):
        return {**body, **given}
    if kind == "embedding":
        return {**body, "input": given}
    return {**body, "messages": form.input_messages(given)}


def _usage(details: object) -> dict[str, Any]:
    if not isinstance(details, Mapping):
        return {}
    known = {name: count for name, count in details.items() if name in _USAGE or name in _USAGE.values()}
    return {f"gen_ai.usage.{_USAGE.get(name, name)}": count for name, count in known.items()}
