"""DPO, KTO, ORPO and reward models, compared with one sequence at a time, and invalid input."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_realloc.algorithms.base.module import MultiModelModule
from lightning_realloc.algorithms.base.pairs import chosen_tokens, pair_sums
from lightning_realloc.algorithms.dpo import DPO
from lightning_realloc.algorithms.kto import KTO, with_known_mismatches, with_mismatches
from lightning_realloc.algorithms.losses.preference_losses import PairLossSettings, Pairs, pair_loss
from lightning_realloc.algorithms.orpo import ORPO
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.training import Loss, Totals, TrainOptions, pack_columns
from lightning_realloc.errors import ConfigError, DataError
from tests.models import byte_tokenizer, tiny_model
from tests.strategies.algorithms import preferences

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7], [5, 6, 7], [8], [8]]
RESPONSES = [[11, 12], [13, 14, 15, 2], [2], [9, 2]]


def samples(**columns: Any) -> Samples:
    """Return two pairs of different lengths."""
    tokens = {"prompt_ids": Ragged.from_list(PROMPTS), "response_ids": Ragged.from_list(RESPONSES)}
    return Samples(torch.arange(4), {**tokens, **columns})


def one_by_one(model: nn.Module) -> list[Tensor]:
    """Return the log-probabilities of each response's tokens, one forward pass per sequence."""
    found = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        ids = torch.tensor([prompt + response])
        logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        found.append(logprobs[len(prompt) - 1 :])
    return found


def scored(reference: nn.Module, **columns: Any) -> Samples:
    """Return the pairs with the reference's log-probabilities."""
    with torch.no_grad():
        return samples(ref_logprobs=Ragged.from_list(one_by_one(reference)), **columns)


def run_in_parts(
    module: Any, model: nn.Module, batch: Samples, totals: Totals, parts: Sequence[Sequence[int]], *, share: bool
) -> list[Loss]:
    """Return the losses of micro-batches, accumulating their gradients."""
    method = getattr(module, "actor_loss", None) or module.reward_loss
    losses = []
    for rows in parts:
        loss = method(model, pack_columns(batch.select(rows), CPU, share_prompts=share), totals)
        loss.value.backward()
        losses.append(loss)
    return losses


def assert_same(losses: Sequence[Loss], expected: Tensor, ours: nn.Module, theirs: nn.Module) -> None:
    """Compare the summed loss and its gradients."""
    expected.backward()
    assert sum(loss.value.item() for loss in losses) == pytest.approx(expected.item(), abs=1e-6)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=2e-6)


WHOLE, PARTS = [[0, 1, 2, 3]], [[2, 3], [0, 1]]


@pytest.mark.parametrize(("parts", "share"), [(WHOLE, True), (WHOLE, False), (PARTS, True)])
def test_dpo_is_the_mean_over_pairs_of_the_loss_of_their_log_ratios(parts: list[list[int]], share: bool) -> None:
    model, twin, reference = tiny_model("llama"), tiny_model("llama"), tiny_model("llama", seed=1)
    module = DPO(model, loss=["sigmoid", "sft"], loss_weights=[1.0, 0.5], beta=0.3)
    totals = Totals(4, 9, group_size=2, sums={"chosen_tokens": 3})
    losses = run_in_parts(module, model, scored(reference), totals, parts, share=share)
    logprobs, ref = one_by_one(twin), one_by_one(reference)
    ratios = [ours.sum() - theirs.sum().detach() for ours, theirs in zip(logprobs, ref, strict=True)]
    logits = torch.stack([ratios[0] - ratios[1], ratios[2] - ratios[3]])
    # 3 of the tokens were chosen: 2 of the first pair, 1 of the second
    nll = -(logprobs[0].sum() + logprobs[2].sum()) / 3
    assert_same(losses, -(0.3 * logits).sigmoid().log().mean() + 0.5 * nll, model, twin)
    merged = {name: sum(float(loss.metrics[name].total.detach()) for loss in losses) for name in losses[0].metrics}
    assert merged["margin"] / 2 == pytest.approx((0.3 * logits).mean().item(), abs=1e-5)
    assert merged["accuracy"] == float((logits > 0).sum())


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_losses_by_rank_are_the_same_in_parts_as_over_the_sorted_whole(name: Any) -> None:
    model, twin, reference = tiny_model("llama"), tiny_model("llama"), tiny_model("llama", seed=1)
    module = DPO(model, loss=name, beta=0.3)
    batch = scored(reference)
    with torch.no_grad():
        batch = batch.with_columns(logprobs=Ragged.from_list(one_by_one(model)))
    batch = batch.with_columns(**module.match(batch)).without_columns("logprobs")
    losses = run_in_parts(module, model, batch, Totals(4, 9, group_size=2), PARTS, share=True)
    ours, ref = (torch.stack([row.sum() for row in one_by_one(m)]) for m in (twin, reference))
    ratios = ours - ref.detach()
    upper, lower = (ours[0::2] - ours[1::2], (ref[0::2] - ref[1::2]).detach())
    if name == "aot_unpaired":
        upper, lower = ratios[0::2], ratios[1::2]
    expected = -(0.3 * (upper.sort().values - lower.sort().values)).sigmoid().log().mean()
    assert_same(losses, expected, model, twin)


