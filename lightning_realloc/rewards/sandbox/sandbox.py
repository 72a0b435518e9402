"""A program that nobody has read, run under limits: in a folder of its own, and without this process's secrets.

It is not walled off from files: it reads and writes what this user may. Who trains on hostile prompts puts a container
around the run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import lightning_realloc
from lightning_realloc.errors import RewardError
from lightning_realloc.rewards.sandbox.processes import kill_tree
from lightning_realloc.rewards.sandbox.supervisor import Ending, Limits

_ROOT = str(Path(lightning_realloc.__file__).resolve().parent.parent)
_SUPERVISE = (
    f"import sys; sys.path.insert(0, {_ROOT!r}); from lightning_realloc.rewards.sandbox.supervisor import main; main()"
)
_GRACE_S = 30.0
"""How much longer than its program a supervisor may take."""


def run_limited(
    command: Sequence[str],
    *,
    folder: Path,
    limits: Limits,
    standard_input: str = "",
    with_errors: bool = True,
    namespaces: bool = True,
) -> Ending:
    """Run a program to its end or its limits; nothing of it runs when this returns.

    Args:
        command: The program's full path and its arguments.
        folder: Where it runs.
        limits: What it may use.
        standard_input: What it can read.
        with_errors: Whether its output holds what it wrote to standard error, too.
        namespaces: Whether to make some for it where the kernel allows that to this user.

    Raises:
        RewardError: when it could not be watched; not for anything that the program does.
    """
    job = {
        "command": list(command),
        "folder": str(folder),
        "environment": _environment(folder),
        "input": standard_input,
        "with_errors": with_errors,
        "namespaces": namespaces,
        "limits": asdict(limits),
        "parent": os.getpid(),
    }
    supervisor = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _SUPERVISE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        told, errors = supervisor.communicate(json.dumps(job), timeout=limits.wall_s + _GRACE_S)
        return Ending(**json.loads(told))
    except (subprocess.TimeoutExpired, ValueError) as error:
        kill_tree(supervisor.pid)
        _, errors = supervisor.communicate()
        raise RewardError(
            f"a program could not be watched ({type(error).__name__}): {errors.strip()[-300:]}; see to that machine"
        ) from error
    except BaseException:
        kill_tree(supervisor.pid)
        supervisor.communicate()
        raise


def _environment(folder: Path) -> Mapping[str, str]:
    """Return what the program may know: no keys, no proxies, no rank of this run."""
    known = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    return known | threads | {"HOME": str(folder), "TMPDIR": str(folder), "PYTHONHASHSEED": "0"}
