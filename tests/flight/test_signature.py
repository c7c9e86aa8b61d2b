# SPDX-License-Identifier: Apache-2.0
"""Signatures of both formats: what they catch, what an independent implementation says, and how keys are handled."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stepfork
import stepfork.trace
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from sftrace_otel.bundle import signing
from sftrace_otel.bundle.flight import verify_flight
from sftrace_otel.bundle.pack import pack, unpack
from sftrace_otel.bundle.read import validate_bundle
from sftrace_otel.fork import ForkPoint, fork_trace
from sftrace_otel.formats import flight, signature

VECTOR = Path(__file__).parents[1] / "data" / "vectors" / "sftrace" / "completed.sftrace"
PKCS8 = serialization.PrivateFormat.PKCS8
PEM = serialization.Encoding.PEM
Cli = Callable[..., Any]


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """A private key, and the public one."""
    private = tmp_path / "keys" / "key.pem"
    private.parent.mkdir()
    public, _ = signing.new_key(private)
    return private, public


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A `.sftrace` bundle with a sidecar and a blob, all listed."""
    path = tmp_path / "home" / "run.sftrace"
    shutil.copytree(VECTOR, path)
    body = b"a body"
    digest = hashlib.sha256(body).hexdigest()
    blob = path / "blobs" / digest[:2] / digest[2:4] / digest
    blob.parent.mkdir(parents=True)
    blob.write_bytes(body)
    (path / "spans.jsonl").write_bytes(b'{"schema_version":"1","sidecar":"spans"}\n{"name":"a"}\n')
    reseal(path)
    assert validate_bundle(path, verify_integrity=True).exit_code == 0
    return path


@pytest.fixture(params=["sftrace", "flight"])
def bundle(request: pytest.FixtureRequest) -> Path:
    """A bundle of each format."""
    path: Path = request.getfixturevalue("trace" if request.param == "sftrace" else "good")
    return path


def reseal(path: Path) -> None:
    """All digests of a `.sftrace` bundle anew, as somebody who hides a change would."""
    names = [str(one.relative_to(path)) for one in sorted(path.rglob("*")) if one.is_file()]
    files = {
        name: hashlib.sha256((path / name).read_bytes()).hexdigest()
        for name in names
        if name not in ("integrity.json", "signature.dsse.json")
    }
    record = {"schema_version": "0.1", "algorithm": "sha256", "files": files}
    (path / "integrity.json").write_text(json.dumps(record, indent=2) + "\n")


