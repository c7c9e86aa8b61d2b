# SPDX-License-Identifier: Apache-2.0
"""Clock and chance: recorded and given back to the program, never to anybody else."""

from __future__ import annotations

import datetime
import json
import os
import random
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from sftrace_otel.bundle.read import list_bundles, open_bundle, validate_bundle
from sftrace_otel.core.draws import NONE, Draws
from sftrace_otel.formats import schema as schemas

AGENT = """
import asyncio, datetime, json, random, sys, threading, time, uuid
from dataclasses import dataclass, field
from datetime import datetime as dt
from time import time as earlier
import sftrace_otel
from sftrace_otel import trace_tool

class Timer:
    read = time.perf_counter           # no method

@dataclass
class Item:
    id: uuid.UUID = field(default_factory=uuid.uuid4)

@trace_tool
def tool(x):
    return {"got": x, "at": time.time()}

def more():
    random.seed(7)
    found = [random.random(), random.uniform(1, 2), random.choice("abcdefgh"),
        random.gauss(0, 1), random.randint(1, 10**9)]
    items = list(range(20)); random.shuffle(items)
    own = random.Random(); seeded = random.Random(3)
    return [*found, items, random.sample(range(100), 5), random.randbytes(4).hex(), own.random(), seeded.random()]

async def sleeper(n):
    await asyncio.sleep(0.01 * (3 - n))
    return [n, time.time_ns(), str(uuid.uuid4())]

async def together():
    loop = asyncio.get_running_loop()
    began = loop.time()
    found = await asyncio.gather(*(sleeper(n) for n in range(3)))
    assert loop.time() - began > 0.02
    return found

def main(count=1):
    out = {
        "time": [time.time(), time.time_ns(), time.monotonic(), time.monotonic_ns(), time.perf_counter(), earlier()],
        "timer": Timer().read(),
        "now": [dt.now().isoformat(), datetime.datetime.now(datetime.UTC).isoformat(), dt.today().isoformat(),
                datetime.date.today().isoformat()],
        "uuid": [str(uuid.uuid4()), str(uuid.uuid1()), str(Item().id)],
        "random": more(),
        "tool": tool({"id": str(uuid.uuid4()), "now": dt.now().isoformat()}),
    }
    threads, shared = [], {}
    def work(n):
        shared[n] = [tool({"n": n, "id": str(uuid.uuid4()), "r": random.random()}), time.time()]
    for n in range(4):
        threads.append(threading.Thread(target=work, args=(n,)))
    for one in threads: one.start()
    for one in threads: one.join()
    out["threads"] = [shared[n] for n in range(4)]
    out["tasks"] = asyncio.run(together())
    out["last"] = [time.time() for _ in range(count)]
    out["is"] = [type(dt.now()) is datetime.datetime, isinstance(dt.now(), datetime.datetime)]
    return out

if __name__ == "__main__":
    print("OUT", json.dumps(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)))
"""


