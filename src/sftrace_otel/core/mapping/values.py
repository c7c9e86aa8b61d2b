# SPDX-License-Identifier: Apache-2.0
"""Reading span attributes that each instrumentation spells in its own way.

Decision: a content attribute may be a structure (SDK 1.45 and later) or JSON text, and both read the same. Text that a
length limit cut in the middle stays text and is reported. Rejected: repairing cut JSON, since a guess would be hashed
and replayed as if it had been said.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from sftrace_otel.core.mapping.model import SpanRecord

__all__ = ["Attributes", "as_text", "dump", "failure", "message_content", "plain", "provider_name"]

_OPENERS = frozenset("{[")
_PROVIDERS = {
    "az.ai.openai": "azure.ai.openai",
    "az.ai.inference": "azure.ai.inference",
    "azure": "azure.ai.openai",
    "azure_openai": "azure.ai.openai",
    "vertex_ai": "gcp.vertex_ai",
    "vertexai": "gcp.vertex_ai",
    "gemini": "gcp.gemini",
    "google": "gcp.gen_ai",
    "aws": "aws.bedrock",
    "bedrock": "aws.bedrock",
    "xai": "x_ai",
    "mistralai": "mistral_ai",
    "watsonx": "ibm.watsonx.ai",
}


class Attributes:
    """Attributes of one span, read by key with fallbacks; `cut` collects the keys whose JSON text was cut."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self.cut: set[str] = set()

    def has(self, *keys: str) -> bool:
        """Whether any of `keys` is there, whatever its value."""
        return any(key in self.raw for key in keys)

    def text(self, *keys: str) -> str | None:
        """The first of `keys` that holds a non-empty string."""
        for key in keys:
            value = self.raw.get(key)
            if isinstance(value, str) and value:
                return value
        return None

    def number(self, *keys: str) -> int | None:
        """The first of `keys` that holds a whole number."""
        for key in keys:
            value = self.raw.get(key)
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return None

    def value(self, *keys: str) -> Any:
        """The first of `keys` that is there and not None: a structure as plain lists and dicts, JSON text decoded."""
        for key in keys:
            value = self.raw.get(key)
            if value is not None:
                return self._decoded(key, value)
        return None

    def rows(self, prefix: str) -> list[dict[str, Any]]:
        """A list spread over keys `prefix.N.rest`, in the order of N; `rest` becomes a nested dict or list."""
        tree = self.tree(prefix)
        items = tree if isinstance(tree, list) else []
        return [item for item in items if isinstance(item, dict)]

    def tree(self, prefix: str) -> Any:
        """Everything under `prefix.` as nested dicts, and as lists where all keys of a level are numbers."""
        start = prefix + "."
        root: dict[str, Any] = {}
        for key, value in self.raw.items():
            if key.startswith(start):
                _put(root, key[len(start) :].split("."), plain(value))
        return _lists(root)

    def _decoded(self, key: str, value: object) -> Any:
        if not isinstance(value, str):
            return plain(value)
        stripped = value.lstrip()
        if stripped[:1] not in _OPENERS and not _scalar(stripped):
            return value
        try:
            return msgspec.json.decode(value)
        except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
            pass  # what it refuses is read again, to tell what is cut from what is only unusual
        try:
            return json.loads(value, parse_constant=_refuse, parse_float=_finite)
        except (ValueError, RecursionError):
            if stripped[:1] in _OPENERS:
                self.cut.add(key)
            return value


def plain(value: Any) -> Any:
    """`value` with tuples as lists and mappings as dicts, all the way down."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
        return [plain(item) for item in value]
    return value


def dump(value: object) -> str:
    """`value` as JSON text where a field of the OpenAI form is text; text stays as it is."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def as_text(value: object) -> str:
    """`value` as the text of a message: None becomes the empty string."""
    return "" if value is None else dump(value)


def message_content(content: Any) -> Any:
    """Content of one message: a list of parts is decoded from JSON text, any other text is what was said."""
    if isinstance(content, str) and content.lstrip()[:2] in ("[{", "[]"):
        return Attributes({"content": content}).value("content")
    return plain(content)


def provider_name(name: str | None) -> str | None:
    """The GenAI convention's name of a provider, from older and other spellings."""
    if not name:
        return None
    lowered = name.strip().lower()
    return _PROVIDERS.get(lowered, lowered) or None


def failure(record: SpanRecord) -> tuple[str, str] | None:
    """Type and message of the failure that ended the span, None if its status is not an error.

    An empty message becomes the type, and a missing type `Error`: both are non-empty in an event.
    """
    if record.status_code != "ERROR":
        return None
    kind = record.attributes.get("error.type")
    message: object = record.status_description
    for event in record.events:
        if event.name == "exception":
            kind = event.attributes.get("exception.type") or kind
            message = event.attributes.get("exception.message") or message
    name = str(kind) if kind else "Error"
    return name, str(message) if message else name


def _scalar(text: str) -> bool:
    return text[:1] == '"' and text.rstrip()[-1:] == '"' and len(text) > 1


def _refuse(constant: str) -> object:
    raise ValueError(constant)


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(text)
    return number


def _put(node: dict[str, Any], path: Sequence[str], value: object) -> None:
    for part in path[:-1]:
        child = node.get(part)
        if not isinstance(child, dict):
            child = node[part] = {}
        node = child
    node.setdefault(path[-1], value)


def _lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    if node and all(key.isdecimal() for key in node):
        return [_lists(node[key]) for key in _in_order(node)]
    return {key: _lists(item) for key, item in node.items()}


def _in_order(node: Mapping[str, Any]) -> Iterator[str]:
    return iter(sorted(node, key=int))
