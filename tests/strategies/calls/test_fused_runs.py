"""Inference during generation gives the same tokens, rewards, losses and weights as inference after it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback
from torch.optim import SGD

from lightning_realloc import GenerationOptions
from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.training import TrainOptions
from lightning_realloc.errors import ConfigError
from lightning_realloc.layout.dims import Layout
from lightning_realloc.runtime.messages.mailbox import Mailbox
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.exchange.generated_samples import ChunkedSamples
from lightning_realloc.strategies.exchange.iteration_data import IterationData
from lightning_realloc.strategies.exchange.routing import CallPlacement, Routes
from tests.matrices import matrix
from tests.models import tiny_scorer
from tests.strategies import runs
from tests.strategies.exchange.test_iteration_data import (
    CALLS,
    DEADLINE_S,
    GENERATE,
    Post,
    ThreadMailbox,
    _batch,
    _roll_out,
)
from tests.strategies.runs import Batches, Outcome, calls
from tests.workers import WorkerPool

# Plain gradient descent: AdamW turns rounding of a tiny gradient into a whole step.
DESCENT = partial(SGD, lr=0.2)
PPO_PLANS = (
    calls(actor_generate="dp1@0", reference_infer="dp1@1", reward_infer="dp1@1", critic_infer="dp1@1",
          actor_train="dp1@0", critic_train="dp1@1"),
    calls(actor_generate="dp2@0,2", reference_infer="fsdp2@1,3", reward_infer="pp2@1,3", critic_infer="dp2@3,1",
          actor_train="fsdp2@0,2", critic_train="tp2@1,3"),
)  # fmt: skip
"""Plans for 2 ranks and for 4."""
GRPO_PLAN = calls(actor_generate="tp2@0-1", reference_infer="dp1@2", actor_train="fsdp3@0-2")


@dataclass
class Hidden(Callback):
    """Records the logged seconds of fused calls before the end of generation, in every iteration."""

    logged: list[dict[str, float]] = field(default_factory=list)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Read the logged metrics."""
        metrics = trainer.logged_metrics
        self.logged.append({name: float(v) for name, v in metrics.items() if name.startswith("hidden_s/")})


def run_chunks(
    algorithm: str, plan: Any, cases: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
) -> list[tuple[Outcome, list[dict[str, float]]]]:
    """Train a fresh model under the plan with each of these options of the strategy."""
    found, world_size = [], runs.world_size()
    for case in cases:
        module: Any = runs.ppo if algorithm == "ppo" else runs.grpo
        rewards = {"reward": tiny_scorer("llama", seed=5)} if algorithm == "ppo" else {}
        hidden = Hidden()
        outcome = runs.train(
            module(optimizer=DESCENT, **rewards, **settings), ReallocStrategy(plan, **case), world_size,
            Batches(2), callbacks=[hidden],
        )  # fmt: skip
        found.append((outcome, hidden.logged))
    return found


def assert_same(ours: Outcome, theirs: Outcome) -> None:
    """Compare all results of two runs, up to the rounding of other micro-batches."""
    assert ours.tokens == theirs.tokens
    for rewards, others in zip(ours.rewards, theirs.rewards, strict=True):
        assert rewards == pytest.approx(others, abs=1e-5)
    for one, other in zip(ours.logged, theirs.logged, strict=True):
        assert one == pytest.approx(other, abs=1e-5, rel=1e-5)
    assert runs.largest_difference(ours.weights, theirs.weights) <= 1e-5


