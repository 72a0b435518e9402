"""Runs with ``engine="vllm"`` and a rollout budget keep account of responses as those of the native engine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lightning_realloc import GenerationOptions, RolloutBudget
from lightning_realloc.generation import SamplingParams, VLLMOptions
from lightning_realloc.strategies import ReallocStrategy
from tests.devices import CPU_ALONE
from tests.generation.vllm.stand_in import notes, stand_in
from tests.matrices import matrix
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs
from tests.strategies.calls.test_rollout_budget import Learnt, noted
from tests.strategies.runs import Batches
from tests.vllm_environment import vllm_python
from tests.workers import WorkerPool

NUM_ITERATIONS = 4
SAMPLING = SamplingParams(n=2, max_new_tokens=20, temperature=0.01, stop_token_ids=tuple(range(100, 128, 3)))


def decided_model() -> PreTrainedModel:
    """Return a model whose draws at this temperature are greedy ones: logits differ by far more than it."""
    model = tiny_model("llama", hidden_size=128, num_key_value_heads=2)  # heads of 32, a size that vLLM has
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1000)
    return model


def learn(layout: str, world_size: int, engine: str, options: GenerationOptions) -> Learnt:
    """Return the result of a run whose weights stay the same."""
    shape = {"hidden_size": 128, "num_key_value_heads": 2}
    module = noted(runs.RecordedGRPO)(
        decided_model(), runs.low_tokens, reference=tiny_model("llama", seed=1, **shape), engine=engine,
        generation=options, sampling=SAMPLING, learning_rate=0.0, tokenizer=byte_tokenizer(),
        ratio_to="behaviour",
    )  # fmt: skip
    record = runs.Record()
    plan = runs.calls(actor_generate=layout, actor_train=f"dp{world_size}", reference_infer=f"dp{world_size}")
    runs.trainer(ReallocStrategy(plan), world_size, callbacks=[record]).fit(module, Batches(NUM_ITERATIONS))
    learnt: Learnt = module.learnt
    learnt.logged = record.logged
    return learnt


def run(workers: WorkerPool, layout: str, world_size: int, engine: str, **options: Any) -> Learnt:
    """Return the first rank's result, which is the same on every rank."""
    function = partial(learn, layout, world_size, engine, GenerationOptions(**options))
    everyone = workers.run(function, world_size=world_size, deadline_s=1500, init_process_group=False)
    assert all(learnt.responses == everyone[0].responses for learnt in everyone)
    first: Learnt = everyone[0]
    return first


@CPU_ALONE
@pytest.mark.parametrize(("layout", "world_size"), matrix([("dp2", 2), ("tp2", 2)], ("tp2", 2)))
def test_every_response_is_learned_from_once_and_as_without_a_budget(
    layout: str, world_size: int, workers: WorkerPool, tmp_path: Path
) -> None:
    def outcome(name: str, **options: Any) -> Learnt:
        (tmp_path / name).mkdir()
        return run(workers, layout, world_size, "vllm", vllm=VLLMOptions(python=stand_in(tmp_path / name)), **options)

    whole, pieces = (
        outcome("whole"),
        outcome("pieces", rollout_budget=RolloutBudget(tokens=110 if layout == "tp2" else 55)),
    )
    carried = [int(step["carried_samples"]) for step in pieces.logged]
    assert max(carried) > 0 and notes(tmp_path / "pieces", "asked"), carried
    assert max(step["staleness"] for step in pieces.logged) > 0
    done, everything = pieces.all, whole.all
    assert len(done) == len(everything) - carried[-1]
    assert all(tokens == everything[sample_id] for sample_id, tokens in done.items())


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("layout", "world_size"), [("dp1", 1), ("dp2", 2), ("tp2", 2)])
def test_vllm_finishes_and_carries_the_responses_of_the_native_engine(
    layout: str, world_size: int, workers: WorkerPool
) -> None:
    budget = RolloutBudget(tokens=60 if layout == "dp2" else 120)
    native = run(workers, layout, world_size, "native", rollout_budget=budget)
    vllm = VLLMOptions(python=vllm_python())
    served = run(workers, layout, world_size, "vllm", rollout_budget=budget, vllm=vllm, max_cache_bytes=1 << 26)
    assert served.responses == native.responses
    for name in ("carried_samples", "staleness"):
        assert [step[name] for step in served.logged] == [step[name] for step in native.logged]
    assert max(step["carried_samples"] for step in served.logged) > 0
    assert max(step["staleness"] for step in served.logged) > 0
