"""Our losses and gradients equal those of TRL's own code on the same tensors to 1e-6.

TRL's models read padded rows and ours packs, so packing is compared, too. Intended differences:

- ``sigmoid`` with label smoothing is conservative DPO here; TRL's ignores the setting, so it is compared without.
- ORPO's likelihood is that of responses, as in the paper (eq. 2); TRL's includes prompts. With prompts of one token,
  which has no prediction, both are equal.
- KTO's mismatched responses come from the nearest other prompt; TRL's from the previous row, even if its prompt is the
  same. Here all prompts differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_realloc.algorithms.base.pairs import chosen_tokens
from lightning_realloc.algorithms.dpo import DPO
from lightning_realloc.algorithms.kto import KTO
from lightning_realloc.algorithms.orpo import ORPO
from lightning_realloc.algorithms.reward_model import RewardModel
from lightning_realloc.algorithms.sft import SFT
from lightning_realloc.batch.packing import pack
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.training import Totals, pack_columns
from lightning_realloc.runtime.parallel.packed_forward import token_logprobs
from tests.models import tiny_model, tiny_scorer

pytest.importorskip("trl", reason="parity needs TRL: pip install 'lightning-realloc[parity]'")

from tests.parity import trl_trainers as trl

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7], [8, 9], [10], [30, 31, 32, 33]]
CHOSEN = [[11, 12], [13, 14, 15, 2], [16, 2], [40, 41, 42]]
REJECTED = [[17, 18, 19], [20, 2], [21, 22, 23], [43, 2]]
BETA = 0.3


def batch(prompts: Sequence[list[int]], responses: Sequence[list[int]], **columns: Any) -> Samples:
    """Return samples of prompts and responses."""
    tokens = {"prompt_ids": Ragged.from_list(prompts), "response_ids": Ragged.from_list(responses)}
    return Samples(torch.arange(len(prompts)), {**tokens, **columns})


def pairs(prompts: Sequence[list[int]] = PROMPTS, **columns: Any) -> Samples:
    """Return the pairs in our order: chosen and rejected alternate."""
    responses = [side for pair in zip(CHOSEN, REJECTED, strict=True) for side in pair]
    return batch([prompt for prompt in prompts for _ in range(2)], responses, **columns)


def padded(rows: Sequence[list[int]], value: int = 0) -> Tensor:
    """Return rows padded on the right."""
    longest = max(map(len, rows))
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows])


def tokens_of(prompts: Sequence[list[int]], responses: Sequence[list[int]]) -> dict[str, Tensor]:
    """Return rows in the layout of TRL's collators."""
    both = list(zip(prompts, responses, strict=True))
    return {
        "input_ids": padded([prompt + response for prompt, response in both]),
        "attention_mask": padded([[1] * len(prompt + response) for prompt, response in both]),
        "completion_mask": padded([[0] * len(prompt) + [1] * len(response) for prompt, response in both]),
    }


def trl_pairs() -> dict[str, Tensor]:
    """Return the pairs in TRL's order: all chosen responses, then all rejected ones."""
    return tokens_of([*PROMPTS, *PROMPTS], [*CHOSEN, *REJECTED])


