"""Whose programs listen at an address of this machine, as the kernel tells.

The client asks before it sends a token, and the server before it joins a Ray cluster. Every user can take the port of a
server that has ended. Elsewhere than on Linux nothing is known.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterator
from pathlib import Path

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENS = "0A"
_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


def listening_users(host: str, port: int) -> set[int] | None:
    """Ids of the users whose sockets take connections to this address of this machine. None: that is not known."""
    names = ("127.0.0.1", "::1") if host == "localhost" else (host,)
    try:
        wanted = {ipaddress.ip_address(name) for name in names}
        sockets = [one for table in _TABLES if table.exists() for one in _listeners(table)]
    except (OSError, ValueError, IndexError):
        return None
    has_old = any(one.version == 4 for one in wanted)  # which come to a socket at every new address, too
    found = {
        user
        for at, its_port, user in sockets
        if its_port == port and (at in wanted or (at.is_unspecified and (at.version == 6 or has_old)))
    }
    return found if _TABLES[0].exists() else None


def _listeners(table: Path) -> Iterator[tuple[_Ip, int, int]]:
    """Address, port and user of each. They come first in the table, which may be long."""
    with table.open(encoding="ascii") as file:
        next(file, "")
        for line in file:
            fields = line.split()
            if fields[3] != _LISTENS:
                return
            address, _, port = fields[1].partition(":")
            yield _ip(address), int(port, 16), int(fields[7])


def _ip(text: str) -> _Ip:
    """Words of 32 bits, each written as a number of this machine."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    found = ipaddress.ip_address(b"".join(struct.pack("=I", word) for word in words))
    return getattr(found, "ipv4_mapped", None) or found
