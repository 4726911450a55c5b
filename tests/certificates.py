"""Certificates for mutual TLS on the loopback interface, made by the openssl program."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from baton.grpc_channel import TlsFiles

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl program")

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class Authority:
    """Signs certificates that are valid for a day."""

    def __init__(self, folder: Path, name: str) -> None:
        """Its files are ``folder``/``name``.*."""
        self._folder = folder
        self.certificate = folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        files = ("-keyout", str(self._key), "-out", str(self.certificate))
        _openssl("req", "-x509", *_NEW_KEY, *files, "-subj", f"/CN={name}", "-days", "1")

    def sign(self, name: str) -> TlsFiles:
        """A certificate for a worker at 127.0.0.1."""
        key, request, certificate, extensions = (
            self._folder / f"{name}.{kind}" for kind in ("key", "csr", "pem", "ext")
        )
        files = ("-keyout", str(key), "-out", str(request))
        _openssl("req", *_NEW_KEY, *files, "-subj", f"/CN={name}")
        extensions.write_text("subjectAltName=IP:127.0.0.1\n")
        signer = ("-CA", str(self.certificate), "-CAkey", str(self._key), "-CAcreateserial")
        signed = ("-in", str(request), "-out", str(certificate), "-extfile", str(extensions))
        _openssl("x509", "-req", *signed, *signer, "-days", "1")
        return TlsFiles(certificate, key, self.certificate)


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=30)
