# SPDX-License-Identifier: Apache-2.0
"""Bodies, URLs and headers: the secret goes, every other character stays."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftrace_otel.core.redact import MARK, RedactionPolicy, jsontext
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


# --- large documents --------------------------------------------------------------------------------------------------

_json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.sampled_from(['é"\\', "a b", ""]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["k", "ü", 'q"', "n"]), inner),
    max_leaves=12,
)


@given(
    _json_values,
    st.lists(st.sampled_from(["sk-abcdefgh12345678", "x sk-abcdefgh12345678\n"]), max_size=2),
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_changed_parts_are_rewritten_alike_by_both_ways(
    value: Any, secrets: list[str], indent: int | None, ascii_only: bool
) -> None:
    whole = {"a": value, "s": secrets, "password": value, "z": [secrets, value]}
    text = json.dumps(whole, indent=indent, ensure_ascii=ascii_only)
    policy = RedactionPolicy.default({})
    old, read = jsontext.loads(text), jsontext.parse(text)
    assert read is not None
    new, _ = policy.redact(old)
    quick = jsontext.respelled_where_changed(text, old, new)
    assert quick == jsontext.rewritten(text, read[1], read[0], policy.redact(read[0])[0])
    assert json.loads(quick) == json.loads(json.dumps(new))


def _blob(size: int) -> str:
    return base64.b64encode(bytes(n * 7919 % 251 for n in range(size))).decode()


@pytest.mark.parametrize(
    "blob",
    [
        base64.b64encode(b"some text of a file\n" * 500 + b"password=hunter2hunter2\n").decode(),
        _blob(9_000)[:-4] + "/AKIAIOSFODNN7EXAMPLE+" + _blob(9_000),
        base64.b64encode(b"\0\1\2" * 3_000 + b"Tr0ub4dor&3-zebra" + b"\0\1\2" * 3_000).decode(),
    ],
)
def test_secrets_inside_long_base64_are_found(blob: str) -> None:
    policy = RedactionPolicy.default({"DB_PASSWORD": "Tr0ub4dor&3-zebra"})
    assert policy.redact_text(blob)[0] != blob
    assert policy.redact({"data": blob})[0] != {"data": blob}
    assert policy.redact_document(json.dumps({"data": blob}))[1]


def test_secrets_beside_long_base64_are_found() -> None:
    policy = RedactionPolicy.default({})
    for before, after in (("password=", ""), ("Bearer ", ""), ("x ", " sk-abcdefgh12345678"), ("sk-abcdefgh ", "")):
        text = before + _blob(9_000) + after
        assert policy.redact_text(text)[0] != text
    image = f'{{"url": "data:image/png;base64,{_blob(9_000)}", "n": 1}}'
    assert policy.redact_document(image) == (image, False)


def test_a_large_document_with_one_secret_is_done_in_time_that_grows_with_it() -> None:
    def cost(count: int) -> float:
        rows = [{"id": n, "text": f"some words {n}", "score": n / 7} for n in range(count)]
        rows[count // 2]["text"] = "my sk-abcdefgh12345678"
        text = json.dumps(rows)
        policy = RedactionPolicy.default({})
        before = time.process_time()
        redacted, changed = policy.redact_document(text)
        took = time.process_time() - before
        assert changed and redacted == text.replace("sk-abcdefgh12345678", "[REDACTED]")
        return took

    small, large = min(cost(2_000), cost(2_000)), cost(16_000)
    assert large < 8 * small * 3 + 0.1


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ('{"cmd": "run --token abcdef123456x"}', "abcdef123456x"),
        ('{"argv": ["curl", "-u", "bob:hunter2x"]}', "bob:hunter2x"),
        ('{"argv": ["curl", "--user", "bob:hunter2x"]}', "bob:hunter2x"),
        ('{"arguments": "{\\"argv\\": [\\"-u\\", \\"bob:hunter2x\\"]}"}', "bob:hunter2x"),
    ],
)
def test_options_are_found_in_json_documents_as_they_are_in_values(text: str, secret: str) -> None:
    assert secret not in json.dumps(POLICY.redact(json.loads(text))[0])
    assert POLICY.redact_document(text) == (text.replace(secret, MARK), True)
    assert POLICY.redact_text(text)[0] == text.replace(secret, MARK)


@given(
    st.recursive(
        st.sampled_from(["--token", "-u", "a:bcdefgh1", "x --password hunter2x9", "abcdef123456x", "Bearer abcdefgh1"])
        | st.sampled_from(
            ["api_key", "k", "<password>abc1</password>", "password=hunter2x9", '{"token": "a1b2c3d4e5"}']
        ),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["name", "value", "k", "token", "argv"]), inner, max_size=3)
        ),
        max_leaves=6,
    )
)
def test_a_document_hides_what_its_value_hides(value: Any) -> None:
    policy = RedactionPolicy.default({})
    text = json.dumps({"v": value})
    assert json.loads(policy.redact_document(text)[0]) == policy.redact({"v": value})[0]


_SPELT = st.text(st.sampled_from('a": \\,{}é'), max_size=6)
_GAP = st.sampled_from(["", "", " ", "\n", "\t "])


@st.composite
def _object_text(draw: st.DrawFn, depth: int = 2) -> str:
    """The text of an object whose keys may stand there twice, spaced and escaped in any way."""
    members = []
    for _ in range(draw(st.integers(0, 4))):
        key, gap = draw(_SPELT), draw(_GAP)
        if depth and draw(st.booleans()):
            value = draw(_object_text(depth - 1))
        else:
            value = json.dumps(draw(_SPELT), ensure_ascii=draw(st.booleans()))
        if draw(st.booleans()):
            value = value.replace(":", "\\u003a") if value.startswith('"') else value
        members.append(f"{json.dumps(key)}{gap}:{draw(_GAP)}{value}")
    return "{" + f",{draw(_GAP)}".join(members) + "}"


def _keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError
    return dict(pairs)


@settings(max_examples=400)
@given(_object_text())
def test_a_key_that_stands_twice_is_never_overlooked(text: str) -> None:
    try:
        want = json.loads(text, object_pairs_hook=_keys_once)
    except ValueError:
        want = None
    assert loads(text) == want


def test_a_stream_with_a_key_twice_hides_what_the_first_holds() -> None:
    line = '{"delta": {"content": "sk-abcdefgh12345678"}, "x": 1, "delta": {"content": "fine"}}'
    body = f"data: {line}\n\ndata: [DONE]\n\n"
    assert "sk-abcdefgh12345678" not in POLICY.redact_document(body)[0]


def test_a_known_secret_that_is_json_itself_is_hidden_where_a_body_embeds_it() -> None:
    secret = '{"type":"service_account","project_id":"shop-9","client_id":"117"}'
    policy = RedactionPolicy.default({"GOOGLE_CREDENTIALS": secret})
    for body in (f'{{"config":{secret},"n":1}}', f'data: {{"config":{secret}}}\n\ndata: [DONE]\n\n'):
        redacted, changed = policy.redact_document(body)
        assert changed and "service_account" not in redacted
