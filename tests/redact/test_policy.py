# SPDX-License-Identifier: Apache-2.0
"""What the policy hides in values, what it leaves, and what it says about it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sftrace_otel.core.redact import MARK, Finding, RedactionPolicy
from sftrace_otel.core.redact.names import Sensitivity, sensitivity

POLICY = RedactionPolicy.default({})
OPAQUE = "q7Xw-19ab_ZZ"

SENSITIVE = (
    "db_password x-api-key X-Amz-Signature secretKey set-cookie cookie proxy-authorization api_token accessToken "
    "REFRESH-TOKEN client_secret dbPassword x-goog-api-key privateKey authToken2 X-API-KEY passwd token id_token "
    "csrf_token smtp_pass aws_secret_access_key AWSSecretKey api-key api_keys x-amz-security-token DB_PASSWORD_HASH "
    "dbpassword myApiKey APIKey AccountKey credentials new_password password_confirmation jwt"
)
BENIGN = (
    "max_tokens max_completion_tokens prompt_tokens token_count tokenizer num_speculative_tokens "
    "token_type_ids stop_token per_layer_token_embd author authored_at authority secretary passenger passage "
    "compass keyboard monkey primary_key key_rotation_days sort_key session_length cookie_recipe token_type "
    "tokens key keys next_page_token public_key foreign_key pass signature session_id idempotency-key "
    "pad_token sha256 uuid x-ratelimit-remaining-tokens "
)


@pytest.mark.parametrize("name", SENSITIVE.split())
def test_sensitive_names(name: str) -> None:
    assert sensitivity(name)
    assert POLICY.redact({name: OPAQUE}) == ({name: MARK}, (Finding(f"/{name}", "sensitive_key"),))


@pytest.mark.parametrize("name", BENIGN.split())
def test_benign_names(name: str) -> None:
    value = {name: OPAQUE}
    assert sensitivity(name) is Sensitivity.NONE
    assert POLICY.redact(value)[0] is value


@pytest.mark.parametrize("value", [None, 0, 7, 1.5, True, False, "", [], {}, ["a"], {"a": 1}])
def test_the_names_of_the_reference_hide_whatever_stands_under_them(value: Any) -> None:
    assert POLICY.redact({"Client-Secret": value})[0] == {"Client-Secret": MARK}


@pytest.mark.parametrize("value", [None, 5, 1.5, True, "", [], {}, [1, 2], {"count": 3}])
def test_numbers_flags_and_empty_values_under_a_token_stay(value: Any) -> None:
    assert POLICY.redact({"token": value})[0] == {"token": value}


@pytest.mark.parametrize(
    ("value", "hidden"), [(4815, True), (["a"], True), ({"a": 1}, True), (None, False), (True, False)]
)
def test_a_password_of_any_other_name_hides_numbers_and_containers_too(value: Any, hidden: bool) -> None:
    assert POLICY.redact({"db_password": value})[0] == {"db_password": MARK if hidden else value}


def test_a_token_of_a_language_model_is_no_secret() -> None:
    value = {"logprobs": {"content": [{"token": "Hello", "logprob": -0.1, "bytes": [72], "top_logprobs": []}]}}
    assert POLICY.redact(value)[0] is value
    text = json.dumps(value)
    assert POLICY.redact_text(text) == (text, ())


@pytest.mark.parametrize(
    ("value", "redacted"),
    [
        ({"name": "Authorization", "value": "xyz"}, {"name": "Authorization", "value": MARK}),
        ({"value": 123456, "key": "db_password"}, {"value": MARK, "key": "db_password"}),
        ([["X-Api-Key", "a-b"], ["accept", "*/*"]], [["X-Api-Key", MARK], ["accept", "*/*"]]),
        (["run.py", "--api-key", "hunter"], ["run.py", "--api-key", MARK]),
        (["curl", "-u", "kim:pw"], ["curl", "-u", MARK]),
    ],
)
def test_names_and_values_apart(value: Any, redacted: Any) -> None:
    assert POLICY.redact(value)[0] == redacted


@pytest.mark.parametrize(
    "value",
    [
        {"required": ["token", "user"]},
        ["python", "-u", "agent.py"],
        {"name": "limit", "value": 5},
        {"name": "token", "value": 5},
        ["--verbose", "yes"],
        {"properties": {"token": {"type": "string", "description": "the token"}}},
    ],
)
def test_names_without_a_secret(value: Any) -> None:
    assert POLICY.redact(value) == (value, ())


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("export OPENAI_API_KEY=abcd1234efgh; ls", f"export OPENAI_API_KEY={MARK}; ls"),
        ("Client(user='kim', password='x1')", f"Client(user='kim', password='{MARK}')"),
        ("password: hunter\nuser: kim", f"password: {MARK}\nuser: kim"),
        ("Cookie: sid=abc; theme=dark\r\nHost: x", f"Cookie: {MARK}\r\nHost: x"),
        ('{"a": "{\\"secret\\": \\"x\\\\\\"y\\"}"}', f'{{"a": "{{\\"secret\\": \\"{MARK}\\"}}"}}'),
        ("AccountKey=abc123def456==;Endpoint=x", f"AccountKey={MARK};Endpoint=x"),
        ("a\\nsk-abcdefgh1234", f"a\\n{MARK}"),
        ("Authorization%3A%20Bearer%20abcdefgh", f"Authorization%3A%20Bearer%20{MARK}"),
        ("see https://git@github.com/a/b", "see https://git@github.com/a/b"),
        ("http://localhost:3000/@vite/client", "http://localhost:3000/@vite/client"),
        ("mysql://root:pa/ss?w#rd9z@db/x", f"mysql://{MARK}@db/x"),
        (
            "os.environ['API_KEY'], api_key=self.key, api_key=get_key()",
            "os.environ['API_KEY'], api_key=self.key, api_key=get_key()",
        ),
    ],
)
def test_texts(text: str, redacted: str) -> None:
    assert POLICY.redact_text(text)[0] == redacted


def test_a_clean_value_comes_back_as_the_same_object() -> None:
    value = {"messages": [{"role": "user", "content": "What is the weather in Oslo?"}], "n": 1, "t": 0.5}
    assert POLICY.redact(value)[0] is value


def test_what_is_beside_a_secret_is_not_copied() -> None:
    beside = {"deep": ["a long enough text", 1]}
    redacted: Any = POLICY.redact({"password": "x", "beside": beside})[0]
    assert redacted["beside"] is beside


def test_pointers_are_escaped_as_rfc_6901_says() -> None:
    findings = POLICY.redact({"a/b": [{"c~d": {"api_key": OPAQUE}}]})[1]
    assert findings == (Finding("/a~1b/0/c~0d/api_key", "sensitive_key"),)


def test_keys_that_hold_secrets_are_redacted_and_stay_apart() -> None:
    first, second = "sk-aaaaaaaaaaaa", "sk-bbbbbbbbbbbb"
    redacted, findings = POLICY.redact({second: 2, first: 1, "plain": 0})
    assert redacted == {MARK: 1, f"{MARK} (2)": 2, "plain": 0}
    assert POLICY.redact({first: 1, "plain": 0, second: 2})[0] == redacted
    assert {finding.reason for finding in findings} == {"secret_in_key"}
    assert first not in repr(findings)


@pytest.mark.parametrize("value", [None, False, "", {}], ids=repr)
def test_a_key_with_a_sensitive_name_may_hold_a_secret_beside_a_value_that_is_none(value: Any) -> None:
    redacted: Any = POLICY.redact({"sk-aaaaaaaaaaaa password": value})[0]
    assert redacted == {f"{MARK} password": value}


def test_parts_that_are_too_deep_are_dropped_not_kept() -> None:
    value: Any = {"password": OPAQUE}
    for _ in range(500):
        value = [value]
    redacted, findings = POLICY.redact(value)
    assert OPAQUE not in json.dumps(redacted)
    assert findings[0].reason == "too_deep"


def test_known_values_of_the_environment() -> None:
    environ = {
        "MY_DB_PASSWORD": "Tr0ub4dor&3-zebra",
        "STRIPE_KEY": "a1b2c3d4e5f6a7b8c9",
        "SORT_KEY": "customer_id",
        "SHORT_TOKEN": "abc",
        "POSTGRES_PASSWORD": "postgres",
        "APP_SECRET": "",
        "GOOGLE_APPLICATION_CREDENTIALS": "/home/kim/key.json",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Basic%20Zm9vOmJhcmJheg,x-tenant=seven-seas",
        "HOME": "/home/kimberley",
    }
    policy = RedactionPolicy.default(environ)
    for secret in ("Tr0ub4dor&3-zebra", "a1b2c3d4e5f6a7b8c9", "Zm9vOmJhcmJheg"):
        assert policy.redact_text(f"so {secret} it is")[0] == f"so {MARK} it is"
    for benign in ("customer_id", "abc", "postgres", "/home/kim/key.json", "seven-seas", "/home/kimberley"):
        assert policy.redact_text(f"so {benign} it is")[0] == f"so {benign} it is"
    assert policy.redact_text("so Tr0ub4dor&3-zebra")[1] == (Finding("", "known_value"),)
    assert policy.describe()["known_values_skipped"] == 2


def test_the_longest_of_overlapping_known_values_goes_first() -> None:
    policy = RedactionPolicy.default({"A_TOKEN": "abcdefgh12", "B_TOKEN": "abcdefgh12-and-more"})
    assert policy.redact_text("x abcdefgh12-and-more y")[0] == f"x {MARK} y"


def test_the_description_holds_no_value_and_no_pattern() -> None:
    toml = """
