"""Log-probabilities and gradients of packs of prompts with images equal those of transformers' own forwards."""

from __future__ import annotations

import pytest
import torch

from lightning_realloc.batch.packing import pack
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.runtime.parallel.packed_forward import token_logprobs
from tests.vision_models import VISION_FAMILIES, forward_arguments, prompt_with_images, tiny_vision_model


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_packs_equal_single_forwards(family: str) -> None:
    prompts = [prompt_with_images(family, seeds) for seeds in ((), (1,), (2, 3, 4), (5,))]
    prompts = [prompts[0], *[prompts[1]] * 2, *prompts[2:]]  # two responses to one prompt, whose tokens are shared
    responses = [[4, 3, 9], [2, 3], [11, 12, 13, 14], [7], [5, 4]]
    columns = {
        "prompt_ids": Ragged.from_list([tokens for tokens, _ in prompts]),
        "response_ids": Ragged.from_list(responses),
    }
    for name, like in prompts[-1][1].items():
        columns[f"input/{name}"] = Ragged.from_list([extras.get(name, like[:0]) for _, extras in prompts])
    packed = pack(Samples(torch.arange(len(prompts)), columns), share_prompts=True)
    assert packed.shared[2] == len(prompts[1][0])
    model, reference = tiny_vision_model(family), tiny_vision_model(family)
    found = token_logprobs(model, packed, only_responses=True).logprobs
    total = torch.zeros(())
    for (tokens, extras), response, own in zip(prompts, responses, packed.responses(found).split(), strict=True):
        logits = reference(**forward_arguments(family, [*tokens, *response], extras), use_cache=False).logits[0]
        expected = logits[len(tokens) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
        torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)
        total = total + expected.sum()
    found.sum().backward()
    total.backward()
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert mine.grad is not None, name
        expected_grad = torch.zeros_like(mine) if theirs.grad is None else theirs.grad  # of unused parts of a tower
        largest = float(expected_grad.abs().max())
        assert float((mine.grad - expected_grad).abs().max()) <= 1e-5 * max(1.0, largest), name
