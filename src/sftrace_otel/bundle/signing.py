# SPDX-License-Identifier: Apache-2.0
"""Signing bundles and verifying signatures: Ed25519 over what `formats.signature` says of a bundle.

Decision: a `.sftrace` bundle is signed over its integrity record and every file that it lists, each hashed as it is
on the disk; a `.flight` bundle over run id, head hash and event count, as the events themselves give them, and the
digests of the manifest and of each blob. Only a bundle that verifies is signed. In `.sftrace` any file that the record
does not list counts as added, because readers open sidecars by their names; beside a chain only blobs are read, so
only those. Keys are read by `cryptography`, imported with the first of them. No text of an error holds any of a key's
bytes: what the library says is not passed on. Rejected: RSA and ECDSA (one kind of key, no parameters to get wrong),
and certificates or transparency logs (whoever needs them can put this same envelope into one).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct

from sftrace_otel.bundle.flight import FlightBundle, open_flight
from sftrace_otel.bundle.read import Bundle, open_bundle
from sftrace_otel.bundle.store import FolderStore, Store
from sftrace_otel.bundle.write import reporting, write_file
from sftrace_otel.errors import FormatError, SettingsError, TraceStorageError
from sftrace_otel.formats import Json, flight, signature
from sftrace_otel.formats.sftrace import INTEGRITY_FILE, SIGNATURE_FILE
from sftrace_otel.formats.signature import Envelope, Signature

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

MAX_KEY_BYTES = 64 << 10
KEY_CODE = "unusable_key"
_BAD = "holds no key that can be read; a PEM file is expected"


class Signed(Struct, frozen=True):
    """A signature that was made: the file it is in, and the id of its key."""

    path: Path
    keyid: str
    format: str


class SignatureReport(Struct, frozen=True):
    """What a signature says of a bundle.

    Attributes:
        state: `valid` (made by the key, and it holds), `invalid`, `missing`, or `unknown` (made by other keys only).
        findings: What does not hold, as pairs of what and where.
        keyid: The id of the key that was given.
        made_by: The ids that the signatures name; nothing vouches for these.
    """

    state: str
    findings: tuple[tuple[str, str], ...]
    keyid: str
    made_by: tuple[str, ...] = ()

    def passes(self, *, required: bool) -> bool:
        """Whether this is good enough; without a signature of the key it is where none is required."""
        return self.state == "valid" or (not required and self.state in ("missing", "unknown"))


class _Statement(NamedTuple):
    payload: bytes
    format: str
    faults: tuple[tuple[str, str], ...]


def sign(path: Path | str, key: Ed25519PrivateKey, *, output: Path | None = None, overwrite: bool = False) -> Signed:
    """Sign a bundle.

    Args:
        path: The bundle.
        key: From `load_private`.
        output: Where the envelope goes; by default into the bundle. A packed bundle needs one.
        overwrite: Replace a signature of something else; one over the same content is added to.

    Raises:
        TraceStorageError: It cannot be read, does not verify (`integrity_mismatch`), is signed already with other
            content (`exists`), or the envelope cannot be written.
    """
    store, made = _stated(path)
    if made.faults:
        what, where = made.faults[0]
        raise TraceStorageError(f"{where}: {what}; only a bundle that verifies is signed", where=str(path),
                                code="integrity_mismatch")  # fmt: skip
    if output is None and not isinstance(store, FolderStore):
        text = "is packed: sign the folder before packing it, or say with -o where the signature goes"
        raise TraceStorageError(text, where=str(path), code="bad_target")
    target = output or store.path / SIGNATURE_FILE
    keyid = keyid_of(key.public_key())
    sig = key.sign(signature.pae(signature.PAYLOAD_TYPE, made.payload))
    others = () if overwrite else _others(target, made.payload, keyid)
    _put(target, Envelope(signature.PAYLOAD_TYPE, made.payload, (*others, Signature(keyid, sig))))
    return Signed(target, keyid, made.format)


def verify(path: Path | str, key: Ed25519PublicKey, *, envelope: Path | None = None) -> SignatureReport:
    """Check a bundle against its signature.

    Args:
        path: The bundle, in a folder or packed.
        key: From `load_public`.
        envelope: The signature, where it is not in the bundle.

    Raises:
        TraceStorageError: The bundle or the envelope cannot be read.
    """
    keyid = keyid_of(key)
    store = open_flight(path).store if _is_flight(path) else open_bundle(path).store
    data = _envelope_bytes(store, envelope)
    if data is None:
        return SignatureReport("missing", ((f"there is no {SIGNATURE_FILE}", SIGNATURE_FILE),), keyid)
    where = SIGNATURE_FILE if envelope is None else str(envelope)
    try:
        found = signature.parse_envelope(data)
        made_by = tuple(signature.keyids(found.signatures))
        if not _holds(key, found):
            if keyid in made_by:
                return SignatureReport("invalid", (("the signature does not hold", where),), keyid, made_by)
            text = "made by another key: " + (", ".join(filter(None, made_by)) or "it names none")
            return SignatureReport("unknown", ((text, where),), keyid, made_by)
        made = _stated(path)[1]
        faults = (*signature.differences(found.payload_type, found.payload, made.payload), *made.faults)
    except TraceStorageError:
        raise
    except FormatError as error:
        return SignatureReport("invalid", ((str(error), where),), keyid)
    return SignatureReport("invalid" if faults else "valid", tuple(dict.fromkeys(faults)), keyid, made_by)


def _others(target: Path, payload: bytes, keyid: str) -> tuple[Signature, ...]:
    """The signatures of other keys over the same payload that are there already."""
    try:
        data = target.read_bytes()
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise TraceStorageError(_unreadable(error), where=str(target)) from None
    try:
        there = signature.parse_envelope(data)
    except FormatError:
        there = None
    if there is None or (there.payload_type, there.payload) != (signature.PAYLOAD_TYPE, payload):
        text = "is there already and signs something else; ask to overwrite it"
        raise TraceStorageError(text, where=str(target), code="exists")
    return tuple(one for one in there.signatures if one.keyid != keyid)


def _put(target: Path, envelope: Envelope) -> None:
    scratch = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    with reporting(target):
        try:
            write_file(scratch, [signature.dump_envelope(envelope)], fsync=True)
            scratch.replace(target)
        finally:
            scratch.unlink(missing_ok=True)


def _envelope_bytes(store: Store, envelope: Path | None) -> bytes | None:
    if envelope is None:
        return store.read(SIGNATURE_FILE) if store.has(SIGNATURE_FILE) else None
    try:
        return envelope.read_bytes()
    except OSError as error:
        raise TraceStorageError(_unreadable(error), where=str(envelope), code="missing_file") from None


def _holds(key: Ed25519PublicKey, envelope: Envelope) -> bool:
    from cryptography.exceptions import InvalidSignature

    signed = signature.pae(envelope.payload_type, envelope.payload)
    for one in envelope.signatures:
        try:
            key.verify(one.sig, signed)
        except InvalidSignature:
            continue
        return True
    return False


# What a bundle says


def _is_flight(path: Path | str) -> bool:
    return Path(path).name.endswith(flight.SUFFIX)


def _stated(path: Path | str) -> tuple[Store, _Statement]:
    if _is_flight(path):
        chain = open_flight(path)
        return chain.store, _of_chain(chain)
    bundle = open_bundle(path)
    return bundle.store, _of_bundle(bundle)


def _of_bundle(bundle: Bundle) -> _Statement:
    """Every listed file, hashed now, and the record itself."""
    if not bundle.has(INTEGRITY_FILE):
        text = f"has no {INTEGRITY_FILE}, so there is nothing to sign over; load it and save it again to get one"
        raise TraceStorageError(text, where=str(bundle.path), code="integrity_unverified")
    names = [name for name in bundle.store.names() if name != SIGNATURE_FILE]
    digests = {name: bundle.digest(name) for name in bundle.listed() if name != SIGNATURE_FILE and bundle.has(name)}
    digests[INTEGRITY_FILE] = bundle.digest(INTEGRITY_FILE)
    report = bundle.integrity()
    faults = [(issue.message, issue.location or INTEGRITY_FILE) for issue in report.issues]
    faults += [("is not in integrity.json, so no signature covers it", name) for name in names if name not in digests]
    predicate: dict[str, Json] = {
        "format": "sftrace",
        "runId": bundle.manifest.run_id,
        "eventCount": bundle.manifest.totals.events,
    }
    return _Statement(signature.statement(digests, predicate), "sftrace", tuple(faults))


def _of_chain(chain: FlightBundle) -> _Statement:
    """What the events say, and the files that they do not hold: the manifest and the blobs."""
    found = chain.verify()
    store = chain.store
    digests = {name: store.digest(name) for name in store.names() if _is_signed(name)}
    faults = [(one.message, one.location or flight.EVENTS_FILE) for one in found.findings]
    predicate: dict[str, Json] = {
        "format": "flight",
        "runId": found.run_id,
        "eventCount": found.event_count,
        "headHash": found.head_hash,
    }
    return _Statement(signature.statement(digests, predicate), "flight", tuple(faults))


def _is_signed(name: str) -> bool:
    return name == flight.MANIFEST_FILE or name.startswith(f"{flight.BLOBS_FOLDER}/")


# Keys


def keyid_of(key: Ed25519PublicKey) -> str:
    """`sha256:` and the SHA-256 of the key's SubjectPublicKeyInfo in DER."""
    from hashlib import sha256

    serialization = _library()
    spki = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return f"sha256:{sha256(spki).hexdigest()}"


