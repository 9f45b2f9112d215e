"""Who a daemon is to the daemons of its run: certificates of an authority that only holders of the run's secret can be.

The secret never travels. From it each host derives the private key of the same certificate authority, which signs one
certificate for a key that this daemon has made for itself. Whoever shows such a certificate has the secret; TLS 1.3
with it on both sides lets nobody else read, change or repeat what is said.
"""

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final
from urllib.parse import quote, unquote

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from resilient_run.ckpt.errors import DaemonError

from .secret import derive

_SCALAR_BYTES: Final = 48
"""So many more than the order has that the remainder is as good as uniform (FIPS 186-5, A.2.1)."""

_P256_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_HOST: Final = "resilient-run:host:"

# Hosts whose clocks are wrong must find each other, too. What is old is refused by its run's incarnation instead: the
# authority is derived from that, and each daemon's own key lives as long as its job.
_BEGIN: Final = datetime(1970, 1, 1, tzinfo=UTC)
_END: Final = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


class Identity:
    """A host of one life of a run, as its peers' daemons can check it.

    Args:
        secret: The run key, or without one the secret in the run's agreement.
        run_id: The run.
        incarnation: Which life of the run id.
        host: Name of this host in it.

    Attributes:
        client: For connections that this host makes.
        server: For those that it accepts.
    """

    def __init__(self, secret: str, *, run_id: str, incarnation: str, host: str) -> None:
        self.run_id = run_id
        self.host = host
        # One authority for each life of a run: what another one's daemons still say must not count in this one.
        seed = derive(secret, "certificate authority", run_id, incarnation, size_bytes=_SCALAR_BYTES)
        signer = ec.derive_private_key(int.from_bytes(seed, "big") % (_P256_ORDER - 1) + 1, ec.SECP256R1())
        authority = _authority(signer).public_bytes(Encoding.PEM).decode()
        key = ec.generate_private_key(ec.SECP256R1())
        own = _leaf(key, signer, host).public_bytes(Encoding.PEM)
        own += key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        self.client = _context(ssl.PROTOCOL_TLS_CLIENT, authority, own)
        self.server = _context(ssl.PROTOCOL_TLS_SERVER, authority, own)
        # Nothing is resumed: a ticket would be a second way in.
        self.server.num_tickets = 0


def host_of(sock: ssl.SSLSocket) -> str:
    """Return which host the verified certificate of the peer names.

    Raises:
        DaemonError: It names none, or one that would steer the terminal that shows the log.
    """
    certificate = sock.getpeercert() or {}
    match certificate.get("subjectAltName"):
        case (("URI", str(name)),) if (
            name.startswith(_HOST) and (host := unquote(name.removeprefix(_HOST))).isprintable()
        ):
            return host
    raise DaemonError("the peer's certificate names no host")


def _context(protocol: int, authority: str, own: bytes) -> ssl.SSLContext:
    # Not `create_default_context`, which trusts the system's authorities and writes keys where SSLKEYLOGFILE says.
    context = ssl.SSLContext(protocol)
    # Hosts are no DNS names: `host_of` has the name, and whoever connects compares it.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=authority)
    with _in_memory(own) as path:
        context.load_cert_chain(path)
    return context


@contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """Yield the path of a file that is on no disk: `load_cert_chain` takes nothing else."""
    descriptor = os.memfd_create("identity", os.MFD_CLOEXEC)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{descriptor}"


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    usage = _usage(key_cert_sign=True)
    builder = _builder("authority", key.public_key(), x509.BasicConstraints(ca=True, path_length=0), usage)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return builder.serial_number(1).add_extension(identifier, critical=False).sign(key, SHA256())


def _leaf(key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey, host: str) -> x509.Certificate:
    usage = _usage(digital_signature=True)
    builder = _builder("daemon", key.public_key(), x509.BasicConstraints(ca=False, path_length=None), usage)
    roles = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    name = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(_HOST + quote(host, safe=""))])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    for extension in (roles, name, issuer):
        builder = builder.add_extension(extension, critical=False)
    return builder.serial_number(x509.random_serial_number()).sign(signer, SHA256())


def _builder(
    name: str, key: ec.EllipticCurvePublicKey, constraints: x509.BasicConstraints, usage: x509.KeyUsage
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name("authority"))
        .public_key(key)
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .add_extension(constraints, critical=True)
        .add_extension(usage, critical=True)
    )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"resilient-run {name}")])


def _usage(*, digital_signature: bool = False, key_cert_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
