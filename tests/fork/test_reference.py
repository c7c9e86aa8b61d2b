# SPDX-License-Identifier: Apache-2.0
"""Forks beside those of stepfork 0.2.1, at every step and event of its own bundles, and its refusals beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import stepfork.fork as theirs
from stepfork.trace import Trace as TheirTrace
from stepfork.trace import validate_bundle as their_validate

import sftrace_otel.fork as ours
from sftrace_otel.trace import Trace, validate_bundle

VECTORS = Path(__file__).parents[1] / "data" / "vectors" / "sftrace"
NAMES = [path.name for path in sorted(VECTORS.glob("*.sftrace"))]


@pytest.mark.parametrize("name", NAMES)
def test_both_fork_alike_at_every_step_and_event(name: str, tmp_path: Path) -> None:
    """They part where the issue calls the reference wrong: it keeps the parent's status in a fork that is cut short."""
    path = VECTORS / name
    parent, their_parent = Trace.load(path), TheirTrace.load(path)
    last = parent.events[-1].step
    valid = {strict: validate_bundle(path, strict=strict).exit_code == 0 for strict in (True, False)}
    points: list[dict[str, Any]] = [{"step": step, "event_id": None} for step in range(last + 1)]
    points += [{"step": None, "event_id": event.id} for event in parent.events]
    for point in points:
        out = tmp_path / "x.sftrace"
        result = ours.fork_trace(path, ours.ForkPoint(**point), output_path=out, overwrite=True)
        theirs_made, info = theirs.ForkEngine(their_parent, theirs.ForkPoint(**point)).fork()
        assert (result.fork_point_step, result.fork_point_event_id) == (info.fork_point_step, info.fork_point_event_id)
        read = TheirTrace.load(out)
        run = {"run_id": "r"}
        assert [one.model_copy(update=run) for one in read.events] == [
            one.model_copy(update=run) for one in theirs_made.events
        ]
        counts = ("events", "llm_calls", "tool_calls")
        assert [getattr(read.totals, one) for one in counts] == [getattr(theirs_made.totals, one) for one in counts]
        for strict, whole in valid.items():
            if whole:
                assert validate_bundle(out, strict=strict, verify_integrity=False).exit_code == 0
                assert their_validate(out, strict=strict).valid


REFUSED: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"step": 999}, []),
    ({"step": -1}, []),
    ({"event_id": "nope"}, []),
    ({}, []),
    ({"step": 5}, [{"step": 1}]),
    ({"step": 5}, [{"event_id": "nope"}]),
    ({"step": 5}, [{"step": 2}, {"step": 2}]),
    ({"step": 5}, [{}]),
    ({"step": 5}, [{"step": 2, "event_id": "e"}]),
    ({"step": 5}, [{"step": 1}, {"step": 0}]),
]


@pytest.mark.parametrize(("point", "overrides"), REFUSED)
def test_refusals_are_worded_alike(point: dict[str, Any], overrides: list[dict[str, Any]]) -> None:
    path = VECTORS / "completed.sftrace"

    def refusal(package: Any, trace: Any) -> tuple[str, str]:
        with pytest.raises((package.ForkError, ValueError)) as caught:
            specs = [package.OverrideSpec(output=1, **one) for one in overrides]
            package.ForkEngine(
                trace, package.ForkPoint(**{"event_id": None, "step": None, **point}), overrides=specs
            ).fork()
        return type(caught.value).__name__, str(caught.value)

    assert refusal(ours, Trace.load(path)) == refusal(theirs, TheirTrace.load(path))
