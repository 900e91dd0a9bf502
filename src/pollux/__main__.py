"""``python -m pollux``: the ``pollux`` command, where it is not on the path. A detached server starts this way."""

from pollux.cli import main

main()
