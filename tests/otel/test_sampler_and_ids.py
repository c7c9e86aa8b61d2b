# SPDX-License-Identifier: Apache-2.0
"""The sampler around the user's, and ids that leave the program's randomness alone."""

from __future__ import annotations

import os
import random

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    Decision,
    ParentBased,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)

from sftrace_otel.otel.ids import SftraceIdGenerator
from sftrace_otel.otel.sampler import RecordAllSampler, record_all


@pytest.mark.parametrize("root", [ALWAYS_OFF, TraceIdRatioBased(0), ParentBased(ALWAYS_OFF)])
def test_dropped_spans_are_recorded_with_all_they_were_started_with(root: Sampler) -> None:
    result = record_all(root).should_sample(None, 2**63, "chat", attributes={"gen_ai.request.model": "m"})
    assert result.decision is Decision.RECORD_ONLY
    assert result.attributes == {"gen_ai.request.model": "m"}


def test_sampled_spans_are_the_users_own_decision() -> None:
    class Theirs(Sampler):
        def should_sample(self, *args: object, **kwargs: object) -> SamplingResult:
            return SamplingResult(Decision.RECORD_AND_SAMPLE, {"rate": 1})

        def get_description(self) -> str:
            return "Theirs"

    result = record_all(Theirs()).should_sample(None, 1, "x", attributes={"a": 1})
    assert (result.decision, result.attributes) == (Decision.RECORD_AND_SAMPLE, {"rate": 1})
    assert record_all(Theirs()).get_description() == "RecordAllSampler{Theirs}"


def test_it_is_wrapped_once() -> None:
    once = record_all(ALWAYS_ON)
    assert isinstance(once, RecordAllSampler)
    assert record_all(once) is once


def test_children_of_a_dropped_span_stay_unsampled() -> None:
    provider = TracerProvider(sampler=record_all(ParentBased(ALWAYS_OFF)), shutdown_on_exit=False)
    tracer = provider.get_tracer("t")
    with tracer.start_as_current_span("a") as parent, tracer.start_as_current_span("b") as below:
        assert parent.is_recording() and below.is_recording()
        assert not below.get_span_context().trace_flags.sampled


def test_ids_leave_the_global_random_alone_and_differ_between_seeded_runs() -> None:
    def run(generator: SftraceIdGenerator | None) -> tuple[float, int]:
        random.seed(0)
        if generator is None:
            return random.random(), 0
        trace_id = generator.generate_trace_id()
        generator.generate_span_id()
        return random.random(), trace_id

    plain, _ = run(None)
    first, second = run(SftraceIdGenerator()), run(SftraceIdGenerator())
    assert plain == first[0] == second[0]
    assert first[1] != second[1]


def test_ids_have_their_size_and_are_not_zero() -> None:
    generator = SftraceIdGenerator()
    spans = {generator.generate_span_id() for _ in range(3_000)}
    traces = {generator.generate_trace_id() for _ in range(3_000)}
    assert len(spans) == len(traces) == 3_000
    assert min(spans) > 0 and max(spans) < 2**64
    assert 2**64 < max(traces) < 2**128
    assert generator.is_trace_id_random() is True


def test_an_id_of_zero_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    words = iter([0, 0, 5, 0, 0, 0, 6])
    monkeypatch.setattr("sftrace_otel.otel.ids._BLOCK", 8)
    monkeypatch.setattr(os, "urandom", lambda size: next(words).to_bytes(size, "big"))
    generator = SftraceIdGenerator()
    assert generator.generate_span_id() == 5
    assert generator.generate_trace_id() == 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_draws_ids_of_its_own() -> None:
    generator = SftraceIdGenerator()
    generator.generate_span_id()
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(into, generator.generate_span_id().to_bytes(8, "big"))
        os._exit(0)
    os.waitpid(pid, 0)
    assert int.from_bytes(os.read(out, 8), "big") != generator.generate_span_id()
    os.close(out)
    os.close(into)
