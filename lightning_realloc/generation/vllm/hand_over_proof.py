"""Checksums of the weights that ranks hand to vLLM, taken from the live weights, and errors of weights that differ.

The memory in which weights travel plays no part. vLLM's workers compare: `worker_proof`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_realloc.errors import WeightMismatch, counted
from lightning_realloc.generation.vllm.messages import reading
from lightning_realloc.generation.vllm.tensor_ranks import TensorRanks
from lightning_realloc.runtime.dtypes import dtype_name
from lightning_realloc.runtime.transfer.agreement import WeightVerification
from lightning_realloc.runtime.transfer.checksums import BoxFamily, Checksums, HeldBox, samples_per_box

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedModel:
    """Model whose weights vLLM gets, as errors name it."""

    role: str = "the model"
    layout: str = "one rank"
    """Layout that it generates in."""
    rank: int = 0
    """Rank that drives vLLM."""
    first_rank: int = 0
    """First rank that generates with the model."""

    @property
    def is_first(self) -> bool:
        """Whether the rank reports starts for all."""
        return self.rank == self.first_rank


class HandOverProof:
    """The rank's half of the proof that vLLM has its weights.

    Args:
        verify_weights: Elements whose checksums are compared: a few of each tensor, other ones each time, all, or none.
        model: Names for errors.
        ranks: Ranks that hold shards of the weights; None: this rank holds whole ones.
    """

    def __init__(
        self, verify_weights: WeightVerification, model: HandedModel, ranks: TensorRanks | None = None
    ) -> None:
        self._extent, self._ranks = verify_weights, ranks
        self.model = model
        """Names for errors."""
        self._num_updates = 0
        self._is_uncompared_known = False
        self.version = 0
        """Version of this rank's weights."""
        self.seconds = 0.0
        """Seconds of all checks, on this rank and in vLLM's workers."""

    @property
    def is_on(self) -> bool:
        """Whether weights are compared."""
        return self._extent != "off"

    def opening(self, weights: Mapping[str, Tensor], label: str) -> dict[str, Any] | None:
        """Return the announcement of an update for vLLM's workers, as JSON; None if nothing is compared."""
        if not self.is_on:
            return None
        self._num_updates += 1
        families: dict[tuple[object, ...], list[str]] = {}
        for name, weight in weights.items():
            boxes = tuple((box.shape, box.offset, box.column) for _, box in self._boxes(name, weight))
            families.setdefault((dtype_name(weight.dtype), self._whole_shape(name, weight), boxes), []).append(name)
        described = [
            {"names": names, "dtype": dtype, "shape": shape, "boxes": boxes}
            for (dtype, shape, boxes), names in families.items()
        ]
        ranks = [self.model.rank] if self._ranks is None else list(self._ranks.numbers)
        how = {"label": label, "seed": self._num_updates, "is_sampled": self._extent == "sampled", "ranks": ranks}
        return {**how, "families": described}

    def expected(self, weights: Mapping[str, Tensor], kind: str) -> dict[str, list[int]] | None:
        """Return name -> checksums of each rank's pieces; None if nothing is compared. Other ranks call `answer`.

        Raises:
            WeightMismatch: if another rank has another version of the weights.
        """
        if not self.is_on:
            return None
        begin = time.perf_counter()
        if self._ranks is not None:
            self._ranks.exchange({"do": "prove", "kind": kind, "seed": self._num_updates})
        own = self._sums(weights, self._num_updates)
        answers = [(self.version, own)] if self._ranks is None else self._ranks.exchange((self.version, own))
        for index, (version, _) in enumerate(answers):
            if version != self.version:
                assert self._ranks is not None
                fault = f"rank {self._ranks.numbers[index]} handed version {version} over"
                raise self._mismatch(fault)
        self.seconds += time.perf_counter() - begin
        return {name: [sums[place] for _, sums in answers] for place, name in enumerate(weights)}

    def answer(self, weights: Mapping[str, Tensor], said: Mapping[str, Any]) -> None:
        """Send this rank's checksums to the first rank, which calls `expected`."""
        assert self._ranks is not None
        self._ranks.exchange((self.version, self._sums(weights, said["seed"])))

    def judge(self, found: Any) -> None:
        """Read the workers' results, in their order.

        Raises:
            WeightMismatch: for a weight that a worker does not have.
            EngineLost: for anything else than results.
        """
        if not self.is_on:
            return
        with reading("vLLM's process"):
            self.seconds += max(float(one["seconds"]) for one in found)
            faults = [(worker, name, what) for worker, one in enumerate(found) for name, what in one["faults"]]
            uncompared = sorted({name for one in found for name in one["uncompared"]})
        if faults:
            worker, name, what = faults[0]
            others = f" ({counted(len(faults), 'fault')} in all)" if len(faults) > 1 else ""
            raise self._mismatch(f"in vLLM's worker {worker}, {name!r} {what}{others}")
        if uncompared and not self._is_uncompared_known:
            count, role = counted(len(uncompared), "weight"), self.model.role
            message = "vLLM keeps %s of %s in a form of its own (%s first): they are compared as they arrive only"
            _log.warning(message, count, role, uncompared[0])
        self._is_uncompared_known = True

    def _mismatch(self, fault: str) -> WeightMismatch:
        model = self.model
        return WeightMismatch(
            f"vLLM of rank {model.rank} does not hold version {self.version} of the weights of {model.role}: after "
            f"they were handed over from {model.layout}, {fault}. Nothing was generated with them. Resume from the "
            f"last checkpoint, and report this message if it comes again; verify_weights='all' compares every element"
        )

    def _whole_shape(self, name: str, weight: Tensor) -> tuple[int, ...]:
        local = tuple(weight.shape)
        return local if self._ranks is None else self._ranks.whole_shape(name, local)

    def _boxes(self, name: str, weight: Tensor) -> list[tuple[bool, HeldBox]]:
        """Return the boxes of all ranks that make up a weight, and whether each is this rank's."""
        held, whole = tuple(weight.shape), self._whole_shape(name, weight)
        found = []
        for column in range(1 if self._ranks is None else self._ranks.count):
            pieces = None if self._ranks is None else self._ranks.own_pieces(name, column)
            is_own = self._ranks is None or self._ranks.index == column
            if pieces is None:
                start = (0,) * len(whole)
                found.append((is_own, HeldBox(whole, start, held, start, whole, 0, column)))
            for piece in pieces or ():
                shape, start = piece.region.shape, piece.region.starts
                found.append((is_own, HeldBox(shape, piece.offset, held, start, whole, 0, column)))
        count = samples_per_box(len(found))
        return [(is_own, box._replace(num_samples=count)) for is_own, box in found]

    def _sums(self, weights: Mapping[str, Tensor], seed: int) -> list[int]:
        """Return the checksum of this rank's pieces of each weight, 0 where it has none."""
        families: dict[tuple[torch.dtype, tuple[HeldBox, ...]], list[str]] = {}
        for name, weight in weights.items():
            boxes = tuple(box._replace(column=0) for is_own, box in self._boxes(name, weight) if is_own)
            if boxes:
                families.setdefault((weight.dtype, boxes), []).append(name)
        groups = [BoxFamily(tuple(names), boxes) for (_, boxes), names in families.items()]
        sums = Checksums(groups, weights, dtype=None, is_sampled=self._extent == "sampled").compute(seed).tolist()
        found = dict(zip([name for group in groups for name in group.names], sums, strict=True))
        return [found.get(name, 0) for name in weights]
