# SPDX-License-Identifier: Apache-2.0
"""What the session decides: rungs, orders, one answer per call, errors that stay, and what it says when it stops."""

from __future__ import annotations

import gc
import json
import weakref
from itertools import permutations
from typing import Any

import pytest

from sftrace_otel.core.match import ISO_TIME, UUID, normalise_text
from sftrace_otel.core.plan import Outcome
from sftrace_otel.core.session import LiveCall, Miss, ReplayReport, RunOutcome, Session
from sftrace_otel.errors import (
    ReplayError,
    ReplayExhaustedError,
    ReplayMismatchError,
    ReplayPolicyError,
    SettingsError,
)
from sftrace_otel.formats import canonical

DONE = RunOutcome(status="completed")
PARTIAL = RunOutcome(status="partial")


def stop(session: Session, live: LiveCall, code: str, kind: type[ReplayError] = ReplayMismatchError) -> Any:
    """The miss with which `live` stops the replay; the same comes again for every later call."""
    with pytest.raises(kind) as caught:
        session.decide(live)
    assert (type(caught.value), caught.value.code) == (kind, code)
    with pytest.raises(kind) as again:
        session.decide(LiveCall("tool", "anything else"))
    assert str(again.value) == str(caught.value)
    assert again.value is not caught.value
    assert str(session.latched) == str(caught.value)
    return getattr(caught.value, "miss", None)


def report(session: Session, outcome: RunOutcome = DONE, expected: RunOutcome = DONE) -> ReplayReport:
    made = session.report(outcome=outcome, expected=expected)
    json.dumps(made.to_dict(), allow_nan=False)
    return made


# --- rungs ------------------------------------------------------------------------------------------------------------


def test_two_equal_calls_in_flight_each_get_their_own_answer(build: Any) -> None:
    calls = [
        build.tool(0, payload={"q": 1}, lineage="t0/0", span=(0, 9)),
        build.tool(1, payload={"q": 1}, lineage="t1/0", span=(1, 8)),
    ]
    for order in ((0, 1), (1, 0)):
        session = Session(calls)
        assert [build.serve(session, build.live(calls[i])) for i in order] == [(i, "lineage") for i in order]


@pytest.mark.parametrize("hashed", [True, False])
def test_equal_calls_without_lineage_come_back_in_recorded_order(build: Any, hashed: bool) -> None:
    calls = [build.tool(i, payload={"q": i % 2}, hashed=hashed) for i in range(4)]
    session = Session(calls)
    lives = [build.live(calls[i], None, hashed=hashed) for i in (1, 1, 0, 0)]
    assert [build.serve(session, live) for live in lives] == [
        (1, "digest"),
        (3, "digest"),
        (0, "digest"),
        (2, "digest"),
    ]


def test_a_shifted_program_falls_back_to_digest_and_occurrence(build: Any) -> None:
    """One more spawn in front moves every slot by one: equal calls must still come in their order."""
    calls = build.sequence({"q": 1}, {"q": 1}, {"q": 2})
    session = Session(calls)
    lives = [build.live(call, str(i + 1)) for i, call in enumerate(calls)]
    assert [build.serve(session, live) for live in lives] == [(0, "digest"), (1, "digest"), (2, "digest")]


def test_lineage_alone_does_not_match(build: Any) -> None:
    calls = build.sequence({"q": 1})
    miss = stop(Session(calls), build.live(calls[0], payload={"q": 2}), "input_differs")
    assert [(d.pointer, d.recorded, d.live) for d in miss.differences] == [("/q", 1, 2)]


def test_equal_hashes_of_other_tools_are_other_calls(build: Any) -> None:
    calls = build.sequence({"q": 1})
    stop(Session(calls), build.live(calls[0], name="other"), "not_recorded")