def test_tokens_after_the_end_of_the_shorter_response_count_less() -> None:
    logprobs = Ragged.from_list([[-1.0, -2.0], [-1.0, -2.0, -4.0, -8.0], [-3.0], [-5.0, -6.0]], dtype=torch.float32)
    chosen, rejected = pair_sums(logprobs, tail_weight=0.5)
    # -1 - 2 - (4 + 8) / 2, and -5 - 6 / 2
    assert (chosen.tolist(), rejected.tolist()) == ([-3.0, -3.0], [-9.0, -8.0])


def test_messages_of_others_in_a_response_count_in_no_sum_and_no_length() -> None:
    prompts, responses = [[5]] * 4, [[6, 7, 8, 9], [10, 11], [12], [13, 14, 15]]
    mask = [[True, False, False, True], [True, True], [True], [True, False, True]]
    tokens = {"prompt_ids": Ragged.from_list(prompts), "response_ids": Ragged.from_list(responses)}
    masked = {"model_mask": Ragged.from_list(mask, dtype=torch.bool), "num_model_tokens": torch.tensor([2, 2, 1, 2])}
    batch = Samples(torch.arange(4), {**tokens, **masked})
    model = tiny_model("llama")
    rows = []
    for prompt, response, kept in zip(prompts, responses, mask, strict=True):
        ids = torch.tensor([prompt + response])
        logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        rows.append(logprobs[torch.tensor(kept)].detach())
    assert chosen_tokens(batch).tolist() == [2.0, 0.0, 1.0, 0.0]
    zeros = Ragged.from_list([[0.0] * len(row) for row in responses], dtype=torch.float32)
    known = pack_columns(batch.with_columns(ref_logprobs=zeros), CPU)
    totals = Totals(4, 7, group_size=2, sums={"chosen_tokens": 3})
    with torch.no_grad():
        loss = DPO(model, loss=["sigmoid_norm"], beta=0.5).actor_loss(model, known, totals)
        odds = ORPO(model).actor_loss(model, pack_columns(batch, CPU), totals)
    means = torch.stack([row.mean() for row in rows])
    expected = -(0.5 * (means[0::2] - means[1::2])).sigmoid().log().mean()
    assert loss.value.item() == pytest.approx(expected.item(), abs=1e-5)
    assert odds.metrics["nll"].total.item() == pytest.approx(-(rows[0].sum() + rows[2].sum()).item(), abs=1e-4)
    assert odds.metrics["nll"].weight == 3
    # KTO's mismatched responses keep their own masks.
    other = Samples(batch.ids, {**batch.columns, "prompt_ids": Ragged.from_list([[5], [5], [6], [6]])})
    both = with_mismatches(other.with_columns(label=torch.ones(4)))
    order = [0, 3, 1, 3, 2, 1, 3, 1]
    assert both.ragged("model_mask").to_lists() == [mask[row] for row in order]
    assert both.tensor("num_model_tokens").tolist() == [[2, 2, 1, 2][row] for row in order]
    mismatched = torch.arange(4) * 2 + 1
    known = other.with_columns(
        mismatched_ids=both.ragged("response_ids").select(mismatched),
        mismatched_mask=both.ragged("model_mask").select(mismatched),
        mismatched_ref_logprobs=zeros.select(order[1::2]),
        ref_logprobs=zeros,
        label=torch.ones(4),
    )
    again = with_known_mismatches(known)
    assert again.without_columns("ref_logprobs").equals(both)


