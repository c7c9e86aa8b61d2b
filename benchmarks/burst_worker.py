# SPDX-License-Identifier: Apache-2.0
"""The burst row: 20,000 tool spans as fast as one thread can, under our processor. Prints how many are missing."""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path

from opentelemetry.sdk.trace import TracerProvider

from sftrace_otel import SftraceSpanProcessor

SPANS = 20_000


def lost(folder: Path) -> int:
    """Spans made, less tool calls found in the bundles."""
    provider = TracerProvider()
    provider.add_span_processor(SftraceSpanProcessor(dir=str(folder), quiet=True))
    tracer = provider.get_tracer("bench")
    with tracer.start_as_current_span("burst"):
        for number in range(SPANS):
            attributes = {
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": "lookup",
                "gen_ai.tool.call.arguments": f'{{"page": {number}}}',
            }
            with tracer.start_as_current_span("execute_tool lookup", attributes=attributes):
                pass
    provider.shutdown()
    found = [json.loads(path.read_text())["totals"]["tool_calls"] for path in folder.glob("*.sftrace/manifest.json")]
    return SPANS - sum(found)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps({"lost": lost(Path(scratch))}))
