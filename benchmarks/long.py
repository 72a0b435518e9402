"""Memory of training on one long row, divided over 1, 2 and 4 context-parallel ranks.

A random Llama reads one response on CPU ranks, and computes the gradients of its log-probabilities. Bytes are the peak
of live tensors minus those alive before the pass, on the rank that needs most. They include the gradients of weights.
Operations are observed for that, which is slow, so no seconds are compared.

Run ``python -m benchmarks.long``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.harness import BenchmarkReport, make_parser
from benchmarks.ranks import answer_of_first_rank, max_over_ranks

DEGREES = (1, 2, 4)
WORLD_SIZE = DEGREES[-1]
MOST_BYTES = 1.15
"""Largest bytes of a rank, over an equal share of those of one rank."""
TOLERANCE = 1e-5
"""Largest difference of losses, relative to that of one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes of the model and of its input."""

    tokens: tuple[int, ...] = (8_192, 32_768)
    vocabulary: int = 256
    hidden_size: int = 128
    num_layers: int = 2


TINY = Workload(tokens=(1_021,), hidden_size=32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One training pass over all ranks of a layout."""

    peak_bytes: int
    """Peak bytes of the rank that needs most."""
    loss: float


Key = tuple[int, bool, int]
"""Tokens of the row, whether blocks recompute their activations, and cp."""


def run_passes(work: Workload) -> dict[Key, Pass]:
    """Run every pass, and return its cost. Collective."""
    from lightning_realloc.layout import Layout
    from lightning_realloc.runtime.parallel.mesh import MeshRegistry

    meshes = MeshRegistry("cpu")
    layouts = {cp: Layout.parse(f"cp{cp}") for cp in DEGREES}
    meshes.create(layouts.values())
    return {
        (tokens, recomputes, cp): _run_pass(work, tokens, recomputes, meshes, layouts[cp])
        for tokens in work.tokens
        for recomputes in (False, True)
        for cp in DEGREES
    }


def _run_pass(work: Workload, tokens: int, recomputes: bool, meshes: Any, layout: Any) -> Pass:
    """Train on a row of so many tokens; ranks outside of the layout only wait."""
    from lightning_realloc.runtime.parallel.packed_forward import token_logprobs

    peak, losses = 0, [0.0]
    if meshes.rank in layout:
        model, batch = _model(work, recomputes, meshes, layout), _row(work, tokens)

        def train() -> None:
            loss = token_logprobs(model, batch, only_responses=True).logprobs.mean()
            loss.backward()
            losses[0] = -loss.item()

        peak = _peak_bytes(train)
    return Pass(peak_bytes=int(max_over_ranks(peak)), loss=max_over_ranks(losses[0]))


def _model(work: Workload, recomputes: bool, meshes: Any, layout: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from lightning_realloc.layout import ModelLayout
    from lightning_realloc.runtime.model.training_mode import enable_activation_checkpointing
    from lightning_realloc.runtime.parallel.model_spec import describe_model
    from lightning_realloc.runtime.parallel.parallelize import parallelize

    config = LlamaConfig(
        vocab_size=work.vocabulary, hidden_size=work.hidden_size, intermediate_size=2 * work.hidden_size,
        num_hidden_layers=work.num_layers, num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=False,
        max_position_embeddings=max(work.tokens) + 1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    if recomputes:
        enable_activation_checkpointing(model)
    return parallelize(model, ModelLayout(describe_model(model), layout), meshes)


def _row(work: Workload, tokens: int) -> Any:
    import torch

    from lightning_realloc.batch.packing import pack
    from lightning_realloc.batch.ragged import Ragged
    from lightning_realloc.batch.samples import Samples

    ids = torch.randint(0, work.vocabulary, (tokens,), generator=torch.Generator().manual_seed(1))
    columns = {"prompt_ids": Ragged.from_list([ids[:1]]), "response_ids": Ragged.from_list([ids[1:]])}
    return pack(Samples(torch.arange(1), columns))


def _peak_bytes(run: Callable[[], object]) -> int:
    from lightning_realloc.runtime.measure.memory_stats import StorageMeter

    meter = StorageMeter()
    meter.start()
    before = meter.current_bytes
    try:
        run()
    finally:
        meter.stop()
    return meter.take_peak() - before


def fill(report: BenchmarkReport, passes: Mapping[Key, Pass]) -> None:
    """Add a row for each pass, and the targets."""
    for (tokens, recomputes, cp), one in passes.items():
        alone = passes[tokens, recomputes, 1]
        share = one.peak_bytes * cp / alone.peak_bytes
        report.add_row(
            tokens=tokens,
            recomputes=recomputes,
            cp=cp,
            peak_bytes=one.peak_bytes,
            over_share=share,
            loss=one.loss,
        )
        if cp > 1:
            name = f"{tokens} tokens, {'recomputed' if recomputes else 'kept'}, cp{cp}"
            report.require_at_most(f"{name}: bytes over an equal share", share, MOST_BYTES)
            report.require_at_most(f"{name}: loss apart", abs(one.loss - alone.loss) / alone.loss, TOLERANCE)


def main(arguments: list[str] | None = None) -> int:
    """Run all passes and report."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--tiny", action="store_true", help="a row of 1,021 tokens, for a quick look")
    options: argparse.Namespace = parser.parse_args(arguments)
    work = TINY if options.tiny else Workload()
    report = BenchmarkReport("long", settings={"world_size": WORLD_SIZE} | asdict(work))
    passes = answer_of_first_rank(run_passes, work, world_size=WORLD_SIZE)
    fill(report, passes)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
