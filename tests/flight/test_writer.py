# SPDX-License-Identifier: Apache-2.0
"""The writer: values come back, lines are what the format says, and nothing that goes wrong is half there."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import threading
import tracemalloc
import unicodedata
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sftrace_otel.bundle import flight as files
from sftrace_otel.errors import CanonicalizationError, FormatError, PayloadError, SftraceError, TraceStorageError
from sftrace_otel.flight import FlightWriter, body_hash, open_flight, redacted, unrepr, verify_flight
from sftrace_otel.formats import canonical, flight


def write(path: Path, **members: Any) -> Path:
    with FlightWriter(path, run_id="r", fsync="never") as chain:
        chain.append("tool.call", members)
    return path


def read(path: Path) -> Any:
    bundle = open_flight(path)
    (event,) = bundle.events()
    return bundle.value(event.body)


texts = st.text(max_size=5) | st.sampled_from(
    ["$blob", "$literal", "$redacted", "$unrepr", "e\u0301", "ﬁ", "한", "a\nb"]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(2**53 - 2, 2**53 + 2) | st.floats(allow_nan=False)
    | texts.filter(lambda text: not any(0xD800 <= ord(c) < 0xE000 for c in text)) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(texts.filter(lambda text: text.encode("utf-8", "ignore").decode() == text), inner, max_size=4),
    max_leaves=10,
)  # fmt: skip


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values, st.sampled_from([60, 16384]))
def test_values_come_back(tmp_path: Path, oracle: Any, value: Any, spill: int) -> None:
    path = tmp_path / "v.flight"
    shutil.rmtree(path, ignore_errors=True)
    with FlightWriter(path, run_id="r", fsync="never", spill_bytes=spill) as chain:
        chain.append("tool.call", {"value": value, "again": [value]})
    back = read(path)
    assert back == {"value": value, "again": [value]}
    result = verify_flight(path)
    assert result.valid and not result.warnings and oracle(path) is None


def test_what_json_cannot_hold(tmp_path: Path) -> None:
    back = read(write(
        tmp_path / "v.flight", nan=float("nan"), inf=[math.inf, -math.inf], big=[2**53, -(10**30), 10**5000],
        raw=bytearray(b"\xff"), view=memoryview(b"m"), pair=(1, (2,)), when=datetime(2026, 1, 1, tzinfo=UTC),
        lone="\ud800", numbers={1: 2}, yes=True,
    ))  # fmt: skip
    assert math.isnan(back["nan"]) and back["inf"] == [math.inf, -math.inf]
    assert back["big"] == [2**53, -(10**30), 10**5000] and type(back["big"][0]) is int
    assert (back["raw"], back["view"], back["pair"], back["yes"]) == (b"\xff", b"m", [1, [2]], True)
    assert back["when"] == unrepr(
        "datetime.datetime", "datetime.datetime(2026, 1, 1, 0, 0, tzinfo=datetime.timezone.utc)"
    )
    assert back["lone"] == unrepr("str", r"'\ud800'") and back["numbers"] == unrepr("dict", "{1: 2}")


def test_a_repr_is_redacted_and_then_cut_and_may_fail(tmp_path: Path) -> None:
    class Long:
        def __repr__(self) -> str:
            return "secret " + "é" * 5000

    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    with FlightWriter(tmp_path / "v.flight", run_id="r", scrub=lambda text: text.replace("secret", "[R]")) as chain:
        chain.append("tool.call", {"long": Long(), "broken": Broken()})
    back = read(tmp_path / "v.flight")
    assert back["long"]["repr"].startswith("[R] é") and len(back["long"]["repr"]) == flight.MAX_REPR
    assert "Broken object at" in back["broken"]["repr"]


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_deep_values_and_cycles(tmp_path: Path, oracle: Any) -> None:
    cycle: dict[str, Any] = {"a": 1}
    cycle["self"] = [cycle]
    deep = {str(depth): nested(depth) for depth in (200, 245, 246, 251, 252, 253, 254, 300, 450)}
    path = write(tmp_path / "v.flight", deep=deep, deepest=nested(10_000), cycle=cycle, twice=[[1]] * 3)
    back = read(path)
    assert verify_flight(path).valid and not verify_flight(path).warnings and oracle(path) is None
    assert back["deep"] == deep
    assert back["deepest"] is not None and "$unrepr" in json.dumps(back["deepest"])
    assert back["cycle"]["a"] == 1 and back["cycle"]["self"][0]["$unrepr"] is True and back["twice"] == [[1]] * 3


def test_ours_stays_and_the_users_lookalike_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "v.flight"
    with FlightWriter(path, run_id="r") as chain:
        ref = chain.blob(b"wire \xff", "application/json")
        mine = {"$blob": "sha256:" + "0" * 64, "size": 1}
        gone = redacted("api-key", "hmac-sha256:0123456789abcdef")
        chain.append("http.response", {"body": ref, "user": mine, "list": [{"$redacted": 1}], "key": gone})
    stored = next(open_flight(path).events()).body
    assert stored["user"] == {"$literal": [["$blob", mine["$blob"]], ["size", 1]]}
    assert stored["key"] == {"$redacted": "api-key", "ref": "hmac-sha256:0123456789abcdef"}
    back = read(path)
    assert (back["body"], back["user"], back["list"]) == (b"wire \xff", mine, [{"$redacted": 1}])
    assert open_flight(path).manifest.capabilities == ["blobs", "redaction-refs"] and verify_flight(path).valid


@pytest.mark.parametrize("name", ["$blob", "$redacted", "$unrepr", "$literal", "e\u0301"])
def test_a_body_whose_own_member_is_named_like_ours_is_refused(tmp_path: Path, name: str) -> None:
    with FlightWriter(tmp_path / "v.flight", run_id="r") as chain:
        with pytest.raises(PayloadError):
            chain.append("x-a.b", {name: 1})
        assert chain.append("x-a.b", {"fine": 1}) == 0
    assert verify_flight(tmp_path / "v.flight").valid


def test_the_line_is_the_canonical_envelope_with_hash_first(good: Path) -> None:
    for line in (good / "events.jsonl").read_bytes().split(b"\n")[:-1]:
        event = json.loads(line)
        assert list(event) == ["hash", *sorted(set(event) - {"hash"})]
        del event["hash"]
        assert line[82:] == canonical.rfc8785_nfc(event)[1:]
        assert unicodedata.is_normalized("NFC", line.decode())


def test_big_members_are_spilled_biggest_first(tmp_path: Path) -> None:
    body = {"a": "x" * 30_000, "b": {"k": ["y" * 9000]}, "c": "z" * 9000, "d": 1}
    path = write(tmp_path / "v.flight", **body)
    stored = next(open_flight(path).events()).body
    assert stored["a"]["media_type"] == flight.TEXT_MEDIA and stored["b"]["media_type"] == flight.VALUE_MEDIA  # type: ignore[index,call-overload]
    assert (stored["c"], stored["d"]) == ("z" * 9000, 1)
    assert read(path) == body and verify_flight(path).valid
    for name in (one for one in path.rglob("blobs/*/*/*") if one.is_file()):
        assert name.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_mode & 0o777 == 0o700 and (path / "events.jsonl").stat().st_mode & 0o777 == 0o600


def test_what_names_a_blob_stays_in_the_line(tmp_path: Path) -> None:
    """The chain commits to the blobs that its lines name; a name inside a blob would be nobody's."""
    body = {"a": {"raw": b"1", "text": "x" * 30_000, "more": [b"2", {"y": "y" * 30_000}], "n": 1}}
    path = write(tmp_path / "v.flight", **body)
    result = verify_flight(path)
    assert result.valid and not result.warnings and read(path) == body
    assert (path / "events.jsonl").stat().st_size < 3000
    assert len([one for one in path.rglob("blobs/*/*/*") if one.is_file()]) == 4


