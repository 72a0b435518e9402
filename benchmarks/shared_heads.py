"""Memory and CPU time of log-probabilities with sharded and with gathered logits, under tensor parallelism.

A random Llama of one block on two CPU ranks reads packed responses. *Infer* computes log-probabilities, *train* the
gradients of log-probabilities and entropies. Arms take turns:

- shares: each rank keeps its shard of the logits, as the package does.
- joined: the head gathers all logits on every rank.

Bytes are the peak of live tensors minus those alive before the call, from a separate pass, since observing is slow. In
training they include the gradients of the weights. Seconds are CPU time of the slower rank, without waiting.

Run ``python -m benchmarks.shared_heads``.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import BenchmarkReport, interleave, make_parser, paired_ratio
from benchmarks.ranks import answer_of_first_rank, max_over_ranks

WORLD_SIZE = 2
ARMS = ("shares", "joined")
CALLS = ("infer", "train")
TOLERANCE = 1e-5
LEAST_BYTES = {"infer": 3.0, "train": 1.7}
"""Call -> least ratio of bytes, joined over shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes of the model and of its input."""

    vocabulary: int = 32_000
    hidden_size: int = 256
    num_sequences: int = 16
    prompt_length: int = 16
    response_length: int = 128
    repeats: int = 5


TINY = Workload(vocabulary=2_000, hidden_size=32, num_sequences=4, prompt_length=4, response_length=32, repeats=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Cost of one call in one arm, over all ranks."""

    peak_bytes: int
    """Peak bytes of the rank that needs most."""
    seconds: tuple[float, ...]
    """CPU-seconds of each repeat, of the slowest rank."""
    logprobs: tuple[float, ...]
    """Log-probabilities of the response tokens."""


def run_calls(work: Workload) -> dict[tuple[str, str], Turn]:
    """Run all calls in all arms, and return (call, arm) -> cost. Collective."""
    from lightning_realloc.runtime.parallel.packed_forward import token_logprobs

    model, packed = _model(work), _packed(work)
    said: dict[tuple[str, str], Tensor] = {}

    def infer(arm: str) -> None:
        with torch.no_grad(), _arm(model, arm):
            said["infer", arm] = token_logprobs(model, packed, only_responses=True).logprobs

    def train(arm: str) -> None:
        model.zero_grad(set_to_none=True)
        with _arm(model, arm):
            found = token_logprobs(model, packed, with_entropy=True, only_responses=True)
            (found.logprobs.sum() + 0.01 * found.entropy.sum()).backward()
        model.zero_grad(set_to_none=True)
        said["train", arm] = found.logprobs.detach()

    turns = {}
    for call, run in (("infer", infer), ("train", train)):
        arms = {arm: partial(run, arm) for arm in ARMS}
        peaks = {arm: max_over_ranks(_peak_bytes(once)) for arm, once in arms.items()}  # this also warms up
        seconds = interleave(arms, repeats=work.repeats)
        for arm in ARMS:
            slowest = tuple(map(max_over_ranks, seconds[arm]))
            logprobs = tuple(said[call, arm][packed.response_mask].tolist())
            turns[call, arm] = Turn(peak_bytes=int(peaks[arm]), seconds=slowest, logprobs=logprobs)
    return turns


def _model(work: Workload) -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    from lightning_realloc.layout import Layout, ModelLayout
    from lightning_realloc.runtime.parallel.mesh import MeshRegistry
    from lightning_realloc.runtime.parallel.model_spec import describe_model
    from lightning_realloc.runtime.parallel.parallelize import parallelize

    config = LlamaConfig(
        vocab_size=work.vocabulary, hidden_size=work.hidden_size, intermediate_size=2 * work.hidden_size,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    meshes, layout = MeshRegistry("cpu"), Layout.parse(f"tp{WORLD_SIZE}")
    meshes.create([layout])
    return parallelize(model, ModelLayout(describe_model(model), layout), meshes)


def _packed(work: Workload) -> Any:
    from lightning_realloc.batch.packing import pack
    from lightning_realloc.batch.ragged import Ragged
    from lightning_realloc.batch.samples import Samples

    generator = torch.Generator().manual_seed(1)

    def draw(length: int) -> Ragged:
        lengths = torch.full((work.num_sequences,), length)
        return Ragged(torch.randint(0, work.vocabulary, (int(lengths.sum()),), generator=generator), lengths)

    columns = {"prompt_ids": draw(work.prompt_length), "response_ids": draw(work.response_length)}
    return pack(Samples(torch.arange(work.num_sequences), columns))


@contextlib.contextmanager
def _arm(model: nn.Module, arm: str) -> Iterator[None]:
    """Gather the head's logits in arm "joined"; leave them sharded in the other arm."""
    from lightning_realloc.runtime.forward.vocab_parallel_logits import VocabParallelLogits

    def join(_module: nn.Module, _inputs: object, logits: VocabParallelLogits) -> Tensor:
        return logits.whole()

    head = model.get_output_embeddings()  # type: ignore[operator]
    handle = head.register_forward_hook(join) if arm == "joined" else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


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


def fill(report: BenchmarkReport, turns: Mapping[tuple[str, str], Turn]) -> None:
    """Add a row for each call, and the targets."""
    for call in CALLS:
        shares, joined = (turns[call, arm] for arm in ARMS)
        bytes_ratio = joined.peak_bytes / shares.peak_bytes
        seconds_ratio = paired_ratio(joined.seconds, shares.seconds)
        report.add_row(
            call=call, shares_bytes=shares.peak_bytes, joined_bytes=joined.peak_bytes, bytes_ratio=bytes_ratio,
            shares_s=median(shares.seconds), joined_s=median(joined.seconds), seconds_ratio=seconds_ratio,
        )  # fmt: skip
        apart = max(abs(one - other) for one, other in zip(shares.logprobs, joined.logprobs, strict=True))
        report.require_at_least(f"{call}: bytes, joined over shares", bytes_ratio, LEAST_BYTES[call])
        report.require_at_least(f"{call}: seconds, joined over shares", seconds_ratio, 1.0)
        report.require_at_most(f"{call}: log-probabilities apart", apart, TOLERANCE)


def main(arguments: list[str] | None = None) -> int:
    """Run both arms and report."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--tiny", action="store_true", help="a vocabulary of 2,000, for a quick look")
    options: argparse.Namespace = parser.parse_args(arguments)
    work = TINY if options.tiny else Workload()
    report = BenchmarkReport("shared_heads", settings={"world_size": WORLD_SIZE} | asdict(work))
    turns = answer_of_first_rank(run_calls, work, world_size=WORLD_SIZE)
    fill(report, turns)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
