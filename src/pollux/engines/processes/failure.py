"""Why a replica failed, from what it wrote to stderr. Elastic and fixed jobs, starters and node agents call it."""

from __future__ import annotations

import re
import signal
from pathlib import Path

TAIL_BYTES = 4000
MOST_BYTES = 64_000  # how far back a traceback is looked for
HEADER = "Traceback (most recent call last)"
_LONGEST_HEADLINE = 300
_RANKS = re.compile(r"^(\[rank\d+\]: ?)+", re.MULTILINE)  # torch's, before every line, once per group it has seen
_NO_CHECKPOINT = re.compile(r"\bpollux\.errors\.(Unreadable|Foreign)CheckpointError: ")
_OF_THE_CODE = re.compile(
    r"(TypeError|NameError|UnboundLocalError|AttributeError|SyntaxError|IndentationError|TabError): "
)
_FRAME = re.compile(r'^ *File ".*", line \d+', re.MULTILINE)
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")
_BAD_USAGE, _USAGE = 2, re.compile(r"^usage: ", re.MULTILINE | re.IGNORECASE)
_CANNOT_START = (126, 127)  # what a shell says of a command that it may not or cannot start
_OF_A_NODE = re.compile(
    r"No such file or directory|ModuleNotFoundError|ImportError|Permission denied|Read-only file system|"
    r"No space left on device|Stale file handle|Input/output error|cannot be started on this node|"
    r"CUDA error|CUDA driver|No CUDA GPUs|NVIDIA driver|cuInit|DeviceUnavailable"
)


def how_it_ended(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exited with {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-exit_code}"


def is_bad_usage(exit_code: int, stderr: str) -> bool:
    """Whether a script refused its arguments, as argparse and click do: another start would end alike, on any node."""
    return exit_code == _BAD_USAGE and _USAGE.search(_RANKS.sub("", stderr)) is not None


def lacks_checkpoint(stderr: str) -> bool:
    """Whether a script has found checkpoints and can use none: another start would end in the same way."""
    return tells_no_checkpoint(read_failure(stderr)[0])


def tells_no_checkpoint(line: str) -> bool:
    """The same of the first line of a failure."""
    return _NO_CHECKPOINT.search(line) is not None


def error_in_code(exit_code: int, stderr: str) -> str:
    """An exception that the code raises, with its line, if it would do so in each start; "" otherwise.

    Errors that the node may be the cause of, as a package that is missing there, are not among them.
    """
    headline, tail = read_failure(stderr)
    headline = headline or _last_line(stderr)  # Python shows a wrong syntax of the script itself without a header
    if exit_code != 1 or not _OF_THE_CODE.match(headline) or node_cause(exit_code, stderr):
        return ""
    frames = _FRAME.findall(tail.partition(f"\n{headline}")[0])
    return f"{_ADDRESS.sub('0x', headline)} ({frames[-1].strip()})" if frames else ""


def node_cause(exit_code: int, stderr: str) -> str:
    """In a line, why a replica failed, if the cause may be its node and not its script; "" otherwise."""
    headline = read_failure(stderr)[0] or _last_line(stderr)
    if exit_code in _CANNOT_START or _OF_A_NODE.search(headline):
        return (headline or how_it_ended(exit_code))[:_LONGEST_HEADLINE]
    return ""


def read_end(path: str | Path) -> str:
    """The end of a file of text; "" for one that cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(file.tell() - MOST_BYTES, 0))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def read_failure(stderr: str) -> tuple[str, str]:
    """The exception in a line ("" if there was none), and the end of the text with the whole of its traceback."""
    text = _RANKS.sub("", stderr).strip()
    began = text.rfind(HEADER)
    if began < 0:
        return "", text[-TAIL_BYTES:]
    # Frames are indented; the first line that is not names the exception.
    lines = text[began:].splitlines()[1:]
    headline = next((line for line in lines if line.strip() and not line.startswith((" ", "\t"))), "")
    tail = text[min(began, max(len(text) - TAIL_BYTES, 0)) :]
    if len(tail) > 4 * TAIL_BYTES:  # much was written after it, or it is a deep recursion
        tail = f"{tail[: 2 * TAIL_BYTES]}\n[...]\n{tail[-2 * TAIL_BYTES :]}"
    return headline[:_LONGEST_HEADLINE], tail


def _last_line(stderr: str) -> str:
    lines = [line.strip() for line in _RANKS.sub("", stderr).splitlines() if line.strip()]
    return lines[-1][:_LONGEST_HEADLINE] if lines else ""


def describe_failure(what: str, path: str | Path, stderr: str, exit_code: int) -> str:
    """A line that says it all, and below it the end of stderr, which was read from ``path``.

    Without a traceback the last line says why a script left by itself; it has nothing to do with a signal.
    """
    headline, tail = read_failure(stderr)
    if not headline and exit_code > 0:
        headline = _last_line(stderr)
    summary = f"{what}: {headline}" if headline else what
    return f"{summary}\nIts stderr ({path}) ends with:\n{tail or '(nothing)'}"
