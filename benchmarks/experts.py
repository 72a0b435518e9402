"""Bytes and seconds of a training step of a mixture of experts: gathered by FSDP, divided by ``ep``, and cut by ``tp``.

A random Mixtral reads four responses on four CPU ranks, one for each rank, and computes the gradients of their
log-probabilities. Ranks of ``tp`` share their responses. ``sent_bytes`` are what a rank sends of activations and their
gradients, counted where they are sent: with ``ep`` rows to the ranks of experts and back, with ``tp`` its part of sums
over ranks, as a ring sends them. ``expected_bytes`` follow from tokens and width, with ``ep`` for an even router.
``gathered_bytes`` are the experts that a rank does not hold and FSDP gathers, in both passes. Peaks are of live
tensors, without weights.

Run ``python -m benchmarks.experts``.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any
from unittest.mock import patch

from benchmarks.harness import BenchmarkReport, make_parser
from benchmarks.ranks import answer_of_first_rank, max_over_ranks, turns_within

LAYOUTS = ("fsdp4", "fsdp4.ep2", "fsdp4.ep4", "fsdp2.tp2")
WORLD_SIZE = 4
FLOAT_BYTES = 4
MOST_APART = 0.1
"""Largest difference of bytes sent, relative to those expected of an even router."""
TOLERANCE = 1e-5
"""Largest difference of losses, relative to that of gathered experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes of the model and of its input."""

    tokens: int = 1_024
    """Tokens of the row of each rank."""
    hidden_size: int = 256
    features: int = 512
    """Intermediate features of an expert."""
    experts: int = 16
    experts_per_token: int = 2
    num_layers: int = 2
    turns: int = 15
    """Most steps of each layout that are timed."""
    limit_s: float = 180.0


TINY = Workload(tokens=256, hidden_size=32, features=32, turns=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step in a layout, on the rank that needs most."""

    seconds: float
    """Median over turns."""
    sent_bytes: float
    """Mean over ranks."""
    expected_bytes: float
    gathered_bytes: int
    peak_bytes: int
    loss: float
    """Mean over ranks."""


def expected_bytes(work: Workload, *, ep: int, tp: int) -> float:
    """Return the bytes of activations and their gradients that a rank sends.

    Under ``ep``, a layer sends each pair of token and expert away and back, and the same gradients; each expert gets
    equally many. Under ``tp``, attention and experts of a layer sum their outputs and the gradients of their inputs,
    the head the gradient of its input, and the embedding its output; a ring sends each sum twice, but for a rank's own
    part.
    """
    pairs = work.tokens * work.experts_per_token
    exchanged = 4 * work.num_layers * pairs * (ep - 1) / ep
    summed = (4 * work.num_layers + 2) * tp * work.tokens * 2 * (tp - 1) / tp
    return (exchanged + summed) * work.hidden_size * FLOAT_BYTES


def run_steps(work: Workload) -> dict[str, Step]:
    """Run steps of all layouts in turns, and return their costs. Collective."""
    from lightning_realloc.layout import Layout
    from lightning_realloc.runtime.parallel.mesh import MeshRegistry

    meshes = MeshRegistry("cpu")
    layouts = {text: Layout.parse(text) for text in LAYOUTS}
    meshes.create(layouts.values())
    arms = {text: _Arm(work, layout, meshes) for text, layout in layouts.items()}
    for arm in arms.values():
        arm.observe()
    for _ in turns_within(work.turns, work.limit_s):
        for arm in arms.values():
            arm.time()
    return {text: arm.result() for text, arm in arms.items()}


