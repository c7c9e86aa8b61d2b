# SPDX-License-Identifier: Apache-2.0
"""Bodies, URLs and headers: the secret goes, every other character stays."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftrace_otel.core.redact import MARK, RedactionPolicy
from sftrace_otel.core.redact.documents import cut_again
from sftrace_otel.core.redact.jsontext import kept, loads, parse

POLICY = RedactionPolicy.default({})


@pytest.mark.parametrize(
    ("body", "redacted"),
    [
        (
            '{ "user":"kim",\n\t"p\\u0061ssword" : "Tr0\\u0075b" , "n":1.50e+3, "u":"\\u00e9\\/" }',
            '{ "user":"kim",\n\t"p\\u0061ssword" : "[REDACTED]" , "n":1.50e+3, "u":"\\u00e9\\/" }',
        ),
        ('[{"token":12},{"token":"a b"}]\n', '[{"token":12},{"token":"[REDACTED]"}]\n'),
        ('{"m":"\\u00e9 sk-abcdefgh1234 \\u00e9\\n"}', '{"m":"\\u00e9 [REDACTED] \\u00e9\\n"}'),
        ('{"m":"\\ud83d\\ude00 ghp_abcdefgh \\ud83d\\ude00"}', '{"m":"\\ud83d\\ude00 [REDACTED] \\ud83d\\ude00"}'),
        ('{"db_password": {"a": 1}, "b": [1,  2]}', '{"db_password": "[REDACTED]", "b": [1,  2]}'),
        ('{"sk-abcdefgh1234": 1, "a":2}', '{"[REDACTED]": 1, "a":2}'),
        ("user=kim&password=Tr0%26b&n=1", "user=kim&password=[REDACTED]&n=1"),
        ("q=Bearer+abcdefgh1&x=%41", "q=Bearer+[REDACTED]&x=%41"),
        ('{"a":1}\n{"secret":"x"}\n', '{"a":1}\n{"secret":"[REDACTED]"}\n'),
        ("plain words with sk-abcdefgh1234 in them", "plain words with [REDACTED] in them"),
        ('{"api_key": "cut off', '{"api_key": "[REDACTED]'),
    ],
)  # fmt: skip
def test_bodies(body: str, redacted: str) -> None:
    assert POLICY.redact_document(body) == (redacted, True)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{}",
        '{"a" : [1, 2.0, "x\\u0041"]}',
        "a=b&c=d",
        'data: {"choices":[]}\n\ndata: [DONE]\n\n',
        "words",
        "[" * 5000,
    ],
)
def test_clean_bodies_stay(body: str) -> None:
    assert POLICY.redact_document(body) == (body, False)


def test_a_repeated_key_hides_nothing_behind_it() -> None:
    redacted = POLICY.redact_document('{"password":"Tr0ub4dor","password":""}')[0]
    assert "Tr0ub4dor" not in redacted


def test_multipart_by_name_and_content() -> None:
    body = (
        '--xyz\r\nContent-Disposition: form-data; name="password"\r\n\r\nTr0ub4dor\r\n'
        '--xyz\r\nContent-Disposition: form-data; name="meta"\r\nContent-Type: application/json\r\n\r\n'
        '{"api_key":"abc", "n":1}\r\n'
        '--xyz\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\nline\r\n\r\nend\r\n--xyz--\r\n'
    )
    redacted = POLICY.redact_document(body)[0]
    assert redacted == body.replace("Tr0ub4dor", MARK).replace('"abc"', f'"{MARK}"')


def test_server_sent_events_keep_their_lines() -> None:
    stream = 'event: x\nid: 1\ndata: {"a": "sk-abcdefgh1234"}\n\n: ping\r\n\ndata:{"b":1}\n\ndata: [DONE]\n\n'
    assert POLICY.redact_document(stream)[0] == stream.replace("sk-abcdefgh1234", MARK)


def test_two_streams_in_one_response_are_joined_apart() -> None:
    def event(index: int, content: str) -> str:
        return f"data: {json.dumps({'choices': [{'index': index, 'delta': {'content': content}}]})}\n\n"

    stream = event(0, "sk-abc") + event(1, "nothing ") + event(0, "defghijk") + event(1, "here")
    redacted = POLICY.redact_document(stream)[0]
    assert redacted == event(0, MARK) + event(1, "nothing ") + event(0, "") + event(1, "here")


@pytest.mark.parametrize(
    "event",
    [
        lambda text: {
            "type": "content_block_delta",
            "index": 1,
            "delta": {"type": "input_json_delta", "partial_json": text},
        },
        lambda text: {"type": "response.output_text.delta", "item_id": "i", "content_index": 0, "delta": text},
        lambda text: {"message": {"content": text}, "done": False},
    ],
)
def test_streams_of_other_apis(event: Any) -> None:
    stream = "".join(f"data: {json.dumps(event(piece))}\n\n" for piece in ("go ghp", "_abcd", "efgh1 on"))
    redacted = POLICY.redact_document(stream)[0]
    assert "abcd" not in redacted and "efgh1" not in redacted
    assert redacted.count("data: ") == 3


def test_log_probabilities_in_a_stream_stay() -> None:
    event = {
        "choices": [{"index": 0, "delta": {"content": "Hi"}, "logprobs": {"content": [{"token": "Hi", "logprob": 0}]}}]
    }
    stream = f"data: {json.dumps(event)}\n\n" * 2
    assert POLICY.redact_document(stream) == (stream, False)


@pytest.mark.parametrize(
    ("url", "redacted"),
    [
        (
            "https://bob:pw@h:8443/a?api_key=x&page=2#access_token=y",
            f"https://{MARK}@h:8443/a?api_key={MARK}&page=2#access_token={MARK}",
        ),
        ("https://h/?key=AIzaSy4xf9fLdjaIBGJjUm74BKsCb1h6kB&q=cats", f"https://h/?key={MARK}&q=cats"),
        ("https://h/?key=name&max_tokens=5", "https://h/?key=name&max_tokens=5"),
        ("https://h/botx?sig=a%2Fb&t=%20", f"https://h/botx?sig={MARK}&t=%20"),
        ("/relative?X-Amz-Signature=1f", f"/relative?X-Amz-Signature={MARK}"),
        ("https://h/v1/sk-abcdefgh1234/x", f"https://h/v1/{MARK}/x"),
    ],
)  # fmt: skip
def test_urls(url: str, redacted: str) -> None:
    assert POLICY.redact_url(url) == redacted


def test_headers_keep_order_and_spelling() -> None:
    pairs = [
        ("aUTHORIZATION", "Bearer abc"), ("X-Request-Id", "req-77"), ("Set-Cookie", "sid=1"), ("Set-Cookie", "b=2"),
        ("Location", "https://a:b@h/?token=zzz&n=1"), ("x-ratelimit-remaining-tokens", "149"),
        ("OpenAI-Organization", "org"),
        ("x-note", "sk-abcdefgh1234"), ("cookie", ""),
    ]  # fmt: skip
    assert POLICY.redact_headers(pairs) == [
        ("aUTHORIZATION", MARK), ("X-Request-Id", "req-77"), ("Set-Cookie", MARK), ("Set-Cookie", MARK),
        ("Location", f"https://{MARK}@h/?token={MARK}&n=1"), ("x-ratelimit-remaining-tokens", "149"),
        ("OpenAI-Organization", "org"), ("x-note", MARK), ("cookie", ""),
    ]  # fmt: skip


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.text(), lambda parts: st.lists(parts) | st.dictionaries(st.text(), parts)
    )
)
def test_json_texts_are_read_as_the_standard_library_reads_them(value: Any) -> None:
    text = json.dumps(value, indent=1)
    read = parse(text)
    assert read is not None and read[0] == value == json.loads(text)
    assert loads(text) == value


@settings(deadline=None)
@given(st.lists(st.text(max_size=5), min_size=1), st.integers(0, 40), st.integers(1, 10))
def test_pieces_cut_again_join_to_the_redacted_text(pieces: list[str], start: int, length: int) -> None:
    joined = "".join(pieces)
    if start + length <= len(joined):
        hidden = joined[:start] + MARK + joined[start + length :]
        again = cut_again(pieces, hidden)
        assert len(again) == len(pieces)
        assert "".join(again) == hidden


def test_texts_that_do_not_fit_are_not_aligned() -> None:
    assert kept("abc", f"x{MARK}c") is None
    assert kept("abc", f"a{MARK}c") == [(0, 1), (2, 3)]
    assert cut_again(["ab", "c"], f"x{MARK}") == [MARK, ""]
