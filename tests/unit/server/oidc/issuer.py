"""An OpenID Connect issuer on the loopback: discovery, published keys, and tokens that it signs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt  # type: ignore[import-not-found,unused-ignore]
from cryptography.hazmat.primitives.asymmetric import ec, rsa  # type: ignore[import-not-found,unused-ignore]
from cryptography.hazmat.primitives.serialization import (  # type: ignore[import-not-found,unused-ignore]
    Encoding,
    PublicFormat,
)

AUDIENCE = "pollux-lab"


class Issuer:
    def __init__(self, url: str) -> None:
        self.url = url
        self.rsa_key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.keys: dict[str, tuple[Any, str]] = {"first": (self.rsa_key, "RS256")}
        self.calls: list[str] = []
        self.is_away = False
        self.named = url  # what discovery calls it
        self.redirects_to = ""

    def add_key(self, key_id: str) -> None:
        self.keys[key_id] = ec.generate_private_key(ec.SECP256R1()), "ES256"

    def token(self, user: str = "ada", key_id: str = "first", **claims: Any) -> str:
        """``claims``: others than usual; None leaves one out."""
        key, algorithm = self.keys[key_id]
        now = int(time.time())
        usual = {"iss": self.url, "aud": AUDIENCE, "sub": f"id-of-{user}", "preferred_username": user, "iat": now}
        given = {name: value for name, value in {**usual, "exp": now + 600, **claims}.items() if value is not None}
        return str(jwt.encode(given, key, algorithm=algorithm, headers={"kid": key_id}))

    def public_pem(self) -> bytes:
        return bytes(self.rsa_key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))

    def answer(self, path: str) -> dict[str, Any] | None:
        if path == "/.well-known/openid-configuration":
            return {"issuer": self.named, "jwks_uri": f"{self.url}/keys"}
        if path == "/keys":
            return {"keys": [self._public(key_id, *key) for key_id, key in self.keys.items()]}
        return None

    @staticmethod
    def _public(key_id: str, key: Any, algorithm: str) -> dict[str, Any]:
        kind = jwt.algorithms.RSAAlgorithm if algorithm == "RS256" else jwt.algorithms.ECAlgorithm
        return {**kind.to_jwk(key.public_key(), as_dict=True), "kid": key_id, "use": "sig", "alg": algorithm}


@contextmanager
def serving() -> Iterator[Issuer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            issuer.calls.append(self.path)
            found = None if issuer.is_away else issuer.answer(self.path)
            body = json.dumps(found).encode()
            if issuer.redirects_to:
                self.send_response(302)
                self.send_header("Location", issuer.redirects_to)
            else:
                self.send_response(200 if found is not None else 503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        issuer = Issuer(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield issuer
        finally:
            server.shutdown()
            thread.join()