def test_orpo_adds_the_odds_ratio_to_the_likelihood_of_the_chosen_response() -> None:
    model, twin = tiny_model("llama"), tiny_model("llama")
    totals = Totals(4, 9, group_size=2, sums={"chosen_tokens": 3})
    losses = run_in_parts(ORPO(model, beta=0.7), model, samples(), totals, PARTS, share=True)
    rows = one_by_one(twin)
    p = torch.stack([row.mean() for row in rows]).exp()
    odds = p / (1 - p)
    expected = -(rows[0].sum() + rows[2].sum()) / 3 - 0.7 * (odds[0::2] / odds[1::2]).log().sigmoid().log().mean()
    assert_same(losses, expected, model, twin)


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_kto_is_the_mean_over_labelled_responses(loss: Any) -> None:
    model, twin, reference = tiny_model("llama"), tiny_model("llama"), tiny_model("llama", seed=1)
    module = KTO(model, loss=loss, beta=0.4, desirable_weight=1.5, undesirable_weight=0.5)
    batch = scored(reference, label=torch.tensor([True, False, False, True]), kl=torch.full((4,), 0.3))
    losses = run_in_parts(module, model, batch, Totals(4, 9), [[0, 2], [1, 3]], share=True)
    ours, ref = (torch.stack([row.sum() for row in one_by_one(m)]) for m in (twin, reference))
    gains = (ours - ref.detach() - (0.3 if loss == "kto" else 0.0)) * torch.tensor([1.0, -1.0, -1.0, 1.0])
    expected = (torch.tensor([1.5, 0.5, 0.5, 1.5]) * (1 - (0.4 * gains).sigmoid())).mean()
    assert_same(losses, expected, model, twin)


def test_the_reference_point_is_the_mean_mismatched_log_ratio_but_at_least_0() -> None:
    module = KTO(tiny_model("llama"))
    rows = [[1.0, 1.0], [0.5], [9.0], [-0.25]]
    both = samples(trained=torch.tensor([True, False, True, False]))
    both = both.with_columns(
        response_ids=Ragged.from_list([[3, 3], [3], [3], [3]]),
        logprobs=Ragged.from_list(rows, dtype=torch.float32),
        ref_logprobs=Ragged.from_list([[0.0, 0.0], [0.0], [0.0], [0.0]], dtype=torch.float32),
    )
    assert module.estimate_kl(both)["kl"].tolist() == [0.125] * 4
    swapped = both.with_columns(logprobs=both["ref_logprobs"], ref_logprobs=both["logprobs"])
    assert module.estimate_kl(swapped)["kl"].tolist() == [0.0] * 4


def test_every_prompt_gets_the_response_to_another_one() -> None:
    both = with_mismatches(samples(label=torch.ones(4)))
    # The prompts are a, a, b, b: each gets the nearest earlier response to another prompt, cyclically.
    expected = [row for pair in zip(RESPONSES, [RESPONSES[3]] * 2 + [RESPONSES[1]] * 2, strict=True) for row in pair]
    assert both.ragged("response_ids").to_lists() == expected
    assert both.tensor("trained").tolist() == [True, False] * 4
    assert both.ids.tolist() == list(range(8))
    with pytest.raises(DataError, match="needs two different prompts in a batch"):
        with_mismatches(samples().select([0, 1]))


def test_held_out_responses_to_one_prompt_count_from_zero() -> None:
    module = with_trainer(KTO(tiny_model("llama"), beta=0.5))
    module._trainer.training = False
    batch = module.prepare_batch(samples(label=torch.tensor([True, False, True, False])).select([0, 1]))
    logprobs = Ragged.from_list([[1.0, 1.0], [0.5] * 4], dtype=torch.float32)
    zeros = Ragged(torch.zeros(6), logprobs.lengths)
    batch = batch.with_columns(logprobs=logprobs, ref_logprobs=zeros)
    measured = module.measure(batch)
    # 1 - s(0.5 * 2) of the desirable one, 1 - s(0.5 * -2) of the other
    assert measured["losses"].tolist() == pytest.approx([0.26894, 0.73106], abs=1e-4)
    summary = {name: float(value) for name, value in module.summarize(batch.with_columns(**measured)).items()}
    rewards = {"desirable_reward": 1.0, "undesirable_reward": 1.0, "margin": 0.0, "auroc": 0.5}
    assert summary == pytest.approx({"loss": 0.5, **rewards})


