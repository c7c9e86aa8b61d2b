# SPDX-License-Identifier: Apache-2.0
"""The rows of `redaction.jsonl`, each put through the part of the policy that its site reaches.

That the recorder sends every site through the policy is the recorder's to test; here it is what comes out.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from sftrace_otel.core.prepare import prepare
from sftrace_otel.core.redact import RedactionPolicy

_FILE = Path(__file__).parents[1] / "data" / "cases" / "redaction.jsonl"
_MACRO = re.compile(r"\{\{([A-Za-z0-9_]+)(?::((?:(?!\{\{|\}\}).)*))?\}\}", re.DOTALL)
_SPELLINGS = {
    "b64": lambda text: base64.b64encode(text.encode()).decode(),
    "pct": lambda text: quote(text, safe=""),
    "json": lambda text: text,
    "esc": lambda text: "".join(f"\\u{ord(character):04x}" for character in text),
    "sha256": lambda text: hashlib.sha256(text.encode()).hexdigest(),
}


def put_together(value: Any, secrets: dict[str, list[str]]) -> Any:
    """The row with its secrets, which the file keeps in pieces, joined; innermost macros first."""
    if isinstance(value, str):
        while _MACRO.search(value):
            value = _MACRO.sub(
                lambda found: "".join(secrets[found[1]]) if found[2] is None else _SPELLINGS[found[1]](found[2]), value
            )
        return value
    if isinstance(value, list):
        return [put_together(item, secrets) for item in value]
    if isinstance(value, dict):
        return {put_together(key, secrets): put_together(item, secrets) for key, item in value.items()}
    return value


def load() -> dict[str, dict[str, Any]]:
    about, *rows = [json.loads(line) for line in _FILE.read_text("ascii").splitlines()]
    return {row["id"]: put_together(row, about["secrets"]) for row in rows}


ROWS = load()
GENERATED = {
    "red-034": lambda: "A_" * 131072,
    "red-035": lambda: 'password="' + "\\\\a" * 100000,
    "red-036": lambda: " ".join("sk" + f"-{number:048d}" for number in range(5000)),
    "red-037": lambda: "a-b.c+" * 20000 + "://",
}
DEFAULT = RedactionPolicy.default({})


def assert_kept_and_gone(row: dict[str, Any], stored: bytes) -> None:
    for secret in row["must_not_appear"]:
        assert secret.encode() not in stored, "a secret is left"
        assert json.dumps(secret)[1:-1].encode() not in stored, "a secret is left, escaped"
    for text in row["must_appear"]:
        assert text.encode() in stored or json.dumps(text)[1:-1].encode() in stored


def stored(value: object, policy: RedactionPolicy = DEFAULT) -> bytes:
    """Everything that is written of a payload: text, pointers, reasons, tags."""
    prepared = prepare(value, policy)
    return prepared.data + repr((prepared.findings, prepared.tags, policy.describe())).encode()


@pytest.mark.parametrize("name", ["red-006", "red-017", "red-018", "red-031", "red-032"])
def test_texts(name: str) -> None:
    row = ROWS[name]
    assert_kept_and_gone(row, DEFAULT.redact_text(row["input"]["text"])[0].encode())
    assert_kept_and_gone(row, stored({"messages": [{"role": "user", "content": row["input"]["text"]}]}))
    if row.get("exact"):
        assert DEFAULT.redact_text(row["input"]["text"]) == (row["input"]["text"], ())


@pytest.mark.parametrize("name", ["red-010", "red-012"])
def test_tool_arguments(name: str) -> None:
    assert_kept_and_gone(ROWS[name], stored(ROWS[name]["input"]["args"]))


@pytest.mark.parametrize("name", ["red-011", "red-014", "red-019", "red-029"])
def test_tool_results(name: str) -> None:
    row = ROWS[name]
    assert_kept_and_gone(row, stored(row["input"]["value"]))
    if row.get("exact"):
        assert DEFAULT.redact(row["input"]["value"])[0] is row["input"]["value"]


def test_red_013_arguments_of_a_tool_call_stay_json() -> None:
    row = ROWS["red-013"]
    assert_kept_and_gone(row, stored(row["input"]))
    redacted: Any = DEFAULT.redact(row["input"])[0]
    assert json.loads(redacted["tool_calls"][0]["arguments"]) == {"user": "kim", "password": "[REDACTED]"}


def test_red_016_a_schema_keeps_its_property_and_loses_its_default() -> None:
    row = ROWS["red-016"]
    assert_kept_and_gone(row, stored(row["input"]))
    redacted: Any = DEFAULT.redact(row["input"])[0]
    token = redacted["tools"][0]["function"]["parameters"]["properties"]["token"]
    assert token == {"type": "string", "default": "[REDACTED]"}


def test_red_028_parameters_of_a_model_stay() -> None:
    params = ROWS["red-028"]["input"]["params"]
    assert DEFAULT.redact(params)[0] is params


def test_red_015_one_secret_in_every_place_of_a_value() -> None:
    secret = ROWS["red-015"]["input"]["value"]
    value = {secret: {"deep": [secret, {secret: secret}]}, "note": (secret,), f"run {secret}": {secret}}
    assert_kept_and_gone(ROWS["red-015"], stored(value))


@pytest.mark.parametrize("name", ["red-007", "red-022"])
def test_exceptions(name: str) -> None:
    row = ROWS[name]
    assert_kept_and_gone(row, stored(raised(row["input"])))


def raised(described: dict[str, Any]) -> BaseException:
    kinds: dict[str, type[Exception]] = {"RuntimeError": RuntimeError, "KeyError": KeyError, "ValueError": ValueError}
    error = kinds[described["type"]](described["message"].strip("'"))
    for note in described.get("notes", ()):
        error.add_note(note)
    if "cause" in described:
        error.__cause__ = raised(described["cause"])
    return error


def test_red_023_source_lines_of_a_trace() -> None:
    row = ROWS["red-023"]
    assert_kept_and_gone(row, DEFAULT.redact_text(row["input"]["source"])[0].encode())


def test_red_024_a_pattern_of_the_user_leaves_nothing_of_what_it_matched() -> None:
    row = ROWS["red-024"]
    policy = RedactionPolicy.from_toml(f"[[patterns]]\nname = 'dsn'\nregex = '{row['input']['pattern']}'", {})
    assert_kept_and_gone(row, stored(row["input"]["text"], policy))
    assert b"admin" not in stored(row["input"]["text"], policy)


@pytest.mark.parametrize("name", ["red-026", "red-027"])
def test_known_values(name: str) -> None:
    row = ROWS[name]
    environ = {f"SECRET_{number}_TOKEN": value for number, value in enumerate(row["input"]["secrets"])}
    policy = RedactionPolicy.default(environ)
    assert_kept_and_gone(row, stored(row["input"]["text"], policy))


@pytest.mark.parametrize("name", ["red-001", "red-002", "red-003", "red-008", "red-009"])
def test_requests(name: str) -> None:
    row = ROWS[name]
    request = row["input"]
    url = DEFAULT.redact_url(f"http://127.0.0.1:8080{request['path']}")
    headers = DEFAULT.redact_headers(request.get("headers", {}).items())
    assert_kept_and_gone(row, f"{url}{headers}".encode())
    assert_kept_and_gone(
        row, stored({"url": url, "headers": [list(pair) for pair in request.get("headers", {}).items()]})
    )


def test_red_004_a_login_answer() -> None:
    row = ROWS["red-004"]
    headers = DEFAULT.redact_headers(row["input"]["headers"].items())
    body, changed = DEFAULT.redact_document(json.dumps(row["input"]["json"]))
    assert changed
    assert_kept_and_gone(row, f"{headers}{body}".encode())


def chunked(row: dict[str, Any], event: Any) -> tuple[list[str], str]:
    """The row's pieces as a stream of server-sent events, and that stream redacted."""
    pieces: list[str] = row["input"]["chunks"]
    stream = "".join(f"data: {json.dumps(event(piece))}\n\n" for piece in pieces) + "data: [DONE]\n\n"
    return pieces, DEFAULT.redact_document(stream)[0]


