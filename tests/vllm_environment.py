"""Interpreter of an environment with vLLM, for tests that need one: VLLM_PYTHON, or that of `make vllm-env`."""

from __future__ import annotations

import os
from pathlib import Path

_MADE = Path(__file__).parents[1] / "build/vllm-env/bin/python"


def vllm_python() -> str | None:
    """Return the interpreter; None if there is none."""
    return os.environ.get("VLLM_PYTHON") or (str(_MADE) if _MADE.exists() else None)
