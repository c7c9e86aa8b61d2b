# SPDX-License-Identifier: Apache-2.0
"""Views, digests and differences: what makes two calls the same."""

from __future__ import annotations

import base64
import copy
import json
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sftrace_otel.core import match
from sftrace_otel.core.match import MISSING, Difference
from sftrace_otel.errors import CanonicalizationError

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(2**53 - 4, 2**53 + 4)
    | st.floats()
    | st.text(st.characters())
    | st.sampled_from(["[REDACTED]", "a[REDACTED]b"])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def http(url: str, *, method: str = "GET", headers: Any = (), body: Any = None) -> Any:
    return match.view("http", {"method": method, "url": url, "headers": [list(p) for p in headers], "body": body})


# --- URLs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://h.test/q?a=1&b=2&b=3", "http://h.test/q?b=2&a=1&b=3"),
        ("http://h.test/caf%C3%A9?q=a%20b", "http://h.test/caf%c3%a9?q=a+b"),
        ("http://h.test/café", "http://h.test/caf%C3%A9"),
        ("HTTP://H.test:80/x", "http://h.test/x"),
        ("https://h.test:443", "https://h.test/"),
        ("http://h.test/%7Ekim", "http://h.test/~kim"),
        ("http://kim:pw@h.test/x", "http://h.test/x"),
        ("http://[REDACTED]@h.test/x", "http://h.test/x"),
        ("http://[::1]:80/x#top", "http://[::1]/x"),
        ("http://h.test/?q=%5BREDACTED%5D", "http://h.test/?q=[REDACTED]"),
        ("http://h.test/x?", "http://h.test/x"),
    ],
)
def test_urls_that_mean_the_same(one: str, other: str) -> None:
    assert match.digest(http(one)) == match.digest(http(other))
    assert match.differences(http(one), http(other)) == []


@pytest.mark.parametrize(
    ("one", "other", "pointer"),
    [
        ("http://h.test/q?b=2&b=3", "http://h.test/q?b=3&b=2", "/query/b/0"),
        ("http://h.test/a%2Fb", "http://h.test/a/b", "/url"),
        ("http://h.test/a+b", "http://h.test/a%20b", "/url"),
        ("http://h.test:81/x", "http://h.test/x", "/url"),
        ("http://h.test/x", "https://h.test/x", "/url"),
        ("http://h.test/X", "http://h.test/x", "/url"),
        ("http://h.test/?a", "http://h.test/?a=", "/query/a/0"),
        ("http://h.test/?a=%FF", "http://h.test/?a=%25FF", "/query/a/0"),
    ],
)
def test_urls_that_differ(one: str, other: str, pointer: str) -> None:
    assert match.digest(http(one)) != match.digest(http(other))
    assert match.differences(http(one), http(other))[0].pointer == pointer


def test_mapped_hosts_are_read_as_the_recorded_ones() -> None:
    hosts = {"127.0.0.1:9002": "127.0.0.1:8001", "http://localhost:1": "https://api.test", "box": "h.test"}

    def url(text: str) -> Any:
        return match.view("http", {"url": text}, hosts=hosts)["url"]  # type: ignore[index,call-overload]

    assert url("http://127.0.0.1:9002/v1") == "http://127.0.0.1:8001/v1"
    assert url("http://localhost:1/v1") == "https://api.test/v1"
    assert url("http://box:77/v1") == "http://h.test:77/v1"
    assert url("http://127.0.0.1:9003/v1") == "http://127.0.0.1:9003/v1"


# --- headers and bodies -----------------------------------------------------------------------------------------------


def test_headers_that_change_per_run_take_no_part() -> None:
    recorded = [
        ("Accept", "application/json"),
        ("User-Agent", "x/1"),
        ("X-Stainless-Retry-Count", "0"),
        ("Cookie", "a"),
    ]
    live = [
        ("accept", "application/json"),
        ("user-agent", "x/2"),
        ("traceparent", "00-a-b-01"),
        ("accept-encoding", "br"),
    ]
    assert http("http://h.test/", headers=recorded) == http("http://h.test/", headers=live)


