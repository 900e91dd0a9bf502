"""The secret by which a supervisor knows its own server: a file that only their user can read.

The supervisor sends a nonce, the engine answers with a proof that it has read the file. The secret is never sent.
Called by ``supervisor`` and ``connection``.
"""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path

from pollux.errors import EngineError

SECRET_FILE = "supervisor.key"
NUM_BYTES = 32


def make_secret(directory: Path) -> bytes:
    """A new secret in the directory, in place of an older one."""
    secret = secrets.token_bytes(NUM_BYTES)
    path = directory / SECRET_FILE
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
    fresh.replace(path)
    return secret


def read_secret(directory: Path) -> bytes:
    """Raises:
    EngineError: it cannot be read.
    """
    try:
        return (directory / SECRET_FILE).read_bytes()
    except OSError as error:
        path = directory / SECRET_FILE
        raise EngineError(
            f"the supervisor's secret {path} cannot be read ({error.strerror}): run as the user who started it"
        ) from error


def new_nonce() -> str:
    return secrets.token_hex(NUM_BYTES)


def proof_of(secret: bytes, nonce: str) -> str:
    return hmac.digest(secret, b"pollux-engine:" + nonce.encode(), "sha256").hex()


def is_proof(secret: bytes, nonce: str, proof: object) -> bool:
    return isinstance(proof, str) and hmac.compare_digest(
        proof_of(secret, nonce).encode(), proof.encode(errors="replace")
    )
