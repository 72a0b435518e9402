"""Read the ``.metadata`` file of a distributed checkpoint."""

from __future__ import annotations

import pickle
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from lightning_realloc.strategies.checkpoint_files import DamagedCheckpoint, reading

METADATA_FILE = ".metadata"


def read_metadata(folder: Path) -> Metadata:
    """Return what a checkpoint folder says of its tensors and of where each region is stored.

    Raises:
        CheckpointError: for a file that is missing or damaged.
    """
    file = folder / METADATA_FILE
    with reading(file), file.open("rb") as stream:
        metadata = pickle.load(stream)
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise DamagedCheckpoint(f"{file} holds no description of tensors; it was written by something else")
    return metadata