def test_a_blob_is_there_before_the_line_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda one, to: seen.append(f"blob {Path(to).name[:4]}") or replace(one, to))
    real = files.append_to
    monkeypatch.setattr(files, "append_to", lambda file, line: seen.append("line") or real(file, line))
    chain = FlightWriter(tmp_path / "v.flight", run_id="r")
    chain.append("tool.call", {"raw": b"1"})
    assert len(seen) == 2 and seen[0].startswith("blob") and seen[1] == "line"
    chain.close()
    assert seen[-1] == "blob mani"  # the manifest, after everything


def test_threads_make_one_chain(tmp_path: Path, oracle: Any) -> None:
    path = tmp_path / "v.flight"
    seqs: list[list[int]] = [[] for _ in range(4)]
    ready = threading.Barrier(4)
    with FlightWriter(path, run_id="r", fsync="never", spill_bytes=300) as chain:
        start = chain.append("run.start", {})

        def work(number: int) -> None:
            ready.wait()
            for step in range(60):
                body = {"name": str(number), "raw": bytes([step]), "text": "t" * (step * 10)}
                seqs[number].append(chain.append("tool.call", body, parents=[seqs[number][-1] if step else start]))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert verify_flight(path).event_count == 241 and verify_flight(path).valid and oracle(path) is None
    assert sorted(seq for one in seqs for seq in one) == list(range(1, 241)) and all(one == sorted(one) for one in seqs)
    times = [event.t_mono_ns for event in open_flight(path).events()]
    assert min(times) >= 0