def test_the_pair_loss_compares_scores_of_chosen_and_rejected_responses() -> None:
    module = preferences.reward_model(centre_coef=0.01)
    batch = samples(margin=torch.tensor([1.0, 1.0, 0.0, 0.0]))
    # Gradients reach 8, and float32 rounds them by more than the tolerance; losses are of scores in float32.
    model, twin = (preferences.reward_model().roles()[0].build(seed=0).double() for _ in range(2))
    losses = run_in_parts(module, model, batch, Totals(4, 9, group_size=2), PARTS, share=True)
    rows = [torch.tensor([prompt + response]) for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    scores = torch.cat([twin(input_ids=ids).logits[:, 0] for ids in rows]).float()
    apart = scores[0::2] - scores[1::2] - torch.tensor([1.0, 0.0])
    expected = -apart.sigmoid().log().mean() + 0.01 * (scores[0::2] + scores[1::2]).square().mean()
    assert_same(losses, expected, model, twin)


def test_every_step_is_scored_at_its_last_token() -> None:
    module = preferences.process_reward()
    model, twin = (module.roles()[0].build(seed=0).eval() for _ in range(2))
    ends = [[0, 1], [1, 0, 0, 1], [1], [0, 1]]
    labels = [[0, 1], [0, 0, 0, 1], [1], [0, 0]]
    batch = samples(
        step_ends=Ragged.from_list(ends, dtype=torch.bool), step_labels=Ragged.from_list(labels, dtype=torch.float32)
    )
    batch = module.prepare_batch(batch)
    assert batch.tensor("num_steps").tolist() == [1, 2, 1, 1]
    losses = run_in_parts(module, model, batch, Totals(4, 9, sums={"num_steps": 5}), [[1], [0, 2, 3]], share=True)
    expected = torch.zeros(())
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        scores = twin(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) :, 0]
        for place, is_end in enumerate(ends[row]):
            if is_end:
                expected = expected - (scores[place] if labels[row][place] else -scores[place]).sigmoid().log() / 5
    assert_same(losses, expected, model, twin)


def test_held_out_pairs_are_measured_as_in_training() -> None:
    module = DPO(tiny_model("llama"), loss=["ipo", "sft"], loss_weights=[1.0, 0.5], beta=0.2)
    logprobs = Ragged.from_list([[-1.0, -2.0], [-1.0] * 4, [-3.0], [-5.0, -6.0]], dtype=torch.float32)
    reference = Ragged(torch.zeros(9), logprobs.lengths)
    batch = samples(logprobs=logprobs, ref_logprobs=reference)
    measured = module.measure(batch)
    zeros = torch.zeros(2)
    pairs = Pairs(
        torch.tensor([-3.0, -3.0]),
        torch.tensor([-4.0, -11.0]),
        zeros,
        zeros,
        torch.tensor([2, 1]),
        torch.tensor([4, 2]),
    )
    # 6 nats over 3 chosen tokens
    expected = pair_loss("ipo", pairs, PairLossSettings(beta=0.2)).mean().item() + 0.5 * 2.0
    summary = {name: float(value) for name, value in module.summarize(batch.with_columns(**measured)).items()}
    # Margins: 0.2 * (-3 + 4) and 0.2 * (-3 + 11). Both right, with probability s(0.2) = 0.54983 and s(1.6) = 0.83202.
    calibration = ((1 - 0.54983) + (1 - 0.83202)) / 2
    rest = {"margin": 0.9, "accuracy": 1.0, "calibration_error": calibration}
    assert summary == pytest.approx({"loss": expected, **rest}, abs=1e-5)
    assert module.summarize(batch) == {}


def test_a_reward_model_reports_its_auroc_and_calibration_error() -> None:
    module = preferences.reward_model()
    batch = samples(scores=torch.tensor([3.0, 1.0, 0.0, 2.0]))
    summary = module.summarize(batch.with_columns(**module.measure(batch)))
    # Of the four comparisons of a chosen with a rejected score, 3 > 1 and 3 > 2 are right, 0 > 1 and 0 > 2 are not.
    assert float(summary["auroc"]) == pytest.approx(0.5)
    assert float(summary["accuracy"]) == 0.5
    # Both pairs are 2 apart: probability s(2) = 0.88 each, and one of the two is right.
    assert float(summary["calibration_error"]) == pytest.approx(0.8808 - 0.5, abs=1e-4)


