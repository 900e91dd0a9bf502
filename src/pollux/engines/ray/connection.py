"""Joins a Ray cluster, and finds the supervisor of a Pollux there or makes one. The proxy calls it.

Every failure is one sentence that says what to do; nothing of another Pollux is touched.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pollux.engines.ray.network import can_connect, speaks_tls

if TYPE_CHECKING:
    from ray.actor import ActorHandle
from pollux.errors import EngineError

NAMESPACE = "pollux"
NO_SUPERVISOR, NO_RAY, ANOTHER = "there is no supervisor", "no Ray answers", "another Pollux on this Ray cluster"
REACH_S = 5.0
ANSWER_S = 60.0
CHECK_S = 15.0  # that nodes have to answer a check
LAST_S = 10.0  # beyond their grace, for jobs that are ended
_HOST_PORT = re.compile(r"(?P<host>.+):(?P<port>[0-9]{1,5})")

logger = logging.getLogger(__name__)


class Refused(EngineError):
    """It cannot be; the message says why and what to do."""


def supervisor_name(cluster: str) -> str:
    return f"pollux:{cluster}:supervisor"


def join(settings: dict[str, Any]) -> ActorHandle:
    """The supervisor's handle. ``settings``: address, and what a supervisor is made with.

    Raises:
        Refused: no Ray is there, another version, or the name is another Pollux's.
    """
    address, supervisor_settings = settings["address"], settings["supervisor"]
    connect(address)
    import ray

    name, ends_at = supervisor_name(supervisor_settings["cluster"]), time.monotonic() + ANSWER_S
    while True:
        supervisor = _find(name)
        if supervisor is None and not settings["makes_supervisor"]:
            raise Refused(f"{NO_SUPERVISOR}: nothing of this Pollux runs at {address}")
        if supervisor is None:
            logger.info("no supervisor named %s is there: making one", name)
            supervisor = _make(name, supervisor_settings)
        try:
            about = ray.get(supervisor.about.remote(), timeout=ANSWER_S)
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
            cause = str(error).rstrip().splitlines()
            if "creation task" in str(error):
                raise Refused(f"the supervisor {name} cannot be made on the head: {cause[-1]}") from error
            if isinstance(error, ray.exceptions.ActorDiedError) and time.monotonic() < ends_at:
                time.sleep(0.2)  # it was ending just then; its name is free soon
                continue
            why = f"the supervisor {name} does not answer: {_first_line(error)}; see Ray's logs on the head"
            raise Refused(why) from error
        if about["owner"] != supervisor_settings["owner"]:
            raise Refused(
                f"{ANOTHER} is called {supervisor_settings['cluster']!r} (that of "
                f"{about['where']}, running now): give this one another name with --name; nothing of the other was "
                "touched"
            )
        if not about["is_over"]:
            return supervisor
        ray.kill(supervisor)  # its jobs have left, and it takes no others
        time.sleep(0.2)


def connect(address: str) -> None:
    """Raises Refused."""
    try:
        import ray
    except ImportError as error:
        raise Refused(f'ray is not installed here ({error}): pip install "pollux-scheduler[ray]"') from error
    match = _HOST_PORT.fullmatch(address)
    if match is not None and "://" not in address:
        why = can_connect(match["host"], int(match["port"]), REACH_S)
        if why:
            raise Refused(
                f"{NO_RAY} at {address} ({why}): see that the head runs (`ray status` on it) and that the port "
                "is reachable from here, or leave --address out to start a head"
            )
        _require_same_encryption(match["host"], int(match["port"]), os.environ)
    _require_token(address)
    handler = signal.getsignal(signal.SIGTERM) if threading.current_thread() is threading.main_thread() else None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except RuntimeError as error:
        if "ersion mismatch" in str(error):
            what = " ".join(str(error).split())
            raise Refused(
                f"the Ray cluster at {address} and this machine have different versions: {what}; this is Ray "
                f"{ray.__version__} on Python {sys.version.split()[0]}: install the same on all machines"
            ) from error
        raise Refused(f"Ray at {address} cannot be joined: {_first_line(error)}") from error
    except (ConnectionError, ValueError, TimeoutError) as error:
        raise Refused(
            f"no Ray cluster can be joined at {address}: {_first_line(error)}; see that it is Ray's head that listens "
            "there; the server must run on a machine of the cluster (`ray start --address=...` makes it one)"
        ) from error
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)  # Ray puts its own there


def _require_same_encryption(host: str, port: int, env: Mapping[str, str]) -> None:
    """With TLS on one side alone ``ray.init`` takes minutes, and its words are of something else.

    Raises:
        Refused: it is so.
    """
    ours = env.get("RAY_USE_TLS", "0").lower() in ("1", "true")
    theirs = speaks_tls(host.strip("[]"), port, REACH_S)
    if theirs is None or ours == theirs:
        return
    if theirs:
        raise Refused(
            f"Ray at {host}:{port} speaks TLS: set RAY_USE_TLS=1, RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and "
            "RAY_TLS_CA_CERT where pollux up is called, as for ray start"
        )
    raise Refused(f"Ray at {host}:{port} does not speak TLS: unset RAY_USE_TLS where pollux up is called")


def _require_token(address: str) -> None:
    """Ask the head one question: with a wrong token, ``ray.init`` takes half a minute and speaks of something else.

    Raises:
        Refused: it wants another token than this process has.
    """
    import ray

    errors: list[Exception] = []

    def ask() -> None:
        try:
            ray._raylet.GcsClient(address=address)
        except Exception as error:  # Ray has many; all but one are for ray.init to tell
            errors.append(error)

    asking = threading.Thread(target=ask, daemon=True)  # what listens there may not be Ray's, and never answer
    asking.start()
    asking.join(REACH_S)
    if errors and isinstance(errors[0], ray.exceptions.AuthenticationError):
        has_token = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
        has_token = has_token or os.path.exists(os.path.expanduser("~/.ray/auth_token"))
        seen = "another token than this one" if has_token else "a token, and there is none here"
        if has_token and os.environ.get("RAY_AUTH_MODE") != "token":
            seen = "a token, and RAY_AUTH_MODE is not 'token' here"
        raise Refused(
            f"Ray at {address} asks for {seen}: set RAY_AUTH_MODE=token and the cluster's RAY_AUTH_TOKEN or "
            "RAY_AUTH_TOKEN_PATH where pollux up is called (`ray get-auth-token` on the head shows it)"
        ) from errors[0]


def _find(name: str) -> ActorHandle | None:
    import ray

    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _make(name: str, settings: dict[str, Any]) -> ActorHandle:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from pollux.engines.ray.supervisor import RaySupervisor

    actor = ray.remote(num_cpus=0, max_concurrency=32, max_restarts=0)(RaySupervisor)
    options: dict[str, object] = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
    head = head_node()
    if head is not None:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(head, soft=False)
    return actor.options(**options).remote(**settings)


def head_node() -> str | None:
    """Its id, where the cluster says which it is: it outlives all others."""
    import ray

    for row in ray.nodes():
        if row["Alive"] and "node:__internal_head__" in row["Resources"]:
            return str(row["NodeID"])
    return None


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else repr(error)
