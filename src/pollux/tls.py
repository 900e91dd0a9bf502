"""How the server proves to clients and jobs that it is the one they mean, and whom a token may be sent to.

The client, the reports of ``pollux.train`` and the server's own check of its certificate use it.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from pollux.errors import InvalidValueError

CA_VARIABLE = "POLLUX_CA"  # certificates to trust: a file, or their text
PLAIN_VARIABLE = "POLLUX_PLAIN_HTTP"  # "1": tokens may go to other machines without encryption
_BEGIN = "-----BEGIN CERTIFICATE-----"


def client_context(ca: str | None) -> ssl.SSLContext:
    """Checks a server's name and certificate. ``ca``: a file or the text of what to trust; None: the system's.

    A server's own certificate may be trusted by itself: it need not be signed by itself.

    Raises:
        InvalidValueError: there is no certificate in it.
    """
    try:
        if ca is None:
            return ssl.create_default_context()
        text = ca if _BEGIN in ca else Path(ca).expanduser().read_text(encoding="ascii")
        if _BEGIN not in text:  # ssl would take an empty text for the system's certificates
            raise ValueError("it has no certificate")
        context = ssl.create_default_context(cadata=text)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        shown = "the text given" if ca is not None and _BEGIN in ca else repr(ca)
        raise InvalidValueError(f"CA {shown}: {error}; a file of PEM certificates is needed") from error
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def is_loopback_url(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_own_address(url: str) -> bool:
    """Whether it is an address of this machine: what is sent there does not leave it."""
    host = urlsplit(url).hostname or ""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))  # only one's own can be bound
    except (OSError, ValueError):
        return False
    return True


def check_plain(url: str, allows_plain: bool) -> None:
    """Raises:
    InvalidValueError: a token would go to another machine without encryption, and that was not asked for.
    """
    if not (url.startswith("https:") or allows_plain or is_loopback_url(url) or is_own_address(url)):
        raise InvalidValueError(
            f"server {url}: it is on another machine, and http would send the token unencrypted; use https "
            f"(pollux up --tls-cert FILE --tls-key FILE), an SSH tunnel, or, in a network that only you use, "
            f"pollux --plain-http or {PLAIN_VARIABLE}=1"
        )
