# SPDX-License-Identifier: Apache-2.0
"""The boundary of the anthropic SDK, 0.40 to 2.x.

Decision: the seam of `sdk`, which every helper of messages goes through, beta and the clients for other hosts too. The
client for Bedrock's own API is left to the HTTP boundary: its requests name no model in the body and its streams are
AWS's binary events, which replay as the HTTP calls they are. Rejected: the SDK's own spans, which lack the exchange.
"""

from __future__ import annotations

from typing import Any

from sftrace_otel.core.mapping import wire
from sftrace_otel.instrumentation.sdk import Sdk

__all__ = ["install", "patched", "uninstall"]


def _provider(client: Any) -> str | None:
    kinds = {kind.__name__ for kind in type(client).__mro__}
    if "BaseBedrockClient" in kinds:
        return None
    if "BaseVertexClient" in kinds:
        return "gcp.vertex_ai"
    return wire.provider_of(client.base_url.host, own="anthropic")


_sdk = Sdk("anthropic", "sftrace_otel.anthropic", _provider)
install = _sdk.install
uninstall = _sdk.uninstall
patched = _sdk.patched
