"""Encode plain data and samples as messages, and gather the samples or the exceptions of all ranks.

Python objects of samples are not sent, because every rank has them from the data loader.

If one rank alone raised, the others would wait in the next collective. So it sends its exception in place of its
samples, and every rank raises it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_realloc.batch.samples import Samples
from lightning_realloc.errors import DataError, class_name
from lightning_realloc.runtime.messages.failure_store import peer_error
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.runtime.messages.plain_data import decode_value, encode_value


def encode_message(value: object) -> Tensor:
    """Return plain data, which may contain samples, as one (bytes,) uint8 tensor on the host.

    Raises:
        DataError: naming the class of an object that is no plain data.
    """
    return torch.frombuffer(encode_value(value), dtype=torch.uint8)


def decode_message(blob: Tensor) -> Any:
    """Return the value that `encode_message` was given, without Python objects of the samples."""
    return decode_value(blob.numpy().data)


def all_gather_samples(mine: Samples | Exception | None) -> Samples:
    """Return the samples of all ranks on every rank, in ascending order of their ids. Collective over all ranks.

    Args:
        mine: Samples of this rank. None if another rank contributes the same samples. An exception if this rank
            failed to make them.

    Raises:
        ReallocError: on every rank if one contributed an exception. The failed rank raises its own. Others raise the
            message of the lowest failed rank, in the same class if this package defines it.
    """
    own = mine if isinstance(mine, Exception) else None
    if isinstance(mine, Samples):
        mine = replace(mine.to("cpu"), data={})  # as the other ranks get them, also on the only rank
    everyone = gather_objects(mine if own is None else (class_name(own), str(own)))
    for rank, theirs in enumerate(everyone):
        if isinstance(theirs, tuple):
            if own is not None and (len(everyone) == 1 or dist.get_rank() == rank):
                raise own
            raise peer_error(rank, *theirs) from own
    gathered = [theirs for theirs in everyone if theirs is not None]
    if not gathered:
        raise DataError("no rank contributed samples; a call must run on at least one rank")
    return Samples.concatenate(gathered).sorted_by_id()
