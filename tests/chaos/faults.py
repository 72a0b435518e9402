"""Faults of a trial: which signal hits which process of a run, and at which moment."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

MOMENTS = {
    "start-up": "lightning_realloc.strategies.pool.builder:PoolBuilder.build",
    "generation": "lightning_realloc.generation.loop.run:GenerationRun.step",
    "reallocation": "lightning_realloc.runtime.transfer.executor:Reallocation.run",
    "reward": "tests.strategies.runs:low_tokens",
    "inference": "lightning_realloc.strategies.calls.infer_call:InferCalls.run",
    "training": "lightning_realloc.strategies.calls.train_call:TrainCalls._step",
    "change of plan": "lightning_realloc.strategies.pool.model_pool:ModelPool.apply_plan",
    "save: shards": "lightning_realloc.strategies.checkpoints.checkpoint_writer:_Save.write",
    "save: description": "lightning_realloc.strategies.checkpoints.folders:write_description",
    "save: exchange": "lightning_realloc.strategies.checkpoints.folders:_exchange",
    "export": "lightning_realloc.strategies.checkpoints.hf_folder:write_running_model",
}
"""Moment -> function of the package before (or, for the exchange, after) which a fault happens."""
OCCURRENCES = {"start-up": (1, 1), "export": (1, 1), "change of plan": (1, 2), "generation": (3, 20),
               "save: exchange": (1, 2)}  # fmt: skip
"""Moment -> least and largest number of the time at which a fault happens; 2 to 4 for others."""
ON_RANK_0 = ("save: description", "save: exchange", "export")
"""Moments that only rank 0 comes through."""
ON_TWO_RANKS = ("inference", "training")
"""Moments that all plans of the trial bring to ranks 0 and 1 only."""
ALGORITHMS = ("grpo", "ppo", "agents")
SIGNALS = ("SIGKILL", "SIGTERM", "SIGSTOP")
LAUNCHERS = ("environment", "script", "spawn", "torchrun")
"""Ways to start ranks. "environment" forks them with variables as torchrun sets them, which takes a second."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of one run."""

    number: int
    algorithm: str
    """``grpo``, ``ppo``, or ``agents``: GRPO with environments that fail, too."""
    launcher: str
    """One of `LAUNCHERS`."""
    world_size: int
    signal: str
    """One of `SIGNALS`."""
    target: str
    """``one`` rank, ``all`` ranks, or the ``launcher``."""
    rank: int
    """The rank that comes to the moment, and is hit if the target is one rank."""
    moment: str
    """One of `MOMENTS`."""
    occurrence: int
    """How often the rank comes to the moment before the fault."""

    @property
    def is_gentle(self) -> bool:
        """Whether ranks can end by themselves, with a checkpoint."""
        return self.signal == "SIGTERM"

    def to_mapping(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)

    def __str__(self) -> str:
        where = f"rank {self.rank}" if self.target == "one" else self.target
        return (
            f"{self.number:3d} {self.algorithm:6s} {self.world_size} {self.launcher:11s} {self.signal:7s} {where:8s} "
            f"{self.moment} ({self.occurrence})"
        )


def draw_faults(count: int, seed: int) -> list[Fault]:
    """Return faults that cover all moments, signals, targets and launchers about evenly."""
    rng = random.Random(seed)
    moments = _shuffled_cycle(list(MOMENTS), count, rng)
    signals = _shuffled_cycle(list(SIGNALS), count, rng)
    launchers = _shuffled_cycle(["environment"] * 5 + ["script", "spawn", "torchrun"], count, rng)
    return [
        _draw(number, moment, signal, launcher, rng)
        for number, (moment, signal, launcher) in enumerate(zip(moments, signals, launchers, strict=True))
    ]


def _draw(number: int, moment: str, signal: str, launcher: str, rng: random.Random) -> Fault:
    world_size = rng.choice((3, 4))
    targets = ["one", "one", "all"] if launcher == "environment" else ["one", "all", "launcher"]
    target = "one" if signal == "SIGSTOP" else rng.choice(targets)
    return Fault(
        number=number,
        algorithm=rng.choice(ALGORITHMS),
        launcher=launcher,
        world_size=world_size,
        signal=signal,
        target=target,
        rank=0 if moment in ON_RANK_0 else rng.randrange(2 if moment in ON_TWO_RANKS else world_size),
        moment=moment,
        occurrence=rng.randint(*OCCURRENCES.get(moment, (2, 4))),
    )


def _shuffled_cycle(values: list[str], count: int, rng: random.Random) -> list[str]:
    """Return each value about equally often, in random order."""
    drawn: list[str] = []
    while len(drawn) < count:
        drawn += rng.sample(values, len(values))
    return drawn[:count]