def test_other_headers_do_and_repeats_keep_their_order() -> None:
    one, other = (http("http://h.test/", headers=[("x-a", v), ("x-b", "9"), ("x-a", w)]) for v, w in ("12", "21"))
    assert [item.pointer for item in match.differences(one, other)] == ["/headers/x-a/0", "/headers/x-a/1"]


def test_content_type_counts_without_its_parameters() -> None:
    one = http("http://h.test/", headers=[("content-type", "application/json")])
    assert one == http("http://h.test/", headers=[("Content-Type", "Application/JSON; charset=utf-8")])
    assert one != http("http://h.test/", headers=[("content-type", "text/plain")])


def multipart(boundary: str, *parts: tuple[str, str | None, bytes]) -> Any:
    raw = b""
    for name, filename, content in parts:
        named = f'; filename="{filename}"' if filename else ""
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{named}\r\n'
        raw += head.encode() + b"Content-Type: application/octet-stream\r\n\r\n" + content + b"\r\n"
    raw += f"--{boundary}--\r\n".encode()
    try:
        body: Any = raw.decode()
    except UnicodeDecodeError:
        body = {"base64": base64.b64encode(raw).decode()}
    return http("http://h.test/", headers=[("content-type", f"multipart/form-data; boundary={boundary}")], body=body)


def test_multipart_bodies_compare_by_part() -> None:
    tricky = ("f", "a.bin", b"\x00\xff--bbbb")
    assert multipart("aaaa", tricky, ("n", None, b"1")) == multipart('"bbbb"'.strip('"'), tricky, ("n", None, b"1"))
    assert multipart("a", ("n", None, b"1"), ("m", None, b"2")) == multipart("a", ("m", None, b"2"), ("n", None, b"1"))
    found = match.differences(multipart("a", ("f", "x", b"one")), multipart("b", ("f", "x", b"two")))
    assert found == [Difference("/body/multipart/f/0/content", "one", "two")]
    renamed = match.differences(multipart("a", ("f", "x", b"one")), multipart("b", ("f", "y", b"one")))
    assert [item.pointer for item in renamed] == ["/body/multipart/f/0/filename"]


@pytest.mark.parametrize(
    "body", ["no boundary here", "--aaaa\r\n\r\nnever ends", {"base64": "not base64!"}, None, {"json": 1}, ["x"]]
)
def test_a_body_that_is_no_multipart_is_compared_as_it_is(body: Any) -> None:
    seen = http("http://h.test/", headers=[("content-type", "multipart/form-data; boundary=aaaa")], body=body)
    assert seen["body"] == body


def test_form_bodies_compare_like_queries() -> None:
    headers = [("content-type", "application/x-www-form-urlencoded")]
    one, other = (http("http://h.test/", headers=headers, body=body) for body in ("a=x+y&b=2", "b=2&a=x%20y"))
    assert one == other


def test_trace_context_in_meta_takes_no_part() -> None:
    plain = {"name": "t", "arguments": {"q": 1}}
    traced = {**plain, "_meta": {"traceparent": "00-1", "tracestate": "x"}}
    kept = {**plain, "_meta": {"traceparent": "00-1", "team": "red"}}
    assert match.view("tool", traced) == plain
    assert match.view("tool", kept) == {**plain, "_meta": {"team": "red"}}
    assert match.view("tool", {"params": traced}) == {"params": plain}
    assert match.view("llm", {"method": "m", "request": traced}) == {"method": "m", "request": plain}


def test_extra_headers_of_an_llm_request_count_like_headers() -> None:
    def seen(headers: Any) -> Any:
        return match.view("llm", {"method": "m", "request": {"model": "x", "extra_headers": headers}})

    assert seen({"X-Request-Id": "1", "X-Team": "red"}) == seen({"x-team": "red"})
    assert seen({"x-team": "red"}) != seen({"x-team": "blue"})


