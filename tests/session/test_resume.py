# SPDX-License-Identifier: Apache-2.0
"""Resume mode of the session alone: inside the prefix and past it, policies, stubs, reuse, redacted values."""

from __future__ import annotations

from typing import Any

import pytest

from sftrace_otel.core.plan import Outcome
from sftrace_otel.core.resume import Policies, Policy, Stub, carried
from sftrace_otel.core.session import RunOutcome, Session
from sftrace_otel.errors import ReplayMismatchError, ReplayPolicyError, SettingsError

DONE = RunOutcome(status="completed")
CUT = RunOutcome(status="partial")
LIVE = Policies(["tool:*=live", "http:*=live"])
OPEN = Outcome(status="missing")


def resuming(calls: Any, policies: Any = LIVE, **more: Any) -> Session:
    return Session(calls, mode="resume", policies=policies, **more)


def place(decision: Any) -> tuple[str, int | None, str | None]:
    return decision.action, None if decision.call is None else decision.call.index, decision.rung


def told(session: Session, outcome: RunOutcome = DONE) -> Any:
    return session.report(outcome=outcome, expected=CUT)


def new(build: Any, lineage: str | None, payload: Any = "new", **more: Any) -> Any:
    return build.live(build.tool(99, payload=payload), lineage=lineage, **more)


# --- inside and past --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["causal", "strict", "any"])
def test_the_prefix_is_served_and_what_comes_after_it_goes_out(build: Any, order: str) -> None:
    calls = build.sequence("a", "b")
    session = resuming(calls, order=order)
    assert [place(session.decide(build.live(call)))[0] for call in calls] == ["serve", "serve"]
    assert place(session.decide(new(build, "2"))) == ("live", None, None)
    assert place(session.decide(build.live(calls[0], lineage="3"))) == ("live", None, None), "once more is not served"
    report = told(session)
    assert (report.served, report.live, report.exit_code) == (2, 2, 0)
    assert session.went_live == new(build, "2")
    assert report.text().splitlines()[0] == "replay: resumed; 2 of 2 recorded calls used"


@pytest.mark.parametrize(
    ("order", "at"), [(order, at) for order in ("causal", "strict", "any") for at in ("0", "1", "2")]
)
def test_another_call_before_the_end_of_the_prefix_diverges(build: Any, order: str, at: str) -> None:
    calls = build.sequence("a", "b", "c")
    session = resuming(calls, order=order)
    for call in calls[: int(at)]:
        session.decide(build.live(call))
    with pytest.raises(ReplayMismatchError) as caught:
        session.decide(new(build, at))
    assert caught.value.code == "input_differs"
    report = told(session)
    assert (report.exit_code, report.live, report.to_dict()["verdict"]) == (1, 0, "diverged")


def test_a_call_that_skips_the_rest_of_the_prefix_diverges(build: Any) -> None:
    session = resuming(build.sequence("a", "b"))
    with pytest.raises(ReplayMismatchError):
        session.decide(new(build, "5"))


def test_what_was_recorded_at_another_time_stays_out_of_order(build: Any) -> None:
    calls = build.sequence("a", "b")
    with pytest.raises(ReplayMismatchError) as caught:
        resuming(calls).decide(build.live(calls[1]))
    assert caught.value.code == "out_of_order"


def test_a_task_may_be_past_the_end_while_another_is_not(build: Any) -> None:
    calls = [
        build.tool(0, payload="a", lineage="t0/0"),
        build.tool(1, payload="b", lineage="t1/0"),
        build.tool(2, payload="c", lineage="t1/1"),
    ]
    session = resuming(calls)
    session.decide(build.live(calls[0]))
    assert place(session.decide(new(build, "t0/1"))) == ("live", None, None)
    assert place(session.decide(build.live(calls[1]))) == ("serve", 1, "lineage")
    with pytest.raises(ReplayMismatchError):
        session.decide(new(build, "t1/1"))


