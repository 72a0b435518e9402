"""The loss of supervised fine-tuning equals Hugging Face's, over the tokens of responses."""

from __future__ import annotations

import pytest
import torch

from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.training import Totals, pack_columns
from lightning_realloc.errors import DataError
from tests.models import tiny_model
from tests.strategies import runs

PROMPTS = [[5, 6, 7], [8], [9, 10]]
RESPONSES = [[11, 12], [13, 14, 15, 2], [2]]


def pairs() -> Samples:
    """Return three pairs of different lengths."""
    return Samples(
        torch.arange(3),
        {"prompt_ids": Ragged.from_list(PROMPTS), "response_ids": Ragged.from_list(RESPONSES)},
    )


def test_the_loss_and_its_gradient_are_those_of_hugging_face() -> None:
    model, reference = tiny_model("llama"), tiny_model("llama")
    module = runs.sft(actor=model)
    loss = module.actor_loss(model, pack_columns(pairs(), torch.device("cpu")), Totals(3, 7))
    loss.value.backward()
    # Hugging Face averages over a row's labels: 2, 4 and 1 of them, 7 in all.
    expected = torch.zeros(())
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        ids = torch.tensor([prompt + response])
        labels = torch.tensor([[-100] * len(prompt) + response])
        expected = expected + reference(input_ids=ids, labels=labels).loss * len(response) / 7
    expected.backward()
    assert loss.value.item() == pytest.approx(expected.item(), abs=1e-6)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-6)
    nll = loss.metrics["nll"]
    assert (nll.total / nll.weight).item() == pytest.approx(expected.item(), abs=1e-6)


def test_losses_of_micro_batches_add_up_to_that_of_the_mini_batch() -> None:
    model = tiny_model("llama")
    module, totals, device = runs.sft(actor=model), Totals(3, 7), torch.device("cpu")
    whole, *parts = (
        module.actor_loss(model, pack_columns(pairs().select(rows), device), totals).value.item()
        for rows in ([0, 1, 2], [0, 2], [1])
    )
    assert sum(parts) == pytest.approx(whole, abs=1e-6)


def test_rejected_responses_are_not_trained_on() -> None:
    with pytest.raises(DataError, match="also the rejected ones"):
        runs.sft().check_batch(pairs().with_columns(chosen=("a", "b", "c"), rejected=("d", "e", "f")))


def test_scores_are_summarized_per_token() -> None:
    module = runs.sft()
    assert module.summarize(pairs()) == {}
    scored = pairs().with_columns(logprobs=Ragged.from_list([[-1.0, -2.0], [0.0] * 4, [-4.0]], dtype=torch.float32))
    measured = module.measure(scored)
    assert measured["response_logprobs"].tolist() == [-3.0, 0.0, -4.0]
    # 7 nats over 7 tokens; the lengths alone are enough
    assert float(module.summarize(scored.with_columns(**measured).lengths_only())["loss"]) == pytest.approx(1.0)


def test_the_gradient_of_a_pair_does_not_depend_on_the_rest_of_its_pack() -> None:
    model, device = tiny_model("llama"), torch.device("cpu")
    module, embedded = runs.sft(actor=model), []
    model.get_input_embeddings().register_forward_hook(lambda layer, given, made: embedded.append(made))
    for row in range(3):
        alone = pairs().select([row])
        # Only this pair counts: the other ones have the same tokens, and the model mask excludes all of them.
        mask = [[index == row] * len(response) for index, response in enumerate(RESPONSES)]
        counted = pairs().with_columns(model_mask=Ragged.from_list(mask, dtype=torch.bool))
        gradients = []
        for samples in (alone, counted):
            packed = pack_columns(samples, device)
            model.zero_grad()
            loss = module.actor_loss(model, packed, Totals(1, len(RESPONSES[row])))
            embedded[-1].retain_grad()
            loss.value.backward()
            touched = embedded[-1].grad[0].abs().sum(-1) > 0
            own = packed.ids[packed.sample_index] == row
            assert not touched[~own].any() and touched[own][:-1].all(), "a pair sees another one"
            gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        torch.testing.assert_close(gradients[1], gradients[0], atol=1e-6, rtol=1e-5)


def test_a_text_without_a_prompt_has_hugging_faces_loss() -> None:
    # Nothing predicts a text's first token: 3 of 4 tokens count.
    model, text = tiny_model("llama"), [13, 14, 15, 2]
    columns = {"prompt_ids": Ragged.from_list([[]], dtype=torch.int64), "response_ids": Ragged.from_list([text])}
    counted = {"model_mask": Ragged.from_list([[False, True, True, True]], dtype=torch.bool)}
    samples = Samples(torch.arange(1), {**columns, **counted, "num_model_tokens": torch.tensor([3])})
    module = runs.sft(actor=model)
    loss = module.actor_loss(model, pack_columns(samples, torch.device("cpu")), Totals(1, 3)).value
    expected = model(input_ids=torch.tensor([text]), labels=torch.tensor([text])).loss
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    with torch.no_grad():
        logprobs = module.score(model, pack_columns(samples, torch.device("cpu")))
    scored = samples.with_columns(logprobs=Ragged(logprobs, torch.tensor([4])))
    measured = scored.with_columns(**module.measure(scored)).lengths_only()
    assert float(module.summarize(measured)["loss"]) == pytest.approx(expected.item(), abs=1e-6)
