"""Builds and loads the emulated device, before torch is imported: torch looks for CUDA once."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")


def load() -> None:
    """Load the device's library into this process.

    Raises:
        RuntimeError: if torch has been imported, has a CUDA of its own, or the library cannot be built.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the emulated device must be loaded before torch is imported")
    folder = _torch_folder()
    if (folder / "lib" / "libtorch_cuda.so").exists():
        raise RuntimeError("this torch is built for CUDA; the emulated device needs the build for the CPU")
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(folder / "lib" / name), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(_built(folder)))


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("torch is not installed")
    return Path(spec.origin).parent


def _built(folder: Path) -> Path:
    """Return the library, built once for each source and version of torch."""
    version = importlib.metadata.version("torch")
    key = hashlib.sha256(SOURCE.read_bytes() + version.encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"emulated-cuda-{os.getuid()}-{key}.so"
    if not path.exists():
        own = path.with_suffix(f".{os.getpid()}")  # several processes may build at a time
        include, lib = folder / "include", folder / "lib"
        command = [
            os.environ.get("CXX", "g++"), "-shared", "-fPIC", "-O1", "-std=c++20", str(SOURCE), "-o", str(own),
            f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", f"-L{lib}", "-lc10", "-ltorch_cpu",
        ]  # fmt: skip
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            raise RuntimeError(f"the emulated device does not compile:\n{made.stderr[-4000:]}")
        own.replace(path)
    return path