def test_a_task_waits_for_what_came_before_its_spawn(build: Any) -> None:
    calls = [build.tool(0, payload="a", lineage="0"), build.tool(1, payload="b", lineage="t1/0")]
    session = resuming(calls)
    with pytest.raises(ReplayMismatchError):
        session.decide(new(build, "t2/0"))


def test_what_came_after_a_spawn_does_not_hold_the_task_up(build: Any) -> None:
    calls = [build.tool(0, payload="b", lineage="t0/0"), build.tool(1, payload="a", lineage="1")]
    session = resuming(calls)
    session.decide(build.live(calls[0]))
    assert place(session.decide(new(build, "t0/1"))) == ("live", None, None)
    assert place(session.decide(build.live(calls[1]))) == ("serve", 1, "lineage")


def test_without_lineage_all_that_had_ended_comes_first(build: Any) -> None:
    calls = [build.tool(0, payload="a"), build.tool(1, payload="b", span=(10, None), outcome=OPEN)]
    session = resuming(calls)
    with pytest.raises(ReplayMismatchError):
        session.decide(new(build, None))
    session = resuming(calls)
    session.decide(build.live(calls[0]))
    assert place(session.decide(new(build, None))) == ("live", None, None)
    assert place(session.decide(build.live(calls[1]))) == ("live", 1, None)


def test_equal_calls_in_flight_at_the_end_each_keep_their_place(build: Any) -> None:
    """Both had begun when the recording was cut; one had its answer."""
    calls = [
        build.tool(0, payload="same", lineage="t0/0", span=(0, None), outcome=OPEN),
        build.tool(1, payload="same", lineage="t1/0", span=(0, 5)),
    ]
    session = resuming(calls)
    assert place(session.decide(build.live(calls[0]))) == ("live", 0, None)
    assert place(session.decide(build.live(calls[1]))) == ("serve", 1, "lineage")
    report = told(session)
    assert (report.exit_code, report.replaced, report.unused) == (0, 1, ())


def test_what_an_open_call_had_done_is_served_inside_it(build: Any) -> None:
    calls = [
        build.tool(0, "outer", payload="o", lineage="0", span=(0, None), outcome=OPEN),
        build.tool(1, payload="i", lineage="0/0", span=(1, 2), parent=0),
    ]
    session = resuming(calls)
    assert place(session.decide(build.live(calls[0]))) == ("live", 0, None)
    assert place(session.decide(build.live(calls[1]), inside_live=True)) == ("serve", 1, "lineage")
    assert place(session.decide(new(build, "0/1"), inside_live=True)) == ("live", None, None)


def test_a_recorded_call_that_is_never_made_is_a_divergence(build: Any) -> None:
    calls = [build.tool(0, payload="a", lineage="t0/0"), build.tool(1, payload="b", lineage="t1/0")]
    session = resuming(calls)
    session.decide(build.live(calls[0]))
    session.decide(new(build, "t0/1"))
    report = told(session)
    assert (report.exit_code, len(report.unused)) == (1, 1)
    assert report.text().startswith("replay: diverged")


@pytest.mark.parametrize("policy", ["forbidden", "manual"])
def test_the_policy_of_a_recorded_call_holds_for_an_open_one(build: Any, policy: str) -> None:
    calls = [build.tool(0, payload="a", lineage="0", span=(0, None), outcome=OPEN, policy=policy)]
    with pytest.raises(ReplayPolicyError) as caught:
        resuming(calls).decide(build.live(calls[0]))
    assert caught.value.code == policy


def test_a_resumed_run_that_fails_exits_with_1(build: Any) -> None:
    session = resuming([])
    session.decide(new(build, "0"))
    report = told(session, RunOutcome(status="failed", error_type="E", message="no"))
    assert (report.exit_code, report.to_dict()["verdict"]) == (1, "resumed, and failed")
    assert "outcome: failed with E: no" in report.text()


