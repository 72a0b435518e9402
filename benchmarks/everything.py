"""GRPO with drafting and sample rebalancing, next to GRPO without: equality and seconds.

- on: tokens are drafted from earlier responses at the adaptive depth, and samples move between generating ranks.
- off: neither.

Both arms train the same model with the same seeds for the same epochs, and take turns. Ratios are those to the trained
model's own log-probabilities (``ratio_to="proximal"``). The comparison covers all tokens and rewards, and every bit of
the trained weights. The model first learns predictable text, as in `speculative_models`. A few tokens end a response,
so lengths differ.

A step of another shape rounds the last bits of logits differently. If a random number lies that close between two
tokens, another token is drawn. The table then has the place of the first difference, and the exit code is 1.

Run ``python -m benchmarks.everything``.
"""

from __future__ import annotations

import argparse
import copy
import gc
import hashlib
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from benchmarks.harness import BenchmarkReport, make_parser, paired_ratio
from benchmarks.ranks import answers_of_ranks, gather_from_ranks
from benchmarks.speculative_models import RECIPES, VOCABULARY, markov_text, train

OFF, ON = "off", "on"
EQUAL = "share of runs with the same rewards, tokens and weights"
ARMS: Mapping[str, Mapping[str, bool]] = {OFF: {"drafts": False, "moves": False}, ON: {"drafts": True, "moves": True}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Settings of a run, equal in both arms."""

    recipe: str = "3m"
    warm_up_steps: int = 120
    num_prompts: int = 12
    """Prompts, which repeat in every epoch."""
    prompts_per_iteration: int = 4
    """Prompts per iteration, over all ranks."""
    group_size: int = 4
    epochs: int = 4
    prompt_tokens: int = 16
    new_tokens: int = 192
    """Longest response, in tokens."""
    slots: int = 4
    """Responses that run at a time on a rank."""
    ends: int = 2
    """Number of tokens that end a response."""
    steps_per_iteration: int = 2
    learning_rate: float = 1e-4
    ratio_to: str = "proximal"
    seed: int = 1

    @property
    def iterations(self) -> int:
        """Iterations of a run."""
        return self.epochs * (self.num_prompts // self.prompts_per_iteration)


QUICK = Workload(recipe="draft", warm_up_steps=20, num_prompts=4, epochs=2, prompts_per_iteration=2, new_tokens=24)


@dataclass(slots=True)
class Readings:
    """Measurements of one rank in a run."""

    rewards: list[float] = field(default_factory=list)
    """Mean reward of each iteration, the same on all ranks."""
    tokens: list[dict[int, tuple[int, ...]]] = field(default_factory=list)
    """Responses of this rank by sample id, for each iteration."""
    seconds: list[float] = field(default_factory=list)
    """Seconds of each iteration, from a common start of all ranks."""
    generate_s: list[float] = field(default_factory=list)
    moved: int = 0
    accepted: int = 0
    generated: int = 0
    row_steps: int = 0
    weights: str = ""
    """Digest of the trained actor's weights; used from the first rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Measurements of all ranks in a run."""

    rewards: tuple[float, ...]
    tokens: tuple[Mapping[int, tuple[int, ...]], ...]
    seconds: float
    generate_s: float
    moved: int
    accepted: int
    tokens_per_step: float
    weights: str

    @property
    def num_tokens(self) -> int:
        """Drawn tokens of all iterations."""
        return sum(len(response) for iteration in self.tokens for response in iteration.values())


def compare(run: Run, other: Run) -> str | None:
    """Return the first difference of two runs in tokens, rewards or weights; None if all bits are equal."""
    iterations = zip(run.tokens, other.tokens, run.rewards, other.rewards, strict=True)
    for number, (tokens, others, reward, other_reward) in enumerate(iterations, start=1):
        for sample_id in sorted(tokens):
            if tokens[sample_id] != others[sample_id]:
                return f"iteration {number}, tokens of sample {sample_id}"
        if reward != other_reward:
            return f"iteration {number}, reward {reward!r} and {other_reward!r}"
    return None if run.weights == other.weights else "weights alone, at the end"


def merge(ranks: Sequence[Readings]) -> Run:
    """Combine the measurements of all ranks; ranks in tensor parallelism have the same samples."""
    first = ranks[0]
    tokens = tuple(
        {sample_id: response for rank in ranks for sample_id, response in rank.tokens[number].items()}
        for number in range(len(first.rewards))
    )
    num_samples, num_noted = sum(map(len, tokens)), sum(len(own) for rank in ranks for own in rank.tokens)
    return Run(
        rewards=tuple(first.rewards), tokens=tokens,
        seconds=sum(max(each) for each in zip(*(rank.seconds for rank in ranks), strict=True)),
        generate_s=sum(max(each) for each in zip(*(rank.generate_s for rank in ranks), strict=True)),
        moved=first.moved, accepted=round(sum(rank.accepted for rank in ranks) * num_samples / num_noted),
        tokens_per_step=sum(rank.generated for rank in ranks) / max(1, sum(rank.row_steps for rank in ranks)),
        weights=first.weights,
    )  # fmt: skip


def run_arm(arm: str, model: PreTrainedModel, work: Workload) -> Run:
    """Train a copy of the model, and return the measurements of all ranks. Collective."""
    from lightning_realloc.batch.ragged import Ragged
    from lightning_realloc.batch.samples import Samples
    from lightning_realloc.data.loader import BatchLoader

    noted = Readings()
    prompts = markov_text(work.num_prompts, work.prompt_tokens, seed=20_000_000 + work.seed).tolist()
    names = tuple(f"prompt {number}" for number in range(work.num_prompts))
    table = Samples(torch.arange(work.num_prompts), {"prompt_ids": Ragged.from_list(prompts), "prompt": names})
    module = make_module(copy.deepcopy(model), work, noted, **ARMS[arm])
    data = BatchLoader(table, batch_size=work.prompts_per_iteration, seed=work.seed)
    world_size = dist.get_world_size()
    layout = f"dp{world_size}@0-{world_size - 1}" if world_size > 1 else "dp1@0"
    calls: dict[str, Any] = {call.name: {"layout": layout} for call in module.dataflow.model_calls}
    calls["actor.generate"]["max_slots"] = work.slots
    return fit(module, data, noted, calls, epochs=work.epochs)


def fit(module: Any, data: Any, noted: Readings, calls: Mapping[str, Any], *, epochs: int) -> Run:
    """Train under a plan with these calls; return the measurements of all ranks. Collective."""
    from benchmarks.workload import make_trainer
    from lightning_realloc import ReallocStrategy

    strategy = ReallocStrategy(plan={"calls": calls})
    trainer = make_trainer(strategy=strategy, callbacks=[make_meter(noted)], max_epochs=epochs, limit_val_batches=0)
    trainer.fit(module, data)
    noted.weights = digest(strategy.full_weights("actor"))
    return merge(gather_from_ranks(noted))


def digest(weights: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of every bit of the weights."""
    sha = hashlib.sha256()
    for name in sorted(weights):
        sha.update(weights[name].detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


def small_tokens(completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float]:
    """Reward the share of tokens in the lower half of the vocabulary."""
    return [sum(token < VOCABULARY // 2 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def make_module(model: PreTrainedModel, work: Workload, noted: Readings, *, drafts: bool, moves: bool) -> Any:
    """Return GRPO on the model, which records its rollouts."""
    from benchmarks.workload import byte_tokenizer
    from lightning_realloc import SamplingParams, TrainOptions

    ends = tuple(range(VOCABULARY - work.ends, VOCABULARY))
    return recorded_grpo(noted, drafts=drafts, moves=moves)(
        model.requires_grad_(True), small_tokens, tokenizer=byte_tokenizer(),
        sampling=SamplingParams(n=work.group_size, max_new_tokens=work.new_tokens, stop_token_ids=ends),
        train_options=TrainOptions(num_minibatches=work.steps_per_iteration), learning_rate=work.learning_rate,
        kl_coef=0.04, ratio_to=work.ratio_to, seed=work.seed,
    )  # fmt: skip


def recorded_grpo(noted: Readings, *, drafts: bool, moves: bool) -> Callable[..., Any]:
    """Return a constructor of an arm's GRPO, which records its rollouts."""
    from lightning_realloc import GRPO, GenerationOptions, Speculation

    class Recorded(GRPO):
        def roll_out(self, actor: Any, prompts: Any) -> Any:
            made = super().roll_out(actor, prompts)
            ids = made.ids.tolist()
            noted.tokens.append(dict(zip(ids, map(tuple, made.ragged("response_ids").to_lists()), strict=True)))
            noted.accepted += actor.stats.accepted_tokens
            noted.generated += actor.stats.generated_tokens
            noted.row_steps += actor.stats.row_steps
            return made

    generation = GenerationOptions(sample_reallocation=moves)
    return partial(Recorded, speculation=Speculation() if drafts else None, generation=generation)


def make_meter(noted: Readings) -> Any:
    """Return a callback that records rewards and seconds."""
    from lightning.pytorch.callbacks import Callback

    class Meter(Callback):
        """Measures every iteration."""

        def on_train_batch_start(self, *args: Any) -> None:
            dist.barrier()
            self._begin = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            noted.seconds.append(time.perf_counter() - self._begin)
            known = trainer.callback_metrics
            noted.rewards.append(float(known["reward"]))
            noted.generate_s.append(float(known["seconds/actor.generate"]))
            noted.moved += int(known.get("moved_samples/actor.generate", 0))

    return Meter()


def work_on(rank: int, work: Workload, turns: int, answers: Connection) -> None:
    """Run all turns of both arms on this rank; the first rank sends the results."""
    recipe = replace(RECIPES[work.recipe], steps=work.warm_up_steps, draft_blocks=None)
    model, _ = train(recipe, seed=work.seed)  # the same on every rank
    for arm in ARMS:  # loads kernels
        run_arm(arm, model, replace(work, epochs=1, num_prompts=work.prompts_per_iteration, new_tokens=8))
    take_turns(rank, lambda arm: run_arm(arm, model, work), turns, answers)


def take_turns(rank: int, run: Callable[[str], Run], turns: int, answers: Connection) -> None:
    """Run both arms in turns; the first rank sends the results."""
    for turn in range(turns):
        for arm in (OFF, ON) if turn % 2 == 0 else (ON, OFF):
            made = run(arm)
            gc.collect()
            if rank == 0:
                answers.send((arm, made))


def collect(report: BenchmarkReport, answers: Iterable[tuple[str, Run]], *, ranks: int) -> None:
    """Collect the runs of both arms as they arrive, and report on them."""
    runs: defaultdict[str, list[Run]] = defaultdict(list)
    for arm, run in answers:
        runs[arm].append(run)
        sys.stderr.write(f"ranks={ranks}, {arm}: {run.seconds:.2f} s, {run.generate_s:.2f} s of it generating\n")
    fill(report, runs, ranks=ranks)


def fill(report: BenchmarkReport, runs: Mapping[str, Sequence[Run]], *, ranks: int) -> None:
    """Add a row for each arm, and the targets."""
    judge = runs[OFF][0]
    spent, generating = [run.seconds for run in runs[OFF]], [run.generate_s for run in runs[OFF]]
    for arm, made in runs.items():
        apart = next(filter(None, (compare(run, judge) for run in made)), "none")
        report.add_row(
            ranks=ranks, arm=arm, runs=len(made), drawn=judge.num_tokens,
            seconds=median(run.seconds for run in made), off_over=paired_ratio(spent, [run.seconds for run in made]),
            generate_s=median(run.generate_s for run in made),
            off_over_generate=paired_ratio(generating, [run.generate_s for run in made]),
            accepted=fmean(run.accepted for run in made), tokens_per_step=fmean(run.tokens_per_step for run in made),
            moved=fmean(run.moved for run in made), difference=apart,
        )  # fmt: skip
        report.settings[f"rewards, ranks={ranks}, {arm}"] = [run.rewards for run in made]
    equal = fmean(compare(run, judge) is None for made in runs.values() for run in made)
    report.require_at_least(f"ranks={ranks}: {EQUAL}", equal, 1)
    ratio = paired_ratio(spent, [run.seconds for run in runs[ON]])
    report.require_at_least(f"ranks={ranks}: seconds off over on", ratio, 1.0)


def main(arguments: list[str] | None = None) -> int:
    """Run both arms in turns on each number of ranks; return 1 if they differ."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--turns", type=int, default=2, help="runs of each arm, in turns")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    parser.add_argument("--quick", action="store_true", help="a model of 100,000 weights and few iterations")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, prompts, order and sampling")
    parser.add_argument("--ratio-to", choices=("proximal", "behaviour"), default="proximal", help="GRPO's ratio_to")
    options = parser.parse_args(arguments)
    work = replace(QUICK if options.quick else Workload(), seed=options.seed, ratio_to=options.ratio_to)
    report = BenchmarkReport("everything", seeds=(options.seed,), settings=asdict(work))
    for ranks in options.ranks:
        collect(report, answers_of_ranks(work_on, work, options.turns, world_size=ranks), ranks=ranks)
    return conclude(report, options)


def conclude(report: BenchmarkReport, options: argparse.Namespace) -> int:
    """Print the report; return the exit code, which is also 1 if the arms differ."""
    unequal = any(EQUAL in target.name and not target.met for target in report.targets)
    return max(report.finish(options), int(unequal))


if __name__ == "__main__":
    sys.exit(main())
