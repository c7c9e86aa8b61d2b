# SPDX-License-Identifier: Apache-2.0
"""The boundary of the openai SDK, 1.x to 3.x.

Decision: the seam of `sdk`, which all of its typed helpers go through, Azure's clients too. Rejected: wrapping
`Completions.create` and its kin, a list that grows with each release and misses the helpers.
"""

from __future__ import annotations

from typing import Any

from sftrace_otel.core.mapping import wire
from sftrace_otel.instrumentation.sdk import Sdk, address_of

__all__ = ["install", "patched", "uninstall"]


def _provider(client: Any) -> str:
    azure = any(kind.__name__ == "BaseAzureClient" for kind in type(client).__mro__)
    return wire.provider_of(address_of(client)[0], azure=azure)


_sdk = Sdk("openai", "sftrace_otel.openai", _provider)
install = _sdk.install
uninstall = _sdk.uninstall
patched = _sdk.patched
