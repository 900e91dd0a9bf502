"""Addresses as other machines know them. Node agents and the Ray engine call it; no Ray.

Nothing here assumes 127.0.0.1: gloo and NCCL would choose an interface by the host's own name, which on many machines
leads to the loopback, so each replica is told the interface that has its node's address.
"""

from __future__ import annotations

import socket
import ssl

import psutil

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def interface_of(address: str) -> str | None:
    """The network interface that has this address; None if none here has it."""
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.address.split("%")[0] == address:
                return name
    return None


def network_env(address: str) -> dict[str, str]:
    """What a replica on the node with this address finds in its environment, unless its job says otherwise."""
    interface = interface_of(address)
    return {} if interface is None else dict.fromkeys(INTERFACE_VARIABLES, interface)


def free_port(address: str) -> int:
    """A port that is free now."""
    with socket.create_server((address, 0), family=_family(address)) as listener:
        return int(listener.getsockname()[1])


def can_connect(host: str, port: int, timeout_s: float) -> str:
    """Why no connection to that port can be made; "" if it can."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def speaks_tls(host: str, port: int, timeout_s: float) -> bool | None:
    """Whether what listens there wants TLS; None: it does not say. Nothing is trusted, and nothing is told to it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])  # or gRPC does not answer
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as plain, context.wrap_socket(plain):
            return True
    except ssl.SSLError as error:  # an alert is TLS, too: it wants a certificate of ours, say
        return "ALERT" in (error.reason or "")
    except TimeoutError:
        return None
    except OSError:  # it hung up
        return False


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