def test_a_whole_recording_that_needs_nothing_more_is_compared(build: Any) -> None:
    calls = build.sequence("a")
    session = resuming(calls)
    session.decide(build.live(calls[0]))
    ended = RunOutcome(status="completed", output=1)
    assert session.report(outcome=ended, expected=ended).exit_code == 0
    assert session.report(outcome=DONE, expected=ended).exit_code == 1
    session.decide(new(build, "1"))
    assert session.report(outcome=DONE, expected=ended).exit_code == 0


# --- policies ---------------------------------------------------------------------------------------------------------


def calls_of_each_kind(build: Any) -> dict[str, Any]:
    return {
        "tool": build.live(build.tool(0, "refund", "x"), lineage="0"),
        "llm": build.live(build.llm(0, {"q": 1}), lineage="0"),
        "http": build.live(build.http(0, "POST", "http://h.test:81/pay?x=1"), lineage="0"),
    }


def test_llm_calls_go_out_and_the_rest_is_blocked_unless_something_else_is_said(build: Any) -> None:
    for kind, live in calls_of_each_kind(build).items():
        session = resuming([], None)
        if kind == "llm":
            assert session.decide(live).action == "live"
            continue
        with pytest.raises(ReplayPolicyError) as caught:
            session.decide(live)
        assert caught.value.code == "blocked"
        assert "its policy is block (the default)" in str(caught.value)
        with pytest.raises(ReplayPolicyError):
            session.decide(calls_of_each_kind(build)["llm"])
        report = told(session)
        assert (report.exit_code, report.live) == (4, 0)
        assert report.to_dict()["verdict"] == "blocked"
        assert report.to_dict()["blocked"] == {"tool": "tool 'refund'", "http": "POST http://h.test:81/pay"}[kind]


@pytest.mark.parametrize(
    ("policies", "actions"),
    [
        (["tool:refund=live"], ("live", "live", "block")),
        (["tool:*=live", "tool:refund=block"], ("block", "live", "block")),
        (["tool:refund=block", "tool:*=live"], ("live", "live", "block")),
        (["llm:*=block"], ("block", "block", "block")),
        (["llm:openai/*=stub"], ("block", "stub", "block")),
        (["llm:other/m=block"], ("block", "live", "block")),
        (["http:h.test=live"], ("block", "live", "live")),
        (["http:h.test:81=live"], ("block", "live", "live")),
        (["http:h.test:80=live"], ("block", "live", "block")),
        (["http:POST http://h.test:81/p*=ask"], ("block", "live", "ask")),
        (["http:GET *=live"], ("block", "live", "block")),
        ({"tool:refund": "live", "http:*": Stub({"ok": True})}, ("live", "live", "stub")),
    ],
)
def test_the_last_policy_that_fits_counts(build: Any, policies: Any, actions: tuple[str, ...]) -> None:
    found = Policies(policies)
    assert tuple(found.of(live).action for live in calls_of_each_kind(build).values()) == actions


def test_the_options_of_other_modes_are_policies_too(build: Any) -> None:
    found = Policies(["tool:b=block"], ["a", "b", "http POST http://h.test:81/pay"], ["openai/m"])
    assert found.described() == [
        "tool:a=live", "tool:b=live", "http:POST http://h.test:81/pay=live", "llm:openai/m=live", "tool:b=block",
    ]  # fmt: skip
    assert found.of(calls_of_each_kind(build)["http"]).action == "live"


def test_an_exchange_inside_a_live_tool_goes_out_unless_its_host_is_blocked(build: Any) -> None:
    live = calls_of_each_kind(build)["http"]
    assert resuming([], None).decide(live, inside_live=True).action == "live"
    with pytest.raises(ReplayPolicyError):
        resuming([], Policies(["http:*=block"])).decide(live, inside_live=True)
    with pytest.raises(ReplayPolicyError):
        resuming([], None).decide(calls_of_each_kind(build)["tool"], inside_live=True)


