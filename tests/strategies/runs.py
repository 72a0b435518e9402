"""Run algorithms for the tests of the strategy: tiny models and batches, few iterations, recorded results."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_realloc.algorithms.grpo import GRPO
from lightning_realloc.algorithms.ppo import PPO
from lightning_realloc.algorithms.sft import SFT
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.training import TrainOptions
from lightning_realloc.generation import SamplingParams
from lightning_realloc.strategies import ReallocStrategy
from tests.devices import DEFAULT_DEVICE, accelerator_on
from tests.models import byte_tokenizer, tiny_model
from tests.workers import WorkerPool

SAMPLING = SamplingParams(n=2, max_new_tokens=6, stop_token_ids=tuple(range(100, 128)))
"""A quarter of the vocabulary ends a response, so that lengths differ between samples and ranks."""


class Batches:
    """The same batches of random prompts, or supervised pairs with ``responses``, in every epoch and on every rank.

    ``silent`` pairs of each batch, the last ones, have an empty response.
    """

    def __init__(
        self, count: int = 2, *, size: int = 6, responses: bool = False, seed: int = 0, silent: int = 0
    ) -> None:
        self.count = count
        self.size = size
        self.responses = responses
        self.seed = seed
        self.silent = silent

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Samples]:
        generator = torch.Generator().manual_seed(self.seed)
        for index in range(self.count):
            columns: dict[str, Any] = {"prompt_ids": _rows(self.size, generator)}
            if self.responses:
                spoken = _rows(self.size, generator).to_lists()[: self.size - self.silent]
                columns["response_ids"] = Ragged.from_list(spoken + [[]] * self.silent)
            ids = torch.arange(self.size) + index * self.size
            columns["prompt"] = tuple(f"prompt {number}" for number in ids.tolist())
            yield Samples(ids, columns)


def _rows(count: int, generator: torch.Generator) -> Ragged:
    lengths = torch.randint(2, 9, (count,), generator=generator).tolist()
    return Ragged.from_list([torch.randint(3, 128, (length,), generator=generator) for length in lengths])


def low_tokens(completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float]:
    """Reward the share of tokens in the lower half of the vocabulary."""
    return [sum(token < 64 for token in ids) / max(1, len(ids)) for ids in completion_ids]


@dataclass
class Record(Callback):
    """Metrics of a run after every iteration, without those that depend on the clock."""

    logged: list[dict[str, float]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Record Lightning's metrics after the iteration."""
        self.logged.append(numbers(trainer.logged_metrics))
        self.steps.append(trainer.global_step)


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as plain numbers, without those that depend on the clock."""
    # "tokens_per_s" stands for "tokens_per_step/", too.
    clock = (
        "seconds/", "hidden_s/", "idle_share", "reallocation_", "tokens_per_s", "moved_samples/", "peak_memory_GiB",
        "waiting_share/", "environment_s", "tool_s/", "partner_s/", "given_s/",
    )  # fmt: skip
    return {name: float(value) for name, value in metrics.items() if not name.startswith(clock)}


class Recorded:
    """Keeps the tokens and rewards of every iteration and evaluation of an algorithm with reward functions."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.tokens: list[list[list[int]]] = []
        self.rewards: list[list[float]] = []

    def judge(self, samples: Samples) -> Mapping[str, Any]:
        """Compute rewards, and keep the tokens in a column that every rank receives fully."""
        return {**super().judge(samples), "tokens": token_rows(samples)}  # type: ignore[misc]

    def summarize(self, samples: Samples) -> dict[str, Tensor]:
        """Record results, and log the algorithm's metrics."""
        self.tokens.append(rows_of_tokens(samples))
        self.rewards.append(samples.tensor("rewards").tolist())
        return super().summarize(samples)  # type: ignore[misc, no-any-return]


class RecordedGRPO(Recorded, GRPO):
    """GRPO with a reference that keeps tokens and rewards, unless ``kl_coef`` is given."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        if "kl" not in settings:
            settings.setdefault("kl_coef", 0.04)
        super().__init__(*args, **settings)


def token_rows(samples: Samples) -> Tensor:
    """Return the tokens of the responses (B, 64), padded with -1: one value per sample, which every rank receives."""
    responses = samples.ragged("response_ids")
    rows = torch.full((len(samples), 64), -1)
    for row, tokens in zip(rows, responses.split(), strict=True):
        row[: len(tokens)] = tokens
    return rows


def rows_of_tokens(samples: Samples) -> list[list[int]]:
    """Return the responses that `token_rows` kept."""
    return [[token for token in row if token >= 0] for row in samples.tensor("tokens").tolist()]


def high_rate(settings: Mapping[str, Any]) -> dict[str, float]:
    """Return a learning rate that makes two iterations differ, unless an optimizer has its own."""
    return {} if "optimizer" in settings else {"learning_rate": 1e-2}


def grpo(**settings: Any) -> RecordedGRPO:
    """Return GRPO on the tiny llama, with a learning rate that makes two iterations differ."""
    shared = {"sampling": SAMPLING, "tokenizer": byte_tokenizer(), "loss_average": "sequence"}
    settings = {**shared, **high_rate(settings), **settings}
    reward = settings.pop("reward", low_tokens)
    model = settings.pop("actor", None) or tiny_model("llama")
    reference = settings.pop("reference", None) or tiny_model("llama", seed=1)
    return RecordedGRPO(model, reward, reference=reference, **settings)


class RecordedPPO(PPO):
    """PPO that keeps the tokens and scores of every iteration and evaluation."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.tokens: list[list[list[int]]] = []
        self.rewards: list[list[float]] = []

    def estimate_advantages(self, samples: Samples) -> Mapping[str, Any]:
        """Estimate values, and keep the tokens in a column that every rank receives fully."""
        return {**super().estimate_advantages(samples), "tokens": token_rows(samples)}

    def summarize(self, samples: Samples) -> dict[str, Tensor]:
        """Record results, and log PPO's metrics."""
        self.tokens.append(rows_of_tokens(samples) if "tokens" in samples else [])
        self.rewards.append(samples.tensor("scores").tolist())
        return super().summarize(samples)


