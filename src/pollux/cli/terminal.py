"""Text of jobs as a terminal may show it: colours stay, everything else that commands the terminal becomes visible.

A job's output could otherwise move the cursor over other lines, change the window's title, or answer questions of the
terminal as if they were typed. ``logs`` and the commands that follow jobs call it.
"""

from __future__ import annotations

import re
from typing import TextIO

_COLOUR = re.compile(r"(\x1b\[[0-9;:]*m)")
_KEPT = "\t\r"  # progress bars write their line anew


def visible(line: str) -> str:
    """Control characters as ``^[`` and the like, but for colours, tabs and carriage returns."""
    parts = _COLOUR.split(line)
    parts[::2] = ("".join(map(_character, part)) for part in parts[::2])
    return "".join(parts)


def for_file(text: str, file: TextIO) -> str:
    """As it is, unless ``file`` is a terminal. It may have several lines."""
    return "\n".join(map(visible, text.split("\n"))) if file.isatty() else text


def _character(character: str) -> str:
    if character.isprintable() or character in _KEPT:
        return character
    code = ord(character)
    return f"^{chr(code ^ 0x40)}" if code < 0x80 else f"<U+{code:04X}>"
