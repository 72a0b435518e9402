"""CPU-seconds of generation with drafted tokens: adaptive depth, fixed depths, and no drafts.

Text and models are those of `speculative_models`. The first blocks of a target learn to draft by a second loss. Models
without this training have blocks that hardly draft, so the figures of "blocks" do not hold for them.

A cell is a model, a batch size and a drafter. Its arms run in one process, a slice of each at a time (see `slices`), on
one thread each. Seconds, and the clock of the engines, are CPU time of that thread. Every turn has its own seed, and
all arms of a turn must draw the same tokens. Each arm generates once before the first turn, in which the controller
measures costs. History holds one earlier response to every prompt, drawn with another seed.

Run ``python -m benchmarks.speculative``.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import fmean
from typing import get_args

import torch
import transformers
from transformers import PreTrainedModel

from benchmarks.harness import BenchmarkReport, make_parser, paired_ratio
from benchmarks.slices import SlicedArms, keep_memory
from benchmarks.speculative_grpo import SETTINGS as GRPO_SETTINGS
from benchmarks.speculative_grpo import measure_grpo
from benchmarks.speculative_models import LONGEST, RECIPES, Recipe, markov_text, train
from lightning_realloc.generation import GenerationEngine, SamplingParams
from lightning_realloc.generation.core.sample import Completion
from lightning_realloc.generation.loop.run import GenerationStats
from lightning_realloc.generation.speculative.config import DrafterName, Speculation
from lightning_realloc.generation.speculative.draft_model import BlocksDrafter, ModelDrafter
from lightning_realloc.generation.speculative.drafter import Drafter
from lightning_realloc.generation.speculative.lookup import HistoryDrafter
from lightning_realloc.generation.speculative.registry import build_drafter

PROMPT_TOKENS = 32
DRAFTERS = tuple(name for name in get_args(DrafterName) if name != "none")
ADAPTIVE = "adaptive"
NONE = "0"
OVER_BEST_FIXED = 0.97
OVER_NONE = 0.98
WITH_A_GOOD_DRAFTER = {1: 1.8, 4: 1.3}
"""Batch size -> least speed-up over no speculation, with the best drafter."""
PLANNER_SHARE = 0.01
_HEAP_BYTES = 3 << 30
"""Heap size, larger than the memory of all arms of a cell."""
_MOST_DIFFERING = 0.05
"""Share of responses that rounding may change: products of other shapes round differently and can change a draw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Models, cells and turns to measure."""

    models: tuple[str, ...] = ("3m", "40m")
    batches: tuple[int, ...] = (1, 4, 16, 32)
    depths: tuple[int, ...] = (2, 4, 8)
    """Fixed depths, without 0."""
    new_tokens: int = LONGEST - PROMPT_TOKENS
    cell_s: float = 80.0
    """Approximate CPU-seconds of a cell."""
    least_turns: int = 12
    most_turns: int = 20
    seed: int = 1
    temperature: float = 1.0
    """Temperature of sampling. At 5 and above no drafter predicts the text."""

    def with_turns(self, times: int) -> Settings:
        """Return settings with ``times`` as many turns in every cell."""
        turns = {name: times * getattr(self, name) for name in ("cell_s", "least_turns", "most_turns")}
        return replace(self, **turns)


@dataclass(frozen=True, slots=True)
class Models:
    """Target model, and a small model of the same text."""

    name: str
    target: PreTrainedModel
    draft: PreTrainedModel
    draft_blocks: int
    """Blocks of the target that learnt to draft."""

    def make_drafter(self, name: str) -> Drafter:
        """Return a new drafter; ``name`` "0" returns one that drafts nothing."""
        if name == NONE:
            return Drafter()
        if name == "model":
            return ModelDrafter(self.draft, self.target)
        if name == "blocks":
            return BlocksDrafter(self.target, self.draft_blocks)
        if name == "history":
            return HistoryDrafter(responses_per_prompt=1)
        return build_drafter(Speculation(drafter=name), self.target)


class Arm:
    """One engine, with its results in each turn."""

    def __init__(
        self,
        models: Models,
        drafter: str,
        depth: int | None,
        prompts: Sequence[Sequence[int]],
        give_way: Callable[[], None] = lambda: None,
        *,
        temperature: float = 1.0,
    ) -> None:
        """Draft ``depth`` tokens ahead; None: the adaptive depth. Models are copied: one engine may use them.

        ``give_way`` is called only before each step. Arms that draft read the clock more often; with more such places
        they would find cold caches more often than others.
        """

        def goes_on(has_work: bool) -> bool:
            give_way()
            return has_work

        models = copy.deepcopy(models)
        self._prompts = prompts
        self._temperature = temperature
        self.drafter = models.make_drafter(drafter)
        self._engine = GenerationEngine(
            models.target, max_slots=len(prompts), drafter=self.drafter, lockstep=goes_on, clock=time.thread_time,
            speculation=Speculation(drafter="none", num_draft_tokens=depth),
        )  # fmt: skip
        self.turns: list[tuple[Completion, ...]] = []
        self.stats: list[GenerationStats] = []

    def generate(self, new_tokens: int, seed: int) -> list[Completion]:
        """Return one response to each prompt."""
        return self._engine.generate(
            self._prompts,
            SamplingParams(max_new_tokens=new_tokens, seed=seed, temperature=self._temperature, ignore_eos=True),
        )

    def take_turn(self, new_tokens: int, first_seed: int) -> None:
        """Generate with the seed of the next turn, and keep the result."""
        self.turns.append(tuple(self.generate(new_tokens, first_seed + len(self.turns))))
        self.stats.append(self._engine.stats)

    def total(self, name: str) -> float:
        """Return the sum of one of the engine's counts over all turns."""
        return sum(getattr(stats, name) for stats in self.stats)


