"""Running inference calls on this rank: over all samples at once, or unit by unit while others are still generated."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.samples import Ragged, Samples
from lightning_realloc.batch.training import MicroBatch, pack_columns
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.runtime.parallel.pipeline import PipelineStage, pipeline_infer
from lightning_realloc.strategies.exchange.chunk_results import ChunkResults
from lightning_realloc.strategies.exchange.iteration_data import IterationData
from lightning_realloc.strategies.exchange.sample_table import Chosen
from lightning_realloc.strategies.pool.model_pool import ModelPool
from lightning_realloc.strategies.pool.precision import without_gradients
from lightning_realloc.strategies.pool.replica import Replica


class InferCalls:
    """Runs micro-batches through models.

    Args:
        module: The algorithm; its methods do the work.
        pool: Its models.
        device: Where tensors are worked on.
        rank: This process.
    """

    def __init__(
        self,
        module: Any,
        pool: ModelPool,
        *,
        device: torch.device,
        rank: int,
    ) -> None:
        self._module, self._pool, self._device, self._rank = module, pool, device, rank

    def share(
        self, call: ModelFunctionCall, replica: Replica, rows: Chosen, micro_batches: Sequence[MicroBatch]
    ) -> Samples | None:
        """Return what this rank's micro-batches gave; None when none of them counts, or another stage has it."""
        method = getattr(self._module, call.method)
        replica.model.eval()  # the home replica may come from a training call with dropout
        parts = [rows.at(micro.positions) for micro in micro_batches]
        precision, adapted = without_gradients(replica.model, self._device), self._pool.adapted_for
        with torch.no_grad(), precision, adapted(call, replica.model):
            values = self._values(method, replica, parts)
        if values is None:
            return None
        counted = [
            Samples(part.ids, {call.produces[0]: column.to("cpu")})
            for part, column, micro in zip(parts, values, micro_batches, strict=True) if micro.counts
        ]  # fmt: skip
        return Samples.concatenate(counted) if counted else None

    def units(
        self, calls: Sequence[ModelFunctionCall], replicas: Mapping[str, Replica], data: IterationData
    ) -> dict[str, ChunkResults]:
        """Return what fused calls of one source made on this rank; each unit goes through all of them in turn.

        What fails is raised once all units have come: a rank that generates hears of nothing before.
        """
        source = data.source(calls[0])
        work: defaultdict[str, ChunkResults] = defaultdict(ChunkResults)
        units = data.units(source)
        try:
            for unit in units:
                for call in calls:
                    layout = replicas[call.name].layout
                    shares = data.routes.fusion.unit_shares(call, unit.lengths)
                    share = shares[layout.data_parallel_index(self._rank)]
                    if share:
                        self._work_on(call, replicas[call.name], unit.rows, share, work[call.name])
        except Exception:
            for _ in units:
                pass
            raise
        over = data.over_at(source)
        for name, done in work.items():
            data.facts[f"hidden_s/{name}"] = done.seconds_before(over)
        return dict(work)

    def _work_on(
        self, call: ModelFunctionCall, replica: Replica, rows: Chosen, share: Sequence[MicroBatch], work: ChunkResults
    ) -> None:
        begin = time.perf_counter()
        made = self.share(call, replica, rows, share)
        work.times.append((begin, time.perf_counter()))
        if made is not None:
            work.parts.append(made)

    def _values(
        self, method: Callable[..., Tensor], replica: Replica, parts: Sequence[Samples]
    ) -> list[Tensor | Ragged] | None:
        """Return one column per micro-batch; None where another stage of a pipeline has them."""

        def column_of(model: nn.Module, batch: PackedBatch) -> Tensor | Ragged:
            values = method(model, batch)
            return values if len(batch) == values.shape[0] != batch.num_tokens else batch.responses(values)

        packs = (pack_columns(part, self._device, share_prompts=self._module.share_prompts) for part in parts)
        if replica.layout.dims.pp > 1:
            stage = PipelineStage(replica.model, replica.model_layout, self._pool.meshes)
            return pipeline_infer(stage, list(packs), column_of)
        return [column_of(replica.model, batch) for batch in packs]