def pieces_of(stream: str, pick: Any) -> list[str]:
    return [pick(json.loads(line[6:])) for line in stream.split("\n") if line.startswith("data: {")]


def test_red_020_a_secret_cut_over_the_deltas_of_a_stream() -> None:
    row = ROWS["red-020"]
    pieces, stream = chunked(row, lambda piece: {"choices": [{"index": 0, "delta": {"content": piece}}]})
    assert_kept_and_gone(row, stream.encode())
    after = pieces_of(stream, lambda event: event["choices"][0]["delta"]["content"])
    assert len(after) == len(pieces)
    assert "".join(after) == "here: [REDACTED] done"
    assert not any(piece in "".join(after) for piece in pieces[1:4])


def test_red_021_a_tool_argument_cut_over_deltas() -> None:
    row = ROWS["red-021"]
    _, stream = chunked(
        row,
        lambda piece: {
            "choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}}]
        },
    )
    after = pieces_of(stream, lambda event: event["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"])
    assert json.loads("".join(after)) == {"password": "[REDACTED]", "n": 1}
    assert "Tr0ub" not in stream and "zebra" not in stream and "bra" not in "".join(after)


def test_red_039_a_known_secret_in_bytes() -> None:
    row = ROWS["red-039"]
    data = base64.b64decode(row["input"]["bytes_b64"])
    policy = RedactionPolicy.default({"APP_PASSWORD": row["must_not_appear"][0]})
    assert_kept_and_gone(row, stored({"body": data}, policy))
    assert_kept_and_gone(row, stored({"body": row["input"]["bytes_b64"]}, policy))