def ppo(**settings: Any) -> RecordedPPO:
    """Return PPO on tiny llamas with a high learning rate. Only the actor and the critic have the same shape."""
    settings = {"sampling": SAMPLING, "tokenizer": byte_tokenizer(), **high_rate(settings), **settings}
    reward = settings.pop("reward", low_tokens)
    model = settings.pop("actor", None) or tiny_model("llama")
    reference = settings.pop("reference", None) or tiny_model("llama", seed=1)
    return RecordedPPO(model, reward, reference=reference, **settings)


def sft(**settings: Any) -> SFT:
    """Return SFT on the tiny llama."""
    settings = {"tokenizer": byte_tokenizer(), **high_rate(settings), **settings}
    return SFT(settings.pop("actor", None) or tiny_model("llama"), **settings)


def world_size() -> int:
    """Return the number of ranks. Call it before a Trainer runs, since Lightning clears the environment afterwards."""
    return int(os.environ["WORLD_SIZE"])


def trainer(strategy: Any, world_size: int, **options: Any) -> L.Trainer:
    """Return a quiet Trainer whose ranks share the default device, unless ``options`` name another accelerator."""
    quiet = {
        "accelerator": accelerator_on(DEFAULT_DEVICE), "devices": world_size, "strategy": strategy,
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "num_sanity_val_steps": 0, "max_epochs": 1,
    }  # fmt: skip
    return L.Trainer(**{**quiet, **options})


@dataclass
class Outcome:
    """Results of a run on this rank."""

    logged: list[dict[str, float]]
    steps: list[int]
    weights: dict[str, Tensor]
    """Full weights of the actor on the first rank; {} on others."""
    tokens: list[list[list[int]]] = field(default_factory=list)
    rewards: list[list[float]] = field(default_factory=list)


def train(module: Any, plan: Any, world_size: int, batches: Batches, **options: Any) -> Outcome:
    """Fit under ``ReallocStrategy(plan)`` and return the outcome."""
    record = Record()
    options["callbacks"] = [*options.get("callbacks", ()), record]
    strategy = plan if isinstance(plan, ReallocStrategy) else ReallocStrategy(plan)
    fitted = trainer(strategy, world_size, **options)
    fitted.fit(module, batches)
    weights = strategy.full_weights("actor")
    return Outcome(record.logged, record.steps, weights, getattr(module, "tokens", []), getattr(module, "rewards", []))


def calls(**layouts: Any) -> dict[str, Any]:
    """Return a plan's mapping: ``calls(actor_train="fsdp4")`` names ``actor.train``."""
    return {"calls": {name.replace("_", "."): layout for name, layout in layouts.items()}}


def plan_of(module: Any, layout: str) -> dict[str, Any]:
    """Return a plan that generates in ``layout`` and does everything else in another."""
    placed = [call for call in module.dataflow.calls if call.role is not None]
    return {"calls": {call.name: layout if call.kind == "generate" else "dp2" for call in placed}}


def train_in_layout(
    module: Any, layout: str, world_size: int, batches: Any, strategy: Mapping[str, Any], **options: Any
) -> Outcome:
    """Fit with ``plan_of`` a layout, on one rank with ``"static"``, and further settings of the strategy."""
    plan: Any = "static" if world_size == 1 else plan_of(module, layout)
    return train(module, ReallocStrategy(plan, **strategy), world_size, batches, **options)


_outcomes: dict[bytes, Outcome] = {}


def outcome_of(workers: WorkerPool, run: Callable[..., Outcome], *arguments: Any, world_size: int) -> Outcome:
    """Return the first rank's outcome of a function on all ranks, which log the same. Equal runs are made once."""
    key = pickle.dumps((run, arguments, world_size))
    if key not in _outcomes:
        everyone = workers.run(run, *arguments, world_size=world_size, init_process_group=False)
        assert all(outcome.logged == everyone[0].logged for outcome in everyone)
        _outcomes[key] = everyone[0]
    return _outcomes[key]


def options(**settings: Any) -> TrainOptions:
    """Return training options."""
    return TrainOptions(**settings)


def mean_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Return the mean absolute difference between two sets of weights, which hold the same names.

    For sums in another order: Adam turns rounding of a gradient near zero into a hundredth of an update of that weight,
    so the largest difference says little. A sample more or less changes most weights.
    """
    total = sum(float((ours[name] - theirs[name]).abs().sum()) for name in ours)
    return total / sum(weight.numel() for weight in ours.values())


def largest_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Return the largest absolute difference between two sets of weights."""
    assert ours.keys() == theirs.keys(), f"only in one: {ours.keys() ^ theirs.keys()}"
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def check_equal_to_one_rank(outcomes: Sequence[Outcome], alone: Outcome) -> None:
    """Assert that all ranks got the tokens, rewards, metrics and weights of a run on one rank, up to rounding."""
    for outcome in outcomes:
        assert outcome.tokens == alone.tokens
        assert outcome.rewards == alone.rewards
        for ours, theirs in zip(outcome.logged, alone.logged, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5, rel=1e-5)
    assert largest_difference(outcomes[0].weights, alone.weights) <= 1e-5
