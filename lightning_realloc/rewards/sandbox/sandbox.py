"""Run an untrusted program under limits, in its own folder and without this process's environment.

Files are not protected: the program reads and writes with this user's rights, or with those of nobody if this user is
root. Without namespaces, a program also reaches sockets, and one of an ordinary user can signal this run and read its
environment. If prompts may be hostile, give a sandbox of the system, or run training in a container.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from lightning_realloc.errors import RewardError
from lightning_realloc.rewards.sandbox.processes import kill_tree
from lightning_realloc.rewards.sandbox.supervisor import Limits, ProgramResult

_ROOT = str(Path(__file__).resolve().parents[3])
_SUPERVISE = f"""
import sys
sys.path.insert(0, {_ROOT!r})
from lightning_realloc.rewards.sandbox.supervisor import supervise
supervise()
"""
_SSH_AGENT = "SSH_AUTH_SOCK"
"""Environment variable with the path of an agent's socket. In a container, its agent may run outside."""
_SUPERVISOR_GRACE_S = 30.0
"""Extra seconds for the supervisor beyond its program's wall time."""


def run_limited(
    command: Sequence[str],
    *,
    folder: Path,
    limits: Limits,
    standard_input: str = "",
    with_errors: bool = True,
    namespaces: bool = True,
) -> ProgramResult:
    """Run a program to its end or its limits; none of its processes remains on return.

    Args:
        command: Full path of the program, and its arguments.
        folder: Working directory.
        limits: Resource limits.
        standard_input: Text for standard input.
        with_errors: Whether the captured output includes standard error.
        namespaces: Whether to use namespaces if the kernel allows it to this user.

    Raises:
        RewardError: if the program could not be supervised; never for the program's own failures.
    """
    job = {
        "command": list(command),
        "folder": str(folder),
        "environment": _environment(folder),
        "input": standard_input,
        "with_errors": with_errors,
        "namespaces": namespaces,
        "sockets": [os.environ[_SSH_AGENT]] if _SSH_AGENT in os.environ else [],
        "limits": asdict(limits),
        "parent": os.getpid(),
    }
    supervisor = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _SUPERVISE],
        env=_public_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        report, errors = supervisor.communicate(json.dumps(job), timeout=limits.wall_s + _SUPERVISOR_GRACE_S)
        return ProgramResult(**json.loads(report))
    except (subprocess.TimeoutExpired, ValueError) as error:
        kill_tree(supervisor.pid)
        _, errors = supervisor.communicate()
        raise RewardError(
            f"a program could not be supervised ({type(error).__name__}): {errors.strip()[-300:]}; check that machine"
        ) from error
    except BaseException:
        kill_tree(supervisor.pid)
        supervisor.communicate()
        raise


def _public_environment() -> dict[str, str]:
    """Return environment variables that hold no keys, proxies or ranks."""
    return {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}


def _environment(folder: Path) -> Mapping[str, str]:
    """Return the program's environment variables."""
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    return _public_environment() | threads | {"HOME": str(folder), "TMPDIR": str(folder), "PYTHONHASHSEED": "0"}
