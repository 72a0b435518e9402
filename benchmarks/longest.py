"""Longest sequence that fine-tuning can train on in 4 GB, here and with TRL.

Both arms fine-tune the same random Llama in float32 with AdamW, and recompute the activations of blocks. Ours computes
logits in tiles, TRL in chunks, as it does by default. A run takes a step on a short sequence, which makes the
optimizer's state, and one on a sequence of the tried length. Its bytes are the largest resident set of its process,
libraries included; with ``cp2`` that of the larger of two ranks. Activation offload needs a CUDA device.

Memory is almost linear in the length. So two short sequences predict the longest that fits, and lengths around the
prediction are tried until one fits, and one that is at most 5 % longer does not.

Run ``python -m benchmarks.longest``; it needs TRL.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import multiprocessing
import resource
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.harness import BenchmarkReport, be_quiet, make_parser
from benchmarks.ranks import answer_of_first_rank, max_over_ranks

STEP_TOKENS = 128
"""Tried lengths are multiples of this."""
MOST_APART = 1.05
"""Length that does not fit over the longest that does, at most."""
SHORT_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The model, and the memory of a device."""

    limit_bytes: int = 4 * 10**9
    first_tokens: tuple[int, int] = (1024, 2048)
    """Lengths that predict the longest."""
    vocabulary: int = 32_000
    hidden_size: int = 128
    intermediate_size: int = 16_384
    """Wide, so that few tokens fill the memory: attention to many would take hours on a CPU."""
    num_layers: int = 2
    num_heads: int = 4


TINY = Workload(limit_bytes=10**9)


@dataclass(frozen=True, slots=True)
class Longest:
    """Longest sequence of one arm."""

    fitting: int
    """Longest tried length that fits."""
    beyond: int
    """Shortest tried length that does not fit."""
    peaks: dict[int, int]
    """Tried length -> peak bytes."""


def find_longest(peak_of: Callable[[int], int], work: Workload) -> Longest:
    """Try lengths until one fits that is nearly as long as one that does not.

    Raises:
        RuntimeError: if not even the first length fits.
    """
    peaks: dict[int, int] = {}
    for tokens in work.first_tokens:
        peaks[tokens] = peak_of(tokens)
    while True:
        fitting = [tokens for tokens, peak in peaks.items() if peak <= work.limit_bytes]
        beyond = [tokens for tokens, peak in peaks.items() if peak > work.limit_bytes]
        if not fitting:
            raise RuntimeError(f"{min(peaks)} tokens need {peaks[min(peaks)]} bytes, more than {work.limit_bytes}")
        if beyond and min(beyond) <= MOST_APART * max(fitting):
            return Longest(max(fitting), min(beyond), peaks)
        tokens = next_length(peaks, work)
        peaks[tokens] = peak_of(tokens)


def next_length(peaks: dict[int, int], work: Workload) -> int:
    """Return the length to try next: the predicted longest, or a little more or less if that is known.

    >>> next_length({1000: 1 * 10**9, 2000: 2 * 10**9}, Workload())
    3968
    >>> next_length({1000: 1 * 10**9, 2000: 2 * 10**9, 3968: 39 * 10**8}, Workload())
    4096
    """
    (one, less), (other, more) = sorted(peaks.items(), key=lambda entry: abs(entry[1] - work.limit_bytes))[:2]
    slope = (more - less) / (other - one)
    predicted = one + (work.limit_bytes - less) / slope
    length = math.floor(predicted / STEP_TOKENS) * STEP_TOKENS
    longest = max((tokens for tokens, peak in peaks.items() if peak <= work.limit_bytes), default=0)
    return max(length, longest + STEP_TOKENS) if length != longest else longest + STEP_TOKENS


# --- one run of an arm ------------------------------------------------------------------------------------------------


def train_ours(job: tuple[Workload, int, str]) -> int:
    """Fine-tune with this package in a layout, and return the largest resident set of its ranks. Collective."""
    from benchmarks.workload import byte_tokenizer, make_trainer, random_texts
    from lightning_realloc import SFT, ReallocStrategy, SFTDataModule

    work, tokens, layout = job
    be_quiet()
    call = {"layout": layout, "gradient_checkpointing": True, "micro_batch_tokens": tokens}
    texts = [random_texts(1, length=length - 1, seed=1)[0] for length in (SHORT_TOKENS, tokens)]
    trainer = make_trainer(strategy=ReallocStrategy(plan={"calls": {"actor.train": call}}), max_steps=2)
    module = SFT(_config(work), tokenizer=byte_tokenizer(), optimizer=_adam)
    rows = [{"text": text} for text in texts]
    trainer.fit(module, SFTDataModule(rows, batch_size=1, shuffle=False))
    return int(max_over_ranks(_peak_bytes()))