@pytest.mark.parametrize("said", [True, False, None])
def test_ask_asks_and_is_block_where_nobody_answers(build: Any, said: bool | None) -> None:
    heard = []

    def ask(live: Any) -> bool:
        heard.append(live.name)
        return bool(said)

    session = resuming([], Policies(["tool:*=ask"]), ask=None if said is None else ask)
    live = calls_of_each_kind(build)["tool"]
    if said:
        assert session.decide(live).action == "live"
    else:
        with pytest.raises(ReplayPolicyError, match="nobody let it go"):
            session.decide(live)
    assert heard == ([] if said is None else ["refund"])


# --- stubs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "kind", "output"),
    [
        ("tool:*=stub", "tool", None),
        ('tool:*=stub:{"sent": true}', "tool", {"sent": True}),
        ("tool:*=stub:null", "tool", None),
        ("http:*=stub", "http", {"status_code": 204, "headers": [], "body": None}),
        ('http:*=stub:{"a": 1}', "http",
         {"status_code": 200, "headers": [["content-type", "application/json"]], "body": {"a": 1}}),
        ('http:*=stub:{"status_code": 500}', "http", {"status_code": 500, "headers": [], "body": None}),
        ('llm:*=stub:{"whole": "answer"}', "llm", {"whole": "answer"}),
    ],
)  # fmt: skip
def test_a_stub_answers(build: Any, policy: str, kind: str, output: Any) -> None:
    session = resuming([], Policies([policy]))
    decision = session.decide(calls_of_each_kind(build)[kind])
    assert (decision.action, decision.rung) == ("serve", "stub")
    assert decision.call is not None and decision.call.outcome.output == output
    report = told(session)
    assert (report.live, sum(report.stubbed.values()), report.exit_code) == (0, 1, 0)
    assert "answered by a stub 1" in report.text()
    assert report.to_dict()["stubbed"] == 1


@pytest.mark.parametrize(("text", "says"), [("", ""), (':"yes"', "yes")])
def test_a_stub_of_a_model_says_a_text(build: Any, text: str, says: str) -> None:
    session = resuming([], Policies([f"llm:*=stub{text}"]))
    call = session.decide(calls_of_each_kind(build)["llm"]).call
    assert call is not None
    output: Any = call.outcome.output
    assert output["choices"][0]["message"] == {"role": "assistant", "content": says}


def test_a_model_without_a_neutral_answer_needs_one(build: Any) -> None:
    live = build.live(build.llm(0, {"q": 1}), lineage="0", method="embeddings.create")
    with pytest.raises(ReplayPolicyError, match="whole answer"):
        resuming([], Policies(["llm:*=stub"])).decide(live)


@pytest.mark.parametrize(
    "text", ["", "tool", "tool:x", "tool:=live", "tool:x=", "tool:x=Live", "tools:x=live", "tool:x=live:1",
             "tool:x=stub:", "tool:x=stub:{"]
)  # fmt: skip
def test_a_policy_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(SettingsError):
        Policy.read(text)


# --- reuse ------------------------------------------------------------------------------------------------------------


def test_a_call_of_the_parent_with_the_same_input_answers_once(build: Any) -> None:
    parent = build.sequence("a", "b", "b", "c")
    session = resuming(parent[:1], None, reuse=parent[1:])
    session.decide(build.live(parent[0]))
    assert place(session.decide(build.live(parent[2], lineage="1"))) == ("serve", 1, "reused")
    assert place(session.decide(build.live(parent[2], lineage="4"))) == ("serve", 2, "reused")
    with pytest.raises(ReplayPolicyError):
        session.decide(build.live(parent[2], lineage="5"))
    assert told(session).reused == 2


def test_of_equal_calls_of_the_parent_the_one_at_the_same_place_answers(build: Any) -> None:
    parent = [build.tool(0, payload="b", lineage="t0/0"), build.tool(1, payload="b", lineage="t1/0")]
    session = resuming([], None, reuse=parent)
    assert place(session.decide(build.live(parent[1]))) == ("serve", 1, "reused")
    assert place(session.decide(build.live(parent[0]))) == ("serve", 0, "reused")