def run(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OTEL_SFTRACE_DIR": str(folder / "sftraces"), **variables}
    for name in ("OTEL_TRACES_EXPORTER", "OTEL_PYTHON_DISTRO"):
        environment.pop(name, None)
    return subprocess.run(
        list(command), cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def said(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    lines = [line for line in done.stdout.splitlines() if line.startswith("OUT ")]
    assert len(lines) == 1, done.stderr
    found: dict[str, object] = json.loads(lines[0][4:])
    return found


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, object]]:
    """The folder of the agent, its bundle, and what it printed."""
    folder = tmp_path_factory.mktemp("agent")
    (folder / "agent.py").write_text(AGENT)
    instrument = str(Path(sys.executable).with_name("opentelemetry-instrument"))
    done = run(
        folder, instrument, "--sftrace_nondeterminism", "record", sys.executable, "agent.py",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    bundles = list_bundles(folder / "sftraces")
    assert len(bundles) == 1, done.stderr
    return folder, bundles[0].path, said(done)


def test_replay_gives_the_same_clock_and_chance(recorded: tuple[Path, Path, dict[str, object]]) -> None:
    folder, bundle, output = recorded
    done = run(
        folder, sys.executable, "-m", "sftrace_otel", "replay", str(bundle), "--json", "--", sys.executable, "agent.py"
    )
    assert said_in(done.stdout + done.stderr) == output
    report = json.loads(done.stdout[done.stdout.index("\n{") :] if not done.stdout.startswith("{") else done.stdout)
    assert done.returncode == 0, done.stderr
    assert report["nondeterminism"]["beyond"] == {}
    assert report["nondeterminism"]["served"] > 40


def said_in(text: str) -> dict[str, object]:
    line = next(line for line in text.splitlines() if line.startswith("OUT "))
    found: dict[str, object] = json.loads(line[4:])
    return found


@pytest.mark.full
def test_reads_beyond_the_recording_are_real_and_said(recorded: tuple[Path, Path, dict[str, object]]) -> None:
    folder, bundle, output = recorded
    command = ("-m", "sftrace_otel", "replay", str(bundle), "--", sys.executable, "agent.py", "3")
    done = run(folder, sys.executable, *command)
    now = said_in(done.stdout + done.stderr)
    last = now["last"]
    assert isinstance(last, list) and last[:1] == output["last"] and len(set(last)) == 3
    assert done.returncode == 0
    assert "time.time (2)" in done.stdout + done.stderr


def test_the_bundle_is_valid_and_ids_are_unique(recorded: tuple[Path, Path, dict[str, object]]) -> None:
    import jsonschema

    _, path, _ = recorded
    assert validate_bundle(path, verify_integrity=True).exit_code == 0
    bundle = open_bundle(path)
    validator = jsonschema.Draft202012Validator(json.loads(schemas.schema("nondeterminism")))
    for line in bundle.lines("nondeterminism.jsonl"):
        validator.validate(json.loads(line))
    rows = list(bundle.draws())
    assert {row["kind"] for row in rows} == {"clock", "rng"}
    keys = [(row["source"], row["lineage"], row["index"]) for row in rows]
    assert len(set(keys)) == len(keys)
    spans = [row["span_id"] for row in bundle.calls if row.get("span_id")]
    assert len(spans) == len(set(spans)) == len(bundle.calls)


@pytest.mark.full
def test_off_records_nothing_and_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    instrument = str(Path(sys.executable).with_name("opentelemetry-instrument"))
    done = run(tmp_path, instrument, sys.executable, "agent.py")
    assert done.returncode == 0, done.stderr
    (one,) = list_bundles(tmp_path / "sftraces")
    assert not (one.path / "nondeterminism.jsonl").exists()


IN_PROCESS = """
import datetime, logging, pickle, random, ssl, sys, time, uuid, threading, socket
from time import time as mine
before = {name: getattr(time, name) for name in ("time", "time_ns", "monotonic", "perf_counter")}
state = dict(vars(random._inst)); now = datetime.datetime.__dict__["now"]; seed = random.Random.__dict__["seed"]
uuid4, rnd, bits = uuid.uuid4, random.random, random.getrandbits
import sftrace_otel
from sftrace_otel import instrument, uninstrument, record
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
instrument()
assert time.time is before["time"]          # nobody has asked yet
with record("agent", output="run.sftrace"):
    assert time.time is not before["time"] and mine is time.time
    first = [time.time(), random.random(), str(uuid.uuid4()), datetime.datetime.now()]
    assert pickle.loads(pickle.dumps(time.time)) is time.time
    assert pickle.loads(pickle.dumps(first[3])) == first[3]
    import queue
    @sftrace_otel.trace_tool
    def tool(): return 1
    tool()
from sftrace_otel.replay import ReplaySession
with ReplaySession.from_trace("run.sftrace") as session:
    with record("agent", output="other.sftrace"):
        again = [time.time(), random.random(), str(uuid.uuid4()), datetime.datetime.now()]
        assert again == first, (again, first)
        ids = [RandomIdGenerator().generate_span_id() for _ in range(100)]
        assert len(set(ids)) == 100
        a = logging.LogRecord("a", 1, "p", 1, "m", (), None); assert a.created > first[0]
        tool()
        handshake()
report = session.report()
assert report.nondeterminism["served"] == 4, report.nondeterminism
uninstrument()
assert {name: getattr(time, name) for name in before} == before and mine is before["time"]
assert datetime.datetime.__dict__["now"] is now and random.Random.__dict__["seed"] is seed
assert (uuid.uuid4, random.random, random.getrandbits) == (uuid4, rnd, bits)
assert set(vars(random._inst)) == set(state)
assert not [m for m in list(sys.modules.values()) for v in list(vars(m).values()) if type(v).__name__ == "_Source"]
assert datetime.datetime.now().year >= 2024
print("fine")
"""
HANDSHAKE = '''
def handshake():
    """A TLS handshake of this process with itself, certificate and all."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    here = datetime.datetime(2024, 1, 1)
    made = (x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(7).not_valid_before(here).not_valid_after(datetime.datetime(2099, 1, 1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), False).sign(key, hashes.SHA256()))
    pem = made.public_bytes(serialization.Encoding.PEM)
    no = serialization.NoEncryption()
    text = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, no)
    open("cert.pem", "wb").write(pem + text)
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER); served.load_cert_chain("cert.pem")
    asking = ssl.create_default_context(cadata=pem.decode())
    a, b, c, d = ssl.MemoryBIO(), ssl.MemoryBIO(), None, None
    client, server = asking.wrap_bio(a, b, server_hostname="localhost"), served.wrap_bio(b, a, server_side=True)
    done = [False, False]
    for _ in range(10):
        for at, side in enumerate((client, server)):
            try:
                done[at] = done[at] or side.do_handshake() is None
            except ssl.SSLWantReadError:
                pass
    assert done == [True, True]
'''


def test_others_are_not_touched_and_everything_comes_back(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(HANDSHAKE + IN_PROCESS)
    done = run(tmp_path, sys.executable, "program.py", OTEL_SFTRACE_NONDETERMINISM="record")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "fine"


def test_reads_of_one_place_and_source_are_a_sequence_of_their_own() -> None:
    rows = [
        {"source": "time.time", "lineage": "t0/", "index": 1, "value": 2.0},
        {"source": "time.time", "lineage": "t0/", "index": 0, "value": 1.0},
        {"source": "time.time", "lineage": None, "index": 0, "value": 9.0},
        {"source": "random.getrandbits", "lineage": "", "index": 0, "value": "5", "bits": 3},
    ]
    draws = Draws(rows)
    assert draws.take("time.time", "t0/") == 1.0
    assert draws.take("time.time", "") is NONE
    assert draws.take("time.time", None) == 9.0
    assert draws.take("time.time", "t0/") == 2.0
    assert draws.take("random.getrandbits", "", 4) is NONE
    assert draws.take("random.getrandbits", "", 3) == "5"
    assert draws.report() == {"recorded": 4, "served": 4, "beyond": {"time.time": 1, "random.getrandbits": 1}}


def test_nothing_is_replaced_in_this_process() -> None:
    assert type(time.time).__name__ == type(random.random).__name__ == "builtin_function_or_method"
    assert type(datetime.datetime.__dict__["now"]).__name__ == "classmethod_descriptor"
    assert uuid.uuid4.__module__ == "uuid" and "random" not in vars(random._inst)  # type: ignore[attr-defined]
