# SPDX-License-Identifier: Apache-2.0
"""Texts made to be slow: four times the text takes about four times as long, never sixteen.

The size of the work is measured in CPU time of this process, at sizes where a quadratic step would dominate.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from sftrace_otel.core.prepare import prepare
from sftrace_otel.core.redact import RedactionPolicy

UNITS = {
    "identifier": "A_", "jwt": "eyJ", "jwt-glued": "eyJ_", "pem": "-----BEGIN PRIVATE KEY-----", "word": "token",
    "assignment": "token:", "parameter": "?key=", "parameters": "&a=b", "userinfo": "://a:b", "accounts": "://a@",
    "slashes": "://a:b/", "bearer": "bearer ", "basic": "basic ", "cookie": "cookie:",
    "header": "authorization: basic ",
    "base64": "YWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFh",
    "base64-lines": "YWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFh ", "quotes": '"',
    "backslashes": "\\", "percent": "%41", "github": "ghp_", "vendors": "hf_AIza", "dashes": "-", "options": "--token ",
    "open-quotes": "password='", "escaped-quotes": 'password=\\"', "objects": '{"token": "a", ', "brackets": "[",
    "braces": "{", "lines": "secret:\n", "aws": "ASIA", "bot": "bot1234567890:", "semicolons": ";token=1",
    "secrets": "sk-abcdefgh1234 ", "marks": "[REDACTED]", "data": "data: {}\n", "known": "&zz-",
    "blocks": "password: |\n  a\n", "texts": " " * 100 + "auth: |\n",
    "indents": "password: |\n" + " " * 40, "fields": "<input name=password value='x",
    "tags": "<input ", "attributes": " password=a", "tables": "a,password\nb,c\n", "heads": "a,password\n",
    "cells": "password,", "open-cells": 'a,password\nb,"', "rules": "|password|b|\n|--|--|\n", "fences": "```\na,key\n",
}  # fmt: skip


def whole(unit: str, size: int) -> list[str]:
    """The unit repeated, alone and as the content of JSON, of an event stream, and of a form."""
    text = unit * (size // len(unit))
    quoted = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return [text, f'["{quoted}"]', f'data: {{"delta":"{quoted}"}}\n\n', f"a={text}"]


def work(policy: RedactionPolicy, text: str) -> None:
    policy.redact_text(text)
    policy.redact_document(text)
    policy.redact_url(text)


@pytest.mark.parametrize("name", sorted(UNITS))
def test_hostile_texts_come_to_an_end_and_stay_stable(name: str) -> None:
    policy = RedactionPolicy.default({"APP_TOKEN": "abcabc-&zz-abc"})
    for text in whole(UNITS[name], 4_000):
        redacted = policy.redact_text(text)[0]
        assert policy.redact_text(redacted) == (redacted, ())


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(UNITS))
def test_time_grows_with_the_text(name: str) -> None:
    for form in range(4):
        small, large = (cpu_time(work, whole(UNITS[name], size)[form]) for size in (40_000, 160_000))
        assert large < 9 * small + 0.1


def cpu_time(run: Callable[[RedactionPolicy, str], None], text: str) -> float:
    """The shortest of three runs, each with a policy that has seen nothing."""
    times = []
    for _ in range(3):
        policy = RedactionPolicy.default({"APP_TOKEN": "abcabc-&zz-abc"})
        start = time.process_time()
        run(policy, text)
        times.append(time.process_time() - start)
    return min(times)


@pytest.mark.full
def test_a_stream_of_many_events_is_linear() -> None:
    def stream(size: int) -> str:
        pieces = ("x sk-abc", "defgh1234 ")
        return "".join(
            f'data: {{"choices":[{{"index":0,"delta":{{"content":"{pieces[number % 2]}"}}}}]}}\n\n'
            for number in range(size)
        )

    small, large = (
        cpu_time(lambda policy, text: policy.redact_document(text), stream(size)) for size in (1_000, 4_000)
    )
    assert large < 9 * small + 0.1


def test_shared_parts_do_not_multiply() -> None:
    value: object = ["a long enough text"]
    for _ in range(60):
        value = [value, value]
    prepared = prepare(value, RedactionPolicy.default({}), max_bytes=100_000)
    assert prepared.truncated
    assert len(prepared.data) <= 100_000
