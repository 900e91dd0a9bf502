"""Certificates made on the spot, by the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest


class Certificate(NamedTuple):
    cert: Path
    key: Path


def make_certificate(folder: Path, name: str = "IP:127.0.0.1", days: int = 2) -> Certificate:
    """Signed by itself, for this name."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command here to make a certificate with")
    folder.mkdir(parents=True, exist_ok=True)
    made = Certificate(folder / "cert.pem", folder / "key.pem")
    options = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=pollux"]
    files = ["-keyout", str(made.key), "-out", str(made.cert)]
    subprocess.run(
        ["openssl", "req", "-x509", *options, *files, "-days", str(days), "-addext", f"subjectAltName={name}"],
        check=True,
        capture_output=True,
        timeout=30,
    )
    return made
