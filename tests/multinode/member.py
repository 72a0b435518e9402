"""Script of one rank of a trial: trains as in the trial of faults, and goes on from the newest checkpoint, if any.

Its argument is a JSON file with the case.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from lightning_realloc.strategies.checkpoints.checkpoint_files import checkpoints_in, newest_complete
from tests.chaos import victim


def main(file: Path) -> None:
    """Train, in the first start or after one that failed."""
    case = json.loads(file.read_text())
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        case.pop("fault", None)
        newest = newest_complete([checkpoints_in(Path(case["folder"]) / "checkpoints")])
        case["ckpt_path"] = None if newest is None else str(newest)
    victim.train(case)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