def assert_equal(
    ours: Tensor, theirs: Tensor, our_model: nn.Module, their_model: nn.Module, *, tolerance: float = 1e-6
) -> None:
    """Compare two losses and their gradients of all weights."""
    assert ours.item() == pytest.approx(theirs.item(), abs=tolerance, rel=1e-6)
    ours.backward()
    theirs.backward()
    one, other = (torch.cat([_gradient(p) for p in model.parameters()]) for model in (our_model, their_model))
    # Rounding errors grow with the gradient: that of sppo_hard is above 10, and gemma3's off by up to 1.02e-6 of it.
    assert float((one - other).norm()) <= 2 * tolerance * max(1.0, float(other.norm()))
    assert float(other.norm()) > 1e-3


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of a parameter; zeros of one that the model does not use."""
    return (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).flatten()


def scored(samples: Samples, **models: nn.Module) -> Samples:
    """Return samples with the log-probabilities of the responses under each model."""
    packed = pack(samples)
    with torch.no_grad():
        columns = {
            n: packed.responses(token_logprobs(m, packed, only_responses=True).logprobs) for n, m in models.items()
        }
    return samples.with_columns(**columns)


def totals_of(samples: Samples, group_size: int = 1, **sums: float) -> Totals:
    """Return the totals of one mini-batch."""
    return Totals(len(samples), samples.ragged("response_ids").num_tokens, group_size, sums)


# ---- supervised fine-tuning and reward models
def test_sft() -> None:
    ours, theirs = tiny_model("llama"), trl.fused(tiny_model("llama"))
    samples, tokens = batch(PROMPTS, CHOSEN), tokens_of(PROMPTS, CHOSEN)
    loss = SFT(ours).actor_loss(ours, pack_columns(samples, CPU), totals_of(samples)).value
    labels = tokens["input_ids"].masked_fill(tokens.pop("completion_mask") == 0, -100)
    assert_equal(loss, trl.sft_loss(theirs, {**tokens, "labels": labels}), ours, theirs)


@pytest.mark.parametrize(("margins", "centre_coef"), [(None, None), ([0.5, 0.0, 2.0, 1.0], 0.01)])
def test_reward_model(margins: list[float] | None, centre_coef: float | None) -> None:
    ours, theirs = tiny_scorer("llama", seed=5), tiny_scorer("llama", seed=5)
    samples, tokens = pairs(), trl_pairs()
    del tokens["completion_mask"]
    if margins is not None:
        samples = samples.with_columns(margin=torch.tensor(margins).repeat_interleave(2))
        tokens["margin"] = torch.tensor(margins)
    module = RewardModel(ours, centre_coef=centre_coef or 0.0)
    loss = module.reward_loss(ours, pack_columns(samples, CPU, share_prompts=True), totals_of(samples, 2)).value
    assert_equal(loss, trl.reward_loss(theirs, tokens, centre_coef=centre_coef), ours, theirs)


# ---- pairs
def our_dpo(model: nn.Module, reference: nn.Module, **settings: Any) -> Tensor:
    """Return our loss, in two micro-batches."""
    module = DPO(model, **settings)
    samples = scored(module.prepare_batch(pairs()), ref_logprobs=reference, logprobs=model)
    totals = totals_of(samples, 2, chosen_tokens=float(samples.tensor("chosen_tokens").sum()))
    if any(call.name == "match" for call in module.calls()):
        samples = samples.with_columns(**module.match(samples))
    parts = [samples.without_columns("logprobs").select(rows) for rows in ([2, 3, 6, 7], [0, 1, 4, 5])]
    return sum(module.actor_loss(model, pack_columns(part, CPU, share_prompts=True), totals).value for part in parts)  # type: ignore[return-value]


DPO_CASES: Sequence[Mapping[str, Any]] = (
    {"loss": "sigmoid"}, {"loss": "sigmoid_norm"}, {"loss": "hinge"}, {"loss": "ipo"}, {"loss": "nca_pair"},
    {"loss": "bco_pair"}, {"loss": "sppo_hard"}, {"loss": "apo_zero"}, {"loss": "apo_down"}, {"loss": "discopop"},
    {"loss": "sft"}, {"loss": "exo_pair", "label_smoothing": 0.1}, {"loss": "robust", "label_smoothing": 0.1},
    {"loss": "aot"}, {"loss": "aot", "label_smoothing": 0.1}, {"loss": "aot_unpaired", "label_smoothing": 0.1},
    {"loss": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    {"loss": "sigmoid", "tail_weight": 0.4}, {"loss": ["ipo", "sft"], "tail_weight": 0.4},
    {"loss": "sigmoid", "divergence": "forward_kl"}, {"loss": "ipo", "divergence": "js"},
    {"loss": "discopop", "divergence": "alpha", "alpha": 0.3}, {"loss": "hinge", "divergence": "alpha", "alpha": 1.0},
)  # fmt: skip


WEIGHTED_CASES: Sequence[Mapping[str, Any]] = (
    {"loss": "sigmoid", "weighting": "wpo"},
    {"loss": ["ipo", "nca_pair"], "loss_weights": [0.3, 1.0], "weighting": "wpo"},
)  # fmt: skip
"""Cases with weights, which apply in training only. Unlike TRL, we do not weight the likelihood of chosen responses."""


def trl_dpo(model: nn.Module, reference: nn.Module, case: Mapping[str, Any]) -> Tensor:
    """Return TRL's loss of a case with our names."""
    names = {"js": "js_divergence", "alpha": "alpha_divergence"}
    divergence = case.get("divergence", "reverse_kl")
    return trl.dpo_loss(
        model, reference, trl_pairs(), beta=BETA,
        loss_types=[case["loss"]] if isinstance(case["loss"], str) else case["loss"],
        loss_weights=case.get("loss_weights"), label_smoothing=case.get("label_smoothing", 0.0),
        ld_alpha=case.get("tail_weight"), f_divergence_type=names.get(divergence, divergence),
        f_alpha_divergence_coef=case.get("alpha", 0.5), use_weighting=case.get("weighting") == "wpo",
    )  # fmt: skip


