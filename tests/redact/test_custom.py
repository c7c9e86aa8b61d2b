# SPDX-License-Identifier: Apache-2.0
"""The user's own rules: what they do, what is refused, and that a refusal tells nothing."""

from __future__ import annotations

import re
import time

import pytest

from sftrace_otel.core.redact import MARK, Finding, RedactionPolicy
from sftrace_otel.core.redact.linear import why_not_linear
from sftrace_otel.errors import SettingsError

LINEAR = [
    r"TICKET-\d{6}", r"ORD-\d+", r"://[^:@/]+:[^@/]+@", r"(?<=pin )\d{4}", r"(?:token|key)=\S+", r"[A-Z]{3}-\d{1,8}",
    r"(?i)secret: .*", r"(?<![a-z])[a-z]+@corp", r"a{0,64}b", r"foo=\S+|bar=\S+", r"x[0-9]++y", r"(?:ab){2,5}c",
    r"^\s*key=.*", r"[^\W\d]{4,20}\d{2}",
]  # fmt: skip
NOT_LINEAR = [
    r"(a+)+b", r"(a|a)*b", r"(?:a|b)*c", r".*foo", r"\d+$", r"[a-z]+@corp", r"\w+\w+x", r"(.)\1", r"x[a-z]+@",
    r"a.*b.*c", r"(?:a{0,64}){0,64}b",
    r".{0,200}a.{0,200}b", r"(?=.*b)a", r"(?:\d+-)+x", r"(?P<q>['\"]).*?(?P=q)", r"\s+$",
    r"(?:x+)?y", r"(?i)K[k]+z", r"(?:(?i:k)[K]+z)",
]  # fmt: skip


@pytest.mark.parametrize("pattern", LINEAR)
def test_linear_patterns_are_taken(pattern: str) -> None:
    assert why_not_linear(pattern) is None


@pytest.mark.parametrize("pattern", NOT_LINEAR)
def test_patterns_that_may_be_slow_are_refused(pattern: str) -> None:
    assert why_not_linear(pattern)
    with pytest.raises(SettingsError, match="linear"):
        RedactionPolicy.from_toml(f"[[patterns]]\nregex = '''{pattern}'''", {})


@pytest.mark.full
@pytest.mark.parametrize("pattern", LINEAR)
def test_linear_patterns_take_linear_time(pattern: str) -> None:
    compiled = re.compile(pattern)
    for unit in ("a", "ab", "0", "x0", "://", "://a:", "key=", "TICKET-", "ORD-", "secret: ", " ", "ABC-", "pin "):
        times = []
        for size in (40_000, 160_000):
            text = unit * (size // len(unit)) + "\n!"
            start = time.process_time()
            compiled.sub(MARK, text)
            times.append(time.process_time() - start)
        assert times[1] < 12 * times[0] + 0.05


def test_patterns_go_first_and_are_reported_by_their_names() -> None:
    toml = """
[[patterns]]
name = 'dsn'
regex = '://[^:@/]+:[^@/]+@'
[[patterns]]
regex = '(?<=pin )[0-9]{4}'
"""
    policy = RedactionPolicy.from_toml(toml, {})
    redacted, findings = policy.redact({"t": "dsn postgresql://admin:Tr0ub4dor@db/x pin 4815"})
    assert redacted == {"t": f"dsn postgresql{MARK}db/x pin {MARK}"}
    assert findings == (Finding("/t", "dsn"), Finding("/t", "pattern-2"))


def test_anchored_patterns_see_each_text_by_itself_and_texts_inside_json() -> None:
    policy = RedactionPolicy.from_toml("[[patterns]]\nregex = '^internal-.{1,20}$'", {})
    assert policy.redact(["a public text", "internal-memo"])[0] == ["a public text", MARK]
    assert policy.redact_text('{"a":"internal-memo"}')[0] == f'{{"a":"{MARK}"}}'


def test_keys_and_allow_lists() -> None:
    toml = """
keys = ['tenantCode']
allow_keys = ['session_token', 'password']
allow_values = ['AKIAIOSFODNN7EXAMPLE', 'sk-test-dummy-dummy']
"""
    policy = RedactionPolicy.from_toml(toml, {})
    value = {"tenant_code": "blue", "session_token": "x", "password": "x", "note": "AKIAIOSFODNN7EXAMPLE"}
    # password and session_token are names of the reference: they cannot be allowed, nor can its patterns
    assert policy.redact(value)[0] == {**dict.fromkeys(value, MARK), "note": "AKIAIOSFODNN7EXAMPLE"}
    assert policy.redact_text("tenant_code=blue-42-green")[0] == f"tenant_code={MARK}"
    assert policy.redact_text("use AKIAIOSFODNN7EXAMPLE, not AKIAABCDEFGHIJKLMNOP")[0].endswith(f"not {MARK}")
    assert policy.redact_text("sk-test-dummy-dummy")[0] == MARK
    assert RedactionPolicy.from_toml("allow_keys = ['id_token']", {}).redact({"id_token": "x"})[0] == {"id_token": "x"}


def test_variables_and_environment() -> None:
    environ = {"LEGACY_LOGIN": "hunter-two-2", "APP_TOKEN": "abcdefgh-123"}
    both = RedactionPolicy.from_toml("variables = ['LEGACY_LOGIN', 'ABSENT']", environ)
    assert both.redact_text("hunter-two-2 abcdefgh-123")[0] == f"{MARK} {MARK}"
    alone = RedactionPolicy.from_toml("environment = false\nvariables = ['LEGACY_LOGIN']", environ)
    assert alone.redact_text("hunter-two-2 abcdefgh-123")[0] == f"{MARK} abcdefgh-123"


@pytest.mark.parametrize(
    ("toml", "told"),
    [
        ("keys = [", "not TOML"),
        ("kees = ['Tr0ub4dor']", "unknown entry"),
        ("keys = 'Tr0ub4dor'", "'keys'"),
        ("keys = ['']", "'keys'"),
        ("environment = 'Tr0ub4dor'", "'environment'"),
        ("patterns = ['Tr0ub4dor']", "'patterns'"),
        ("[[patterns]]\nregex = 'a'\n[[patterns]]\nregex = '(Tr0ub4dor'", "pattern 2"),
        ("[[patterns]]\nname = 'Tr0ub4dor\\u0000'\nregex = 'a'", "pattern 1"),
        ("[[patterns]]\nname = \"a\\nTr0ub4dor\"\nregex = 'a'", "`name`"),
        ("[[patterns]]\nregex = 'Tr0ub4dor|'", "empty text"),
        ("[[patterns]]\nregex = 'REDACTED'", "come to rest"),
        ("[[patterns]]\nregex = 'Tr0ub4dor'\nflags = 'i'", "nothing else"),
        ("[[patterns]]\nregex = '(Tr0ub4dor+)+x'", "linear"),
    ],
)
def test_errors_name_the_entry_and_never_its_content(toml: str, told: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(told)) as raised:
        RedactionPolicy.from_toml(toml, {})
    assert "Tr0ub4dor" not in str(raised.value)
    assert raised.value.__cause__ is None
