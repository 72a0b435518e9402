"""Script of one rank of a trial: trains as in the trial of faults, and goes on from the newest checkpoint, if any.

Its argument is a JSON file with the case.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.chaos import victim


def main(file: Path) -> None:
    """Train, in the first start or after one that failed."""
    case = json.loads(file.read_text())
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) or case.get("started_again"):
        case.pop("fault", None)
        case["ckpt_path"] = newest_checkpoint(Path(case["folder"]) / "checkpoints")
    victim.train(case)


def newest_checkpoint(folder: Path) -> str | None:
    """Return the newest complete checkpoint; None without one."""
    complete = sorted(folder.glob("*.ckpt/realloc.json"), key=lambda path: path.stat().st_mtime)
    return str(complete[-1].parent) if complete else None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
