"""The log of vLLM's process, which is kept after a failure, and the error in it that caused the others.

vLLM reports many failures as an error that points to another one, such as "See root cause above".
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from textwrap import shorten

_ERROR = re.compile(r"\b(?:[A-Za-z_]\w*\.)*(?P<error>[A-Za-z_]*(?:Error|Exception): .*)")
_POINTS_ELSEWHERE = re.compile(
    r"root cause|died unexpectedly|worker process of vLLM ended|Engine core|closed by peer|[Bb]roken pipe|EngineDead|"
    r"leaked \w+ objects"
)
"""Errors that follow from another one, which is in the log."""
_DECORATION = re.compile(r"ValidationError: \d+ validation errors? for \w+ |Value error, | \[type=.*")
"""Parts of pydantic's errors around the message."""
_PASSES = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
"""A port that vLLM found free and another process took meanwhile; the next start finds another one."""
_WAYS_OUT = (
    (r"unexpected keyword argument", "leave it out of VLLMOptions(arguments=...)"),
    (r"architectures? .*(not supported|failed to be inspected)|No module or parameter named", "use engine='native'"),
    (r"max_model_len .* greater than|derived max", "lower VLLMOptions(max_length=...)"),
    (
        r"KV cache|cache blocks",
        "raise GenerationOptions(max_cache_bytes=...) or VLLMOptions(memory_share=...), or lower "
        "VLLMOptions(max_length=...)",
    ),
    (
        r"(?i)out of memory|allocate memory|free memory on device|less than requested memory",
        "lower GenerationOptions(max_cache_bytes=...) or VLLMOptions(memory_share=...), or end other processes there",
    ),
    (r"ModuleNotFoundError|ImportError|cannot open shared object", "install vLLM anew in the environment of {python}"),
    (r"No space left|Read-only file system", "free space there, or set TMPDIR to a folder with more"),
    (r"signal SIGKILL", "the system's log says whether memory had run out"),
    (r"no sign of life", "raise VLLMOptions(timeout_s=...) if it was only slow"),
)
"""Text of a cause -> way out, which follows the path of the log."""
_LATER_SENTENCES = re.compile(r"(?<=.{50}[^.\s]\.) (?=[A-Z])")
"""Beginning of advice after an error's first sentences, which names vLLM's own settings."""


class ProcessLog:
    """Standard output and errors of vLLM's process, in a file next to its folder.

    Args:
        folder: The folder; logs of earlier ones there are removed ``kept_s`` after their failure.
    """

    def __init__(self, folder: Path, *, kept_s: float = 7 * 86400.0) -> None:
        self.path = folder.with_name(f"{folder.name}.log")
        """The file."""
        self.is_kept = False
        """Whether it stays after the process: an error names it."""
        for other in folder.parent.glob(f"{folder.name.rpartition('-')[0]}-*.log"):
            if time.time() - other.stat().st_mtime > kept_s:
                other.unlink(missing_ok=True)

    def lines(self) -> list[str]:
        """Return the lines that are not empty."""
        text = self.path.read_text(errors="replace") if self.path.exists() else ""
        return [line.strip() for line in text.splitlines() if line.strip()]

    def end(self, num_lines: int = 4) -> str:
        """Return the last lines, for a message."""
        return f"the end of its log: {' | '.join(self.lines()[-num_lines:])[-600:] or 'nothing'}"

    def root_cause(self) -> str | None:
        """Return the last error that follows from no other one; None if there is none."""
        errors = [found["error"] for line in self.lines() if (found := _ERROR.search(line))]
        return next((plain(error) for error in reversed(errors) if not _POINTS_ELSEWHERE.search(error)), None)

    def remove_unless_kept(self) -> None:
        """Remove the file, unless an error names it."""
        if not self.is_kept:
            self.path.unlink(missing_ok=True)


def plain(error: str) -> str:
    """Return the message of an error in one line of bounded length."""
    text = _LATER_SENTENCES.split(_DECORATION.sub("", " ".join(error.split())))[0].rstrip(".")
    return shorten(text, 400, placeholder="...")


def points_elsewhere(error: str) -> bool:
    """Return whether an error follows from another one, which is in the log."""
    return _POINTS_ELSEWHERE.search(error) is not None


def may_start_later(cause: str) -> bool:
    """Return whether another start may succeed where this one failed."""
    return _PASSES.search(cause) is not None


def start_way_out(cause: str, python: str) -> str:
    """Return the way out of a known cause, as the end of a sentence; empty for others."""
    found = (way.format(python=python) for pattern, way in _WAYS_OUT if re.search(pattern, cause))
    return next((f"; {way}" for way in found), "")
