"""One turn of one arm of `benchmarks.plans`: train four models for a few iterations and measure them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch.distributed as dist

from benchmarks.memory import live_bytes
from benchmarks.ranks import gather_from_ranks

WORLD_SIZE = 4
ROLES = ("actor", "critic", "reference", "reward")
CALLS = {
    "actor.generate": "generate", "reference.infer": "reference", "reward.infer": "reward", "critic.infer": "values",
    "actor.train": "actor", "critic.train": "critic",
}  # fmt: skip
"""Call -> its column of the table."""

Plan = Literal["static", "heuristic"] | Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Arm:
    """Plan and overlap of one arm."""

    name: str
    plan: Plan = field(hash=False)
    overlap: Literal["iterations", "none"]
    measured: int = 3
    """Measured iterations, after a warm-up iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes of the four models, 52 million weights each by default, and samples of an iteration."""

    hidden_size: int = 512
    intermediate_size: int = 1408
    num_layers: int = 12
    num_heads: int = 8
    num_kv_heads: int = 4
    vocabulary: int = 32000
    num_prompts: int = 4
    prompt_tokens: int = 24
    new_tokens: int = 128
    warmup_tokens: int = 4
    """Length of the first iteration's responses."""
    learning_rate: float = 1e-5


@dataclass(slots=True)
class Readings:
    """Measurements of one rank."""

    span_s: float = 0.0
    """Wall seconds of all measured iterations together."""
    cpu_s: float = 0.0
    idle_s: float = 0.0
    calls: dict[str, float] = field(default_factory=dict)
    """Call -> seconds over the measured iterations, for calls in which this rank takes part."""
    bytes_moved: int = 0
    """Bytes moved by all ranks in the measured iterations."""
    bytes_minimum: int = 0
    peak_bytes: int = 0
    rollouts: list[dict[int, list[int]]] = field(default_factory=list)
    """Responses by sample id, for each iteration."""
    scores: list[list[float]] = field(default_factory=list)
    logged: list[dict[str, float]] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    num_weights: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Measurements of one turn of one arm, over all ranks; times are per iteration."""

    seconds: float
    """Wall seconds of the slowest rank."""
    cpu_s: float
    """CPU-seconds of all ranks."""
    seconds_per_call: Mapping[str, float]
    """Call -> seconds of its slowest rank, with reallocation and without waiting."""
    idle_shares: tuple[float, ...]
    """Idle share of each rank."""
    bytes_moved: int
    bytes_minimum: int
    peak_bytes: tuple[int, ...]
    """Peak bytes of each rank."""
    rollouts: tuple[Any, ...]
    """Token ids of the responses in each iteration, in the order of sample ids."""
    scores: tuple[Any, ...]
    """Scores of the reward model in each iteration."""
    losses: Mapping[tuple[str, int], float]
    """(role, iteration) -> loss, where it was logged."""
    plan: Mapping[str, Any]
    num_weights: Mapping[str, int]


def run_arm(arm: Arm, work: Workload) -> Turn:
    """Train with a new Trainer, and return the measurements of all ranks. Collective."""
    from benchmarks.workload import make_trainer
    from lightning_realloc import ParameterReallocation, ReallocStrategy

    switching = ParameterReallocation()
    meter = _make_meter(arm, work, switching)
    strategy = ReallocStrategy(plan=arm.plan, overlap=arm.overlap)
    trainer = make_trainer(strategy=strategy, callbacks=[switching, meter], max_steps=1 + arm.measured)
    trainer.fit(make_module(work, meter.noted), make_prompts(work))
    return merge(gather_from_ranks(meter.noted), arm)


def merge(parts: Sequence[Readings], arm: Arm) -> Turn:
    """Combine the measurements of all ranks."""
    first, number = parts[0], arm.measured
    return Turn(
        seconds=max(part.span_s for part in parts) / number,
        cpu_s=sum(part.cpu_s for part in parts) / number,
        seconds_per_call={call: max(part.calls.get(call, 0.0) for part in parts) / number for call in CALLS},
        idle_shares=tuple(part.idle_s / part.span_s for part in parts),
        bytes_moved=first.bytes_moved // number,
        bytes_minimum=first.bytes_minimum // number,
        peak_bytes=tuple(part.peak_bytes for part in parts),
        rollouts=tuple(in_order(made) for made in zip(*(part.rollouts for part in parts), strict=True)),
        scores=tuple(map(tuple, first.scores)),
        losses=losses_by_iteration(first.logged, first.plan, arm.overlap),
        plan=first.plan,
        num_weights=first.num_weights,
    )


def losses_by_iteration(
    logged: Sequence[Mapping[str, float]], plan: Mapping[str, Any], overlap: str
) -> dict[tuple[str, int], float]:
    """Return (role, iteration) -> loss.

    If iterations overlap, a loss that some ranks learn late is logged one iteration later. The last iteration waits for
    its own loss and logs that instead, so the loss before it is missing.
    """
    from lightning_realloc import Layout

    losses, last = {}, len(logged) - 1
    for role in ("actor", "critic"):
        num_ranks = len(Layout.parse(_layout(plan["calls"][f"{role}.train"])).ranks)
        delay = 1 if overlap == "iterations" and num_ranks < WORLD_SIZE else 0
        for index, metrics in enumerate(logged[delay:last]):
            losses[role, index] = metrics[f"{role}/loss"]
        losses[role, last] = logged[last][f"{role}/loss"]
    return losses


def _layout(entry: str | Mapping[str, Any]) -> str:
    return entry if isinstance(entry, str) else str(entry["layout"])


def in_order(made: Sequence[Mapping[int, list[int]]]) -> list[list[int]]:
    """Return the responses of all ranks in one iteration, in the order of their ids."""
    rows = {sample_id: tokens for part in made for sample_id, tokens in part.items()}
    return [rows[sample_id] for sample_id in sorted(rows)]


def make_prompts(work: Workload) -> Any:
    """Return prompts of random letters for eight iterations."""
    from benchmarks.workload import random_prompts

    return random_prompts(work.num_prompts * 8, length=work.prompt_tokens, batch_size=work.num_prompts)


def make_module(work: Workload, noted: Readings) -> Any:
    """Return PPO with four random Llamas, which records responses and scores."""
    from benchmarks.workload import byte_tokenizer, llama_config, stable_adam
    from lightning_realloc import PPO, SamplingParams

    class Recorded(PPO):
        def roll_out(self, actor: Any, prompts: Any) -> Any:
            made = super().roll_out(actor, prompts)
            rows = zip(made.ids.tolist(), made.ragged("response_ids").to_lists(), strict=True)
            noted.rollouts[-1].update(rows)
            return made

        def summarize(self, samples: Any) -> Any:
            noted.scores.append(samples.tensor("scores").tolist())
            return super().summarize(samples)

    config, optimizer = llama_config(work), stable_adam(work.learning_rate)
    sampling = SamplingParams(max_new_tokens=work.new_tokens, ignore_eos=True)

    return Recorded(config, config, tokenizer=byte_tokenizer(), sampling=sampling, optimizer=optimizer)


def _make_meter(arm: Arm, work: Workload, switching: Any) -> Any:
    from lightning_realloc import PhaseCallback

    class Meter(PhaseCallback):
        """Measures the memory of the first iteration, and the time of the others together."""

        def __init__(self) -> None:
            self.noted = Readings()
            self._before = Readings()
            self._weighs = False

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self._weigh()
                dist.barrier()  # ranks begin the measured iterations together; no barrier follows
                self._before = self._totals(trainer)
            self._weighs = batch_idx == 0
            self.noted.rollouts.append({})
            tokens = work.warmup_tokens if batch_idx == 0 else work.new_tokens
            module.sampling = replace(module.sampling, max_new_tokens=tokens)

        def on_phase_start(self, trainer: Any, module: Any, phase: str) -> None:
            self._weigh()

        def on_phase_end(self, trainer: Any, module: Any, phase: str) -> None:
            self._weigh()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            names = ("actor/loss", "critic/loss")
            known = trainer.callback_metrics
            self.noted.logged.append({name: float(known[name]) for name in names if name in known})
            if batch_idx == arm.measured:
                self._note(self._totals(trainer), self._before)
                pool = trainer.strategy.pool
                self.noted.plan = trainer.strategy.plan.to_mapping()
                self.noted.num_weights = {role: pool.home(role).model_layout.model.num_elements for role in ROLES}

        def _weigh(self) -> None:
            if self._weighs:
                self.noted.peak_bytes = max(self.noted.peak_bytes, live_bytes(num_sharing=WORLD_SIZE))

        def _totals(self, trainer: Any) -> Readings:
            switches, runner = switching.summary().values(), trainer.strategy.runner
            return Readings(
                span_s=time.perf_counter(),
                cpu_s=time.process_time(),
                idle_s=runner.seconds_idle,
                calls=dict(runner.seconds),
                bytes_moved=sum(switch.bytes_moved for switch in switches),
                bytes_minimum=sum(switch.bytes_minimum for switch in switches),
            )

        def _note(self, after: Readings, before: Readings) -> None:
            for name in ("span_s", "cpu_s", "idle_s", "bytes_moved", "bytes_minimum"):
                setattr(self.noted, name, getattr(after, name) - getattr(before, name))
            self.noted.calls = {name: seconds - before.calls[name] for name, seconds in after.calls.items()}

    return Meter()