def test_a_forked_child_does_not_write_into_its_parents_chain(tmp_path: Path) -> None:
    chain = FlightWriter(tmp_path / "v.flight", run_id="r")
    chain.append("run.start", {})
    child = os.fork()
    if child == 0:
        try:
            chain.append("tool.call", {})
        except TraceStorageError as error:
            os._exit(0 if "process that began it" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    chain.append("run.end", {})
    assert verify_flight(chain.close()).event_count == 2


def test_a_closed_writer_and_a_second_close(tmp_path: Path) -> None:
    chain = FlightWriter(tmp_path / "v.flight", run_id="r")
    assert chain.close() == chain.close() == tmp_path / "v.flight"
    for call in (lambda: chain.append("run.end", {}), lambda: chain.blob(b"")):
        with pytest.raises(TraceStorageError, match="closed") as caught:
            call()
        assert caught.value.code == "closed"


def test_what_is_there_is_not_replaced_unless_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "v.flight", a=1)
    with pytest.raises(TraceStorageError, match="already exists"):
        FlightWriter(path, run_id="r")
    with FlightWriter(path, run_id="r2", overwrite=True) as chain:
        assert open_flight(path).manifest.run_id == "r"
        chain.append("run.start", {})
    assert open_flight(path).manifest.run_id == "r2" and [one.name for one in tmp_path.iterdir()] == ["v.flight"]
    (tmp_path / "other.flight").mkdir()
    (tmp_path / "other.flight" / "thesis.txt").write_text("mine")
    (tmp_path / "link.flight").symlink_to(path)
    for name in ("other.flight", "link.flight", "no.sftrace"):
        with pytest.raises(TraceStorageError):
            FlightWriter(tmp_path / name, run_id="r", overwrite=True)
    assert verify_flight(path).valid


@pytest.mark.parametrize("partial", [0, 40])
def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partial: int) -> None:
    chain = FlightWriter(tmp_path / "v.flight", run_id="r")
    chain.append("run.start", {})
    real = os.write

    def full(file: int, data: bytes) -> int:
        if partial and len(data) > partial:
            return real(file, data[:partial])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(TraceStorageError, match="No space left"):
        chain.append("tool.call", {"name": "lost " * 20})
    monkeypatch.undo()
    assert chain.append("tool.call", {"name": "kept"}) == 1
    assert verify_flight(chain.close()).event_count == 2


def test_parents_are_before_their_event(tmp_path: Path) -> None:
    with FlightWriter(tmp_path / "v.flight", run_id="r") as chain:
        for parents in ([0], [-1], [5]):
            with pytest.raises(TraceStorageError, match="not before it"):
                chain.append("tool.call", {}, parents=parents)
        chain.append("run.start", {})
        assert chain.append("tool.call", {}, parents=(0,)) == 1


def test_bad_text_of_the_envelope(tmp_path: Path) -> None:
    with FlightWriter(tmp_path / "v.flight", run_id='run "é\\', fsync="never") as chain:
        chain.append('x-a."\u0001é', {}, t_wall='"\\', t_mono_ns=2**53 + 1, v=3)
        chain.append("run.end", {}, extra={"x-note": ["e\u0301", 1e16], "aaa": 1})
        with pytest.raises(CanonicalizationError):
            chain.append("\ud800", {})
    result = verify_flight(tmp_path / "v.flight")
    assert result.valid and result.event_count == 2
    assert [event.extra for event in open_flight(tmp_path / "v.flight").events()][1] == {
        "x-note": ["é", 10**16],
        "aaa": 1,
    }


