"""Division of an iteration's sequences between the ranks, optimizer steps, micro-batches and slots of one call."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_realloc.dataflow.dataflow import CallKind
from lightning_realloc.dataflow.execution_plan import CallPlan
from lightning_realloc.tuning.memory.parts import Workload


@dataclass(frozen=True, slots=True)
class CallShape:
    """Numbers of sequences on the rank with most of them, from which the seconds and bytes of a call follow."""

    share: int
    """Sequences of the rank; in training, those of one optimizer step."""
    num_steps: int
    """Optimizer steps of a training call; 1 for other calls."""
    micro_batch: int
    """Sequences of the largest micro-batch, as ``batch.packing`` makes them of sequences of equal length."""
    slots: int
    """Sequences that the rank decodes at a time."""
    samples_per_prompt: int
    """Sequences with the same prompt, which is processed once."""

    @classmethod
    def from_plan(cls, kind: CallKind, plan: CallPlan, workload: Workload, sequence_tokens: float) -> CallShape:
        """Divide the sequences of an iteration.

        Args:
            sequence_tokens: Tokens of a sequence: the mean for seconds, the most for bytes.
        """
        num_minibatches, num_epochs = (workload.num_minibatches, workload.num_epochs) if kind == "train" else (1, 1)
        share = math.ceil(workload.num_sequences / (plan.layout.data_parallel_size * num_minibatches))
        limit = plan.micro_batch_tokens or workload.micro_batch_tokens
        return cls(
            share=share,
            num_steps=num_minibatches * num_epochs,
            micro_batch=min(share, max(1, int(limit // sequence_tokens))),
            slots=min(plan.max_slots, share),
            samples_per_prompt=workload.samples_per_prompt,
        )

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of the share."""
        return math.ceil(self.share / self.micro_batch)

    @property
    def mean_micro_batch(self) -> float:
        """Mean sequences of a micro-batch."""
        return self.share / self.num_micro_batches

    @property
    def num_waves(self) -> int:
        """Number of times that all slots are filled."""
        return math.ceil(self.share / self.slots)

    def num_prompts(self, sequences: int) -> int:
        """Return the number of prompts that so many sequences have."""
        return math.ceil(sequences / self.samples_per_prompt)