@pytest.mark.parametrize("field", ["provider", "model"])
def test_another_provider_or_model_is_another_llm_call(build: Any, field: str) -> None:
    calls = [build.llm(0, {"messages": []}, lineage="0")]
    miss = stop(Session(calls), build.live(calls[0], **{field: "other"}), "not_recorded")
    assert "here it has LLM openai/m chat.completions.create" in miss.summary


def test_equal_by_value_is_served_and_reported(build: Any) -> None:
    calls = build.sequence({"t": 1}, {"t": 2})
    session = Session(calls)
    assert build.serve(session, build.live(calls[0], payload={"t": 1.0})) == (0, "lineage")
    assert build.serve(session, build.live(calls[1])) == (1, "lineage")
    made = report(session)
    assert (made.respelled, made.exit_code) == (1, 0)
    assert "equal by value though their hashes differ" in made.text()


def test_redacted_places_match_on_the_last_rung(build: Any) -> None:
    calls = build.sequence({"key": "[REDACTED]", "q": 1}, {"key": "[REDACTED]", "q": 2})
    session = Session(calls)
    assert build.serve(session, build.live(calls[0], payload={"key": "abc", "q": 1})) == (0, "redacted")
    assert build.serve(session, build.live(calls[1], None, payload={"key": "def", "q": 2})) == (1, "redacted")
    made = report(session)
    assert (dict(made.matched), made.exit_code) == ({"lineage": 0, "digest": 0, "redacted": 2}, 0)
    assert "any value was taken" in made.text()


def test_a_redacted_call_is_not_served_twice_either(build: Any) -> None:
    calls = build.sequence({"key": "[REDACTED]"}, {"q": 2})
    session = Session(calls)
    session.decide(build.live(calls[0], payload={"key": "abc"}))
    stop(session, build.live(calls[0], "1", payload={"key": "def"}), "already_used", ReplayExhaustedError)


def test_a_stricter_live_redaction_still_matches(build: Any) -> None:
    """The secret of this machine is redacted in the live payload; the recording, made elsewhere, shows the text."""

    def redact(value: Any) -> Any:
        return json.loads(json.dumps(value).replace("hunter2", "[REDACTED]"))

    calls = build.sequence({"text": "pw hunter2", "q": 1}, {"text": "pw hunter2", "q": 1})
    live = build.live(calls[0], payload={"text": "pw [REDACTED]", "q": 1})
    session = Session(calls, redact=redact)
    assert build.serve(session, live) == (0, "redacted")
    miss = stop(session, live._replace(payload={"text": "pw [REDACTED]", "q": 2}), "input_differs")
    assert [d.pointer for d in miss.differences] == ["/q"]
    assert "hunter2" not in miss.text() and "hunter2" not in json.dumps(miss.to_dict())
    stop(Session(calls), live, "input_differs")


def test_ignore_rules_apply_to_both_sides_and_are_reported(build: Any) -> None:
    calls = build.sequence({"at": "2026-01-01T10:00:00Z", "id": 7, "q": 1})
    live = build.live(calls[0], payload={"at": "2027-02-03T11:12:13Z", "id": 8, "q": 1})
    rules = ["/id", normalise_text(ISO_TIME, "<time>"), lambda kind, name, seen: seen if kind == "tool" else None]
    session = Session(calls, ignore=rules)
    assert build.serve(session, live) == (0, "lineage")
    made = report(session)
    assert made.ignored[0] == "/id"
    assert "left out of matching: /id, " in made.text()
    stop(Session(calls, ignore=rules), live._replace(payload={**live.payload, "q": 2}), "input_differs")


def test_a_rule_that_raises_stops_the_replay(build: Any) -> None:
    def broken(kind: str, name: str, seen: Any) -> Any:
        raise KeyError("messages")

    calls = build.sequence({"q": 1})
    session = Session(calls, ignore=[broken])
    stop(session, build.live(calls[0], payload={"q": 2}), "ignore_rule_failed", ReplayError)