@dataclass(slots=True)
class Cell:
    """Results of one model, batch size and drafter."""

    model: str
    batch: int
    drafter: str
    arms: dict[str, Arm] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Arm -> CPU-seconds of each turn."""

    @property
    def name(self) -> str:
        """Short text for tables and ``--only``."""
        return f"{self.model} B={self.batch} {self.drafter}"

    def over_none(self, arm: str) -> float:
        """Return the speed-up of an arm over no speculation."""
        return paired_ratio(self.seconds[NONE], self.seconds[arm])

    def over_best_fixed(self) -> float:
        """Return the speed-up of the adaptive arm over the fastest fixed depth, including 0."""
        return min(paired_ratio(self.seconds[arm], self.seconds[ADAPTIVE]) for arm in self.arms if arm != ADAPTIVE)

    def share(self, arm: str, name: str) -> float:
        """Return one of the engine's counts of seconds as a share of the arm's seconds."""
        return self.arms[arm].total(name) / sum(self.seconds[arm])

    def num_differing(self, arm: str) -> int:
        """Return the number of responses with other tokens than without speculation.

        Raises:
            RuntimeError: if there are more than rounding explains.
        """
        pairs = [pair for turns in zip(self.arms[NONE].turns, self.arms[arm].turns, strict=True)
                 for pair in zip(*turns, strict=True)]  # fmt: skip
        differing = sum(plain.token_ids != drafted.token_ids for plain, drafted in pairs)
        if differing > _MOST_DIFFERING * len(pairs):
            raise RuntimeError(
                f"{self.name}: arm {arm} drew other tokens than no speculation in {differing} of {len(pairs)} "
                f"responses; rounding explains at most {_MOST_DIFFERING:.0%}"
            )
        return differing


def measure(cell: Cell, models: Models, settings: Settings) -> None:
    """Run the arms of a cell in turns, as many as fit its seconds."""
    text = markov_text(cell.batch, PROMPT_TOKENS, seed=10_000_000 + settings.seed)
    prompts = [tuple(row) for row in text.tolist()]
    depths: dict[str, int | None] = {NONE: 0, **{str(depth): depth for depth in settings.depths}, ADAPTIVE: None}
    with SlicedArms(tuple(depths)) as sliced:
        for name, depth in depths.items():
            drafter = NONE if name == NONE else cell.drafter
            cell.arms[name] = Arm(models, drafter, depth, prompts, sliced.give_way, temperature=settings.temperature)
        earlier = Arm(models, NONE, 0, prompts, temperature=settings.temperature).generate(
            settings.new_tokens, settings.seed
        )
        warm_up(cell, earlier, settings, sliced)
        turns: dict[str, Callable[[], object]] = {
            name: lambda arm=arm: arm.take_turn(settings.new_tokens, settings.seed + 2)  # type: ignore[misc]
            for name, arm in cell.arms.items()
        }
        cell.seconds = {name: [] for name in turns}
        gc.collect()
        gc.freeze()  # so that collections of an arm's objects skip those of the models
        num_turns = 1
        while len(cell.seconds[NONE]) < num_turns:
            for name, seconds in sliced.run(turns).items():
                cell.seconds[name].append(seconds)
            fitting = int(settings.cell_s / sum(own[0] for own in cell.seconds.values()))
            num_turns = min(max(fitting, settings.least_turns), settings.most_turns)


def warm_up(cell: Cell, earlier: Sequence[Completion], settings: Settings, sliced: SlicedArms) -> None:
    """Pass an earlier response to each prompt to every arm, and generate once with another seed.

    The responses come from a separate engine. An arm that had already generated, outside its own thread, ran 1 %
    faster.
    """
    for arm in cell.arms.values():
        remember(arm.drafter, earlier)
    sliced.run({name: lambda arm=arm: arm.generate(settings.new_tokens, settings.seed + 1)  # type: ignore[misc]
                for name, arm in cell.arms.items()})  # fmt: skip
    for arm in cell.arms.values():
        remember(arm.drafter, earlier)  # replaces the responses of the warm-up: history keeps one


def remember(drafter: Drafter, responses: Sequence[Completion]) -> None:
    """Pass responses made elsewhere to a drafter; drafters without history ignore them."""
    drafter.receive_news([(response.input.prompt_key, response.token_ids) for response in responses])


def add_rows(cell: Cell, report: BenchmarkReport) -> None:
    """Add one row for each arm of a cell."""
    for name, arm in cell.arms.items():
        verified = arm.total("verified_tokens")
        report.add_row(
            model=cell.model, batch=cell.batch, drafter=cell.drafter, arm=name, turns=len(arm.turns),
            cpu_s=fmean(cell.seconds[name]),
            tokens_per_row_step=arm.total("generated_tokens") / arm.total("row_steps"),
            accepted_share=arm.total("accepted_tokens") / verified if verified else 0.0,
            over_none=cell.over_none(name), planner_share=cell.share(name, "planning_s"),
            drafting_share=cell.share(name, "drafting_s"), differing=cell.num_differing(name),
        )  # fmt: skip


def judge_cell(cell: Cell, report: BenchmarkReport) -> None:
    """Add the targets of one cell."""
    report.require_at_least(f"{cell.name}: over the best fixed depth", cell.over_best_fixed(), OVER_BEST_FIXED)
    report.require_at_least(f"{cell.name}: over no speculation", cell.over_none(ADAPTIVE), OVER_NONE)


def judge(cells: Sequence[Cell], report: BenchmarkReport) -> None:
    """Add the targets over all cells: those of the best drafter, and the planning share."""
    for model in dict.fromkeys(cell.model for cell in cells):
        for batch, target in WITH_A_GOOD_DRAFTER.items():
            ratios = {cell.drafter: cell.over_none(ADAPTIVE) for cell in cells
                      if (cell.model, cell.batch) == (model, batch)}  # fmt: skip
            if ratios:
                best = max(ratios, key=ratios.__getitem__)
                report.require_at_least(f"{model} B={batch}: best drafter, {best}", ratios[best], target)
    share, name = max((cell.share(ADAPTIVE, "planning_s"), cell.name) for cell in cells)
    report.require_at_most(f"planner's largest share, {name}", share, PLANNER_SHARE)


def chosen_cells(settings: Settings, only: Sequence[str]) -> list[Cell]:
    """Return unmeasured cells whose names contain one of ``only``; all cells if it is empty."""
    cells = [Cell(model, batch, drafter)
             for model in settings.models for batch in settings.batches for drafter in DRAFTERS]  # fmt: skip
    return [cell for cell in cells if not only or any(text in cell.name for text in only)]


def train_models(recipe: Recipe, report: BenchmarkReport) -> Models:
    """Train a target and its draft model, and report their losses."""
    begin = time.process_time()
    target, loss = train(recipe)
    draft, draft_loss = train(RECIPES["draft"], seed=1)
    num_weights = sum(weight.numel() for weight in target.parameters())
    report.settings[f"model {recipe.name}"] = {
        "num_weights": num_weights, "training_cpu_s": time.process_time() - begin, "loss": loss,
        "draft_loss": draft_loss,
    }  # fmt: skip
    assert recipe.draft_blocks is not None, f"the target {recipe.name} has to learn to draft with its first blocks"
    return Models(recipe.name, target, draft, recipe.draft_blocks)


def run(
    settings: Settings,
    report: BenchmarkReport,
    *,
    only: Sequence[str] = (),
    after_cell: Callable[[Cell], None] = lambda cell: None,
) -> list[Cell]:
    """Measure all cells, one model after the other; ``after_cell`` is called after each cell's report."""
    cells = chosen_cells(settings, only)
    report.settings |= {each.name: getattr(settings, each.name) for each in fields(settings)}
    models: Models | None = None
    for cell in cells:
        if models is None or models.name != cell.model:
            models = train_models(RECIPES[cell.model], report)
        measure(cell, models, settings)
        add_rows(cell, report)
        judge_cell(cell, report)
        after_cell(cell)
    if cells:
        judge(cells, report)
    return cells


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--seed", type=int, default=1, help="seed of prompts and sampling")
    parser.add_argument(
        "--only", nargs="+", default=[], help='only cells whose name contains one of these: "3m B=4 history"; or "grpo"'
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="temperature of sampling; no drafter predicts the text at 5"
    )
    parser.add_argument("--times", type=int, default=1, help="multiple of the turns, for more precision")
    parser.add_argument("--quick", action="store_true", help="the small model, batches 1 and 4, few turns")
    options: argparse.Namespace = parser.parse_args(arguments)
    torch.set_num_threads(1)
    keep_memory(_HEAP_BYTES)
    transformers.logging.set_verbosity_error()
    settings = Settings(seed=options.seed)
    if options.quick:
        settings = Settings(seed=options.seed, models=("3m",), batches=(1, 4), new_tokens=48, cell_s=2.0)
    settings = replace(settings, temperature=options.temperature).with_turns(options.times)
    report = BenchmarkReport("speculative", seeds=(options.seed,), settings={"clock": "CPU time of a thread"})

    def keep(cell: Cell) -> None:
        """Print and write the results so far: all cells take half an hour or more, and a run may be stopped."""
        over_none, over_best = cell.over_none(ADAPTIVE), cell.over_best_fixed()
        print(f"{cell.name}: {over_none:.3f} over none, {over_best:.3f} over the best fixed depth", flush=True)
        report.write(options.json)

    run(settings, report, only=options.only, after_cell=keep)
    if not options.only or "grpo" in options.only:
        measure_grpo(report, replace(GRPO_SETTINGS, epochs=2 if options.quick else 3))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