@pytest.mark.parametrize("world_size", matrix([2, 4], 2))
def test_ppo_gives_the_same_results_from_chunks(workers: WorkerPool, world_size: int) -> None:
    plan = PPO_PLANS[world_size // 4]
    cases: list[dict[str, Any]] = [{"generation_chunks": 1}, {"generation_chunks": world_size}]
    if world_size == 2:  # metrics that are not late are logged with their iteration
        cases = [{"overlap": "none"}, {"generation_chunks": 4, "overlap": "calls"}]
    found = workers.run(run_chunks, "ppo", plan, cases, {}, world_size=world_size, init_process_group=False,
                        deadline_s=120.0)[0]  # fmt: skip
    fused = {"hidden_s/reference.infer", "hidden_s/reward.infer", "hidden_s/critic.infer"}
    for (whole, nothing), (outcome, hidden) in zip(found[::2], found[1::2], strict=True):
        assert_same(outcome, whole)
        assert nothing == [{}, {}]
        assert [set(logged) for logged in hidden] == [fused, fused]


@pytest.mark.exhaustive  # moving samples: test_sample_reallocation.py; chunks: above
@pytest.mark.parametrize(
    "settings",
    [{}, {"generation": GenerationOptions(sample_reallocation=True)}, {"engine": "hf"}],
    ids=["alone", "moving samples", "hf"],
)
def test_grpo_gives_the_same_results_from_chunks(workers: WorkerPool, settings: dict[str, Any]) -> None:
    layouts = dict(GRPO_PLAN["calls"])
    if settings:
        layouts["actor.generate"] = "dp2@0-1"
    cases = [{"generation_chunks": parts} for parts in (1, 3)]
    everyone = workers.run(run_chunks, "grpo", {"calls": layouts}, cases, settings, world_size=3,
                           init_process_group=False)  # fmt: skip
    (whole, _), (outcome, hidden) = everyone[0]
    assert_same(outcome, whole)
    assert [set(logged) for logged in hidden] == [{"hidden_s/reference.infer"}] * 2


def _fail(where: str) -> str:
    """Return the error of every rank if the reward model fails in its second pass, or the rollout changes samples."""
    module = runs.ppo(reward=tiny_scorer("llama", seed=5))
    passes = []
    score, roll_out = module.score_sequences, module.roll_out

    def score_sequences(*args: Any) -> Any:
        passes.append(1)
        if len(passes) == 2:
            raise ArithmeticError("no scores today")
        return score(*args)

    def changed(*args: Any) -> Samples:
        made = roll_out(*args)
        return made.with_columns(finish_reason=made.tensor("finish_reason") + 1)

    if where == "reward":
        module.score_sequences = score_sequences  # type: ignore[method-assign]
    else:
        module.roll_out = changed  # type: ignore[method-assign]
    try:
        runs.train(module, ReallocStrategy(PPO_PLANS[0], generation_chunks=4), runs.world_size(), Batches(1))
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("where", "message"), [("reward", "no scores today"), ("rollout", "returned other samples than sample_responses")]
)
def test_a_failure_reaches_all_ranks(workers: WorkerPool, where: str, message: str) -> None:
    messages = workers.run(_fail, where, world_size=2, init_process_group=False)
    assert all(message in text for text in messages), messages


def test_chunks_that_would_have_no_effect_are_refused() -> None:
    for settings, message in (
        ({"generation_chunks": 0}, "generation_chunks=0 must be at least 1"),
        ({"generation_chunks": 4, "overlap": "none"}, r"generation_chunks=4 .* overlap='none' .*; use overlap='calls'"),
        (
            {"generation_chunks": 2, "max_staleness": 1},
            r"generation_chunks=2 .* max_staleness=1 .*; use max_staleness=0",
        ),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            ReallocStrategy(**settings)  # type: ignore[arg-type]


def test_the_first_chunk_arrives_during_the_generation_of_others() -> None:
    layouts = {"actor.generate": "dp1@0", "critic.infer": "dp1@1", "reward.infer": "dp1@0", "actor.train": "dp1@0",
               "critic.train": "dp1@1"}  # fmt: skip
    post, made = Post(), _roll_out(_batch(3))
    has_first = threading.Event()

    def chunked(rank: int) -> tuple[IterationData, ChunkedSamples]:
        places = {
            name: CallPlacement(
                layout=Layout.parse(text), micro_batch_tokens=40, train_options=TrainOptions(), order_seeds=(1,)
            )
            for name, text in layouts.items()
        }
        mailbox = cast(Mailbox, ThreadMailbox(rank, 2, post))
        data = IterationData(_batch(3), Routes(CALLS, places, 2, 2), mailbox, rank=rank, run=1)
        samples = data.chunked(GENERATE)
        assert samples is not None
        return data, samples

    def generate() -> None:
        data, samples = chunked(0)
        samples.send(made.select([4, 1]))
        assert has_first.wait(DEADLINE_S), "the chunk came only with the others"
        data.record(GENERATE, made)

    def infer() -> list[int]:
        (data, samples), sizes = chunked(1), []
        for chunk in samples.chunks(data.table(GENERATE).known):
            sizes.append(len(chunk.lengths))
            has_first.set()
        return sizes

    with ThreadPoolExecutor(2) as ranks:
        generating, inferring = ranks.submit(generate), ranks.submit(infer)
        generating.result()
        assert inferring.result() == [2, 4]