def test_red_040_environment_and_arguments_of_a_process() -> None:
    row = ROWS["red-040"]
    policy = RedactionPolicy.default(row["input"]["env"])
    assert_kept_and_gone(row, stored(row["input"], policy))
    assert_kept_and_gone(row, stored(" ".join(row["input"]["argv"]), policy))


@pytest.mark.parametrize("name", sorted(GENERATED))
def test_hostile_texts(name: str) -> None:
    text = GENERATED[name]()
    assert_kept_and_gone(ROWS[name], stored({"result": text}))


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(GENERATED))
def test_hostile_texts_in_time(name: str) -> None:
    text = GENERATED[name]()
    policy = RedactionPolicy.default({})
    start = time.process_time()
    policy.redact({"result": text})
    assert time.process_time() - start < ROWS[name]["max_seconds"]


def test_every_row_is_here() -> None:
    assert len(ROWS) == 35


# --- markup, forms, and secrets that come later -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("<auth><password>xmlSecret45</password></auth>", "<auth><password>[REDACTED]</password></auth>"),
        ('<ns:apiKey id="1">abcdef123456</ns:apiKey>', '<ns:apiKey id="1">[REDACTED]</ns:apiKey>'),
        ("<Secret><![CDATA[a&b c]]></Secret>", "<Secret>[REDACTED]</Secret>"),
        ("<password>a</password><password>b1</password>", "<password>[REDACTED]</password>" * 2),
        ("<password></password><author>kim 12345678</author>", "<password></password><author>kim 12345678</author>"),
        (
            "<auth>basic</auth> <max_tokens>12345678</max_tokens>",
            "<auth>basic</auth> <max_tokens>12345678</max_tokens>",
        ),
    ],
)
def test_an_element_with_a_secrets_name_is_emptied(text: str, redacted: str) -> None:
    policy = RedactionPolicy.default({})
    assert policy.redact_text(text)[0] == redacted
    assert policy.redact({"body": text})[0] == {"body": redacted}
    assert policy.redact_document(text)[0] == redacted
    in_json = json.dumps({"body": text}).replace("</", "<\\/")
    assert json.loads(policy.redact_document(in_json)[0]) == {"body": redacted}


FORM = (
    '--b1\r\nContent-Disposition: form-data; name="user"\r\n\r\nkim\r\n'
    '--b1\r\nContent-Disposition: form-data; name="password"\r\nContent-Type: text/plain\r\n\r\n%s\r\n'
    '--b1\r\nContent-Disposition: form-data; name="f"; filename="a.txt"\r\n\r\nx\r\n--b1--\r\n'
)


def test_a_part_with_a_secrets_name_is_emptied() -> None:
    policy = RedactionPolicy.default({})
    for secret in ("mpartSecret33", "two\r\nlines of it"):
        assert policy.redact_text(FORM % secret)[0] == FORM % "[REDACTED]"
        assert policy.redact({"body": FORM % secret})[0] == {"body": FORM % "[REDACTED]"}
        assert policy.redact_document(FORM % secret) == (FORM % "[REDACTED]", True)
    assert policy.redact_document(FORM % "") == (FORM % "", False)


@pytest.mark.parametrize(
    "piece", ["<password>", "<password", "</password>", "<a>", 'Content-Disposition: x; name="password"\n\n']
)
def test_markup_takes_linear_time(piece: str) -> None:
    policy = RedactionPolicy.default({})

    def cost(count: int) -> float:
        before = time.process_time()
        policy.redact_text(piece * count + "</password>")
        return time.process_time() - before

    small, large = min(cost(1_000), cost(1_001)), cost(8_000)
    assert large < 8 * small * 3 + 0.1


def test_secrets_that_are_set_later_are_learned() -> None:
    policy = RedactionPolicy.default({"OLD_PASSWORD": "oldEnvSecret11"})
    text = "late lateEnvValue77 and oldEnvSecret11"
    assert policy.redact("lateEnvValue77 is clean")[1] == ()
    policy.learn({"LATE_PASSWORD": "lateEnvValue77", "HOME": "/root"})
    assert policy.redact("lateEnvValue77 is clean")[0] == "[REDACTED] is clean"
    assert policy.redact_text(text)[0] == "late [REDACTED] and [REDACTED]"
    assert policy.redact({"lateEnvValue77": 1})[0] == {"[REDACTED]": 1}
    assert policy.describe()["known_values"] == 2


def test_a_policy_that_knows_no_environment_learns_nothing() -> None:
    policy = RedactionPolicy.from_toml('environment = false\nvariables = ["LEGACY"]', {})
    policy.learn({"LATE_PASSWORD": "lateEnvValue77", "LEGACY": "legacyValue88"})
    assert policy.redact_text("lateEnvValue77 legacyValue88")[0] == "lateEnvValue77 [REDACTED]"
    for other in (RedactionPolicy.reference(), RedactionPolicy.strictest()):
        described = other.describe()
        other.learn({"LATE_PASSWORD": "lateEnvValue77"})
        assert other.describe() == described
