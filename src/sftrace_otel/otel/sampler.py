# SPDX-License-Identifier: Apache-2.0
"""A sampler around the user's, through which the recorder sees every span and other exporters the sampled ones.

Decision: what the user's sampler drops becomes RECORD_ONLY: the SDK then calls span processors and keeps the sampled
flag off, which `BatchSpanProcessor`, `SimpleSpanProcessor` and propagation go by. Rejected: sampling everything, since
it changes what the user pays another backend for; and `AlwaysRecordSampler` of SDK 1.45, which does the same but keeps
the attributes of the dropped result, and the SDK's own samplers drop without any (tried on 1.45.2), so a span would
lose all it was started with: its operation, its model, and our reference.

What it costs: a dropped span is now a recording one (some 15 µs more), and code that asks `span.is_recording()` before
it collects details collects them.
"""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind
from opentelemetry.trace.span import TraceState
from opentelemetry.util.types import Attributes

__all__ = ["RecordAllSampler", "record_all"]


class RecordAllSampler(Sampler):
    """The root sampler's decisions, with DROP turned into RECORD_ONLY and no attribute lost by it."""

    def __init__(self, root: Sampler) -> None:
        self.root = root

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """The root sampler's result where it samples."""
        result = self.root.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)
        if result.decision is Decision.RECORD_AND_SAMPLE:
            return result
        return SamplingResult(Decision.RECORD_ONLY, result.attributes or attributes, result.trace_state)

    def get_description(self) -> str:
        """Names the root sampler."""
        return f"RecordAllSampler{{{self.root.get_description()}}}"


def record_all(sampler: Sampler) -> Sampler:
    """`sampler`, wrapped once."""
    return sampler if isinstance(sampler, RecordAllSampler) else RecordAllSampler(sampler)