def test_mapped_hosts(build: Any) -> None:
    calls = [
        build.http(0, "GET", "http://127.0.0.1:8001/x", lineage="0"),
        build.llm(1, {"messages": []}, provider="127.0.0.1:8001", lineage="1"),
    ]
    here = build.http(0, "GET", "http://127.0.0.1:9002/x", lineage="0")
    session = Session(calls, map_hosts={"127.0.0.1:8001": "127.0.0.1:9002"})
    assert build.serve(session, build.live(here)) == (0, "lineage")
    assert build.serve(session, build.live(calls[1], provider="127.0.0.1:9002")) == (1, "lineage")
    miss = stop(Session(calls), build.live(here), "not_recorded")
    assert "--map-host 127.0.0.1:8001=127.0.0.1:9002" in miss.text()


# --- once, and in order -----------------------------------------------------------------------------------------------


def test_nothing_is_served_twice(build: Any) -> None:
    calls = build.sequence({"q": 1}, {"q": 1}, {"q": 2})
    session = Session(calls)
    for call in calls[:2]:
        session.decide(build.live(call))
    miss = stop(session, build.live(calls[0], "2"), "already_used", ReplayExhaustedError)
    assert "already used: recorded 2 times, asked for 3 times" in miss.summary
    assert miss.position == "call 3 of 3"
    assert report(session).exit_code == 1


def test_calls_inside_a_served_tool_are_skipped_with_it(build: Any) -> None:
    calls = [
        build.tool(0, "outer", lineage="0", span=(0, 9)),
        build.tool(1, "inner", lineage="0/0", span=(1, 4), parent=0),
        build.tool(2, "innermost", lineage="0/0/0", span=(2, 3), parent=1),
        build.tool(3, "later", lineage="1", span=(10, 11)),
    ]
    for order in ("causal", "strict", "any"):
        session = Session(calls, order=order)
        assert build.serve_all(session, [build.live(calls[0]), build.live(calls[3])]) == [0, 3]
        session.verify_complete()
        assert (report(session).skipped, report(session).served, report(session).exit_code) == (2, 2, 0)
        miss = stop(session, build.live(calls[1]), "already_used", ReplayExhaustedError)
        assert "recorded inside tool 'outer', which was served as a whole" in miss.text()


def test_calls_of_a_tool_that_is_not_traced_now_are_served_one_by_one(build: Any) -> None:
    calls = [
        build.tool(0, "outer", lineage="0", span=(0, 9)),
        build.tool(1, "inner", lineage="0/0", span=(1, 4), parent=0),
    ]
    session = Session(calls)
    assert build.serve(session, build.live(calls[1], "0")) == (1, "digest")
    assert [call.name for call in session.unused()] == ["outer"]


def test_strict_order_is_the_exact_sequence(build: Any) -> None:
    calls = [build.tool(i, name, lineage=f"t{i}/0", span=(i, 9)) for i, name in enumerate("abc")]
    session = Session(calls, order="strict")
    assert [build.serve(session, build.live(call)) for call in calls] == [(i, "lineage") for i in range(3)]
    for sequence in list(permutations(range(3)))[1:]:
        session = Session(calls, order="strict")
        with pytest.raises(ReplayMismatchError) as caught:
            build.serve_all(session, [build.live(calls[i]) for i in sequence])
        assert caught.value.code == "out_of_order"


def test_strict_order_compares_with_the_next_call(build: Any) -> None:
    calls = build.sequence({"q": 1}, {"q": 2})
    assert build.serve(Session(calls, order="strict"), build.live(calls[0], None)) == (0, "digest")
    miss = stop(Session(calls, order="strict"), build.live(calls[0], payload={"q": 3}), "input_differs")
    assert miss.nearest is calls[0]
    redacted = build.sequence({"q": "[REDACTED]"})
    assert build.serve(Session(redacted, order="strict"), build.live(redacted[0], payload={"q": 1})) == (0, "redacted")


def test_any_order_takes_any(build: Any) -> None:
    calls = build.sequence(*range(4))
    for sequence in permutations(range(4)):
        session = Session(calls, order="any")
        assert build.serve_all(session, [build.live(calls[i], None) for i in sequence]) == list(sequence)


