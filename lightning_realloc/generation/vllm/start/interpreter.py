"""Interpreters with vLLM: the one that a run uses, and its version of vLLM, without importing vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.vllm.messages import check_version
from lightning_realloc.remote_path import expand_home

PROGRAM = Path(__file__).parents[1] / "child.py"
"""Program of vLLM's process; without arguments it prints the version of vLLM."""
_NAME_IT = "name that of an environment with vLLM by VLLMOptions(python=...) or the variable VLLM_PYTHON"


def interpreter(python: str | None) -> str:
    """Return the interpreter that starts vLLM: the one given, else that of the variable VLLM_PYTHON, else this one."""
    return str(expand_home(Path(python or os.environ.get("VLLM_PYTHON") or sys.executable)))


def vllm_version_of(python: str, *, timeout_s: float = 60.0) -> str:
    """Return the version of vLLM that an interpreter has. It takes a tenth of a second, longer on a cold network disk.

    Raises:
        GenerationError: for one that does not run, and for one without vLLM or with a version that was not tested.
    """
    try:
        ended = subprocess.run(
            [python, str(PROGRAM)], stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", timeout=timeout_s
        )
    except OSError as error:
        raise not_started(python, error) from error
    except subprocess.TimeoutExpired as error:
        raise GenerationError(f"vLLM's interpreter {python} said nothing for {timeout_s:g} s; {_NAME_IT}") from error
    except UnicodeDecodeError as error:
        raise GenerationError(f"vLLM's interpreter {python} runs no Python; {_NAME_IT}") from error
    try:
        version = json.loads(ended.stdout.splitlines()[-1])["vllm"]
    except (LookupError, TypeError, ValueError) as error:
        last = (ended.stderr.strip().splitlines() or [f"it ended with exit code {ended.returncode}"])[-1]
        raise GenerationError(f"vLLM's interpreter {python} runs no Python ({last[:200]}); {_NAME_IT}") from error
    return check_version(version, f"the interpreter {python}")


def not_started(python: str, error: OSError) -> GenerationError:
    """Return the error for an interpreter that the system does not start."""
    return GenerationError(f"vLLM's interpreter {python} does not start: {error.strerror}; {_NAME_IT}")