def test_every_fsync_and_a_wrong_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(file) or real(file))
    counts = {}
    for fsync in ("never", "close", "event"):
        flushed.clear()
        chain = FlightWriter(tmp_path / f"{fsync}.flight", run_id="r", fsync=fsync)
        chain.append("tool.call", {"raw": b"1"})
        before = len(flushed)
        chain.close()
        counts[fsync] = (before, len(flushed) - before > 3)
    assert counts == {"never": (0, False), "close": (0, True), "event": (2, True)}
    with pytest.raises(ValueError, match="fsync"):
        FlightWriter(tmp_path / "x.flight", run_id="r", fsync="sometimes")


def test_an_event_that_is_written_again_keeps_every_hash(good: Path, tmp_path: Path) -> None:
    lines = (good / "events.jsonl").read_bytes().split(b"\n")[:-1]
    for bundle in (good, Path(__file__).parents[1] / "data/vectors/flight/ok_respelled.flight"):
        prev = flight.GENESIS
        for event in open_flight(bundle).events():
            sealed = flight.reseal(event, prev)
            assert (sealed.hash, sealed.body_hash) == (event.hash, event.body_hash)
            assert body_hash(event.body, event.type, event.v) == event.body_hash
            if bundle == good:
                assert sealed.line == lines[event.seq] + b"\n"
            prev = sealed.hash
    event = flight.parse_event(lines[8])
    odd = flight.seal(
        seq=0, run_id="r", type="x-later", body=event.body, prev_hash=flight.GENESIS, t_wall="", t_mono_ns=0,
        extra={"zz": {"deep": [1.0]}, "😀": 1},
    )  # fmt: skip
    again = flight.parse_event(odd.line)
    assert again.extra == {"zz": {"deep": [1]}, "😀": 1}
    assert flight.reseal(again, flight.GENESIS) == odd


def test_body_hash_leaves_out_what_is_volatile_at_the_top_only() -> None:
    assert body_hash({"a": 1, "latency_ns": 5, "truncated": True}, "error") == body_hash({"a": 1.0}, "error")
    assert body_hash({"a": {"latency_ns": 5}}, "error") != body_hash({"a": {}}, "error")
    assert body_hash({"a": 1}, "error") != body_hash({"a": 1}, "error", v=2)


@pytest.mark.parametrize(
    "stored", [{"$literal": 1}, {"$literal": [[1]]}, {"$unrepr": True, "lang_type": "int", "repr": "x"}]
)
def test_stored_values_that_mean_nothing(stored: Any) -> None:
    with pytest.raises(FormatError):
        flight.decode_value({"a": [stored]}, lambda digest: b"")


def test_blobs_are_checked_when_they_are_read(good: Path) -> None:
    bundle = open_flight(good)
    blob = next(path for path in good.rglob("blobs/*/*/*") if path.is_file())
    assert bundle.blob(f"sha256:{blob.name}") == blob.read_bytes()
    blob.write_bytes(b"other")
    codes = {f"sha256:{blob.name}": "blob_mismatch", "sha256:" + "0" * 64: "blob_missing", "../x": "invalid_blob"}
    for digest, code in codes.items():
        with pytest.raises(TraceStorageError) as caught:
            bundle.blob(digest)
        assert caught.value.code == code


def test_events_of_a_damaged_record_raise_with_their_line(good: Path) -> None:
    with (good / "events.jsonl").open("ab") as file:
        file.write(b"{}\n")
    seen = []
    with pytest.raises(SftraceError, match=r"events.jsonl:12: v: is missing"):
        for event in open_flight(good).events():
            seen.append(event.seq)
    assert seen == list(range(11))


def test_memory_does_not_grow_with_the_record(tmp_path: Path) -> None:
    path = tmp_path / "v.flight"
    with FlightWriter(path, run_id="r", fsync="never") as chain:
        for number in range(3000):
            chain.append("tool.call", {"n": number, "text": "x" * 900})
    verify_flight(path)
    tracemalloc.start()
    try:
        assert verify_flight(path).valid
        assert sum(1 for _ in open_flight(path).events()) == 3000
        assert tracemalloc.get_traced_memory()[1] < 2_500_000 < (path / "events.jsonl").stat().st_size
    finally:
        tracemalloc.stop()