variables = ['LOGIN']
keys = ['tenant_code']
allow_values = ['fine-by-me']
[[patterns]]
regex = 'KIMDOE-[0-9]+'
"""
    policy = RedactionPolicy.from_toml(toml, {"LOGIN": "Tr0ub4dor&3-zebra"})
    told = json.dumps(policy.describe())
    assert "pattern-1" in told
    assert not any(text in told for text in ("Tr0ub4dor", "KIMDOE", "fine-by-me"))


def test_the_reference_policy_hides_what_the_reference_hides_and_no_more() -> None:
    policy = RedactionPolicy.reference()
    value: Any = {"apiKey": 1, "db_password": "x", "t": "Bearer abcdefgh and AKIAABCDEFGHIJKLMNOP", "u": "http://a:b@c"}
    assert policy.redact(value)[0] == {**value, "apiKey": MARK, "t": f"Bearer {MARK} and AKIAABCDEFGHIJKLMNOP"}
    assert policy.describe()["id"] == "reference"


def test_the_strictest_policy_keeps_structure_and_no_content() -> None:
    policy = RedactionPolicy.strictest()
    value: Any = {"messages": [{"role": "user", "content": "private words", "n": 3}], "ok": True, "none": None}
    hidden = {"messages": [{"role": MARK, "content": MARK, "n": MARK}], "ok": True, "none": None}
    assert policy.redact(value)[0] == hidden
    assert policy.redact(hidden) == (hidden, ())
    assert policy.redact_text("gpt-5-mini")[0] == "gpt-5-mini"
    assert policy.redact_text("private words")[0] == MARK
    assert json.loads(policy.redact_document(json.dumps(value))[0]) == hidden
    stream = 'event: a\ndata: {"text":"private"}\n\ndata: [DONE]\n\n'
    assert policy.redact_document(stream)[0] == f'event: a\ndata: {{"text":"{MARK}"}}\n\ndata: [DONE]\n\n'
    assert policy.redact_document("private words")[0] == MARK
    assert policy.redact_url("https://h/p?q=private#x") == f"https://h/p?q={MARK}"
    assert policy.redact_headers([("Content-Type", "text/plain"), ("X-A", "private")]) == [
        ("Content-Type", "text/plain"),
        ("X-A", MARK),
    ]


def test_what_was_found_clean_is_forgotten_when_it_is_too_much() -> None:
    policy = RedactionPolicy.default({})
    for number in range(40):
        policy.redact({"text": f"{number} " + "harmless words " * 15000})
    kept = sum(map(len, policy._clean))
    assert kept < 5_000_000
    assert policy.redact({"text": "harmless words"})[1] == ()


@pytest.mark.parametrize("name", ["PWD", "OLDPWD"])
def test_the_shells_working_folder_is_no_password(name: str) -> None:
    policy = RedactionPolicy.default({name: "/srv/shop/agents-1", "DB_PWD": "correct-horse-9"})
    assert policy.redact("cannot open /srv/shop/agents-1/menu.txt") == ("cannot open /srv/shop/agents-1/menu.txt", ())
    assert policy.redact("it is correct-horse-9")[0] == "it is [REDACTED]"
