"""The ``pollux`` command. Parses, calls, prints; everything it does can be done from Python without it."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """Ctrl-C was pressed.

    A type of its own, as Python notes a plain KeyboardInterrupt that passes through ``exec``, which dataclasses use at
    import, and then ends ``python -m pollux`` by the signal, though it was handled and another exit code was set.
    """


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted


def main() -> None:
    """Console entry point. Its libraries are an extra, so they are looked for here and not at import."""
    # A scheduler's matrices are tiny: threads for them only burn time. Must be said before numpy is loaded.
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as under nohup
        signal.signal(signal.SIGINT, _interrupt)
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401

        from pollux.cli.app import app

        app(prog_name="pollux")
    except KeyboardInterrupt:  # before the command that would answer it is there
        raise SystemExit(130) from None
    except ModuleNotFoundError as error:
        if error.name not in ("httpx", "rich", "typer"):
            raise
        print(
            f'the pollux command needs {error.name}, which is not installed: pip install "pollux-scheduler[cli]"',
            file=sys.stderr,
        )
        raise SystemExit(2) from None


__all__ = ["main"]