def with_trainer(module: MultiModelModule) -> Any:
    """Give a module a trainer in training."""
    module._fabric = None
    module._trainer = SimpleNamespace(training=True, callbacks=[])  # type: ignore[assignment]
    return module


@pytest.mark.parametrize(
    ("batch", "rule"),
    [
        (samples().select([0, 1, 2]), "this one 3 samples; use PreferenceDataModule"),
        (samples().select([0, 2]), "those of samples 0 and 2 differ"),
        (
            samples().with_columns(response_ids=Ragged.from_list([[3], [4], [5], []])),
            "that of sample 3 is empty, leave its pair out",
        ),
        (samples(), "num_minibatches=3 needs as many pairs in an iteration, and this one makes 2"),
    ],
)
def test_batches_that_are_not_pairs_are_refused(batch: Samples, rule: str) -> None:
    module = with_trainer(ORPO(tiny_model("llama"), train_options=TrainOptions(num_minibatches=3)))
    with pytest.raises((DataError, ConfigError), match=rule):
        module.check_batch(batch)


def test_labels_that_are_neither_0_nor_1_are_refused() -> None:
    module = with_trainer(KTO(tiny_model("llama")))
    with pytest.raises(DataError, match="a label of 0 or 1; sample 2 has none"):
        module.check_batch(samples(label=torch.tensor([0.0, 1.0, 0.5, 1.0])))
    steps = {"step_ends": Ragged.from_list([[1, 1], [0] * 4, [1], [1, 0]], dtype=torch.bool)}
    batch = samples(**steps, step_labels=Ragged(torch.zeros(9), steps["step_ends"].lengths))
    with pytest.raises(DataError, match="needs a step to learn from; sample 1 has none"):
        with_trainer(preferences.process_reward()).check_batch(batch)


TWICE = TrainOptions(num_epochs=2)


@pytest.mark.parametrize(
    ("algorithm", "settings", "rule"),
    [
        (DPO, {"loss": "other"}, "loss='other' must be one of sigmoid, "),
        (DPO, {"loss": ["sigmoid", "sigmoid"]}, "each once"),
        (DPO, {"loss": ["sigmoid", "sft"], "loss_weights": [1.0]}, "one weight each"),
        (DPO, {"beta": 0.0}, r"beta=0\.0 must be positive"),
        (DPO, {"label_smoothing": 0.5}, "must lie between 0 and 0.5"),
        (DPO, {"loss": "exo_pair"}, "set 0.001"),
        (DPO, {"loss": "nca_pair", "divergence": "js"}, "loss='nca_pair' needs 'reverse_kl'"),
        (DPO, {"loss": ["aot", "aot_unpaired"]}, "choose one"),
        (DPO, {"loss": "aot", "weighting": "wpo"}, "weighting='wpo' weighs pairs one by one, and loss='aot' compares"),
        (DPO, {"weighting": "other"}, "weighting='other' must be one of wpo"),
        (DPO, {"loss": "aot", "train_options": TWICE}, r"one step a batch, not num_epochs=2 and num_minibatches=1"),
        (KTO, {"train_options": TWICE}, "loss='kto' estimates the divergence from the whole batch"),
        (KTO, {"loss": "dpo"}, "loss='dpo' must be one of kto, apo_zero_unpaired"),
        (KTO, {"undesirable_weight": -1.0}, "may not be negative"),
        (ORPO, {"beta": -0.1}, "may not be negative"),
    ],
)
def test_invalid_settings_are_refused(algorithm: Any, settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        algorithm(tiny_model("llama"), **settings)


@pytest.mark.parametrize("algorithm", [DPO, KTO])
def test_a_reference_that_reads_other_tokens_is_refused(algorithm: Any) -> None:
    module = algorithm(tiny_model("llama"), reference=tiny_model("llama", vocab_size=256), tokenizer=byte_tokenizer())
    with pytest.raises(ConfigError, match="reference has another vocabulary than the actor: 256 tokens, the actor has"):
        module.configure_model()