@given(JSON, st.sampled_from(["tool", "llm", "http"]))
@example({"url": "http://h/?a=1", "headers": {"X-A": 1}, "body": "x"}, "http")
@example({"url": "http://h/", "headers": [["a"], 1, ["b", 2]], "method": None}, "http")
def test_a_view_never_changes_its_payload_and_never_raises(payload: Any, kind: str) -> None:
    before = copy.deepcopy(payload)
    match.view(kind, payload)
    assert repr(payload) == repr(before)


# --- digests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0), (0, -0.0), (10**20, 1e20), (-(2**63), -(2.0**63)), (math.nan, math.nan), ([2.5], [2.50]),
        ({"a": 1, "b": 2}, {"b": 2.0, "a": 1.0}), ("[REDACTED:0123456789abcdef]", "[REDACTED]"),
        ({"$redacted": "sensitive_key", "ref": "hmac-sha256:0123456789abcdef"}, "[REDACTED]"),
    ],
)  # fmt: skip
def test_equal_by_value(one: Any, other: Any) -> None:
    for a, b in ((one, other), ([one], [other]), ({"k": one}, {"k": other})):
        assert match.digest(a) == match.digest(b)
        assert match.differences(a, b) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (True, 1), (False, 0), (1, "1"), (None, False), (2**53, 2**53 + 1), (2.0**53, 2**53 + 1), ([1, 2], [2, 1]),
        ({"n": None}, {}), (math.nan, None), (math.inf, -math.inf), (math.nan, "NaN"), (10**400, 10**400 + 1),
        ("", None),
        ([], {}), ("\ud83d", "\\ud83d"), (2**64, hex(2**64)), ({"$redacted": 1}, {"$redacted": 2}), ({"1": 1}, [1]),
    ],
)  # fmt: skip
def test_different_by_value(one: Any, other: Any) -> None:
    for a, b in ((one, other), (other, one), ([one], [other]), ({"k": one}, {"k": other})):
        assert match.digest(a) != match.digest(b)
        assert match.differences(a, b) != []


@given(JSON)
def test_equal_digests_do_not_depend_on_spelling_or_key_order(value: Any) -> None:
    """Numbers by exact value, key order and spelling free: the same value built another way has the same digest."""
    assert match.digest(value) == match.digest(_respelled(value))
    assert match.digest(value) == match.digest(json.loads(json.dumps(value)))


def _respelled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _respelled(value[key]) for key in reversed(value)}
    if isinstance(value, list):
        return [_respelled(item) for item in value]
    if type(value) is int and abs(value) < 2**53:
        return float(value)
    return value


@given(JSON, JSON)
def test_digest_and_differences_agree(one: Any, other: Any) -> None:
    """Equal digests mean no difference; where nothing is redacted, no difference means equal digests."""
    if match.digest(one) == match.digest(other):
        assert match.equal_where_redacted(one, other)
    if match.equal_where_redacted(one, other) and not match.holds_redaction(one):
        assert match.digest(one) == match.digest(other)


@given(JSON)
def test_every_value_matches_itself(value: Any) -> None:
    assert match.equal_where_redacted(value, copy.deepcopy(value))


def test_what_is_not_json_is_refused() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, {1, 2}, object(), {1: 2, "a": 3}):
        with pytest.raises(CanonicalizationError):
            match.digest(value)


# --- differences ------------------------------------------------------------------------------------------------------


def test_pointers_are_escaped_and_both_values_shown() -> None:
    found = match.differences({"a/b": {"c~d": 1}, "gone": None}, {"a/b": {"c~d": 2}, "new": [3]})
    assert found == [
        Difference("/a~1b/c~0d", 1, 2),
        Difference("/gone", None, MISSING),
        Difference("/new", MISSING, [3]),
    ]


@pytest.mark.parametrize(
    ("recorded", "live", "found"),
    [
        ([1, 2, 3], [1, 9, 2, 3], [Difference("/1", MISSING, 9)]),
        ([1, 9, 2, 3], [1, 2, 3], [Difference("/1", 9, MISSING)]),
        ([1, 2], [1, 2, 3], [Difference("/2", MISSING, 3)]),
        ([1, 1, 1], [1, 1], [Difference("/2", 1, MISSING)]),
        ([1, 2, 3], [4, 3], [Difference("/0", 1, 4), Difference("/1", 2, MISSING)]),
        ([1, 2], [2, 1], [Difference("/0", 1, 2), Difference("/1", 2, 1)]),
        ([], [1], [Difference("/0", MISSING, 1)]),
    ],
)
def test_lists_are_aligned_at_both_ends(recorded: Any, live: Any, found: list[Difference]) -> None:
    assert match.differences(recorded, live) == found