def test_the_first_difference_is_reported_at_its_own_step(build: Any) -> None:
    calls = [build.tool(i, name, lineage=str(i)) for i, name in enumerate("abc")]
    session = Session(calls)
    session.decide(build.live(calls[0]))
    miss = stop(session, build.live(calls[2]), "out_of_order")
    assert miss.position == "call 2 of 3"
    assert miss.summary == (
        "tool 'c' was asked for before tool 'b', which had finished before it started in the recording"
    )
    assert 'order="any"' in miss.text()


# --- what may not be served -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["forbidden", "manual"])
def test_a_policy_that_forbids_stops(build: Any, policy: str) -> None:
    calls = [build.tool(0, policy=policy)]
    session = Session(calls)
    stop(session, build.live(calls[0]), policy, ReplayPolicyError)
    assert f"its replay policy: {policy}" in str(session.latched)
    assert report(session).exit_code == 1


@pytest.mark.parametrize("policy", ["frozen", "live", "derived"])
def test_frozen_mode_serves_what_other_modes_would_run(build: Any, policy: str) -> None:
    calls = [build.tool(0, policy=policy)]
    assert build.serve(Session(calls), build.live(calls[0])) == (0, "digest")


def test_a_cut_payload_is_refused_not_half_served(build: Any) -> None:
    calls = [build.tool(0, outcome=Outcome(status="ok", held="abc", truncated=True))]
    session = Session(calls)
    stop(session, build.live(calls[0]), "payload_truncated", ReplayPolicyError)
    assert "OTEL_SFTRACE_MAX_PAYLOAD_BYTES" in str(session.latched)


def test_a_recording_that_ends_inside_a_call(build: Any) -> None:
    calls = [build.tool(0, lineage="0"), build.tool(1, lineage="1", span=(8, None), outcome=Outcome(status="missing"))]
    session = Session(calls)
    session.decide(build.live(calls[0]))
    stop(session, build.live(calls[1]), "no_result", ReplayExhaustedError)
    assert report(session, expected=PARTIAL).exit_code == 4
    assert report(session, expected=DONE).exit_code == 1


def test_a_recorded_failure_is_served(build: Any) -> None:
    calls = [build.tool(0, outcome=Outcome(status="error", error_type="ValueError", error_message="no"))]
    decision = Session(calls).decide(build.live(calls[0]))
    assert decision.call is not None and decision.call.outcome.error_type == "ValueError"


# --- latching ---------------------------------------------------------------------------------------------------------


def test_a_reason_found_elsewhere_stops_the_replay_too(build: Any) -> None:
    calls = build.sequence(1)
    session = Session(calls)
    session.latch(ReplayPolicyError("connection to h.test:443", code="connection"))
    session.latch(ReplayMismatchError("a later one"))
    with pytest.raises(ReplayPolicyError, match=r"h\.test:443") as caught:
        session.decide(build.live(calls[0]))
    assert caught.value.code == "connection"
    with pytest.raises(ReplayPolicyError):
        session.verify_complete()
    assert report(session).to_dict()["diverged"]["reason"] == "connection"  # type: ignore[index,call-overload]


def test_the_latched_error_keeps_no_frame_of_the_program_alive(build: Any) -> None:
    class Big:
        pass

    session = Session([])

    def program() -> weakref.ref[Big]:
        big = Big()
        with pytest.raises(ReplayExhaustedError):
            session.decide(LiveCall("tool", "t"))
        return weakref.ref(big)

    kept = program()
    gc.collect()
    assert kept() is None
    assert session.latched is not None and session.latched.__traceback__ is None


def test_a_payload_that_cannot_be_matched_stops_with_a_replay_error(build: Any) -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    session = Session(build.sequence(1))
    with pytest.raises(ReplayMismatchError):
        session.decide(LiveCall("tool", "search", payload=deep))
    assert session.latched is not None


