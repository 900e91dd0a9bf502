"""Which Unix user a replica runs as, where the supervisor is root, and which machine this is. The starters ask it.

The server puts the user's name into the replica's environment, under a name that jobs cannot set themselves.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Mapping
from dataclasses import dataclass

RUN_AS = "POLLUX_UNIX_USER"
# What an interpreter needs to find and import torch.
_PLAIN = re.compile("PATH|HOME|LANG|LC_.*|TZ|LD_LIBRARY_PATH|PYTHON.*|VIRTUAL_ENV|(CUDA|NVIDIA)_.*")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnixIdentity:
    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]


def identity_of(env: Mapping[str, str]) -> UnixIdentity | None:
    """Whom a replica with this environment runs as; None: as this process.

    Raises:
        OSError: the user is not known here, is root, or this process may not change to it.
    """
    name = env.get(RUN_AS, "")
    if not name:
        return None
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise OSError(f"the unix user {name!r} is not known on this machine") from None
    if entry.pw_uid == 0 or os.geteuid() != 0:
        raise OSError(f"jobs cannot run as the unix user {name!r}: it is root, or the supervisor is not")
    return UnixIdentity(
        name=name, uid=entry.pw_uid, gid=entry.pw_gid, groups=tuple(os.getgrouplist(name, entry.pw_gid))
    )


def plain_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What of this process's environment a process gets that later becomes another user: no secrets."""
    return {name: value for name, value in environ.items() if _PLAIN.fullmatch(name)}


def become(identity: UnixIdentity) -> None:
    """Change this process to that user, for good."""
    os.setgroups(identity.groups)
    os.setresgid(identity.gid, identity.gid, identity.gid)
    os.setresuid(identity.uid, identity.uid, identity.uid)


def boot_id() -> str:
    """Tells this machine from others until it starts anew; "" where the kernel does not say."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""
