"""Calls that begin on generating ranks without samples give the same tokens, losses and weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import Callback

from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.training import TrainOptions
from lightning_realloc.generation import SamplingParams
from lightning_realloc.generation.rebalance.load import MoveCost, RankLoad, SampleMove
from lightning_realloc.layout.dims import Layout
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.calls.infer_call import EarlyInference
from lightning_realloc.strategies.exchange.routing import CallPlacement, Routes
from lightning_realloc.strategies.exchange.sample_table import SampleTable
from lightning_realloc.tuning.timeline.fusion import tail_sources
from tests.generation.random_moves import moving
from tests.models import byte_tokenizer, tiny_scorer
from tests.strategies import runs
from tests.strategies.calls.test_fused_runs import DESCENT, assert_same
from tests.strategies.exchange.test_iteration_data import ACTOR, CALLS, CRITIC, GENERATE, INFER, REWARD
from tests.strategies.runs import Batches, Outcome, calls
from tests.workers import WorkerPool

TOGETHER = {name: "dp2@0-1" for name in ("actor.generate", "critic.infer", "reward.infer", "actor.train")}
PPO_PLAN = calls(actor_generate="dp2", reference_infer="dp2", reward_infer="dp2", critic_infer="dp2",
                 actor_train="dp2", critic_train="dp2")  # fmt: skip
SAMPLING = SamplingParams(n=2, max_new_tokens=24, stop_token_ids=tuple(range(112, 128)))
"""One eighth of the vocabulary ends a response."""


# ---- calls that may begin early
def _sources(**layouts: str) -> dict[str, str]:
    given = {**TOGETHER, "critic.train": "fsdp2@0-1", **{n.replace("_", "."): text for n, text in layouts.items()}}
    return tail_sources(CALLS, {name: Layout.parse(text) for name, text in given.items()})


def test_calls_of_whole_models_on_the_generating_ranks_may_begin_early() -> None:
    assert _sources() == {"critic.infer": "actor.generate", "reward.infer": "actor.generate"}
    assert _sources(critic_infer="dp2@1,0") == _sources()  # the order of ranks does not matter


@pytest.mark.parametrize("layout", ["fsdp2@0-1", "tp2@0-1", "pp2@0-1", "dp2@0,2", "dp1@0", "dp2@2-3"])
def test_a_call_in_another_kind_of_layout_may_not_begin_early(layout: str) -> None:
    assert _sources(critic_infer=layout) == {"reward.infer": "actor.generate"}
    assert _sources(actor_generate=layout) == {}


def test_a_call_whose_model_generates_or_trains_before_may_not_begin_early() -> None:
    layouts = {name: Layout.parse(text) for name, text in {**TOGETHER, "critic.train": "dp2@0-1"}.items()}
    assert tail_sources((GENERATE, replace(INFER, role="actor")), layouts) == {}
    assert tail_sources((GENERATE, REWARD, CRITIC, INFER), layouts) == {"reward.infer": "actor.generate"}
    assert tail_sources((GENERATE, replace(INFER, needs=("rollout", "scores")), REWARD, ACTOR), layouts) == {
        "reward.infer": "actor.generate"
    }


# ---- assignment of samples to ranks
@given(
    st.lists(st.tuples(st.integers(1, 20), st.sampled_from(["late", "early 0", "early 1"])), min_size=1, max_size=20),
    st.integers(1, 3),
)
def test_every_sample_is_inferred_once_and_early_packs_stay_on_their_rank(
    samples: list[tuple[int, str]], pack_size: int
) -> None:
    lengths = [length for length, _ in samples]
    early: dict[int, Sequence[tuple[int, ...]]] = {}
    for rank in (0, 1):
        rows = [row for row, (_, when) in enumerate(samples) if when == f"early {rank}"]
        early[rank] = [tuple(rows[at : at + pack_size]) for at in range(0, len(rows), pack_size)]
    responses = Ragged(torch.zeros(sum(lengths), 0), torch.tensor(lengths))
    known = Samples(torch.arange(len(lengths)), {"response_ids": responses})
    table = SampleTable(known, early={"critic.infer": early})
    layouts = {**TOGETHER, "critic.infer": "dp2@1,0", "critic.train": "dp2@0-1"}
    places = {
        name: CallPlacement(layout=Layout.parse(text), micro_batch_tokens=20, train_options=TrainOptions())
        for name, text in layouts.items()
    }
    plans = Routes(CALLS, places, 2, 2).micro_batches(INFER, table)
    assert sorted(row for plan in plans for micro in plan for row in micro.positions) == list(range(len(lengths)))
    for index, rank in enumerate((1, 0)):
        assert [micro.positions for micro in plans[index][: len(early[rank])]] == early[rank]
    assert all(micro.counts for plan in plans for micro in plan)


# ---- whole runs
@dataclass
class Early(Callback):
    """Logged seconds of calls that began early, in every iteration."""

    hidden: list[dict[str, float]] = field(default_factory=list)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Read the logged metrics."""
        metrics = trainer.logged_metrics
        self.hidden.append({name: float(v) for name, v in metrics.items() if name.startswith("hidden_s/")})


