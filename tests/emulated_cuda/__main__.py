"""Runs Python with the emulated device: ``python -m tests.emulated_cuda ARGUMENTS``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

START_UP = Path(__file__).with_name("start_up")

if __name__ == "__main__":
    paths = [str(START_UP), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
