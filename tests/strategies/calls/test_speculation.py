"""Speculative decoding gives the same iteration as generation without drafts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_realloc import BestOfN, DynamicSampling, GenerationOptions
from lightning_realloc.generation import SamplingParams, Speculation
from tests.devices import CPU_ALONE
from tests.matrices import matrix
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs
from tests.strategies.runs import Batches, Outcome
from tests.workers import WorkerFailure, WorkerPool

ALGORITHMS = {"grpo": runs.grpo, "ppo": runs.ppo}


def run_algorithm(name: str, layout: str, speculation: Speculation | None, **settings: Any) -> Outcome:
    """Return the outcome of two iterations on two ranks."""
    module = ALGORITHMS[name](speculation=speculation, **settings)
    return runs.train(module, runs.plan_of(module, layout), 2, Batches(2))


DRAFTING = {"history": Speculation(num_draft_tokens=3), "ngram": Speculation(drafter="ngram")}


@pytest.mark.parametrize(
    ("name", "layout", "drafter"),
    matrix(
        # To the bit: test_everything.py. Under tensor parallelism: the next test.
        [(*case, drafter) for case in (("grpo", "dp2"), ("grpo", "fsdp2"), ("ppo", "tp2")) for drafter in DRAFTING],
    ),
)
def test_iterations_give_the_same_results_with_and_without_drafts(
    workers: WorkerPool, name: str, layout: str, drafter: str
) -> None:
    plain, drafted = (
        workers.run(run_algorithm, name, layout, speculation, world_size=2, init_process_group=False)[0]
        for speculation in (None, DRAFTING[drafter])
    )
    assert drafted.tokens == plain.tokens
    assert drafted.rewards == plain.rewards
    for mine, others in zip(drafted.logged, plain.logged, strict=True):
        assert mine == pytest.approx(others, rel=1e-4, abs=1e-6)
    # Log-probabilities come from products of other shapes; Adam's first steps of 1e-2 enlarge their rounding.
    assert runs.mean_difference(drafted.weights, plain.weights) < 1e-6


def test_the_models_first_blocks_draft_under_tensor_parallelism_but_not_fsdp(workers: WorkerPool) -> None:
    own = Speculation(drafter="blocks", draft_blocks=1, num_draft_tokens=2)
    plain, *_ = workers.run(run_algorithm, "grpo", "tp2", None, world_size=2, init_process_group=False)
    drafted, *_ = workers.run(run_algorithm, "grpo", "tp2", own, world_size=2, init_process_group=False)
    assert drafted.tokens == plain.tokens
    with pytest.raises(WorkerFailure, match="cannot draft by its own first blocks; give it a layout with fsdp=1"):
        workers.run(run_algorithm, "grpo", "fsdp2", own, world_size=2, init_process_group=False)


@pytest.mark.exhaustive
def test_the_engine_hf_gives_the_same_iteration(workers: WorkerPool) -> None:
    def run(layout: str, engine: str) -> Outcome:
        settings = {"engine": engine, "sampling": SamplingParams(n=2, max_new_tokens=6, temperature=1e-6)}
        outcome: Outcome = workers.run(run_settings, layout, settings, world_size=2, init_process_group=False)[0]
        return outcome

    plain = run("dp2", "native")
    for layout in ("dp2", "tp2"):
        own = run(layout, "hf")
        assert own.tokens == plain.tokens
        assert runs.mean_difference(own.weights, plain.weights) < 1e-6
    with pytest.raises(WorkerFailure, match="cannot generate by engine='hf'; give it a layout with fsdp=1"):
        run("fsdp2", "hf")


def run_settings(layout: str, settings: dict[str, Any]) -> Outcome:
    """Return the outcome of GRPO with these settings."""
    return run_algorithm("grpo", layout, None, **settings)


@dataclass
class DraftRates(Callback):
    """Records the tokens per step in every iteration."""

    rates: list[float] = field(default_factory=list)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Read the logged metrics."""
        self.rates.append(float(trainer.logged_metrics["tokens_per_step/actor.generate"]))


def run_epochs(drafter: str) -> tuple[list[float], Outcome]:
    """Return tokens per step and the outcome of two epochs over the same prompts, shuffled over two ranks."""
    sampling = SamplingParams(n=4, max_new_tokens=16)
    drafting = Speculation(drafter=drafter, num_draft_tokens=4)  # type: ignore[arg-type]
    actor = tiny_model("llama")
    with torch.no_grad():
        actor.lm_head.weight.mul_(30.0)  # a policy that is certain of some tokens, as trained ones are
    module = runs.grpo(actor=actor, speculation=drafting, sampling=sampling, learning_rate=1e-4)
    record = DraftRates()
    outcome = runs.train(module, runs.plan_of(module, "dp2"), 2, Batches(2), max_epochs=2, callbacks=[record])
    return record.rates, outcome


@CPU_ALONE
@pytest.mark.exhaustive  # of engines: tests/generation/speculative/test_lookup.py
def test_history_drafts_more_accepted_tokens_than_the_samples_own_text(workers: WorkerPool) -> None:
    run = lambda drafter: workers.run(run_epochs, drafter, world_size=2, init_process_group=False)[0]  # noqa: E731
    (by_history, history), (by_own_text, own_text) = run("history"), run("ngram")
    assert history.tokens == own_text.tokens  # as without drafts, see above
    assert history.rewards == own_text.rewards
    # In the second epoch, every prompt has an earlier response, half of the time on the other rank.
    assert min(by_history[2:]) > max(by_own_text[2:])
    assert sum(by_history[2:]) / 2 > 1.3


@dataclass
class Logged(Callback):
    """Records the names of the metrics of every iteration."""

    names: list[set[str]] = field(default_factory=list)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Read the logged metrics."""
        self.names.append(set(trainer.logged_metrics))


def run_choosing(dynamic: bool) -> list[set[str]]:
    """Return the names of metrics if a first pass generates and a second one trains."""
    settings: dict[str, Any] = {
        "sampling": SamplingParams(n=2, max_new_tokens=8),
        "tokenizer": byte_tokenizer(),
        "speculation": Speculation(drafter="ngram", num_draft_tokens=2),
        "generation": GenerationOptions(sample_reallocation="all", max_cache_bytes=300_000),
    }
    if dynamic:
        module: Any = runs.grpo(**settings, dynamic_sampling=DynamicSampling())
    else:
        module = BestOfN(tiny_model("llama"), runs.low_tokens, **settings)
    record = Logged()
    runs.train(module, runs.plan_of(module, "dp2"), 2, Batches(2), max_epochs=1, callbacks=[record])
    return record.names


@pytest.mark.parametrize("dynamic", [False, True])
def test_metrics_of_the_generating_pass_are_logged_with_the_step(workers: WorkerPool, dynamic: bool) -> None:
    wanted = {f"{name}/actor.generate" for name in ("seconds", "tokens_per_step", "moved_samples", "preemptions")}
    for names in workers.run(run_choosing, dynamic, world_size=2, init_process_group=False):
        of_steps = [of_batch for of_batch in names if "actor/loss" in of_batch]  # others wait for prompts
        assert of_steps and all(wanted <= of_step for of_step in of_steps)


def test_a_draft_model_of_another_vocabulary_ends_the_run_by_name(workers: WorkerPool, tmp_path: Any) -> None:
    tiny_model("llama", vocab_size=130).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    small = Speculation(drafter="model", draft_model=str(tmp_path))
    with pytest.raises(WorkerFailure, match="vocabulary of 130 tokens and the target one of 128"):
        workers.run(run_algorithm, "grpo", "dp2", small, world_size=2, init_process_group=False)
