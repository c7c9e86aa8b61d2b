# SPDX-License-Identifier: Apache-2.0
"""The JSON Schemas of the files of a bundle (draft 2020-12), shipped with the package.

Decision: the schemas are files, for tools in other languages; a test holds them to the models. They say what a reader
needs and allow keys they do not know, as the reader does; relations between events are `validate`'s. Rejected: printing
what msgspec makes of the structs (it shows our slots, not the format).
"""

from __future__ import annotations

from importlib import resources

NAMES = (
    "manifest",
    "event",
    "run_start",
    "llm_request",
    "llm_response",
    "tool_call",
    "tool_result",
    "state_change",
    "error",
    "run_end",
    "redactions",
    "integrity",
    "calls",
    "wire",
    "spans",
    "run",
    "provenance",
    "nondeterminism",
    "flight-event",
    "flight-manifest",
)
"""Names of the schemas; `event` is any line of `events.jsonl`, those of rows are of one line of a sidecar."""


def schema(name: str) -> str:
    """The text of a schema, a JSON document with a newline at its end. Raises KeyError for an unknown name."""
    if name not in NAMES:
        raise KeyError(name)
    file = f"{name}.schema.json" if name.startswith("flight-") else f"{name}.json"  # the field's name for it
    return (resources.files(__package__) / "schemas" / file).read_text("utf-8")