def test_another_input_or_a_redacted_one_is_not_reused(build: Any) -> None:
    parent = [build.tool(0, payload="b", lineage="0"), build.tool(1, payload="[REDACTED]", lineage="1")]
    session = resuming([], LIVE, reuse=parent)
    assert session.decide(new(build, "0", "other")).action == "live"
    assert session.decide(new(build, "1", "secret")).action == "live"


@pytest.mark.parametrize(
    "more",
    [{"policy": "forbidden"}, {"policy": "manual"}, {"outcome": OPEN},
     {"outcome": Outcome(status="ok", held=1, truncated=True)}],
)  # fmt: skip
def test_what_cannot_be_served_is_not_reused(build: Any, more: Any) -> None:
    parent = [build.tool(0, payload="b", lineage="0", **more)]
    assert resuming([], LIVE, reuse=parent).decide(build.live(parent[0])).action == "live"


def test_what_a_reused_call_enclosed_is_used_with_it(build: Any) -> None:
    parent = [
        build.tool(4, "outer", payload="o", lineage="4"),
        build.tool(5, payload="i", lineage="4/0", parent=4),
    ]
    session = resuming([], None, reuse=parent)
    assert place(session.decide(build.live(parent[0]))) == ("serve", 4, "reused")
    with pytest.raises(ReplayPolicyError):
        session.decide(build.live(parent[1], lineage="5"))


# --- redacted values --------------------------------------------------------------------------------------------------

MARK = "[REDACTED]"


def test_a_tool_or_exchange_with_a_placeholder_stops_and_a_model_is_asked(build: Any) -> None:
    tool = new(build, "0", {"card": MARK})
    with pytest.raises(ReplayPolicyError) as caught:
        resuming([]).decide(tool)
    assert caught.value.code == "redacted_input"
    exchange = build.live(build.http(0, "POST", "http://h.test/x", body={"to": MARK}), lineage="0")
    with pytest.raises(ReplayPolicyError):
        resuming([]).decide(exchange)
    llm = build.live(build.llm(0, {"messages": [{"content": f"pay {MARK} or {MARK}"}]}), lineage="0")
    session = resuming([], allow_redacted=True)
    assert session.decide(llm).action == "live"
    assert session.decide(tool).action == "live"
    report = told(session)
    assert report.carried == report.to_dict()["redacted_sent"] == 3
    assert "placeholders of redacted values that went out: 3" in report.text()


def test_a_stub_takes_a_placeholder(build: Any) -> None:
    session = resuming([], Policies(["tool:*=stub"]))
    assert session.decide(new(build, "0", {"card": MARK})).rung == "stub"


def test_what_our_own_redaction_took_out_just_now_goes_out_whole(build: Any) -> None:
    assert carried({"a": MARK, "b": [f"x {MARK}"], "c/d": MARK}, []) == 3
    assert carried({"a": MARK, "b": [f"x {MARK}"], "c/d": MARK}, ["/a", "/b", "/c~1d"]) == 0
    assert carried({"ab": MARK}, ["/a"]) == 1
    assert carried({"headers": [["authorization", MARK]], "url": "http://h.test/%5BREDACTED%5D"}, []) == 1
    session = resuming([])
    assert session.decide(new(build, "0", {"card": MARK}), redacted=["/card"]).action == "live"
    assert told(session).carried == 0


@pytest.mark.parametrize("text", ["tool:mail=stub:{hunter2", "tool:mail=live:hunter2", "mail=stub:hunter2"])
def test_a_refused_policy_shows_no_answer(text: str) -> None:
    with pytest.raises(SettingsError) as refused:
        Policy.read(text)
    assert "hunter2" not in str(refused.value)
    assert "mail" in str(refused.value)