def train_with_trl(work: Workload, tokens: int) -> int:
    """Fine-tune with ``trl.SFTTrainer``, and return the largest resident set."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    from benchmarks.workload import byte_tokenizer, random_texts

    be_quiet()
    tokenizer = byte_tokenizer()
    texts = [random_texts(1, length=length - 1, seed=1)[0] for length in (SHORT_TOKENS, tokens)]
    with tempfile.TemporaryDirectory(prefix="benchmark-trl-") as output:
        settings = SFTConfig(
            output_dir=output, use_cpu=True, bf16=False, fp16=False, max_steps=2, per_device_train_batch_size=1,
            gradient_accumulation_steps=1, gradient_checkpointing=True, max_length=None, learning_rate=1e-4,
            optim="adamw_torch_fused", train_sampling_strategy="sequential", save_strategy="no", report_to=[],
            disable_tqdm=True, seed=0,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(_config(work))
        trainer = SFTTrainer(
            model, args=settings, processing_class=tokenizer, train_dataset=Dataset.from_dict({"text": texts})
        )
        trainer.train()
        assert trainer.state.num_input_tokens_seen in (0, SHORT_TOKENS + tokens)
    return _peak_bytes()


def _adam(parameters: Any) -> Any:
    import torch

    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def _config(work: Workload) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=work.vocabulary, hidden_size=work.hidden_size, intermediate_size=work.intermediate_size,
        num_hidden_layers=work.num_layers, num_attention_heads=work.num_heads, num_key_value_heads=work.num_heads // 2,
        max_position_embeddings=1 << 20, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        use_cache=False, dtype="float32",
    )  # fmt: skip


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# --- processes --------------------------------------------------------------------------------------------------------


def peak_of_ours(work: Workload, layout: str, num_ranks: int, tokens: int) -> int:
    """Return the peak bytes of a run in new processes."""
    return int(answer_of_first_rank(train_ours, (work, tokens, layout), world_size=num_ranks))


def peak_of_trl(work: Workload, tokens: int) -> int:
    """Return the peak bytes of a run of TRL in a new process.

    Raises:
        RuntimeError: if the run fails.
    """
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_answer_trl, args=(work, tokens, sending))
    process.start()
    sending.close()
    try:
        return int(receiving.recv())
    except EOFError:
        raise RuntimeError("TRL failed; its error is printed above") from None
    finally:
        process.join()


def _answer_trl(work: Workload, tokens: int, sending: Connection) -> None:
    sending.send(train_with_trl(work, tokens))


def _logged(arm: str, peak_of: Callable[[int], int], tokens: int) -> int:
    peak = peak_of(tokens)
    sys.stderr.write(f"{arm}: {tokens} tokens need {peak / 1e9:.2f} GB\n")
    return peak


def main(arguments: list[str] | None = None) -> int:
    """Run all arms and report."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--tiny", action="store_true", help="a smaller model in 1 GB, for a quick look")
    options: argparse.Namespace = parser.parse_args(arguments)
    if importlib.util.find_spec("trl") is None:
        sys.stderr.write("TRL is missing: pip install -e '.[parity]'\n")
        return 1
    work = TINY if options.tiny else Workload()
    report = BenchmarkReport("longest", settings=asdict(work))
    arms: dict[str, Callable[[int], int]] = {
        "TRL": partial(peak_of_trl, work),
        "ours": partial(peak_of_ours, work, "dp1", 1),
        "ours, cp2": partial(peak_of_ours, work, "cp2", 2),
    }
    found: dict[str, Longest] = {}
    for arm, peak_of in arms.items():
        found[arm] = longest = find_longest(partial(_logged, arm, peak_of), work)
        report.add_row(
            arm=arm, longest_tokens=longest.fitting, peak_bytes=longest.peaks[longest.fitting],
            does_not_fit=longest.beyond, times_trl=longest.fitting / found["TRL"].fitting,
        )  # fmt: skip
        report.settings[arm] = {str(tokens): peak for tokens, peak in sorted(longest.peaks.items())}
        report.write(options.json)
    report.require_at_least("tokens over TRL's, one rank", found["ours"].fitting / found["TRL"].fitting, 1.0)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