@pytest.mark.parametrize(
    "bad",
    [{"mode": "hybrid"}, {"order": "random"}, {"ignore": ["q"]}, {"ignore": [""]}, {"ignore": [3]}, {"ignore": "/q"}],
)
def test_what_does_not_exist_is_refused(bad: Any) -> None:
    with pytest.raises(SettingsError):
        Session([], **bad)


# --- what a miss says -------------------------------------------------------------------------------------------------


def test_the_three_causes_are_told_apart(build: Any) -> None:
    calls = build.sequence({"q": 1}, {"q": 2}, {"q": 3})

    def after_one(live: LiveCall, code: str, kind: type[ReplayError] = ReplayMismatchError) -> Any:
        session = Session(calls)
        session.decide(build.live(calls[0]))
        return stop(session, live, code, kind)

    assert (
        "'fetch' is not in the recording, whose tools are: search"
        in after_one(LiveCall("tool", "fetch"), "not_recorded").text()
    )
    assert (
        "recorded 1 time, asked for 2 times"
        in after_one(build.live(calls[0], "1"), "already_used", ReplayExhaustedError).text()
    )
    differs = after_one(build.live(calls[1], payload={"q": 9}), "input_differs")
    assert "at /q: recorded 2, live 9" in differs.text()
    assert "nearest recorded call: tool 'search', step 3, event evt_1, lineage 1" in differs.text()
    assert 'ignore=["/q"]' in differs.text()


def test_fingerprints_say_where_they_come_from(build: Any) -> None:
    live = LiveCall("tool", "search", payload={"q": 2}, lineage="0")
    stored = stop(Session(build.sequence({"q": 1})), live, "input_differs")
    bare = stop(Session(build.sequence({"q": 1}, hashed=False)), live, "input_differs")
    recorded, now = canonical.digest({"q": 1}), canonical.digest({"q": 2})
    assert f"fingerprints: recorded {recorded}, live {now} (computed)" in stored.text()
    assert f"fingerprints: recorded {recorded} (computed), live {now} (computed)" in bare.text()
    assert bare.to_dict()["fingerprints"]["recorded_computed"] is True


def test_the_nearest_call_is_the_one_with_fewest_differences(build: Any) -> None:
    calls = [build.tool(i, payload={"a": 1, "b": 2, "c": i, "d": [i] * 3}) for i in range(20)]
    miss = stop(
        Session(calls), LiveCall("tool", "search", payload={"a": 9, "b": 2, "c": 7, "d": [7] * 3}), "input_differs"
    )
    assert (miss.nearest.index, [d.pointer for d in miss.differences]) == (7, ["/a"])


def test_an_unknown_url_is_not_recorded_and_a_known_one_differs(build: Any) -> None:
    calls = [
        build.http(0, "GET", "http://h.test/x?a=1", lineage="0"),
        build.http(1, "GET", "http://h.test/y", lineage="1"),
    ]
    other = build.http(0, "GET", "http://h.test/z", lineage="0")
    assert (
        "GET http://h.test/z is not in the recording" in stop(Session(calls), build.live(other), "not_recorded").text()
    )
    near = build.http(0, "GET", "http://h.test/x?a=2", lineage="0")
    assert "at /query/a/0" in stop(Session(calls), build.live(near), "input_differs").text()


