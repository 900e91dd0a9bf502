"""The programs that a job brings along: packages for pip or uv, an environment of conda, a container. For requests."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pollux.api.masking import without_passwords
from pollux.errors import InvalidValueError

MAX_CONDA_CHARACTERS = 100_000
_IMAGE = re.compile("([A-Za-z0-9/.][A-Za-z0-9/._:@+-]{0,500})?")


def check_environment(pip: Sequence[str], uv: Sequence[str], conda: str, container: str) -> None:
    """Raises InvalidValueError: one of them cannot be, or a job has several."""
    for installer, lines in (("pip", pip), ("uv", uv)):
        for line in lines:
            if not line.strip() or "\n" in line:
                needed = "a requirement is needed, as in einops==0.8 or --index-url=URL"
                raise InvalidValueError(f"{installer} {line!r:.200}; {needed}")
    if len(conda) > MAX_CONDA_CHARACTERS or conda.startswith("-"):
        raise InvalidValueError(f"conda {conda!r:.80}; a name, a path or the text of an environment file is needed")
    if not _IMAGE.fullmatch(container):
        raise InvalidValueError(f"container {container!r:.80}; an image is needed, as in docker.io/library/python:3.11")
    given = [name for name, is_given in zip(_NAMES, (pip, uv, conda, container), strict=True) if is_given]
    if len(given) > 1:
        raise InvalidValueError(f"--{' and --'.join(given)}; a job has one environment: choose one of them")


_NAMES = ("pip", "uv", "conda", "container")


def shown_environment(request: Mapping[str, object]) -> dict[str, object]:
    """Of what was submitted, as others may see it: without passwords of indexes."""
    shown: dict[str, object] = {}
    for installer in ("pip", "uv"):
        if isinstance(lines := request.get(installer), list):
            shown[installer] = [without_passwords(str(line)) for line in lines]
    if isinstance(conda := request.get("conda"), str):
        shown["conda"] = without_passwords(conda)
    return shown
