"""Runs of `benchmarks.autotune` on each rank: a tuned run, an untuned run, and a run in which plans take turns."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from benchmarks.plan_turn import WORLD_SIZE, Readings, Workload, make_module
from benchmarks.ranks import gather_from_ranks

COUNTED = 3
"""Measured iterations of a block, after one that is not measured."""
EPOCH = 240
"""Batches of the data, more than any run takes. All runs see the same prompts in the same order."""
AFTER_COMMIT = 4
"""Iterations after the commit, since the first one under the committed plan is part of the cost of tuning."""
WORTH_ANOTHER_LOOK = 1.5
"""Slowness in the first round, relative to the fastest plan, above which a plan is not measured again."""
ROLES = ("actor", "critic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Sizes of models and lengths of responses."""

    name: str
    work: Workload
    share_of_stops: float = 0.0
    """Share of the vocabulary whose tokens end a response. 0: all responses have the maximum length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """Result of a tuned run."""

    start: Mapping[str, Any]
    committed: Mapping[str, Any]
    start_s: float
    """Seconds of an iteration under the start plan, measured by the tuner."""
    committed_s: float
    costs: Mapping[str, float]
    trials: Sequence[Mapping[str, Any]]
    """Tried plans with their predicted and measured seconds, the start plan first."""
    num_tried: int
    iterations: int
    losses: Mapping[tuple[str, int], float]
    scores: Sequence[Sequence[float]]
    """Scores of the reward model in each iteration."""


@dataclass(slots=True)
class Log:
    """Logged metrics and plans of all iterations."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    num_ranks: list[dict[str, int]] = field(default_factory=list)
    """Role -> number of ranks that train it, for each iteration."""

    def losses(self) -> dict[tuple[str, int], float]:
        """Return (role, iteration) -> loss, where the iteration of a loss is certain.

        A loss that some ranks learn late is logged one iteration later, and not at all if the plan changes.
        """
        found = {}
        for at, metrics in enumerate(self.metrics):
            for role in ROLES:
                late = self.num_ranks[at][role] < WORLD_SIZE
                if late and (at == 0 or self.num_ranks[at - 1] != self.num_ranks[at]):
                    continue
                found[role, at - late] = metrics[f"{role}/loss"]
        return found


def make_run(setting: Setting, plan: Any, callbacks: Sequence[Any], max_steps: int) -> tuple[Any, Any, Any, Readings]:
    """Return a Trainer, a module, its data, and the record of scores."""
    from benchmarks.workload import make_trainer, random_prompts
    from lightning_realloc import ReallocStrategy, SamplingParams

    noted = Readings(rollouts=[{}])
    work = setting.work
    module = make_module(work, noted)
    if setting.share_of_stops:
        stops = tuple(range(3, 3 + int(work.vocabulary * setting.share_of_stops)))
        module.sampling = SamplingParams(max_new_tokens=work.new_tokens, stop_token_ids=stops)
    strategy = ReallocStrategy(plan=plan)
    trainer = make_trainer(strategy=strategy, callbacks=list(callbacks), max_steps=max_steps, max_epochs=-1)
    # One epoch: at the end of an epoch, late losses would be logged twice or not at all.
    prompts = random_prompts(work.num_prompts * EPOCH, length=work.prompt_tokens, batch_size=work.num_prompts)
    return trainer, module, prompts, noted


def make_recorder(log: Log) -> Any:
    """Return a callback that fills a log."""
    from lightning.pytorch.callbacks import Callback

    class Recorder(Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            plan = trainer.strategy.plan
            log.num_ranks.append({role: plan.layout(f"{role}.train").dims.size for role in ROLES})

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            known = trainer.callback_metrics
            names = [f"{role}/loss" for role in ROLES]
            log.metrics.append({name: float(known[name]) for name in names if name in known})

    return Recorder()


def tune(setting: Setting, start: Any, *, iterations: int, settings: Mapping[str, Any]) -> Tuned:
    """Train with a tuner that expects ``iterations``, until it commits a plan. Collective."""
    from lightning.pytorch.callbacks import Callback

    from lightning_realloc import AutoTuner

    class StopAfterCommit(Callback):
        since = 0

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            self.since += tuner.tuner.num_tunings > 0
            trainer.should_stop = self.since == AFTER_COMMIT

    log, tuner = Log(), AutoTuner(save_to=None, profile_cache=None, **settings)
    callbacks = [tuner, make_recorder(log), StopAfterCommit()]
    trainer, module, data, noted = make_run(setting, start, callbacks, iterations)
    trainer.fit(module, data)
    found = tuner.tuner
    return Tuned(
        start=found.start.plan.to_mapping(), committed=found.best.plan.to_mapping(), start_s=found.start.score,
        committed_s=found.best.score, costs=dict(found.costs),
        trials=[trial.to_mapping() for trial in found.trials], num_tried=found.num_tried,
        iterations=trainer.global_step, losses=log.losses(), scores=tuple(map(tuple, noted.scores)),
    )  # fmt: skip


def train_untuned(setting: Setting, plan: Any, iterations: int) -> tuple[dict[tuple[str, int], float], Any]:
    """Train under one plan; return losses and scores. Collective."""
    log = Log()
    trainer, module, data, noted = make_run(setting, plan, [make_recorder(log)], iterations)
    trainer.fit(module, data)
    return log.losses(), tuple(map(tuple, noted.scores))


def take_turns(setting: Setting, plans: Sequence[Mapping[str, Any]], *, rounds: int) -> list[list[float]]:
    """Return seconds of iterations under each plan, with the plans in turns in one run. Collective.

    Later rounds leave out plans that were much slower in the first one.
    """
    from lightning.pytorch.callbacks import Callback

    class Turns(Callback):
        def __init__(self) -> None:
            self.seconds: list[list[float]] = [[] for _ in plans]
            self.queue = [(number, index) for number in range(rounds) for index in range(len(plans))]
            self.block: list[float] = []
            self.begin = 0.0

        def on_train_start(self, trainer: Any, *args: Any) -> None:
            trainer.strategy.set_plan(plans[0])

        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            self.begin = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            self.block.append(time.perf_counter() - self.begin)
            if len(self.block) <= COUNTED:
                return
            everyone = gather_from_ranks(self.block[1:])
            self.block = []
            _, index = self.queue.pop(0)
            self.seconds[index] += [sum(row) / len(row) for row in zip(*everyone, strict=True)]
            while self.queue and self._is_slow(*self.queue[0]):
                self.queue.pop(0)
            if self.queue:
                trainer.strategy.set_plan(plans[self.queue[0][1]])
            else:
                trainer.should_stop = True

        def _is_slow(self, number: int, index: int) -> bool:
            if number == 0:
                return False
            fastest = min(median(times) for times in self.seconds if times)
            return median(self.seconds[index]) > WORTH_ANOTHER_LOOK * fastest

    turns = Turns()
    trainer, module, data, _ = make_run(setting, plans[0], [turns], rounds * len(plans) * (COUNTED + 1) + 1)
    trainer.fit(module, data)
    return turns.seconds


def tiny(setting: Setting) -> Setting:
    """Return a setting with tiny models, for a quick look."""
    work = replace(
        setting.work, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=4, vocabulary=512,
        new_tokens=min(8, setting.work.new_tokens),
    )  # fmt: skip
    return replace(setting, work=work)