def load_private(path: Path | str, passphrase: Callable[[], str] | None = None) -> Ed25519PrivateKey:
    """The key in a PEM file (PKCS #8 or OpenSSH).

    Args:
        path: The file.
        passphrase: Called where the key is encrypted.

    Raises:
        SettingsError: It cannot be read or is no Ed25519 key, or the library is not installed (code `unusable_key`).
    """
    serialization = _library()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    data = _key_bytes(path)
    if b"PRIVATE KEY-----" not in data:
        text = "holds no private key"
        raise _key_error(path, f"{text}, but a public one" if _is_public(data) else f"{text} in PEM")
    ssh = b"BEGIN OPENSSH" in data
    load = serialization.load_ssh_private_key if ssh else serialization.load_pem_private_key
    try:
        key = _opened(load, data, passphrase)
    except _Locked:
        raise _key_error(path, "is encrypted, and its passphrase was not given or is wrong") from None
    except Exception:  # what the library says may quote the file
        raise _key_error(path, _BAD) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise _key_error(path, "holds a key of another kind; an Ed25519 key is needed")
    return key


def load_public(path: Path | str) -> Ed25519PublicKey:
    """The key in a PEM file (SubjectPublicKeyInfo), or in OpenSSH's one line.

    Raises:
        SettingsError: As `load_private`; a private key is refused too, since it has no place where one verifies.
    """
    serialization = _library()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    data = _key_bytes(path)
    if b"PRIVATE KEY-----" in data:
        raise _key_error(path, "holds a private key; verify with the public one")
    load = serialization.load_pem_public_key if data.lstrip().startswith(b"-") else serialization.load_ssh_public_key
    try:
        key = load(data)
    except Exception:  # as above
        raise _key_error(path, _BAD) from None
    if not isinstance(key, Ed25519PublicKey):
        raise _key_error(path, "holds a key of another kind; an Ed25519 key is needed")
    return key


