# SPDX-License-Identifier: Apache-2.0
"""Redaction: what must not be written is taken out in memory, before hashing, matching and writing.

`RedactionPolicy` is the surface; each of the other modules is one part of it.
"""

from __future__ import annotations

from sftrace_otel.core.redact.credentials import MARK
from sftrace_otel.core.redact.policy import RedactionPolicy, Vouched
from sftrace_otel.core.redact.walk import Finding

__all__ = ["MARK", "Finding", "RedactionPolicy", "Vouched"]