def rechain(path: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """A `.flight` bundle with its events changed and every digest of chain and manifest computed anew."""
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    change(events)
    prev, lines = flight.GENESIS, []
    for event in events:
        line, prev = flight.reseal(flight.parse_event(json.dumps(event).encode()), prev)[:2]
        lines.append(line)
    (path / "events.jsonl").write_bytes(b"".join(lines))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.update(head_hash=prev, event_count=len(events))
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert verify_flight(path).valid


def edit(path: Path) -> None:
    events = path / "events.jsonl"
    data = events.read_bytes()
    old = b"value is 42" if path.suffix == ".sftrace" else b"MARKER-ORIG"
    assert old in data
    events.write_bytes(data.replace(old, old[:-1] + b"X"))


def edit_resealed(path: Path) -> None:
    if path.suffix == ".flight":
        rechain(path, lambda events: events[4]["body"]["output"].update(text="other"))
        return
    lines = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    end = next(line for line in lines if line["type"] == "run_end")
    end["output"] = "other"
    end["output_hash"] = hashlib.sha256(b'"other"').hexdigest()
    (path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    reseal(path)
    assert validate_bundle(path, verify_integrity=True).exit_code == 0


def cut_tail(path: Path) -> None:
    lines = (path / "events.jsonl").read_bytes().splitlines(keepends=True)
    (path / "events.jsonl").write_bytes(b"".join(lines[:-1]))


def cut_tail_resealed(path: Path) -> None:
    if path.suffix == ".flight":
        rechain(path, lambda events: events.pop())
        return
    cut_tail(path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["totals"]["events"] -= 1
    (path / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    reseal(path)
    assert validate_bundle(path, strict=False, verify_integrity=True).exit_code == 0


def spoil_blob(path: Path) -> None:
    blob = next(one for one in (path / "blobs").rglob("*") if one.is_file())
    blob.write_bytes(b"other")
    if path.suffix == ".sftrace":
        reseal(path)


def remove_blob(path: Path) -> None:
    shutil.rmtree(path / "blobs")
    if path.suffix == ".sftrace":
        reseal(path)


def add_blob(path: Path) -> None:
    digest = hashlib.sha256(b"new").hexdigest()
    blob = path / "blobs" / digest[:2] / digest[2:4] / digest
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"new")


def change_manifest(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.update({"agent_name": "other"} if path.suffix == ".sftrace" else {"note": "other"})
    (path / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    if path.suffix == ".sftrace":
        reseal(path)


CHANGES = [edit, edit_resealed, cut_tail, cut_tail_resealed, spoil_blob, remove_blob, add_blob, change_manifest]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_caught(cli: Cli, bundle: Path, keys: tuple[Path, Path], change: Callable[[Path], None]) -> None:
    assert cli("sign", bundle, "--key", keys[0]).code == 0
    check = ("sign", bundle, "--verify", "--key", keys[1], "--require")
    assert cli(*check).code == 0
    change(bundle)
    done = cli(*check)
    assert done.code == 1
    assert "✗ Signature holds" in done.out
    assert done.err
    assert cli("validate", bundle, "--partial", "--signature-key", keys[1]).code in (1, 2)


def test_sidecars_are_covered(cli: Cli, trace: Path, keys: tuple[Path, Path]) -> None:
    cli("sign", trace, "--key", keys[0])
    check = ("sign", trace, "--verify", "--key", keys[1], "--json")
    spans = (trace / "spans.jsonl").read_bytes()

    def caught() -> set[tuple[str, str]]:
        done = cli(*check)
        assert done.code == 1
        return {(one["location"], one["message"]) for one in done.json["findings"]}

    (trace / "spans.jsonl").unlink()
    reseal(trace)
    assert ("spans.jsonl", "was signed, but is not there") in caught()
    (trace / "spans.jsonl").write_bytes(spans)
    (trace / "calls.jsonl").write_bytes(b'{"schema_version":"1","sidecar":"calls"}\n')
    reseal(trace)
    assert ("calls.jsonl", "was added: the signature does not cover it") in caught()
    reseal(trace)
    (trace / "calls.jsonl").unlink()
    reseal(trace)
    (trace / "wire.jsonl").write_bytes(b'{"schema_version":"1","sidecar":"wire"}\n')  # named by no record
    assert ("wire.jsonl", "is not in integrity.json, so no signature covers it") in caught()


def test_a_missing_signature_fails_where_one_is_required(cli: Cli, bundle: Path, keys: tuple[Path, Path]) -> None:
    check = ("sign", bundle, "--verify", "--key", keys[1])
    cli("sign", bundle, "--key", keys[0])
    (bundle / "signature.dsse.json").unlink()
    assert cli(*check, "--require").code == 1
    done = cli(*check)
    assert done.code == 0
    assert "✓" not in done.out and "nothing was verified" in done.err
    assert cli("verify", bundle, "--signature-key", keys[1]).code == 0
    required = cli("verify", bundle, "--signature-key", keys[1], "--require-signature")
    assert required.code == 1
    assert required.out.endswith("Validation failed.\n")
    assert cli("verify", bundle, "--require-signature").code == 2


def test_an_unknown_signature_fails_where_one_is_required(
    cli: Cli, bundle: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    other = tmp_path / "other.pem"
    public, _ = signing.new_key(other)
    cli("sign", bundle, "--key", other)
    check = ("sign", bundle, "--verify", "--key", keys[1])
    assert cli(*check, "--require").code == 1
    assert cli(*check, "--json").json["state"] == "unknown"
    assert cli(*check).code == 0
    assert cli("sign", bundle, "--key", keys[0]).code == 0  # both have signed then
    assert cli(*check, "--require").code == 0
    assert cli("sign", bundle, "--verify", "--key", public, "--require").code == 0


def test_a_signature_that_names_the_key_but_is_not_by_it(cli: Cli, bundle: Path, keys: tuple[Path, Path]) -> None:
    cli("sign", bundle, "--key", keys[0])
    place = bundle / "signature.dsse.json"
    whole = json.loads(place.read_text())
    for spoil in (
        lambda envelope: envelope["signatures"][0].update(sig=base64.b64encode(bytes(64)).decode()),
        lambda envelope: envelope.update(payload=base64.b64encode(b"{}").decode()),
        lambda envelope: envelope.update(payloadType="text/plain"),
        lambda envelope: envelope.pop("payload"),
        lambda envelope: envelope.update(signatures=[]),
        lambda envelope: envelope.update(payload="!"),
    ):
        envelope = json.loads(json.dumps(whole))
        spoil(envelope)
        place.write_text(json.dumps(envelope))
        assert cli("sign", bundle, "--verify", "--key", keys[1]).code == 1
    place.write_text("no json")
    assert cli("sign", bundle, "--verify", "--key", keys[1]).code == 1


def test_a_signature_of_another_bundle_does_not_hold(
    cli: Cli, trace: Path, good: Path, keys: tuple[Path, Path]
) -> None:
    cli("sign", trace, "--key", keys[0])
    shutil.copy(trace / "signature.dsse.json", good)
    assert cli("sign", good, "--verify", "--key", keys[1]).code == 1


def test_others_verify_what_we_sign(cli: Cli, bundle: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    """A few lines written from the DSSE text, openssl, and securesystemslib."""
    cli("sign", bundle, "--key", keys[0])
    envelope = json.loads((bundle / "signature.dsse.json").read_text())
    assert set(envelope) == {"payload", "payloadType", "signatures"}
    payload, kind = base64.b64decode(envelope["payload"]), envelope["payloadType"]
    signed = " ".join(["DSSEv1", str(len(kind)), kind, str(len(payload)), ""]).encode() + payload
    sig = base64.b64decode(envelope["signatures"][0]["sig"])
    (tmp_path / "message").write_bytes(signed)
    (tmp_path / "sig").write_bytes(sig)
    openssl = shutil.which("openssl")
    if openssl is not None:
        command = [openssl, "pkeyutl", "-verify", "-pubin", "-inkey", str(keys[1]), "-rawin"]
        command += ["-in", str(tmp_path / "message"), "-sigfile", str(tmp_path / "sig")]
        assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import SSlibKey

    theirs = Envelope.from_dict(json.loads((bundle / "signature.dsse.json").read_text()))
    assert theirs.pae() == signed
    public = serialization.load_pem_public_key(keys[1].read_bytes())
    theirs.verify([SSlibKey.from_crypto(public, keyid=envelope["signatures"][0]["keyid"])], threshold=1)

    statement = json.loads(payload)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "urn:sftrace:predicate:bundle:v1"
    for subject in statement["subject"]:
        assert subject["digest"] == {"sha256": hashlib.sha256((bundle / subject["name"]).read_bytes()).hexdigest()}
    events = (bundle / "events.jsonl").read_text().splitlines()
    assert statement["predicate"]["eventCount"] == len(events)
    assert statement["predicate"]["runId"] == json.loads(events[0])["run_id"]
    if bundle.suffix == ".flight":
        assert statement["predicate"]["headHash"] == json.loads(events[-1])["hash"]


def test_the_encoding_that_is_signed_is_that_of_the_dsse_text() -> None:
    """The example of the DSSE protocol page, and lengths in bytes."""
    assert signature.pae("http://example.com/HelloWorld", b"hello world") == (
        b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    )
    assert signature.pae("é", b"") == b"DSSEv1 2 \xc3\xa9 0 "


def test_what_others_sign_verifies(bundle: Path, keys: tuple[Path, Path]) -> None:
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import CryptoSigner

    ours = signing.load_private(keys[0])
    made = signing.sign(bundle, ours)
    envelope = json.loads(made.path.read_text())
    theirs = Envelope(base64.b64decode(envelope["payload"]), envelope["payloadType"], {})
    theirs.sign(CryptoSigner(ours))
    made.path.write_text(json.dumps(theirs.to_dict()))
    assert signing.verify(bundle, signing.load_public(keys[1])).state == "valid"


def test_signing_is_deterministic_and_leaves_the_bundle_valid(
    cli: Cli, bundle: Path, keys: tuple[Path, Path], oracle: Callable[[Path], str | None]
) -> None:
    cli("sign", bundle, "--key", keys[0])
    first = (bundle / "signature.dsse.json").read_bytes()
    assert stat.S_IMODE((bundle / "signature.dsse.json").stat().st_mode) == 0o600
    assert cli("sign", bundle, "--key", keys[0]).code == 0
    assert (bundle / "signature.dsse.json").read_bytes() == first
    done = cli("verify", bundle, "--strict", "--signature-key", keys[1], "--require-signature")
    assert done.code == 0
    assert "✓ Signature holds" in done.out and "warning" not in done.err
    document = cli("verify", bundle, "--signature-key", keys[1], "--json").json
    assert document["valid"] is True and document["signature"]["state"] == "valid"
    if bundle.suffix == ".flight":
        assert oracle(bundle) is None
    else:
        theirs = stepfork.trace.validate_bundle(bundle, strict=True, verify_integrity=True)
        assert theirs.issues == []


def test_packs_keep_it_and_forks_never_carry_it(cli: Cli, trace: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    cli("sign", trace, "--key", keys[0])
    packed = pack(trace).path
    check = ("--verify", "--key", keys[1], "--require")
    assert cli("sign", packed, *check).code == 0
    again = unpack(packed, tmp_path / "again.sftrace").path
    assert (again / "signature.dsse.json").read_bytes() == (trace / "signature.dsse.json").read_bytes()
    assert cli("sign", again, *check).code == 0
    assert cli("sign", packed, "--key", keys[0]).code == 2
    aside = tmp_path / "aside.json"
    assert cli("sign", packed, "--key", keys[0], "-o", aside).code == 0
    (again / "signature.dsse.json").unlink()
    assert cli("sign", again, *check, "--signature", aside).code == 0
    forked = tmp_path / "fork.sftrace"
    fork_trace(trace, ForkPoint(step=2), output_path=forked)
    assert not (forked / "signature.dsse.json").exists()
    assert cli("sign", forked, *check).code == 1


def test_only_what_verifies_is_signed(cli: Cli, bundle: Path, keys: tuple[Path, Path]) -> None:
    edit(bundle)
    done = cli("sign", bundle, "--key", keys[0])
    assert done.code == 2
    assert "only a bundle that verifies is signed" in done.err
    assert not (bundle / "signature.dsse.json").exists()


def test_a_signature_of_other_content_is_replaced_only_if_asked(
    cli: Cli, bundle: Path, keys: tuple[Path, Path]
) -> None:
    cli("sign", bundle, "--key", keys[0])
    edit_resealed(bundle)
    assert cli("sign", bundle, "--key", keys[0]).code == 2
    assert cli("sign", bundle, "--key", keys[0], "--overwrite").code == 0
    assert cli("sign", bundle, "--verify", "--key", keys[1], "--require").code == 0


# Keys


def test_a_new_key_is_private_and_overwrites_nothing(cli: Cli, tmp_path: Path) -> None:
    place = tmp_path / "key.pem"
    assert cli("sign", "--new-key", place).code == 0
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    before = place.read_bytes()
    done = cli("sign", "--new-key", place)
    assert done.code == 2 and "never overwritten" in done.err
    (tmp_path / "key.pem.pub").unlink()
    assert cli("sign", "--new-key", place).code == 2
    assert place.read_bytes() == before
    assert not (tmp_path / "key.pem.pub").exists()


def test_a_passphrase(cli: Cli, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SFTRACE_KEY_PASSPHRASE", "correct horse")
    place = tmp_path / "key.pem"
    cli("sign", "--new-key", place)
    assert b"ENCRYPTED" in place.read_bytes()
    assert cli("sign", bundle, "--key", place).code == 0
    for word in ("wrong", ""):
        monkeypatch.setenv("SFTRACE_KEY_PASSPHRASE", word)
        done = cli("sign", bundle, "--key", place)
        assert done.code == 2
        assert "passphrase" in done.err and "horse" not in done.err and "wrong one" not in done.err


def test_keys_of_openssh(cli: Cli, bundle: Path, tmp_path: Path) -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    private, public = tmp_path / "id", tmp_path / "id.pub"
    no = serialization.NoEncryption()
    private.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.OpenSSH, no))
    raw = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    public.write_bytes(raw + b" somebody\n")
    assert cli("sign", bundle, "--key", private).code == 0
    assert cli("sign", bundle, "--verify", "--key", public, "--require").code == 0


def test_bad_keys_are_one_line_without_their_content(cli: Cli, bundle: Path, keys: tuple[Path, Path]) -> None:
    folder = keys[0].parent
    no = serialization.NoEncryption()
    elliptic = ec.generate_private_key(ec.SECP256R1())
    bad = {
        "rsa": rsa.generate_private_key(65537, 2048).private_bytes(PEM, PKCS8, no),
        "ec": elliptic.private_bytes(PEM, PKCS8, no),
        "torn": keys[0].read_bytes().replace(b"\n-----END", b"x\n-----END")[10:],
        "spoilt": keys[0].read_bytes().replace(b"MC4", b"MC5"),
        "text": b"SECRETSECRET",
        "empty": b"",
        "large": b"-----BEGIN PRIVATE KEY-----" + bytes(1 << 17),
        "public": keys[1].read_bytes(),
    }
    for name, data in bad.items():
        (folder / name).write_bytes(data)
        done = cli("sign", bundle, "--key", folder / name)
        assert (done.code, done.err.count("\n")) == (2, 1), (name, done.err)
        for piece in data.split(b"\n")[1:-2] or [b"SECRETSECRET"]:
            assert piece.decode("latin-1")[:24] not in done.err or len(piece) < 24
        assert "SECRET" not in done.err
    public = elliptic.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / "ec.pub").write_bytes(public)
    for name in ("ec.pub", "text", "empty", "absent", "key.pem", ""):
        done = cli("sign", bundle, "--verify", "--key", folder / name)
        assert (done.code, done.err.count("\n")) == (2, 1), (name, done.err)


def test_arguments_that_do_not_fit(cli: Cli, bundle: Path, keys: tuple[Path, Path]) -> None:
    assert cli("sign").code == 2
    assert cli("sign", bundle).code == 2
    assert cli("sign", bundle, "--key", keys[0], "--require").code == 2
    assert cli("sign", bundle.parent / "none.sftrace", "--key", keys[0]).code == 2