def new_key(path: Path | str, passphrase: str = "") -> tuple[Path, str]:
    """Make a key pair: the private key at `path` (mode 0600), the public one at `path` with `.pub` added.

    Returns:
        The path of the public key, and the key's id.

    Raises:
        SettingsError: One of the files is there already, or cannot be written; the library is not installed.
    """
    serialization = _library()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    encryption = serialization.NoEncryption()
    if passphrase:
        encryption = serialization.BestAvailableEncryption(passphrase.encode())
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    place = Path(path).expanduser()
    beside = place.with_name(f"{place.name}.pub")
    if beside.exists() or beside.is_symlink():
        raise _key_error(beside, "is there already; keys are never overwritten")
    _create(place, private, 0o600)
    try:
        _create(beside, public, 0o644)
    except SettingsError:
        place.unlink(missing_ok=True)
        raise
    return beside, keyid_of(key.public_key())


class _Locked(Exception):
    """An encrypted key that stays closed."""


def _opened(load: Callable[..., object], data: bytes, passphrase: Callable[[], str] | None) -> object:
    try:
        return load(data, password=None)
    except TypeError:  # how the library says that the key is encrypted; OpenSSH's it says the same way
        pass
    except ValueError:
        if b"BEGIN OPENSSH" not in data or passphrase is None:
            raise
    word = passphrase() if passphrase is not None else ""
    if not word:
        raise _Locked
    try:
        return load(data, password=word.encode())
    except ValueError:
        raise _Locked from None


def _library() -> Any:
    """`cryptography.hazmat.primitives.serialization`; with a line to type where it is not there."""
    try:
        from cryptography.hazmat.primitives import serialization
    except ImportError:
        text = "signatures need the library cryptography: pip install 'sftrace-otel[sign]'"
        raise SettingsError(text, code=KEY_CODE) from None
    return serialization


def _key_bytes(path: Path | str) -> bytes:
    try:
        with Path(path).expanduser().open("rb") as file:
            data = file.read(MAX_KEY_BYTES + 1)
    except (OSError, ValueError) as error:
        raise _key_error(path, _unreadable(error)) from None
    if len(data) > MAX_KEY_BYTES:
        raise _key_error(path, "is too large for a key")
    return data


def _is_public(data: bytes) -> bool:
    return b"PUBLIC KEY-----" in data or data.startswith(b"ssh-")


def _create(path: Path, data: bytes, mode: int) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), mode)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
    except FileExistsError:
        raise _key_error(path, "is there already; keys are never overwritten") from None
    except OSError as error:
        raise _key_error(path, _unreadable(error).replace("read", "written")) from None


def _key_error(path: Path | str, text: str) -> SettingsError:
    return SettingsError(f"{path}: {text}", code=KEY_CODE)


def _unreadable(error: Exception) -> str:
    return f"cannot be read: {getattr(error, 'strerror', None) or type(error).__name__}"


def lines(report: SignatureReport) -> Iterator[str]:
    """What the findings of a report say, one line each, not yet cleaned for a terminal."""
    return (f"{where}: {what}" for what, where in report.findings)


def document(report: SignatureReport) -> Mapping[str, object]:
    """A report as JSON."""
    return {
        "state": report.state,
        "keyid": report.keyid,
        "made_by": list(report.made_by),
        "findings": [{"message": what, "location": where} for what, where in report.findings],
    }
