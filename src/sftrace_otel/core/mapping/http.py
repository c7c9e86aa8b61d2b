# SPDX-License-Identifier: Apache-2.0
"""HTTP client spans, in the names of before and after the stable HTTP conventions.

Source: semantic conventions, HTTP spans 1.23 and later, and 1.20 and before. A span holds no body: the call's input and
output say so (`missing`), and what such a run replays is decided elsewhere.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from sftrace_otel.core.mapping.model import MappedCall, SpanRecord
from sftrace_otel.core.mapping.values import Attributes, failure, plain

__all__ = ["http_name", "map_http"]

_USER = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*://)[^/?#]*@")
_PORTS = {"http": 80, "https": 443}


def map_http(record: SpanRecord, attributes: Attributes) -> MappedCall | None:
    """An outgoing HTTP exchange; None for server spans and spans without method or URL."""
    if record.kind != "CLIENT":
        return None
    method = attributes.text("http.request.method_original", "http.request.method", "http.method")
    url = attributes.text("url.full", "http.url") or _composed(attributes)
    if not method or not url:
        return None
    status = attributes.number("http.response.status_code", "http.status_code")
    output = None
    if status is not None:
        output = {"status_code": status, "headers": _headers(attributes, "response"), "body": None}
    return MappedCall(
        kind="http",
        name=http_name(method, url),
        input={"method": method, "url": url, "headers": _headers(attributes, "request"), "body": None},
        output=output,
        error=failure(record) if status is None else None,
        missing=("input", "output"),
        dialect="http",
    )


def http_name(method: str, url: str) -> str:
    """`http METHOD scheme://host[:port]/path`: no user, no query, no fragment, no default port."""
    parts = urlsplit(_USER.sub(r"\1", url))  # a redacted user has brackets, as an address would
    try:
        port = parts.port
    except ValueError:
        port = None
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    tail = f":{port}" if port is not None and port != _PORTS.get(parts.scheme) else ""
    return f"http {method.upper()} {parts.scheme}://{host}{tail}{parts.path or '/'}"


def _composed(attributes: Attributes) -> str | None:
    host = attributes.text("server.address", "http.host", "net.peer.name")
    scheme = attributes.text("url.scheme", "http.scheme")
    if not host or not scheme:
        return None
    port = attributes.number("server.port", "net.peer.port")
    where = host if port is None or ":" in host or port == _PORTS.get(scheme) else f"{host}:{port}"
    path = attributes.text("url.path", "http.target") or "/"
    query = attributes.text("url.query")
    return f"{scheme}://{where}{path}" + (f"?{query}" if query else "")


def _headers(attributes: Attributes, side: str) -> list[list[str]]:
    prefix = f"http.{side}.header."
    pairs: list[list[str]] = []
    for key, value in attributes.raw.items():
        if key.startswith(prefix):
            values: Any = plain(value)
            name = key[len(prefix) :].lower()
            pairs += [[name, str(item)] for item in (values if isinstance(values, list) else [values])]
    return pairs