@pytest.mark.parametrize(
    ("recorded", "live", "advice"),
    [
        ("at 2026-01-01T10:00:00Z", "at 2026-01-01T10:00:01Z", "--normalize iso_time (normalize=['iso_time']"),
        ("2026-01-01T10:00:00 run 123e4567-e89b-12d3-a456-426614174000",
         "2026-01-02T10:00:00 run 223e4567-e89b-12d3-a456-426614174000",
         "--normalize iso_time --normalize uuid (normalize=['iso_time', 'uuid']"),
        ("in /tmp/ab1/x.txt", "in /tmp/cd2/x.txt", "--normalize path"),
        ("run 123e4567-e89b-12d3-a456-426614174000", "run 0", 'ignore=["/m"]'),
    ],
)  # fmt: skip
def test_the_miss_suggests_the_rule_that_helps(build: Any, recorded: str, live: str, advice: str) -> None:
    calls = build.sequence({"m": recorded})
    asked = build.live(calls[0], payload={"m": live})
    text = stop(Session(calls), asked, "input_differs").text()
    assert f"{advice}" in text
    helping: Any = {"normalize": ["iso_time", UUID, "path"]} if "--normalize" in advice else {"ignore": ["/m"]}
    assert build.serve(Session(calls, **helping), asked)[0] == 0


def test_a_rule_for_times_is_only_suggested_when_it_is_enough(build: Any) -> None:
    calls = build.sequence({"at": "2026-01-01", "q": 1})
    text = stop(Session(calls), build.live(calls[0], payload={"at": "2026-01-02", "q": 2}), "input_differs").text()
    assert "normalize" not in text
    assert 'ignore=["/at", "/q"]' in text


def test_long_values_are_cut_around_the_place_where_they_part(build: Any) -> None:
    prompt = "word " * 5000
    calls = build.sequence({"m": prompt + "alpha" + prompt})
    miss = stop(Session(calls), build.live(calls[0], payload={"m": prompt + "omega" + prompt}), "input_differs")
    assert "alpha" in miss.text() and "omega" in miss.text()
    assert len(miss.text()) < 1500
    assert len(json.dumps(miss.to_dict())) < 2500


def test_nothing_from_a_bundle_reaches_the_terminal_unescaped(build: Any) -> None:
    evil = "\x1b]0;x\x07\u202e\x9b31m\nnext: rm"
    calls = [build.tool(0, evil, payload={evil: evil, "q": [evil]}, lineage="0")]
    session = Session(calls)
    miss = stop(session, build.live(calls[0], payload={evil: evil, "q": [evil, evil + "2"]}), "input_differs")
    other = stop(Session(calls), LiveCall("tool", evil + "!", lineage="0"), "not_recorded")
    everything = (
        miss.text() + other.text() + report(session, expected=RunOutcome(status="failed", error_type=evil)).text()
    )
    assert all(char.isprintable() for char in everything.replace("\n", ""))
    assert "\\u001b" in everything
    assert not any(line.startswith("next: rm") for line in everything.split("\n"))


def test_many_differences_are_counted_not_listed(build: Any) -> None:
    calls = build.sequence({str(i): i for i in range(100)})
    miss = stop(Session(calls), build.live(calls[0], payload={str(i): -1 for i in range(100)}), "input_differs")
    assert (len(miss.differences), miss.more) == (50, 50)
    assert "and 94 more" in miss.text()


def test_a_recording_without_calls(build: Any) -> None:
    miss = stop(Session([]), LiveCall("tool", "t"), "recording_ended", ReplayExhaustedError)
    assert miss.position == "call 1, after all 0 recorded calls"


# --- the report -------------------------------------------------------------------------------------------------------


def test_exit_code_0_wants_everything_used_and_the_same_outcome(build: Any) -> None:
    calls = build.sequence({"q": 1}, {"q": 2})
    session = Session(calls)
    session.decide(build.live(calls[0]))
    made = report(session)
    assert (made.exit_code, [call["step"] for call in made.unused]) == (1, [3])
    assert "never reached: 1" in made.text() and "tool 'search', step 3" in made.text()
    with pytest.raises(ReplayMismatchError, match="the program ended without tool 'search'") as caught:
        session.verify_complete()
    assert isinstance(caught.value.miss, Miss) and caught.value.code == "unused_calls"
    session.decide(build.live(calls[1]))
    session.verify_complete()
    made = report(session)
    assert (made.exit_code, made.to_dict()["verdict"], made.served) == (0, "same", 2)
    assert "replay: same; 2 of 2 recorded calls used\n  served 2: 2 by lineage" in made.text()


