# SPDX-License-Identifier: Apache-2.0
"""Properties that hold for every value, with texts made of what the rules look for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from stepfork.trace.redaction import redact_json

from sftrace_otel.core.redact import RedactionPolicy
from sftrace_otel.core.redact.credentials import (
    BASIC,
    BEARER,
    GITHUB,
    JWT,
    PEM,
    REFERENCE,
    SK_KEY,
    USERINFO,
    VENDORS,
)

POLICY = RedactionPolicy.default({"MY_PASSWORD": "Tr0ub4dor&3-zebra", "OPENAI_API_KEY": "sk-proj-aaaabbbbccccdddd1111"})
REFERENCE_POLICY = RedactionPolicy.reference()
PIECES = [
    "Bearer ", "bearer\u00a0", "BEARER\u2003", "Authorization: ", "sk-", "sk-abcdefgh12345", "ghp_abcdefgh1234",
    "gho_12345678", "github_pat_abcdefgh", "[REDACTED]", "é", "ſ", "İ", "\u212a", "-", "_", "\\n", "\\u0073k-",
    "%20", "abcdefgh1234", "sig=", "password=", "\"", "'", "{", "}", "[", "]", ":", ",", "\"password\": \"x1\"",
    "://", "user:pa55word@host", "@", "=", "?key=", "&token=abc", " ", "\n", "eyJhbGciOiJub25lIn0.eyJzdWIi.abc",
    "eyJhbG.eyJzdWIi.abc", "AKIAABCDEFGHIJKLMNOP", "ASIA1234567890123456", "xoxb-1234567890", "npm_", "glpat-",
    "hooks.slack.com/services/T00/B00/", "SG.", "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----",
    "Basic dXNlcjpwYXNz", "Tr0ub4dor&3-zebra", "\\\"", "VHIwdWI0ZG9yJjMtemVicmE=", "token", "api_key", "--token ",
    "Cookie: a=b", "name", "value", "hf_abcdefghijklmnopqrst",
]  # fmt: skip
KEYS = [
    "password", "apiKey", "api-key", "token", "name", "value", "key", "headers", "properties", "default", "type",
    "logprob", "cookie", "db_password", "auth", "n",
]  # fmt: skip
texts = st.one_of(st.text(max_size=20), st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), texts)
values = st.recursive(
    scalars,
    lambda parts: st.one_of(
        st.lists(parts, max_size=4), st.dictionaries(st.one_of(texts, st.sampled_from(KEYS)), parts, max_size=4)
    ),
    max_leaves=10,
)
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
long = settings(quick, max_examples=5000)


@quick
@given(values)
def test_what_the_reference_would_redact_is_redacted(value: Any) -> None:
    redacted = POLICY.redact(value)[0]
    assert redact_json(redacted).findings == []


@quick
@given(values)
def test_redaction_is_stable(value: Any) -> None:
    redacted, findings = POLICY.redact(value)
    assert POLICY.redact(redacted) == (redacted, ())
    assert bool(findings) == (redacted != value)


@quick
@given(values)
def test_the_reference_policy_is_the_reference(value: Any) -> None:
    redacted, findings = REFERENCE_POLICY.redact(value)
    result = redact_json(value)
    assert redacted == result.value
    assert sorted(findings) == sorted((found.path, found.reason) for found in result.findings)


@quick
@given(texts)
def test_texts_documents_and_urls_are_stable(text: str) -> None:
    assert_stable(text)


def assert_stable(text: str) -> None:
    nested = json.dumps({"x": json.dumps({"y": text, "secret": text}), "password": text})
    for given_text in (text, json.dumps(text), nested, f"data: {nested}\n\n", f"a={text}&b=1"):
        redacted = POLICY.redact_text(given_text)[0]
        assert POLICY.redact_text(redacted) == (redacted, ())
        document = POLICY.redact_document(given_text)[0]
        assert POLICY.redact_document(document) == (document, False)
        url = POLICY.redact_url(f"https://h/p?{given_text}")
        assert POLICY.redact_url(url) == url
    assert set(json.loads(POLICY.redact_text(nested)[0])) == {"x", "password"}


@quick
@given(texts)
def test_the_gates_let_no_text_pass_that_a_rule_would_change(text: str) -> None:
    assert_gates_are_certain(text)


def assert_gates_are_certain(text: str) -> None:
    if not POLICY._texts.suspicious([text]):
        rules = (PEM, USERINFO, BEARER, BASIC, SK_KEY, GITHUB, JWT, VENDORS, *REFERENCE, POLICY._texts._known_rule)
        for rule in (*rules, POLICY._texts._query, POLICY._texts._assigned, POLICY._texts._base64):
            assert rule.apply(text) == text


@quick
@given(st.lists(texts, max_size=6))
def test_texts_judged_together_are_judged_as_alone(several: list[str]) -> None:
    alone = [text for text in several if POLICY._texts.suspicious([text])]
    assert POLICY._texts.suspicious(several) or not alone


@quick
@given(values)
def test_a_value_does_not_change_while_it_is_redacted(value: Any) -> None:
    before = json.dumps(value)
    POLICY.redact(value)
    assert json.dumps(value) == before


@pytest.mark.full
@long
@given(values)
def test_values_for_long(value: Any) -> None:
    redacted, findings = POLICY.redact(value)
    assert redact_json(redacted).findings == []
    assert POLICY.redact(redacted) == (redacted, ())
    assert bool(findings) == (redacted != value)
    assert REFERENCE_POLICY.redact(value)[0] == redact_json(value).value


@pytest.mark.full
@long
@given(texts)
def test_texts_for_long(text: str) -> None:
    assert_gates_are_certain(text)
    assert_stable(text)


_PIECES = [
    "password", "token", "=", ":", "--", " ", "\n", '"', "'", "<", ">", "</", "@", "://", "Bearer ", "basic ", "sk-",
    "ghp_", "abcdefgh12345678", "A1", "eyJ", "kn0wnValue!", "\\", "é", "?", "&", "-----BEGIN", "word", "%20", "/",
]  # fmt: skip


@given(st.lists(st.sampled_from(_PIECES), max_size=12).map("".join), st.booleans())
@settings(max_examples=600, deadline=None)
@example("password=q7Xw!19ab", False)
@example("password: q7Xw!19ab", False)
@example("https://me:q7Xw!19ab@host/", False)
@example("<password>q7Xw!19ab</password>", False)
@example("Bearer q7Xw!19ab", False)
def test_a_text_that_seems_quiet_sets_off_no_rule(text: str, json: bool) -> None:
    policy = RedactionPolicy.default({"MY_SECRET": "kn0wnValue!"})
    text = f"[{text}]" if json else text
    if policy._texts._is_quiet(text.encode()):
        assert policy._texts._fired(text, False) == []
        assert policy._texts.hide(text) == (text, [])
        assert policy._hide_once(text, 0) == (text, [])
