"""Run the command line: ``python -m lightning_realloc grpo ...`` is ``lightning-realloc grpo ...``."""

import sys

from lightning_realloc.entry import run_command_line

if __name__ == "__main__":
    sys.exit(run_command_line())
