# SPDX-License-Identifier: Apache-2.0
"""The formats: models, canonical JSON, digests and validation. Pure: bytes and values in, bytes and values out.

Files, clocks, ids and random numbers are handed in; `bundle` is the room that opens files.
"""

from __future__ import annotations

from typing import TypeAlias, Union

Json: TypeAlias = Union[bool, int, float, str, list["Json"], dict[str, "Json"], None]  # noqa: UP007
"""A JSON value as Python holds it: exact builtin types, string keys, finite floats, no lone surrogates."""

__all__ = ["Json"]