def _name(case: Mapping[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())


each_dpo_case = pytest.mark.parametrize("case", DPO_CASES, ids=_name)


@pytest.mark.parametrize("case", (*DPO_CASES, *WEIGHTED_CASES), ids=_name)
def test_dpo_of_models(case: Mapping[str, Any]) -> None:
    ours, theirs = tiny_model("llama"), trl.fused(tiny_model("llama"))
    expected = trl_dpo(theirs, trl.fused(tiny_model("llama", seed=1)), case)
    # Exponentials and a temperature of 0.05 magnify rounding differences between padded and packed models.
    steep = case["loss"] == "discopop" or case.get("divergence") == "forward_kl"
    loss = our_dpo(ours, tiny_model("llama", seed=1), beta=BETA, **case)
    assert_equal(loss, expected, ours, theirs, tolerance=5e-5 if steep else 1e-6)


@each_dpo_case
def test_dpo_of_the_same_log_probabilities(case: Mapping[str, Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    kept = trl_pairs()["completion_mask"][:, 1:].bool()
    theirs, reference = (-torch.rand(kept.shape, generator=generator) for _ in range(2))
    ours = theirs.clone()
    expected = trl_dpo(
        trl.Spoken(torch.where(kept, theirs.requires_grad_(), 0.0)), trl.Spoken(torch.where(kept, reference, 0.0)), case
    )
    expected.backward()
    samples = pairs()
    order = [row for pair in range(len(PROMPTS)) for row in (pair, pair + len(PROMPTS))]

    def ragged(values: Tensor) -> Ragged:
        return Ragged(values[order][kept[order]], samples.ragged("response_ids").lengths)

    columns = {"logprobs": ragged(ours.requires_grad_()), "ref_logprobs": ragged(reference)}
    losses = DPO("unused", beta=BETA, **case).measure(samples.with_columns(**columns))["losses"]
    assert isinstance(losses, Tensor)
    losses.mean().backward()
    assert losses.mean().item() == pytest.approx(expected.item(), abs=1e-6)
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-6)


def test_every_loss_of_trl_is_compared() -> None:
    from typing import get_args

    from lightning_realloc.algorithms.losses.preference_losses import PairLossName

    compared = {
        name for case in DPO_CASES for name in ([case["loss"]] if isinstance(case["loss"], str) else case["loss"])
    }
    assert compared == {*get_args(PairLossName), "sft"}


def test_orpo() -> None:
    ours, theirs = tiny_model("llama"), tiny_model("llama").train()
    prompts = [prompt[:1] for prompt in PROMPTS]
    samples = pairs(prompts)
    totals = totals_of(samples, 2, chosen_tokens=float(chosen_tokens(samples).sum()))
    loss = ORPO(ours, beta=BETA).actor_loss(ours, pack_columns(samples, CPU, share_prompts=True), totals).value
    inputs = {}
    for side, responses in (("chosen", CHOSEN), ("rejected", REJECTED)):
        tokens = tokens_of(prompts, responses)
        inputs[f"{side}_input_ids"] = tokens["input_ids"]
        inputs[f"{side}_attention_mask"] = tokens["attention_mask"]
        inputs[f"{side}_labels"] = tokens["input_ids"].masked_fill(tokens["completion_mask"] == 0, -100)
    assert_equal(loss, trl.orpo_loss(theirs, inputs, beta=BETA), ours, theirs)


# ---- labelled responses
@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("flipped", [False, True], ids=["divergence above zero", "divergence below zero"])
def test_kto(loss: Any, flipped: bool) -> None:
    weights = {"desirable_weight": 1.33, "undesirable_weight": 0.75}
    seeds = (1, 0) if flipped else (0, 1)
    ours, theirs = tiny_model("llama", seed=seeds[0]), trl.fused(tiny_model("llama", seed=seeds[0]))
    reference = tiny_model("llama", seed=seeds[1])
    module = KTO(ours, loss=loss, beta=BETA, **weights)
    labels = torch.tensor([True, False, False, True])
    samples = scored(module.prepare_batch(batch(PROMPTS, CHOSEN, label=labels)), ref_logprobs=reference, logprobs=ours)
    if loss == "kto":
        samples = samples.with_columns(**module.estimate_kl(samples))
        samples = samples.select(samples.tensor("trained").nonzero().flatten())
    samples = samples.without_columns("logprobs")
    our_loss = module.actor_loss(ours, pack_columns(samples, CPU), totals_of(samples)).value
    mismatched = tokens_of(PROMPTS, [CHOSEN[-1], *CHOSEN[:-1]])
    inputs = {"label": labels, **tokens_of(PROMPTS, CHOSEN), **{f"KL_{name}": t for name, t in mismatched.items()}}
    twin = trl.fused(tiny_model("llama", seed=seeds[1]))
    their_loss = trl.kto_loss(theirs, twin, inputs, loss_type=loss, beta=BETA, **weights)
    assert_equal(our_loss, their_loss, ours, theirs)