def done(output: Any = None) -> RunOutcome:
    return RunOutcome(status="completed", output=output)


def failed(error_type: str, message: str | None = None) -> RunOutcome:
    return RunOutcome(status="failed", error_type=error_type, message=message)


@pytest.mark.parametrize(
    ("expected", "actual", "same"),
    [
        (done({"a": 1}), done({"a": 1.0}), True),
        (done({"a": "[REDACTED]"}), done({"a": 5}), True),
        (done({"a": 1}), done({"a": True}), False),
        (done(), done(5), True),
        (done(5), done(), False),
        (done(), failed("ValueError"), False),
        (failed("ValueError"), done(), False),
        (failed("a.b.E"), failed("E", "x"), True),
        (failed("ValueError"), failed("KeyError"), False),
        (PARTIAL, failed("E"), None),
    ],
)
def test_outcomes(expected: RunOutcome, actual: RunOutcome, same: bool | None) -> None:
    made = report(Session([]), actual, expected)
    assert (made.same_outcome, made.exit_code) == (same, 1 if same is False else 0)
    assert ("outcome: recorded" in made.text()) == (same is False)


def test_exit_code_4_is_the_clean_end_of_a_prefix(build: Any) -> None:
    calls = build.sequence({"q": 1}, {"q": 2})

    def ended(*used: int, live: LiveCall, kind: type[ReplayError], code: str) -> tuple[int, int]:
        session = Session(calls)
        for index in used:
            session.decide(build.live(calls[index]))
        stop(session, live, code, kind)
        failed = RunOutcome(status="failed", error_type=kind.__name__)
        return report(session, failed, PARTIAL).exit_code, report(session, failed, DONE).exit_code

    more = LiveCall("tool", "next", lineage="2")
    again = build.live(calls[0], "2")
    assert ended(0, 1, live=more, kind=ReplayExhaustedError, code="recording_ended") == (4, 1)
    assert ended(0, 1, live=again, kind=ReplayExhaustedError, code="already_used") == (4, 1)
    assert ended(0, live=more, kind=ReplayMismatchError, code="not_recorded") == (1, 1)
    assert ended(0, live=again, kind=ReplayExhaustedError, code="already_used") == (1, 1)


def test_a_prefix_that_the_program_does_not_outrun_is_the_same(build: Any) -> None:
    calls = build.sequence({"q": 1})
    session = Session(calls)
    session.decide(build.live(calls[0]))
    assert report(session, DONE, PARTIAL).exit_code == 0


def test_the_report_holds_the_miss(build: Any) -> None:
    session = Session(build.sequence({"q": 1}))
    stop(session, LiveCall("tool", "search", payload={"q": 2}, lineage="0"), "input_differs")
    made = report(session).to_dict()
    assert made["diverged"]["miss"]["differences"] == [{"pointer": "/q", "recorded": "1", "live": "2"}]  # type: ignore[index,call-overload]
    assert made["diverged"]["miss"]["nearest"]["title"] == "tool 'search'"  # type: ignore[index,call-overload]
    assert "at /q: recorded 1, live 2" in report(session).text()


def test_redaction_of_the_recorded_side_hides_no_difference(build: Any) -> None:
    """What the live policy would redact in the recording is no wildcard: the live value there is another."""

    def redact(value: Any) -> Any:
        return {**value, "token": "[REDACTED]"} if "token" in value else value

    calls = build.sequence({"token": "plain", "q": 1})
    miss = stop(Session(calls, redact=redact), build.live(calls[0], payload={"token": 5, "q": 1}), "input_differs")
    assert [(d.pointer, d.recorded, d.live) for d in miss.differences] == [("/token", "[REDACTED]", 5)]
    assert "plain" not in miss.text()
    same = build.live(calls[0], payload={"token": "[REDACTED]", "q": 1})
    assert build.serve(Session(calls, redact=redact), same) == (0, "redacted")
