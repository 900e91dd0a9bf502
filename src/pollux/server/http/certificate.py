"""Checks the server's certificate before it is served: the service calls it when it starts."""

from __future__ import annotations

import ssl
from pathlib import Path

from pollux.errors import InvalidValueError
from pollux.tls import client_context

_MAX_FLIGHTS = 10  # of a handshake; it has three


def check_certificate(certificate: Path, key: Path, host: str) -> str:
    """The certificate's text. A client that knows ``host`` and trusts this certificate alone can talk to the server.

    Raises:
        InvalidValueError: a file cannot be read, they do not belong together, the certificate is out of date, or it is
            for another name.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        server.load_cert_chain(certificate, key, password=lambda: "")  # otherwise it would ask at the terminal
        text = certificate.read_text(encoding="ascii")
    except (OSError, ValueError) as error:
        raise InvalidValueError(
            f"--tls-cert {certificate}, --tls-key {key}: {error}; a PEM certificate and its key without a password "
            "are needed"
        ) from error
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client_context(text).wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(_MAX_FLIGHTS):
        for side in list(sides):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                reason = getattr(error, "verify_message", "") or str(error)
                raise InvalidValueError(
                    f"--tls-cert {certificate}: {reason}; clients and jobs will ask for {host}: name the host that it "
                    "is for (--host), or make one for this host"
                ) from error
            sides.remove(side)
    return text
