"""Install the build of torch that fits this machine, without gigabytes that it cannot use.

On Linux the public registry serves torch built for CUDA, with several gigabytes of packages for it. A Linux machine
without an NVIDIA GPU gets the CPU build instead. It comes from where pip is configured to look, and otherwise through
uv, which knows where PyTorch keeps its CPU builds. On other systems pip's own choice is right.

Runs on the standard library, in the environment that torch is installed into.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import subprocess
import sys

OLDEST_PYTHON = (3, 11)
NO_CPU_BUILD = """
No CPU build of {requirement} was found: neither where pip looks, nor where uv looks for PyTorch's own wheels.
Either point pip at one (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL or pip's configuration file) and run make again,
or accept the registry's CUDA build, several gigabytes large: make WHEELS_FOR=cuda
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "requirement", nargs="?", help="such as torch==2.13.0; a path or an address is installed as it is"
    )
    parser.add_argument("--wheels-for", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--check-python", action="store_true", help="only check that this Python is new enough")
    arguments = parser.parse_args()
    if sys.version_info < OLDEST_PYTHON:
        sys.exit(
            f"Python {'.'.join(map(str, OLDEST_PYTHON))} or newer is needed, this is {sys.version.split()[0]}; "
            "use make PYTHON=/path/to/python"
        )
    if arguments.requirement and not arguments.check_python:
        install(arguments.requirement, wheels_for=arguments.wheels_for)


def install(requirement: str, *, wheels_for: str) -> None:
    """Install the requirement unless it is installed already; exit with the way out if no CPU build can be found."""
    package, is_pin, version = requirement.partition("==")
    if is_pin and _installed(package).partition("+")[0] == version:
        return
    wants_cpu = wheels_for == "cpu" or (wheels_for == "auto" and sys.platform == "linux" and not _has_nvidia_gpu())
    if not (wants_cpu and is_pin) or "+" in version:
        sys.exit(_pip(requirement))
    if _pip(f"{requirement}+cpu", "--no-input", stderr=subprocess.DEVNULL) == 0:
        return
    print(f"pip finds no CPU build of {requirement}; asking uv for PyTorch's own", flush=True)
    # uv installs torch alone; the dependencies come from where pip looks, like everything else.
    in_uv = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "install",
        "--python",
        sys.executable,
        "--torch-backend",
        "cpu",
        "--no-deps",
    ]
    if _pip("uv") != 0 or subprocess.call([*in_uv, requirement]) != 0:
        sys.exit(NO_CPU_BUILD.format(requirement=requirement))


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _has_nvidia_gpu() -> bool:
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True).stdout.startswith(b"GPU")


def _pip(*arguments: str, stderr: int | None = None) -> int:
    return subprocess.call([sys.executable, "-m", "pip", "install", "--quiet", *arguments], stderr=stderr)


if __name__ == "__main__":
    main()