def empty_the_last(loads: Sequence[RankLoad], cost: MoveCost | None, **_: Any) -> tuple[SampleMove, ...]:
    """Move all samples of the last rank to the first one."""
    first, last = loads[0], loads[-1]
    return tuple(SampleMove(sample.sample_id, last.rank, first.rank, "send") for sample in last.live)


class Questions(Batches):
    """Prompts that are messages."""

    def __iter__(self) -> Iterator[Samples]:
        for batch in super().__iter__():
            questions = [[{"role": "user", "content": text}] for text in batch.objects("prompt")]
            yield batch.with_columns(prompt=tuple(questions))


def _asking() -> Any:
    """Return a tokenizer for the reward model, which renders the data's messages: early calls need them, too."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.role[0] }}{{ message.content }}{% endfor %}"
    return tokenizer


def train_with(num_chunks: int) -> tuple[Outcome, list[dict[str, float]]]:
    """Train PPO on this rank; the last rank soon has no samples to generate."""
    early = Early()
    module = runs.ppo(
        optimizer=DESCENT,
        reward=tiny_scorer("llama", seed=5, vocab_size=259),
        reward_tokenizer=_asking(),
        sampling=SAMPLING,
        sample_reallocation="all",
    )
    with moving(every=1, plan_balance=empty_the_last):
        outcome = runs.train(
            module, ReallocStrategy(PPO_PLAN, generation_chunks=num_chunks), runs.world_size(), Questions(2),
            callbacks=[early],
        )  # fmt: skip
    return outcome, early.hidden


def test_ppo_gives_the_same_results_if_a_rank_without_samples_infers_early(workers: WorkerPool) -> None:
    (whole, nothing), (outcome, hidden) = (
        workers.run(train_with, parts, world_size=2, init_process_group=False)[0] for parts in (1, 2)
    )
    assert_same(outcome, whole)
    assert nothing == [{}] * 2
    fused = {"hidden_s/reference.infer", "hidden_s/reward.infer", "hidden_s/critic.infer"}
    assert all(set(logged) == fused for logged in hidden)
    assert all(sum(logged.values()) > 0 for logged in hidden)


def fail_early() -> str:
    """Return the error of every rank when a pass fails while others generate."""
    module = runs.ppo(reward=tiny_scorer("llama", seed=5), sampling=SAMPLING, sample_reallocation="all")

    def fail(*_: Any) -> None:
        raise ArithmeticError("no scores today")

    try:
        with (
            moving(every=1, plan_balance=empty_the_last),
            mock.patch.object(EarlyInference, "_run_pass", fail),
        ):
            runs.train(module, ReallocStrategy(PPO_PLAN, generation_chunks=2), runs.world_size(), Batches(2))
    except Exception as error:
        return str(error)
    return ""


def test_a_failure_on_a_rank_that_infers_early_reaches_all_ranks(workers: WorkerPool) -> None:
    messages = workers.run(fail_early, world_size=2, init_process_group=False)
    assert all("no scores today" in text for text in messages), messages
