"""Certificates for an etcd that speaks TLS."""

import subprocess
from pathlib import Path


def make_certificates(directory: Path) -> None:
    """Make two authorities, `ca` and `other`: one for a server at 127.0.0.1 and a client, one for a `rogue` server.

    The server also has a certificate that has `expired`.
    """

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=directory)

    for authority in ("ca", "other"):
        openssl(
            *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={authority}"),
            *("-keyout", f"{authority}.key", "-out", f"{authority}.pem"),
        )
    for name, authority in (("server", "ca"), ("client", "ca"), ("rogue", "other")):
        (directory / f"{name}.ext").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        openssl(
            *("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}"), "-keyout", f"{name}.key", "-out", name
        )
        signed_by = ("-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial")
        openssl(
            *("x509", "-req", "-in", name, *signed_by, "-days", "2"),
            *("-extfile", f"{name}.ext", "-out", f"{name}.pem"),
        )
    openssl(
        *("x509", "-req", "-in", "server", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "-1"),
        *("-extfile", "server.ext", "-out", "expired.pem"),
    )
