"""Peak memory and seconds of a training step's log-probabilities: whole logits, and tiles of them.

A random model of four layers reads a pack of 8,192 tokens, with a vocabulary of 151,936. Each arm has a process of its
own for each turn, which reads one sequence to warm up and measures one step. Peak memory is the growth of the process's
resident memory during the measured step.

Run ``python -m benchmarks.head``.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from statistics import median
from unittest import mock

from benchmarks.harness import BenchmarkReport, make_parser, paired_ratio
from examples.resident_memory import resident_bytes, start_measuring

ARMS = {"whole logits": False, "tiles": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Model and pack."""

    num_tokens: int = 8192
    sequence_tokens: int = 1024
    vocabulary: int = 151_936
    hidden_size: int = 896
    intermediate_size: int = 4864
    num_layers: int = 4
    num_heads: int = 14
    num_kv_heads: int = 2
    trains_head: bool = True


@dataclass(frozen=True, slots=True)
class Turn:
    """Measurements of one step."""

    seconds: float
    peak_bytes: int
    """Growth of resident memory at most, over the memory before the step."""
    loss: float


def measure(is_tiled: bool, work: Workload, connection: Connection) -> None:
    """Measure a step in this process, and send it."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from lightning_realloc import limits
    from lightning_realloc.batch.packing import pack
    from lightning_realloc.batch.ragged import Ragged
    from lightning_realloc.batch.samples import Samples
    from lightning_realloc.runtime.parallel.packed_forward import token_logprobs

    if not is_tiled:
        mock.patch.object(limits, "TILE_ELEMENTS", 1 << 62).start()
    config = Qwen2Config(
        vocab_size=work.vocabulary, hidden_size=work.hidden_size, intermediate_size=work.intermediate_size,
        num_hidden_layers=work.num_layers, num_attention_heads=work.num_heads, num_key_value_heads=work.num_kv_heads,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.get_output_embeddings().requires_grad_(work.trains_head)
    model.get_input_embeddings().requires_grad_(False)
    count = work.num_tokens // work.sequence_tokens
    ids = torch.randint(0, work.vocabulary, (work.num_tokens,))
    lengths = torch.full((count,), work.sequence_tokens)
    prompts, responses = Ragged(ids[:count], torch.ones_like(lengths)), Ragged(ids[count:], lengths - 1)
    columns = {"prompt_ids": prompts, "response_ids": responses}
    packed = pack(Samples(torch.arange(count), columns))

    def step() -> float:
        said = token_logprobs(model, packed, with_entropy=True, only_responses=True)
        loss = -said.logprobs.mean()
        loss.backward()
        model.zero_grad()
        return float(loss.detach())

    small = pack(Samples(torch.arange(count), columns).select([0]))
    token_logprobs(model, small, only_responses=True).logprobs.mean().backward()
    model.zero_grad()
    before = start_measuring()
    assert before is not None, "this benchmark runs on Linux"
    began = time.perf_counter()
    loss = step()
    connection.send(Turn(time.perf_counter() - began, resident_bytes("VmHWM") - before, loss))


def take_turns(work: Workload, turns: int) -> dict[str, list[Turn]]:
    """Return the turns of each arm."""
    context = multiprocessing.get_context("spawn")
    measured: dict[str, list[Turn]] = {arm: [] for arm in ARMS}
    for _ in range(turns):
        for arm, is_tiled in ARMS.items():
            ours, theirs = context.Pipe()
            process = context.Process(target=measure, args=(is_tiled, work, theirs))
            process.start()
            theirs.close()
            measured[arm].append(ours.recv())
            process.join()
    return measured


def fill(report: BenchmarkReport, measured: Mapping[str, list[Turn]], *, label: str = "") -> None:
    """Add a row for each arm, and the targets."""
    for arm, turns in measured.items():
        report.add_row(
            arm=f"{arm}{label}",
            seconds=median(turn.seconds for turn in turns),
            peak_gib=median(turn.peak_bytes for turn in turns) / 2**30,
            loss=turns[0].loss,
        )
    whole, tiles = measured.values()
    memory = paired_ratio([turn.peak_bytes for turn in whole], [turn.peak_bytes for turn in tiles])
    report.require_at_least(f"peak memory of whole logits over tiles{label}", memory, 3.0)
    seconds = paired_ratio([turn.seconds for turn in tiles], [turn.seconds for turn in whole])
    report.require_at_most(f"seconds of tiles over whole logits{label}", seconds, 1.1)
    report.require_at_most(f"difference of losses{label}", abs(whole[0].loss - tiles[0].loss), 1e-5)


def main(arguments: list[str] | None = None) -> int:
    """Measure both arms in turns, with a trained and with a frozen head, and report."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--turns", type=int, default=3, help="turns of each arm")
    parser.add_argument("--tokens", type=int, default=Workload().num_tokens, help="tokens of the pack")
    options = parser.parse_args(arguments)
    work = Workload(num_tokens=options.tokens)
    report = BenchmarkReport("head", settings={"turns": options.turns} | asdict(work))
    fill(report, take_turns(work, options.turns))
    frozen = Workload(num_tokens=options.tokens, trains_head=False)
    fill(report, take_turns(frozen, options.turns), label=", head frozen")
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