class _Arm:
    """A model in one layout, and this rank's costs of its steps."""

    def __init__(self, work: Workload, layout: Any, meshes: Any) -> None:
        from lightning_realloc.layout import ModelLayout
        from lightning_realloc.runtime.parallel.model_spec import describe_model
        from lightning_realloc.runtime.parallel.parallelize import parallelize

        model = _mixture(work)
        self._placed = ModelLayout(describe_model(model, max_tp=1), layout)
        self._model = parallelize(model, self._placed, meshes)
        tp, self._rank = layout.dims.tp, meshes.rank
        share = self._rank // tp
        self._work, self._batch = work, _rows(work, range(share * tp, (share + 1) * tp))
        self._seconds: list[float] = []

    def observe(self) -> None:
        """Run a step, and record its bytes and its loss."""
        from lightning_realloc.runtime.measure.memory_stats import StorageMeter

        meter = StorageMeter()
        meter.start()
        before = meter.current_bytes
        try:
            with _counted_bytes(self._placed.layout.dims.tp) as sent:
                self._loss = self._step()
        finally:
            meter.stop()
        self._peak_bytes, self._sent_bytes = meter.take_peak() - before, sum(sent)

    def time(self) -> None:
        """Run a step, and record its seconds on the slowest rank."""
        begin = time.perf_counter()
        self._step()
        self._seconds.append(max_over_ranks(time.perf_counter() - begin))

    def result(self) -> Step:
        """Return the costs of a step. Collective."""
        import torch
        import torch.distributed as dist

        means = torch.tensor([self._loss, self._sent_bytes], dtype=torch.float64)
        dist.all_reduce(means)
        loss, sent = (means / WORLD_SIZE).tolist()
        dims = self._placed.layout.dims
        return Step(
            seconds=median(self._seconds),
            sent_bytes=sent,
            expected_bytes=expected_bytes(self._work, ep=dims.ep, tp=dims.tp),
            gathered_bytes=int(max_over_ranks(2 * FLOAT_BYTES * self._num_gathered())),
            peak_bytes=int(max_over_ranks(self._peak_bytes)),
            loss=loss,
        )

    def _step(self) -> float:
        from lightning_realloc.runtime.parallel.packed_forward import token_logprobs

        loss = -token_logprobs(self._model, self._batch, only_responses=True).logprobs.mean()
        loss.backward()
        self._model.zero_grad()
        return float(loss.item())

    def _num_gathered(self) -> int:
        """Return the elements of experts that the rank computes with and does not hold."""
        elements = 0
        for param in self._placed.model.params:
            whole, own = (cut(param.name, self._rank) for cut in (self._placed.gathered_shard, self._placed.shard))
            if ".experts." in param.name and whole is not None and own is not None:
                elements += math.prod(whole.shape) - math.prod(own.shape)
        return elements


@contextmanager
def _counted_bytes(tp: int) -> Iterator[list[float]]:
    """Record the bytes that this rank sends to others by all-to-all with sizes, and by sums over ``tp`` ranks."""
    import torch.distributed as dist

    from lightning_realloc.runtime.forward.peer_group import PeerGroup

    sent: list[float] = []
    exchange, add_up = dist.all_to_all_single, PeerGroup.sum

    def exchanged(output: Any, rows: Any, received: Any = None, sizes: Any = None, group: Any = None) -> Any:
        if sizes is not None:
            to_others = sum(sizes) - sizes[dist.get_rank(group)]
            sent.append(to_others * rows[0].nbytes if len(rows) else 0)
        return exchange(output, rows, received, sizes, group=group)

    def added_up(group: PeerGroup, tensor: Any) -> Any:
        sent.append(2 * (tp - 1) / tp * tensor.nbytes)
        return add_up(group, tensor)

    with patch.object(dist, "all_to_all_single", exchanged), patch.object(PeerGroup, "sum", added_up):
        yield sent


def _mixture(work: Workload) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, MixtralConfig

    config = MixtralConfig(
        vocab_size=256, hidden_size=work.hidden_size, intermediate_size=work.features, num_attention_heads=8,
        num_hidden_layers=work.num_layers, num_key_value_heads=4, num_local_experts=work.experts,
        num_experts_per_tok=work.experts_per_token, max_position_embeddings=work.tokens,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def _rows(work: Workload, seeds: range) -> Any:
    """Return a pack with a random row for each seed."""
    import torch

    from lightning_realloc.batch.packing import pack
    from lightning_realloc.batch.ragged import Ragged
    from lightning_realloc.batch.samples import Samples

    rows = [torch.randint(0, 256, (work.tokens,), generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    prompts, responses = (Ragged.from_list([row[part] for row in rows]) for part in (slice(1), slice(1, None)))
    return pack(Samples(torch.arange(len(rows)), {"prompt_ids": prompts, "response_ids": responses}))


def fill(report: BenchmarkReport, steps: Mapping[str, Step]) -> None:
    """Add a row for each layout, and the targets."""
    gathered = steps["fsdp4"]
    for layout, step in steps.items():
        report.add_row(layout=layout, **asdict(step))
        report.require_at_most(f"{layout}: loss apart", abs(step.loss - gathered.loss) / gathered.loss, TOLERANCE)
        if step.expected_bytes:
            apart = abs(step.sent_bytes / step.expected_bytes - 1)
            report.require_at_most(f"{layout}: bytes sent, apart from the formula", apart, MOST_APART)
            report.require_at_most(f"{layout}: peak over gathered", step.peak_bytes / gathered.peak_bytes, 1.0)


def main(arguments: list[str] | None = None) -> int:
    """Run all steps and report."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--tiny", action="store_true", help="rows of 256 tokens, for a quick look")
    options: argparse.Namespace = parser.parse_args(arguments)
    work = TINY if options.tiny else Workload()
    report = BenchmarkReport("experts", settings={"world_size": WORLD_SIZE} | asdict(work))
    steps = answer_of_first_rank(run_steps, work, world_size=WORLD_SIZE)
    fill(report, steps)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