@pytest.mark.parametrize(
    ("recorded", "live", "same"),
    [
        ("[REDACTED]", "anything", True),
        ("[REDACTED]", {"any": ["thing"]}, True),
        ("[REDACTED]", None, True),
        ("Bearer [REDACTED]", "Bearer abc", True),
        ("Bearer [REDACTED]", "Basic abc", False),
        ("a [REDACTED] b [REDACTED:0123456789abcdef] c", "a 1 b 2 c", True),
        ("a [REDACTED] b [REDACTED] c", "a 1 c", False),
        ("aa[REDACTED]aa", "aaa", False),
        ("[REDACTED] tail", "tail", False),
        ("x [REDACTED]", 1, False),
        ("abc", "[REDACTED]", False),
        ({"password": "[REDACTED]", "user": "kim"}, {"password": "x", "user": "lee"}, False),
        ({"password": "[REDACTED]"}, {}, False),
        ([1, "[REDACTED]", 3], [1, 2, 3], True),
    ],
)
def test_redacted_places_match_whatever_is_live(recorded: Any, live: Any, same: bool) -> None:
    assert match.equal_where_redacted(recorded, live) is same


def test_many_marks_in_a_long_string_stay_linear() -> None:
    recorded = "a[REDACTED]" * 20_000 + "b"
    assert match.equal_where_redacted(recorded, "aX" * 20_000 + "b")
    assert not match.equal_where_redacted(recorded, "aX" * 20_000 + "c")


# --- rules ------------------------------------------------------------------------------------------------------------


def test_pointers_leave_places_out() -> None:
    seen = {"messages": [{"content": "a", "role": "u"}, {"content": "b"}], "user": "kim", "a/b": {"c": 1, "d": 2}}

    def left(*rules: Any) -> Any:
        return match.apply_rules(rules, "tool", "t", seen)

    before = copy.deepcopy(seen)
    assert "user" not in left("/user")
    assert left("/messages/0/content")["messages"] == [{"role": "u"}, {"content": "b"}]
    assert left("/messages/*/content")["messages"] == [{"role": "u"}, {}]
    assert left("/messages/1")["messages"][1] is None
    assert left("/a~1b/c")["a/b"] == {"d": 2}
    assert left("/a~1b/*")["a/b"] == {}
    assert left("/nowhere/0", "/user/0", "/messages/x") == seen
    assert left(lambda kind, name, view: [kind, name, len(view)]) == ["tool", "t", 3]
    assert seen == before


def test_normalisers_rewrite_every_string() -> None:
    rule = match.normalise_text(match.ISO_TIME, "<time>")
    seen = {"a": ["Now: 2026-01-01T10:00:00Z", 1], "b": "on 2026-01-01 10:00:01.123+02:00", "c": "2026-01-01"}
    assert rule("tool", "t", seen) == {"a": ["Now: <time>", 1], "b": "on <time>", "c": "<time>"}
    assert match.UUID.sub("*", "run 123e4567-e89b-12d3-a456-426614174000!") == "run *!"


@given(JSON, JSON)
def test_the_cheap_test_of_equality_is_never_wrong(one: Any, other: Any) -> None:
    for candidate in (other, copy.deepcopy(one), _respelled(one), _confused(one)):
        if match.spelled_alike(one, candidate):
            assert match.digest(one) == match.digest(candidate)


def _confused(value: Any) -> Any:
    """`value` with what Python or orjson would take for equal: True for 1, null for NaN."""
    if isinstance(value, dict):
        return {key: _confused(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_confused(item) for item in value]
    if value != value:
        return None
    return {0: False, 1: True}.get(value, value) if isinstance(value, int) else value
