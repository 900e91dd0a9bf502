"""Runs the command of a job in a container. The process of a replica calls it before it becomes that command.

Apptainer's containers are processes of ours like any other. Those of podman and docker are started by a client, which
passes signals on; what is left of one whose client was killed is found by the mark in its environment, as all leftovers
are. Network, processes and shared memory are the node's own: replicas of a job meet as they do outside.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from pollux.engines.processes.packages import find_tool
from pollux.errors import EngineError

# Variables of this node that mean nothing in an image, or name programs and libraries that it does not have.
NOT_PASSED = frozenset(
    (
        *("PATH", "HOME", "HOSTNAME", "PWD", "OLDPWD", "SHELL", "USER", "LOGNAME", "TMPDIR", "LD_LIBRARY_PATH"),
        *("LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV"),
    )
)
PLACES = ("POLLUX_CHECKPOINT_DIR", "POLLUX_CA")  # variables that name files which a replica needs


def in_container(image: str, directory: str, env: Mapping[str, str], command: Sequence[str]) -> list[str]:
    """The command that runs ``command`` in ``image``, with ``directory`` and the job's checkpoints at their paths.

    Raises:
        EngineError: this node has no program for it.
    """
    tool = find_tool("apptainer", "singularity", "podman", "docker")
    if tool is None:
        raise EngineError(
            "none of apptainer, singularity, podman and docker is installed on this node: --container needs one"
        )
    places = [directory, *(env[name] for name in PLACES if os.path.isabs(env.get(name, "")))]
    places = [place for place in dict.fromkeys(places) if os.path.exists(place)]
    has_gpus = bool(env.get("CUDA_VISIBLE_DEVICES"))
    name = os.path.basename(tool)
    if name in ("apptainer", "singularity"):
        is_file = image.endswith(".sif") or os.path.exists(image) or "://" in image
        bound = ["--bind", ",".join(places), "--pwd", directory]
        kept = [*(["--nv"] if has_gpus else []), "--no-home"]
        return [tool, "exec", *kept, *bound, image if is_file else f"docker://{image}", *command]
    mounted = [word for place in places for word in ("--volume", f"{place}:{place}")]
    passed = [word for key in sorted(env) if key not in NOT_PASSED for word in ("--env", key)]  # values: not in ps
    shared = ["--network=host", "--pid=host", "--ipc=host", f"--user={os.geteuid()}:{os.getegid()}"]
    gpus = [] if not has_gpus else ["--gpus=all"] if name == "docker" else ["--device=nvidia.com/gpu=all"]
    return [tool, "run", "--rm", *shared, *gpus, *mounted, *passed, f"--workdir={directory}", image, *command]
