"""Runs another script, slowly until the file HURRY is there: every step of an optimizer waits a little.

While there is a file OUT-pause, steps wait for its end.

Appends a byte to OUT-steps for each, so that a test sees how far the replicas are together.
"""

import argparse
import os
import runpy
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--hurry", type=Path, required=True)
    parser.add_argument("script")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    number = os.open(f"{args.out}-steps", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def pause(*_):
        os.write(number, b".")
        while os.path.exists(f"{args.out}-pause"):
            time.sleep(0.01)
        if not args.hurry.exists():
            time.sleep(0.2)

    register_optimizer_step_post_hook(pause)
    sys.argv = [args.script, *args.rest]
    sys.path[0] = str(Path(args.script).parent)
    runpy.run_path(args.script, run_name="__main__")


main()
