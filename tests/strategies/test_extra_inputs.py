"""Training a model with further inputs gives the results of one rank in every layout, and losses of plain forwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD

from lightning_realloc.batch.packing import pack
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.errors import ConfigError
from lightning_realloc.runtime.parallel.packed_forward import token_logprobs
from tests.matrices import few_and_more
from tests.models import PLACEHOLDER, model_with_features, tiny_model
from tests.strategies import runs
from tests.strategies.runs import Batches, Outcome, calls
from tests.workers import WorkerPool

PLANS = [
    calls(actor_train="dp2.tp2", actor_generate="dp4", reference_infer="tp2@2-3"),
    calls(actor_train="pp2.fsdp2", actor_generate="dp2.tp2", reference_infer="pp2@0-1"),
]


class BatchesWithFeatures(Batches):
    """Batches whose prompts hold placeholders, with a row of features for each; two prompts have the same tokens."""

    def __iter__(self) -> Iterator[Samples]:
        generator = torch.Generator().manual_seed(7)
        for batch in super().__iter__():
            prompts = [[row[0], PLACEHOLDER, *row[1:]] for row in batch.ragged("prompt_ids").to_lists()]
            prompts[1] = prompts[0]
            counts = torch.tensor([prompt.count(PLACEHOLDER) for prompt in prompts])
            features = Ragged(3 * torch.randn(int(counts.sum()), 64, generator=generator), counts)
            yield batch.with_columns(**{"prompt_ids": Ragged.from_list(prompts), "input/features": features})


def _train(plans: Sequence[Any]) -> list[Outcome]:
    """Train fresh models under each plan on all ranks of this run."""
    world_size, found = runs.world_size(), []
    for plan in plans:
        module = runs.grpo(
            actor=model_with_features(), reference=model_with_features(seed=1), optimizer=partial(SGD, lr=0.5)
        )
        found.append(runs.train(module, plan, world_size, BatchesWithFeatures(2)))
    return found


@few_and_more(PLANS[1:], PLANS[:1])
def test_every_plan_gives_the_results_of_one_rank(workers: WorkerPool, cases: list[Any]) -> None:
    ((alone,),) = workers.run(_train, ["heuristic"], world_size=1, init_process_group=False)
    everyone = workers.run(_train, cases, init_process_group=False, deadline_s=150.0)
    for outcomes in zip(*everyone, strict=True):
        runs.check_equal_to_one_rank(outcomes, alone)


@pytest.mark.parametrize("share_prompts", [False, True])
@torch.no_grad()
def test_packed_logprobs_equal_those_of_plain_forwards(share_prompts: bool) -> None:
    model = model_with_features()
    batch = next(iter(BatchesWithFeatures(1))).repeat(2)
    responses = [[7, 8, 9 + row] for row in range(len(batch))]
    samples = batch.with_columns(response_ids=Ragged.from_list(responses))
    packed = pack(samples, share_prompts=share_prompts)
    assert any(packed.shared) == share_prompts
    logprobs = packed.responses(token_logprobs(model, packed).logprobs).split()
    features = samples.ragged("input/features").split()
    for row, prompt in enumerate(samples.ragged("prompt_ids").to_lists()):
        ids = torch.tensor([[*prompt, *responses[row]]])
        logits = model(ids, features=features[row], use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(logprobs[row], expected, atol=2e-5, rtol=1e-5)


def test_a_model_that_does_not_read_an_input_refuses_it() -> None:
    batch = next(iter(BatchesWithFeatures(1)))
    packed = pack(batch.with_columns(response_ids=Ragged.from_list([[7]] * len(batch))))
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM.forward has no argument 'features'.*'input/features'"):
        token_logprobs(tiny_model("llama"), packed)
