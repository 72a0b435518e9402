"""Python imports this at its start when the folder is on its path: every process then has the emulated device."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))

from tests.emulated_cuda.activate import activate

try:
    activate()
except RuntimeError as error:  # Python goes on after other errors here
    sys.exit(str(error))
