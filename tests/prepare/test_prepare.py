# SPDX-License-Identifier: Apache-2.0
"""Any value as redacted JSON with tags, and back; nothing raises, is changed, or is consumed."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import hashlib
import json
import math
import pathlib
import re
import sys
import types
import uuid
import warnings
from typing import Any

import msgspec
import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stepfork.trace.redaction import redact_json

from sftrace_otel.core.prepare import CUT, LOSSY, Prepared, prepare, restore
from sftrace_otel.core.redact import MARK, RedactionPolicy
from sftrace_otel.formats import canonical

POLICY = RedactionPolicy.default({"MY_PASSWORD": "Tr0ub4dor&3-zebra"})
SECRET = "sk-abcdefgh1234"
NOW = dt.datetime(2026, 11, 30, 12, 0, 0, 5, tzinfo=dt.timezone(dt.timedelta(hours=1)))


def made(value: object, **keywords: Any) -> Prepared:
    prepared = prepare(value, POLICY, **keywords)
    assert prepared.digest == hashlib.sha256(canonical.dumps(prepared.value)).hexdigest()
    assert canonical.dumps(canonical.loads(prepared.data)) == canonical.dumps(prepared.value)
    return prepared


class Colour(enum.Enum):
    RED = "red"
    PAIR = ("a", 1)


class Level(enum.IntEnum):
    LOW = 1


class Kind(enum.StrEnum):
    PLAIN = "plain"


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Login:
    user: str
    password: str
    at: tuple[int, ...] = (1, 2)


class Model(pydantic.BaseModel):
    name: str
    token: pydantic.SecretStr
    when: dt.datetime = NOW


class Record(msgspec.Struct):
    a: int
    api_key: str


class Attrs:
    __attrs_attrs__ = (types.SimpleNamespace(name="a"), types.SimpleNamespace(name="absent"))

    def __init__(self) -> None:
        self.a = (1,)


class Scalar:
    """Looks like a numpy scalar or array: its type has `dtype` and `tolist`."""

    dtype = "float32"

    def __init__(self, items: object) -> None:
        self._items = items
        self.size = 1 if not isinstance(items, list) else len(items)

    def tolist(self) -> object:
        return self._items


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError(SECRET)


class Wordy:
    def __repr__(self) -> str:
        return f"<Wordy password='Tr0ub' at 0x7f00deadbeef {'x' * 9000}>"


class Moody(str):
    """A text whose methods must not be called."""

    def __str__(self) -> str:
        raise AssertionError

    encode = isascii = __str__  # type: ignore[assignment]


RETURNING = [
    float("inf"), -math.inf, 10**5000, -(10**4300), 10**4299, "a\ud800\\b", (), (1, (2, [3])), {1, 2}, {(1, 2), "a"},
    frozenset({frozenset({1}), 2}), b"", b"\x00\xff", bytearray(b"ab"), memoryview(b"ab"), NOW,
    NOW.replace(tzinfo=None),
    dt.date(2026, 1, 2), dt.time(1, 2, 3, 4, tzinfo=dt.UTC), dt.timedelta(days=-3, microseconds=7), dt.timedelta.max,
    decimal.Decimal("1.10"), decimal.Decimal("-Infinity"), uuid.UUID(int=7), pathlib.Path("/a/b"), 1 + 2j,
    pathlib.PureWindowsPath("c:\\x"), pathlib.PurePosixPath("a"), {1: "a", -2: (3,)}, {(1, 2): "a", "b": None, None: 1},
    {True: 1}, {b"k": 1}, {"a": {"b": [(1,), {2}]}}, Point(1, (2,)), collections.OrderedDict(a=1, b=(2,)),
    collections.Counter("aab"), Level.LOW, Kind.PLAIN, {Kind.PLAIN: 1}, [Moody("plain")], {"k\udfff": 1},
]  # fmt: skip


@pytest.mark.parametrize("value", RETURNING, ids=[f"{type(value).__name__}-{n}" for n, value in enumerate(RETURNING)])
def test_these_come_back(value: object) -> None:
    prepared = made(value)
    assert LOSSY not in prepared.tags.values()
    back = restore(prepared.value, prepared.tags)
    assert back == value
    assert restore(canonical.loads(prepared.data), json.loads(json.dumps(prepared.tags))) == value


def test_not_a_number_comes_back() -> None:
    prepared = made({"mean": float("nan"), "all": [float("nan"), 1.0]})
    assert prepared.value == {"mean": "NaN", "all": ["NaN", 1.0]}
    back: Any = restore(prepared.value, prepared.tags)
    assert math.isnan(back["mean"]) and math.isnan(back["all"][0])


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (Colour.RED, "red"),
        (Login("kim", "pw"), {"user": "kim", "password": MARK, "at": [1, 2]}),
        (Model(name="n", token=pydantic.SecretStr("s")), {"name": "n", "token": MARK, "when": NOW.isoformat()}),
        (Record(1, "k"), {"a": 1, "api_key": MARK}),
        (Attrs(), {"a": [1]}),
        (Scalar(1.5), 1.5),
        (Scalar([[1.0, 2.0], [3.0, 4.0]]), [[1.0, 2.0], [3.0, 4.0]]),
        (types.MappingProxyType({"a": 1}), {"a": 1}),
        (range(3), [0, 1, 2]),
        (collections.deque([1, 2]), [1, 2]),
        ({"b": 1, "a": 2}.keys(), ["a", "b"]),
        ({"a": 1}.values(), [1]),
        (..., "Ellipsis"),
        (Login, "<class 'Login'>"),
        (object(), "<object object>"),
        (Unprintable(), "<Unprintable: no repr (RuntimeError)>"),
        (re.compile("a"), "re.compile('a')"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_these_have_a_form_and_are_marked_lossy(value: object, form: object) -> None:
    prepared = made(value)
    got = json.loads(json.dumps(prepared.value).replace(f"{__name__}.", ""))
    assert got == form
    assert prepared.tags[""] == LOSSY
    assert restore(prepared.value, {"": LOSSY}) == prepared.value


def test_an_enum_of_a_tuple_says_how_its_value_comes_back() -> None:
    prepared = made(Colour.PAIR)
    assert restore(prepared.value, prepared.tags) == ("a", 1)


def test_exceptions_with_cause_notes_and_a_cycle() -> None:
    inner = ValueError(f"Authorization: Bearer {SECRET}")
    inner.add_note(f"retry with {SECRET}")
    error = KeyError("k", 7)
    error.__cause__ = inner
    inner.__cause__ = error
    prepared = made(error)
    assert prepared.value == {
        "type": "KeyError", "module": "builtins", "message": "('k', 7)", "args": ["k", 7],
        "cause": {
            "type": "ValueError", "module": "builtins", "message": f"Authorization: Bearer {MARK}",
            "args": [f"Authorization: Bearer {MARK}"], "notes": [f"retry with {MARK}"], "cause": "<cycle: >",
        },
    }  # fmt: skip


def test_a_generator_is_not_consumed() -> None:
    generator = (number for number in range(3))
    made({"items": generator})
    assert list(generator) == [0, 1, 2]


def test_the_value_that_is_given_is_not_changed() -> None:
    value = {"password": "x", "list": [1, {"token": "y"}], "set": {1}}
    made(value)
    assert value == {"password": "x", "list": [1, {"token": "y"}], "set": {1}}


def test_a_repr_is_redacted_then_cut_and_holds_no_address() -> None:
    prepared = made(Wordy())
    text = prepared.value
    assert isinstance(text, str)
    assert len(text) == 4097 and "0x" not in text and "Tr0ub" not in text
    assert made(Wordy()).digest == prepared.digest


def test_errors_of_the_program_tell_no_secret() -> None:
    assert SECRET.encode() not in made([Unprintable()]).data


def test_cycles_and_depth() -> None:
    cycle: Any = {"a": [1]}
    cycle["a"].append(cycle)
    assert made(cycle).value == {"a": [1, "<cycle: >"]}
    assert made({"outer": cycle["a"]}).value == {"outer": [1, {"a": "<cycle: /outer>"}]}
    deep: Any = SECRET
    for _ in range(10_000):
        deep = [deep]
    prepared = made(deep)
    assert prepared.data == b"[" * 100 + b'"<deeper than 100 levels>"' + b"]" * 100
    assert prepared.tags == {"/0" * 100: LOSSY}


@pytest.mark.parametrize("depth", [99, 100, 101])
def test_depth_is_judged_alike_by_the_quick_and_by_the_thorough_way(depth: int) -> None:
    plain: Any = 1
    other: Any = float("nan")
    for _ in range(depth):
        plain, other = [plain], [other]
    assert bool(made(plain).tags) == (depth > 100)
    assert (LOSSY in made(other).tags.values()) == (depth > 100)


def test_shared_parts_are_no_cycles_and_have_one_form_however_they_are_shared() -> None:
    part = {"a": [1, 2], "t": (1,)}
    assert made([part, part, (part,)]).data == made([dict(part), dict(part), (dict(part),)]).data


def test_sets_and_pairs_have_one_order() -> None:
    words = [f"word-{number}" for number in range(50)]
    assert made(set(words)).value == sorted(words)
    assert made({1.5: "a", None: "b"}).digest == made({None: "b", 1.5: "a"}).digest


def test_the_order_of_a_set_does_not_depend_on_its_secrets() -> None:
    one = made({"sk-aaaaaaaaaaaa", "mmm", "zzz"})
    other = made({"sk-zzzzzzzzzzzz", "mmm", "zzz"})
    assert one.digest == other.digest


def test_key_order_is_kept_in_the_text_and_not_in_the_digest() -> None:
    for value in ({"b": 1, "a": 2}, {"b": (1,), "a": 2}, {"b": 1, "password": "x", "a": 0.5}):
        assert list(json.loads(made(value).data)) == list(value)
    assert made({"b": 1, "a": (2,)}).digest == made({"a": (2,), "b": 1}).digest


def test_bytes_with_a_secret_are_hidden_as_a_whole() -> None:
    for data in (b"\x00user=Tr0ub4dor&3-zebra", SECRET.encode(), b'{"password": "x1"}'):
        prepared = made({"body": data})
        assert prepared.value == {"body": MARK}
        assert prepared.tags == {}
        assert prepared.findings[0].pointer == "/body"


def test_no_pointer_spells_a_key_that_was_redacted() -> None:
    prepared = made({SECRET: {"t": (1, b"sk-abcdefgh9999")}})
    assert SECRET not in repr(prepared)


def test_a_value_under_a_sensitive_key_that_is_no_text() -> None:
    assert made({b"password": "Tr0ub", 1: 2}).value == [["cGFzc3dvcmQ=", MARK], [1, 2]]
    assert "Tr0ub" not in repr(made({"password": {"t": ("Tr0ub",)}}))


def test_a_named_tuple_hides_what_a_sensitive_name_says() -> None:
    login = collections.namedtuple("login", "user password tokens token")
    prepared = made({"auth": [1], "them": [login("me", "Tr0ub", 7, 8), login("me", None, 7, True)]})
    assert prepared.value == {"auth": [1], "them": [["me", MARK, 7, 8], ["me", None, 7, True]]}
    assert [(found.pointer, found.reason) for found in prepared.findings] == [("/them/0/1", "sensitive_key")]
    assert prepared.tags == {"/them/0": "tuple", "/them/1": "tuple"}


def test_the_serializer_is_asked_for_unknown_objects_only() -> None:
    asked = []

    def serializer(value: object) -> object:
        asked.append(type(value))
        if isinstance(value, Wordy):
            return {"wordy": (1, SECRET)}
        raise TypeError

    prepared = made([1, (2,), NOW, Wordy(), Colour.RED, object()], serializer=serializer)
    assert asked == [Wordy, object]
    assert prepared.value == [1, [2], NOW.isoformat(), {"wordy": [1, MARK]}, "red", "<object object>"]
    assert made(Wordy(), serializer=lambda value: [value, Wordy()]).tags


def test_a_model_whose_dump_warns_or_fails() -> None:
    class Fails:
        def model_dump(self, **_: object) -> object:
            raise ValueError(SECRET)

    class Old:
        def model_dump(self) -> object:
            return {"a": 1}

    model = Model.model_construct(name=5, token="not a SecretStr")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "name" in json.dumps(made(model).value)
    assert SECRET.encode() not in made(Fails()).data
    assert made(Old()).value == {"a": 1}


def test_what_is_too_large_is_cut_after_redaction_and_marked() -> None:
    value = {"a": f"password={'Tr0ub4dor' * 50}", "b": "é" * 500, "c": [1, 2, 3]}
    prepared = made(value, max_bytes=300)
    assert prepared.truncated and len(prepared.data) <= 300
    assert prepared.size > 1000
    assert b"Tr0ub" not in prepared.data
    assert prepared.tags == {"/b": CUT, "": CUT}
    assert made(value, max_bytes=300).digest == prepared.digest
    assert not made(value).truncated


@pytest.mark.parametrize("max_bytes", [0, 1, 2, 3, 10, 50])
def test_any_limit_is_kept_as_far_as_json_can(max_bytes: int) -> None:
    for value in ("x" * 99, ["x" * 9] * 9, {"k" * 9: {"k": "x" * 90}}, "\x00" * 99, [[[]]] * 40):
        assert len(made(value, max_bytes=max_bytes).data) <= max(max_bytes, 2)


def test_a_restored_value_is_a_copy() -> None:
    recorded: Any = {"a": [1, {"b": [2]}], "t": [[3]]}
    back: Any = restore(recorded, {"/t": "tuple"})
    back["a"][1]["b"].append(9)
    back["t"][0].append(9)
    back["a"].clear()
    assert recorded == {"a": [1, {"b": [2]}], "t": [[3]]}


@pytest.mark.parametrize(
    "tags",
    [
        {"/nowhere/1": "tuple"}, {"": "bytes"}, {"/a": "datetime"}, {"/a/1": "set"}, {"/a": "no such tag"},
        {"/a": "int"},
        {"/a": "dict"}, {"/a": "int_keys"}, {"/a": "NaN"}, {"/a": "timedelta"}, {"/a": "UUID"}, {"/a": "Decimal"},
        {"": "Path"}, {"/c": "tuple"}, {"/c": "int_keys"}, {"/c": "bytes"}, {"": LOSSY}, {"": CUT},
    ],
)  # fmt: skip
def test_tags_of_strangers_are_passed_over(tags: dict[str, str]) -> None:
    value = {"a": [[1], {"b": "?"}], "c": "x"}
    back = restore(value, tags)
    assert json.loads(json.dumps(back)) == value


def test_interrupts_are_not_swallowed() -> None:
    class Interrupts:
        def __repr__(self) -> str:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(Interrupts(), POLICY)


def test_a_program_near_its_recursion_limit_goes_on() -> None:
    value: Any = {"a": float("nan")}
    for _ in range(90):
        value = {"a": value}

    def down(left: int) -> Prepared:
        return prepare(value, POLICY) if left == 0 else down(left - 1)

    depth = 0
    frame: Any = sys._getframe()
    while frame:
        frame, depth = frame.f_back, depth + 1
    for margin in (5, 20, 60, 150, 300):
        try:
            assert down(sys.getrecursionlimit() - depth - margin).data
        except RecursionError:
            assert margin <= 20


keys = st.text(max_size=8)
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=12), st.binary(max_size=12),
    st.datetimes(timezones=st.sampled_from([None, dt.UTC, dt.timezone(dt.timedelta(hours=-3, seconds=7))])), st.dates(),
    st.times(), st.timedeltas(), st.decimals(allow_nan=False), st.uuids(), st.complex_numbers(allow_nan=False),
    st.characters(categories=["Cs"]), st.integers(-5, 5).map(lambda near: 10**4300 + near),
)  # fmt: skip
hashables = st.recursive(
    leaves, lambda parts: st.one_of(st.tuples(parts, parts), st.frozensets(parts, max_size=3)), max_leaves=4
)
anything = st.recursive(
    hashables,
    lambda parts: st.one_of(
        st.lists(parts, max_size=3), st.dictionaries(hashables, parts, max_size=3),
        st.dictionaries(keys, parts, max_size=3), st.tuples(parts), st.sets(hashables, max_size=3),
    ),
    max_leaves=8,
)  # fmt: skip
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quick
@given(anything)
def test_what_can_come_back_comes_back(value: Any) -> None:
    prepared = made(value)
    if not prepared.findings:
        assert restore(prepared.value, prepared.tags) == value
    assert redact_json(prepared.value).findings == []


@quick
@given(anything)
def test_a_prepared_value_prepares_to_itself(value: Any) -> None:
    first = made(value)
    again = made(first.value)
    assert (again.value, again.digest, again.findings, again.tags) == (first.value, first.digest, (), {})


@pytest.mark.full
@settings(quick, max_examples=5000)
@given(anything)
def test_round_trips_for_long(value: Any) -> None:
    prepared = made(value)
    if not prepared.findings:
        assert restore(prepared.value, prepared.tags) == value
    assert made(prepared.value).digest == prepared.digest
