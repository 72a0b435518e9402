"""SFT of a random Qwen3 on one CPU rank, with and without ``TrainOptions(compile=...)``.

A first compiled run starts with an empty inductor cache on disk; a second run, in a new process, finds it filled. The
table has the seconds of the first iteration of each run, the median seconds of later iterations, and the largest
difference of losses.

Run ``python -m benchmarks.compiled``.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from lightning.pytorch.callbacks import Callback

from benchmarks.harness import BenchmarkReport, make_parser, paired_ratio
from benchmarks.ranks import answers_of_ranks

PRECISIONS = ("32-true", "bf16-mixed")
LOSSES_APART = {"32-true": 1e-4, "bf16-mixed": 1e-2}
"""Precision -> largest allowed difference of losses. Compiled blocks round differently, and training amplifies it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The model and one iteration's samples."""

    hidden_size: int = 256
    num_layers: int = 4
    vocabulary: int = 1024
    batch_size: int = 16
    num_characters: int = 90
    iterations: int = 12


TINY = Workload(hidden_size=32, num_layers=2, vocabulary=320, batch_size=4, num_characters=12, iterations=3)


@dataclass(frozen=True, slots=True)
class Fit:
    """One run of training."""

    seconds: tuple[float, ...]
    """Seconds of each iteration."""
    losses: tuple[float, ...]


class Watch(Callback):
    """Keeps the seconds and the loss of each iteration."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self._begin = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        """Start the clock."""
        self._begin = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Keep the seconds and the loss."""
        self.seconds.append(time.perf_counter() - self._begin)
        self.losses.append(float(trainer.logged_metrics["actor/loss"]))


def fit(backend: str | None, precision: str, work: Workload) -> Fit:
    """Train on one rank."""
    from transformers import Qwen3Config

    from benchmarks.workload import byte_tokenizer, make_trainer, random_texts
    from lightning_realloc import SFT, ReallocStrategy, SFTDataModule
    from lightning_realloc.batch.training import TrainOptions

    config = Qwen3Config(
        hidden_size=work.hidden_size, intermediate_size=3 * work.hidden_size, num_hidden_layers=work.num_layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=work.hidden_size // 4, vocab_size=work.vocabulary,
    )  # fmt: skip
    texts = random_texts(work.batch_size * work.iterations, length=work.num_characters, seed=1)
    rows = [{"prompt": text[: 1 + number % 8], "completion": text[number % 16 :]} for number, text in enumerate(texts)]
    watch = Watch()
    trainer = make_trainer(
        strategy=ReallocStrategy("static"), precision=precision, callbacks=[watch], max_steps=work.iterations
    )
    options = TrainOptions(compile=backend)
    module = SFT(config, tokenizer=byte_tokenizer(), train_options=options, learning_rate=1e-4, seed=0)
    trainer.fit(module, datamodule=SFTDataModule(rows, batch_size=work.batch_size))
    return Fit(tuple(watch.seconds), tuple(watch.losses))


def fill(report: BenchmarkReport, precision: str, plain: Sequence[Fit], compiled: Sequence[Fit]) -> None:
    """Add a row. The first compiled fit started with an empty cache, the second one in another process."""
    later = [[second for one in fits for second in one.seconds[1:]] for fits in (plain, compiled)]
    apart = max(
        abs(ours - theirs)
        for one, other in zip(plain, compiled, strict=True)
        for ours, theirs in zip(one.losses, other.losses, strict=True)
    )
    report.add_row(
        precision=precision, first_s=plain[0].seconds[0], first_compiled_s=compiled[0].seconds[0],
        first_from_cache_s=compiled[1].seconds[0], later_s=median(later[0]), later_compiled_s=median(later[1]),
        plain_over_compiled=paired_ratio(*later), losses_apart=apart,
    )  # fmt: skip
    report.require_at_most(f"{precision}: losses apart", apart, LOSSES_APART[precision])


def work_on(rank: int, precision: str, backend: str, work: Workload, answers: Connection) -> None:
    """Train without and with compiled blocks, and send both results."""
    answers.send((fit(None, precision, work), fit(backend, precision, work)))


def main(arguments: list[str] | None = None) -> int:
    """Run both arms twice in each precision, each time in a process of its own, and report."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--tiny", action="store_true", help="a model of two small blocks, for a quick look")
    parser.add_argument("--backend", default="inductor", help="backend of torch.compile")
    options: argparse.Namespace = parser.parse_args(arguments)
    work = TINY if options.tiny else Workload()
    report = BenchmarkReport("compiled", settings={"backend": options.backend} | asdict(work))
    for precision in PRECISIONS:
        with tempfile.TemporaryDirectory() as cache:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
            pairs = [
                pair for _ in range(2)
                for pair in answers_of_ranks(work_on, precision, options.backend, work, world_size=1)
            ]  # fmt: skip
        fill(report, precision, *zip(*pairs, strict=True))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
