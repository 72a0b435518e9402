"""Run inference calls on this rank: over all samples at once, or chunk by chunk while others are still generated."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.samples import Column, Ragged, Samples
from lightning_realloc.batch.shares import MicroBatch
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import ReallocError
from lightning_realloc.runtime.parallel.pipeline import PipelineStage, pipeline_infer
from lightning_realloc.strategies.calls.context import CallContext
from lightning_realloc.strategies.calls.engine_pool import EnginePool
from lightning_realloc.strategies.calls.full_device import SmallerBatches
from lightning_realloc.strategies.exchange.iteration_data import IterationData
from lightning_realloc.strategies.exchange.sample_table import ChunkResults, PositionedRows
from lightning_realloc.strategies.pool.replica import Replica

log = logging.getLogger(__name__)


class InferCalls:
    """Runs inference calls."""

    def __init__(self, context: CallContext, engines: EnginePool) -> None:
        self._context = context
        self._smaller = SmallerBatches(context, engines)

    def forget_layouts(self) -> None:
        """Start with whole micro-batches again: calls have other layouts."""
        self._smaller.forget()

    def run(self, call: ModelFunctionCall, replica: Replica, data: IterationData) -> Samples | None:
        """Return the results of this rank's samples; None if it holds none."""
        plan = data.routes.micro_batches(call, data.table(call))
        micro_batches = plan[replica.layout.data_parallel_index(self._context.rank)]
        if not micro_batches:
            return None
        self._context.mailbox.record.expect_parts(len(self._smaller.divided(call, micro_batches)), "micro-batches")
        return self._run_micro_batches(call, replica, data.rows(call), micro_batches)

    def run_fused(
        self, calls: Sequence[ModelFunctionCall], replicas: Mapping[str, Replica], data: IterationData
    ) -> dict[str, ChunkResults]:
        """Return the results of fused calls of one source; each chunk goes through all of them in turn.

        An error is raised after the last chunk: a rank that generates reads no messages before.
        """
        source = data.routes.fusion.source(calls[0])
        results: defaultdict[str, ChunkResults] = defaultdict(ChunkResults)
        generated = data.chunked(source)
        assert generated is not None, "calls are fused with generation in chunks"
        chunks = generated.chunks(data.table(source).known)
        self._context.mailbox.record.expect_parts(None, "micro-batches")
        try:
            for chunk in chunks:
                for call in calls:
                    layout = replicas[call.name].layout
                    shares = data.routes.fusion.chunk_shares(call, chunk.lengths)
                    share = shares[layout.data_parallel_index(self._context.rank)]
                    if share:
                        self._run_timed(call, replicas[call.name], chunk.rows, share, results[call.name])
        except Exception:
            for _ in chunks:
                pass
            raise
        ended_at = generated.ended_at()
        for name, made in results.items():
            data.report.maxima[f"hidden_s/{name}"] = made.seconds_before(ended_at)
        return dict(results)

    def _run_timed(
        self, call: ModelFunctionCall, replica: Replica, rows: PositionedRows, micro_batches: Sequence[MicroBatch],
        results: ChunkResults,
    ) -> None:  # fmt: skip
        """Run some micro-batches, and add their results and times to ``results``."""
        begin = time.perf_counter()
        made = self._run_micro_batches(call, replica, rows, micro_batches)
        results.times.append((begin, time.perf_counter()))
        if made is not None:
            results.chunks.append(made)

    def _run_micro_batches(
        self, call: ModelFunctionCall, replica: Replica, rows: PositionedRows, micro_batches: Sequence[MicroBatch]
    ) -> Samples | None:
        """Return the results of some micro-batches; None if none of them counts, or another stage holds them."""
        replica.model.eval()  # the home replica may come from a training call with dropout

        def attempt(micro_batches: Sequence[MicroBatch]) -> list[Samples]:
            parts = [rows.select(micro.positions) for micro in micro_batches]
            rows.read_images_ahead([micro.positions for micro in micro_batches])
            with torch.no_grad(), self._context.reading(call, replica):
                values = self._forward(call, replica, parts)
            return [] if values is None else [
                Samples(part.ids, _by_name(call.produces, column.to("cpu")))
                for part, column, micro in zip(parts, values, micro_batches, strict=True) if micro.counts
            ]  # fmt: skip

        counted = self._smaller.run(call, replica.layout, micro_batches, attempt)
        if not counted:
            return None
        made = Samples.concatenate(counted)
        self._require_finite(call, made)
        return made

    def _require_finite(self, call: ModelFunctionCall, made: Samples) -> None:
        """Require finite results of a role that is not trained, and warn of others, whose steps are then skipped.

        Raises:
            ReallocError: naming the role and the samples.
        """
        name = next((name for name, column in made.columns.items() if not is_finite(column)), None)
        if name is None:
            return
        bad = [number for number in made.ids.tolist() if not is_finite(made.by_ids([number]).columns[name])]
        found = f"{name} of {call.role} are not finite for sample ids {bad[:8]} ({len(bad)} of {len(made)})"
        if call.role in self._context.pool.dataflow.trained_roles:
            log.warning("%s: %s", call.name, found)
            return
        raise ReallocError(
            f"{found} in {call.name}, and no step mends a role that is not trained: check the weights that {call.role} "
            f"was loaded from, and use bfloat16 or float32 in place of float16"
        )

    def _forward(
        self, call: ModelFunctionCall, replica: Replica, parts: Sequence[Samples]
    ) -> list[Tensor | Ragged] | None:
        """Return one column per micro-batch; None if another pipeline stage holds them."""
        method = self._context.method_of(call)

        def column_of(model: nn.Module, batch: PackedBatch) -> Tensor | Ragged:
            values = method(model, batch)
            return values if len(batch) == values.shape[0] != batch.num_tokens else batch.responses(values)

        packs, record = (self._context.pack(call, part) for part in parts), self._context.mailbox.record
        if replica.layout.dims.pp > 1:
            stage = PipelineStage(replica.model, replica.model_layout, self._context.pool.meshes)
            return pipeline_infer(stage, list(packs), column_of, count=record.advance)
        return [column_of(replica.model, batch) for batch in record.counted(packs)]


def _by_name(names: Sequence[str], column: Tensor | Ragged) -> dict[str, Column]:
    """Return a column of values (..., k) as k columns of values (...), if there are as many names."""
    if len(names) == 1:
        return {names[0]: column}
    if isinstance(column, Ragged):
        return {name: Ragged(column.values[..., place], column.lengths) for place, name in enumerate(names)}
    return {name: column[..., place] for place, name in enumerate(names)}


def is_finite(column: Column) -> bool:
    """Return whether a column of tensors holds neither NaN nor infinity."""
    assert not isinstance(column, tuple), "python objects are no results of a model"
    values = column.values if isinstance(column, Ragged) else column
    return not values.is_floating_point() or bool(values.isfinite().all())
