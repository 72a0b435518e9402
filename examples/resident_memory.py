"""Resident memory of this process, and its maximum from a moment on. Linux only."""

from __future__ import annotations

from pathlib import Path


def start_measuring() -> int | None:
    """Start another maximum of this process's resident memory, and return what it holds; None outside of Linux."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return resident_bytes("VmRSS")
    except OSError:
        return None


def resident_bytes(field_name: str) -> int:
    """Return this process's resident memory: ``"VmRSS"`` now, ``"VmHWM"`` at most; Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field_name))
