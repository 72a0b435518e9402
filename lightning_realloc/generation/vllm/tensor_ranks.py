"""Tensor-parallel ranks that one vLLM generates for: the first drives it, and each copies its shards of the weights.

The first rank sends commands to the others, which follow until it has responses for all.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.loop.run import Budget
from lightning_realloc.generation.vllm.messages import OnResponse, TokenResponse
from lightning_realloc.layout import ModelLayout
from lightning_realloc.layout.sharding import Piece
from lightning_realloc.runtime.model.adapter_layers import FILE_PREFIX
from lightning_realloc.runtime.transfer.shared_memory import host_identity

Do = Callable[[Mapping[str, Any]], object]
"""Does what a message of the first rank says."""


def file_name(name: str) -> str:
    """Return the name that a parameter has in a checkpoint of the model, or of its adapters after PEFT's prefix."""
    return name.removeprefix(FILE_PREFIX).replace(".base_layer.", ".").replace(".default.", ".")


class TensorRanks:
    """The ranks of this rank's tensor-parallel group. Construction is collective over it.

    Args:
        layout: Where the model's parameters lie.
        rank: This process.
        gather: Returns the values of all ranks for this rank's, in the layout's order. Collective.
        device: Device of this rank.

    Raises:
        GenerationError: for ranks on several hosts.
    """

    def __init__(
        self, layout: ModelLayout, rank: int, gather: Callable[[Any], list[Any]], device: torch.device
    ) -> None:
        self._layout, self._rank, self._gather = layout, rank, gather
        self._ranks = layout.layout.tensor_group(rank)
        self._names = {file_name(param.name): param.name for param in layout.model.params}
        self._said = time.monotonic()
        places = self.exchange((host_identity(), visible_device(device)))
        self.devices = tuple(device for _, device in places)
        """Each rank's device, as ``CUDA_VISIBLE_DEVICES`` names it; "" on CPU."""
        if len({host for host, _ in places}) > 1:
            raise GenerationError(
                f"one vLLM of tp={len(places)} gets its weights in shared memory, and its ranks {list(self._ranks)} "
                f"are on {len({host for host, _ in places})} hosts; choose tp so that a group fits on one host"
            )

    @property
    def is_first(self) -> bool:
        """Whether this rank drives vLLM."""
        return self._ranks[0] == self._rank

    @property
    def numbers(self) -> tuple[int, ...]:
        """The ranks, in the group's order."""
        return self._ranks

    @property
    def index(self) -> int:
        """Place of this rank among them."""
        return self._ranks.index(self._rank)

    @property
    def count(self) -> int:
        """Number of ranks, and of vLLM's workers."""
        return len(self._ranks)

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks, the first one's first. Collective."""
        self._said = time.monotonic()
        return self._gather(value)

    def keep_waiting(self, *, least_s: float = 30.0) -> None:
        """Give the other ranks a sign of life, if the last one is long ago; for the first rank.

        With a longer time, collectives of a group that allows less would fail.
        """
        if time.monotonic() - self._said > least_s:
            self.exchange({"do": "wait"})

    def follow(self, serve: Do, decide: Do | None = None) -> Any:
        """Do as the first rank says until it has a result, and return that.

        ``serve`` gives or proves weights. ``decide`` takes responses, and makes the decision of a `GroupBudget`.
        """
        while "result" not in (said := self.exchange(None)[0]):
            if said["do"] == "decide":
                assert decide is not None, "a call without budget has no decisions"
                decide(said)
            elif said["do"] != "wait":
                serve(said)
        return said["result"]

    def finish(self, result: Any) -> None:
        """Give the other ranks the result that they wait for; for the first rank."""
        self.exchange({"result": result})

    def whole_shape(self, name: str, local: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a weight on all ranks together, by its name in a checkpoint."""
        known = self._names.get(name)
        return local if known is None else tuple(self._layout.model.param(known).shape)

    def own_pieces(self, name: str, index: int | None = None) -> list[Piece] | None:
        """Return the regions of a weight that a rank copies, which no rank before it holds; None: all of it.

        ``index``: its place in the group; None: this rank's.
        """
        known, index = self._names.get(name), self.index if index is None else index
        if known is None:  # a buffer, the same on all ranks
            return [] if index else None
        held = {piece.region for rank in self._ranks[:index] for piece in self._layout.pieces(known, rank)}
        return [piece for piece in self._layout.pieces(known, self._ranks[index]) if piece.region not in held]


class GroupBudget:
    """A budget by which all ranks of a group decide together, on the first rank; the others take `decided`.

    Before each decision, all ranks take the responses that the first one has: what it waits for depends on them.

    Args:
        ranks: The group; None on ranks that follow.
        accept: Takes a response, and counts it in ``budget``.
        budget: Budget whose decisions are collective.
    """

    def __init__(self, ranks: TensorRanks | None, accept: OnResponse, budget: Budget) -> None:
        self._ranks, self._accept, self._budget = ranks, accept, budget
        self.responses: list[TokenResponse] = []
        """Responses that the first rank has received and no rank has taken."""
        self.has_failed = False
        """Whether a response could not be taken: no rank follows any more."""

    def left(self) -> tuple[float, float]:
        """Return the tokens and seconds that are left."""
        tokens, seconds = self._together("left")
        return tokens, seconds

    def may_stop(self) -> bool:
        """Return whether open requests may be left unfinished."""
        return bool(self._together("may_stop"))

    def is_spent(self) -> bool:
        """Return whether the budget is used up."""
        return bool(self._together("is_spent"))

    def _together(self, method: str) -> Any:
        assert self._ranks is not None, "the first rank decides when"
        said = {"do": "decide", "method": method, "responses": self.responses}
        self.responses = []
        self._ranks.exchange(said)
        return self.decided(said)

    def decided(self, said: Mapping[str, Any]) -> Any:
        """Take responses, and return the decision that a message of the first rank names."""
        self.has_failed = True
        for response in said["responses"]:
            self._accept(response)
        result = getattr(self._budget, said["method"])()
        self.has_failed = False
        return result


def visible_device(device: torch.device) -> str:
    """Return a GPU's name among ``CUDA_VISIBLE_DEVICES`` of a new process; empty for a CPU."""
    if device.type != "cuda":
        return ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    index = device.index if device.index is not None else torch.cuda.current_device()
    return visible.split(",")[index] if visible else str(index)


def num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of a tensor."""
    return math.prod(shape) * dtype.itemsize
