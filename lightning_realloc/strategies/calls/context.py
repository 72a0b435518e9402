"""Context of a call on this rank: the algorithm, its models, messages and device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.samples import EXPERTS, Samples
from lightning_realloc.batch.training import pack_columns
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.runtime.measure.usage import PeakMemory
from lightning_realloc.runtime.messages.mailbox import Mailbox
from lightning_realloc.strategies.algorithm_protocol import RunnableAlgorithm
from lightning_realloc.strategies.calls.weight_updates import VersionLog
from lightning_realloc.strategies.pool.model_pool import ModelPool
from lightning_realloc.strategies.pool.precision import without_gradients
from lightning_realloc.strategies.pool.replica import Replica


@dataclass(frozen=True, slots=True)
class CallContext:
    """The parts of a run that every kind of call needs."""

    algorithm: RunnableAlgorithm
    """The algorithm, whose methods do the work."""
    pool: ModelPool
    """Its models."""
    mailbox: Mailbox
    """Messages between the ranks."""
    device: torch.device
    """Device of this rank."""
    peak_memory: PeakMemory
    """Peak memory of this rank."""
    rank: int
    """This process."""
    version_log: VersionLog
    """Versions of the weights that this rank generated each batch with."""

    def method_of(self, call: ModelFunctionCall) -> Callable[..., Any]:
        """Return the algorithm's method for a call."""
        method: Callable[..., Any] = getattr(self.algorithm, call.method)
        return method

    def pack(self, call: ModelFunctionCall, samples: Samples) -> PackedBatch:
        """Return samples of a call as one micro-batch on the device, with the experts that it needs."""
        if EXPERTS not in call.needs:
            samples = samples.without_columns(EXPERTS)
        return pack_columns(samples, self.device, share_prompts=self.algorithm.share_prompts)

    def micro_batch_tokens(self, call: ModelFunctionCall) -> int:
        """Return the tokens of a call's micro-batches: those of the plan, or of its role's options."""
        options = self.algorithm.train_options_of(str(call.role))
        return self.pool.plan.call(call.name).micro_batch_tokens or options.micro_batch_tokens_on(self.device.type)

    @contextmanager
    def reading(
        self, call: ModelFunctionCall, replica: Replica, *, merges: bool = True, keeps_merged: bool = False
    ) -> Iterator[None]:
        """Surround forward passes without gradients: autocast where weights need it, and the call's adapters.

        ``merges``: whether generation merges adapters into the weights. ``keeps_merged``: whether weights with merged
        adapters stay in memory afterwards.
        """
        adapted = self.pool.adapted_for(call, replica.model, merges=merges, keeps=keeps_merged)
        with without_gradients(replica.model, self.device), adapted:
            yield
