# SPDX-License-Identifier: Apache-2.0
"""Secrets that the layout of a text names: YAML block scalars, fields of markup, columns of tables."""

from __future__ import annotations

import json

import pytest

from sftrace_otel.core.redact import RedactionPolicy

HIDDEN = [
    ("db:\n  password: |\n    hunter2\n    more\n\n    x\n  user: bob\n",
     "db:\n  password: |\n    [REDACTED]\n  user: bob\n"),
    ("password: >-\n  hunter2\nuser: bob", "password: >-\n  [REDACTED]\nuser: bob"),
    ('"password": |\n  hunter2', '"password": |\n  [REDACTED]'),
    ("- password: |+ # old\n    hunter2\n  user: bob", "- password: |+ # old\n    [REDACTED]\n  user: bob"),
    ("password: !!binary |\r\n  aHVudGVy\r\nuser: bob", "password: !!binary |\r\n  [REDACTED]\r\nuser: bob"),
    ("password: |\n  ----\n  hunter2\nuser: bob", "password: |\n  [REDACTED]\nuser: bob"),
    ("auth: |\n  q7Xw19ab\nuser: bob", "auth: |\n  [REDACTED]\nuser: bob"),
    ("<input name=password value=hunter2>", "<input name=password value=[REDACTED]>"),
    ("<input value='hunter2' type=\"password\"/>", "<input value='[REDACTED]' type=\"password\"/>"),
    ('<INPUT disabled TYPE=password value="a>b" x>', '<INPUT disabled TYPE=password value="[REDACTED]" x>'),
    ("<meta content='abc' name=\"csrf-token\">", "<meta content='[REDACTED]' name=\"csrf-token\">"),
    ("<textarea name=api_key>foo bar</textarea>", "<textarea name=api_key>[REDACTED]</textarea>"),
    ('<add key="Password" value="x1"/>', '<add key="Password" value="[REDACTED]"/>'),
    ("user,password\nbob,hunter2", "user,password\nbob,[REDACTED]"),
    ("\ufeffuser,password\r\nbob,hunter2\r\n", "\ufeffuser,password\r\nbob,[REDACTED]\r\n"),
    ('user,password,n\nbob,"a""b,c",1\namy,x,y,2\nend', 'user,password,n\nbob,"[REDACTED]",1\namy,[REDACTED],2\nend'),
    ("id, name, password\n1, bob, hunter2\n", "id, name, password\n1, bob, [REDACTED]\n"),
    ("password;secret\nhunter2;hunter3", "password;secret\n[REDACTED];[REDACTED]"),
    ("user\tapi_key\nbob\tabc\n", "user\tapi_key\nbob\t[REDACTED]\n"),
    ("| user | password |\n|---|---|\n| bob | hunter2 |\n", "| user | password |\n|---|---|\n| bob | [REDACTED] |\n"),
    ("The file:\nuser,password\nbob,hunter2", "The file:\nuser,password\nbob,[REDACTED]"),
    ("x\n\n\n\n\n```csv\nuser,password\nbob,hunter2\n```", "x\n\n\n\n\n```csv\nuser,password\nbob,[REDACTED]\n```"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "redacted"), HIDDEN)
def test_what_the_layout_names_is_hidden_everywhere(text: str, redacted: str) -> None:
    policy = RedactionPolicy.default({})
    assert policy.redact_text(text)[0] == redacted
    assert policy.redact({"body": [text]})[0] == {"body": [redacted]}
    assert policy.redact_document(text) == (redacted, True)
    assert json.loads(policy.redact_document(json.dumps({"body": text}))[0]) == {"body": redacted}
    assert RedactionPolicy.default({}).redact_text(redacted) == (redacted, ())


@pytest.mark.parametrize(
    "text",
    [
        "auth: |\n  use the basic scheme\nuser: bob",
        "the password: |\n  see above",
        "password: |\nuser: bob",
        "note: |\n  some text of it\nuser: bob",
        '<input type=submit name=password value="Reset password">',
        '<a id="password" href="x">The password</a>',
        '<input name="max_tokens" value="1000">',
        "We like tea,coffee and the password\nnext line,too",
        "token,count\nfoo,3\nbar,12",
        "user,password\nno row of two cells",
        "setting,secret\nDIR,no\nFILE,${FILE}",
        "import user,password\nfoo,bar",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    policy = RedactionPolicy.default({})
    assert policy.redact_text(text) == (text, ())
    assert policy.redact({"body": [text]})[1] == ()
