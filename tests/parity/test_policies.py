"""Our policy losses equal those of TRL's own code on the same tensors to 1e-6.

TRL holds (B, T) tensors, we hold packs. The left side of each case has TRL's names, the right side ours. Intended
differences:

- ``bnpo`` averages over the tokens of one micro-batch on one rank, so that micro-batch size changes the loss; ours
  never depends on it. With one micro-batch both are equal, and equal to ``dapo``.
- ``cispo``'s ``epsilon_high`` is the bound itself; ours is its distance above 1, as in the paper.
- TRL's ``vespo`` includes the engine correction in its weights; ours has ratios to the engine instead
  (``ratio_to="behaviour"``). Here both get the same ratios.
- TRL 1.16 multiplies the divergence by the ratio by default (``use_bias_correction_kl``); it is compared without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_realloc import KL, Cispo, Clip, Correction, OnPolicyDistillation, PolicyGradient, SamplingParams
from lightning_realloc.algorithms import distillation
from lightning_realloc.algorithms.rollout import surrogate
from lightning_realloc.batch.packing import PackedBatch, pack
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.training import Totals, num_counted_tokens
from lightning_realloc.runtime.forward.divergence import TeacherHead
from lightning_realloc.runtime.forward.token_logprobs import TokenStatistics
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs

pytest.importorskip("trl", reason="parity needs TRL: pip install 'lightning-realloc[parity]'")

from tests.parity import trl_trainers as trl

LENGTHS = [3, 5, 1, 4]
MASK = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
ADVANTAGES = torch.tensor([1.0, -0.5, 2.0, -1.5])
LONGEST = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """A loss of TRL, and ours."""

    theirs: Mapping[str, Any]
    ours: Mapping[str, Any]


def clips(**settings: Any) -> dict[str, Any]:
    """Return our settings of a clipped loss without a divergence, like TRL's defaults in this file."""
    return {"policy_loss": Clip(high=0.28), "kl_coef": 0.0, **settings}


CASES: Mapping[str, Case] = {
    "grpo": Case(theirs={"loss_type": "grpo"}, ours=clips()),
    "grpo with a divergence": Case(theirs={"loss_type": "grpo", "beta": 0.04}, ours=clips(kl_coef=0.04)),
    "grpo, clipped twice": Case(
        theirs={"loss_type": "grpo", "delta": 1.4}, ours=clips(policy_loss=Clip(high=0.28, most=1.4))
    ),
    "gspo": Case(
        theirs={"loss_type": "grpo", "importance_sampling_level": "sequence"}, ours=clips(ratio_level="sequence")
    ),
    "bnpo": Case(theirs={"loss_type": "bnpo", "beta": 0.04}, ours=clips(kl_coef=0.04, loss_average="token")),
    "dr_grpo": Case(theirs={"loss_type": "dr_grpo"}, ours=clips(loss_average="constant")),
    "dapo": Case(theirs={"loss_type": "dapo"}, ours=clips(loss_average="token")),
    "cispo": Case(
        theirs={"loss_type": "cispo", "epsilon_high": 1.5, "beta": 0.04},
        ours=clips(policy_loss=Cispo(high=0.5), kl_coef=0.04, loss_average="token"),
    ),
    "sapo": Case(
        theirs={"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
        ours=clips(policy_loss="sapo"),
    ),
    "luspo": Case(
        theirs={"loss_type": "luspo", "importance_sampling_level": "sequence", "beta": 0.04},
        ours=clips(ratio_level="sequence", loss_average="sum", kl_coef=0.04),
    ),
    "vespo": Case(
        theirs={"loss_type": "vespo", "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0,
                "vespo_lambda_neg": 2.0},
        ours=clips(policy_loss="vespo", loss_average="token"),
    ),
}  # fmt: skip


def drawn(*names: str) -> dict[str, Tensor]:
    """Return (B, T) log-probabilities."""
    generator = torch.Generator().manual_seed(3)
    return {name: -torch.rand(MASK.shape, generator=generator) for name in names}


def trl_inputs(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs of TRL's losses."""
    return {
        "prompt_ids": torch.ones(4, 1, dtype=torch.int64), "prompt_mask": torch.ones(4, 1, dtype=torch.int64),
        "completion_ids": MASK.long(), "completion_mask": MASK.long(), "advantages": ADVANTAGES,
        "old_per_token_logps": rows["old"], "ref_per_token_logps": rows["ref"], "num_items_in_batch": MASK.sum(),
        "old_logps": (rows["old"] * MASK).sum(1),
    }  # fmt: skip


def packed(**columns: Tensor) -> PackedBatch:
    """Return (B, T) tensors in a pack, after prompts of one token, and (B,) tensors unchanged."""
    made: dict[str, Any] = {
        name: Ragged(column[MASK], torch.tensor(LENGTHS)) if column.shape == MASK.shape else column
        for name, column in columns.items()
    }
    tokens = {
        "prompt_ids": Ragged.from_list([[1]] * 4),
        "response_ids": Ragged.from_list([[1] * length for length in LENGTHS]),
    }
    return pack(Samples(torch.arange(4), {**tokens, **made}), columns=list(made))


def our_loss(
    monkeypatch: pytest.MonkeyPatch,
    logprobs: Tensor,
    batch: PackedBatch,
    settings: Mapping[str, Any],
    *,
    num_tokens: int = sum(LENGTHS),
) -> Tensor:
    """Return our loss of given (B, T) log-probabilities, as a training call computes it."""
    places = batch.predicted_places  # prompts of one token have none
    flat = torch.zeros(batch.num_tokens).index_copy(0, places, logprobs[MASK])
    monkeypatch.setattr(surrogate, "token_logprobs", lambda *_, **__: TokenStatistics(flat))
    sampling = SamplingParams(n=2, max_new_tokens=LONGEST)
    module = PolicyGradient(
        tiny_model("llama"), runs.low_tokens, sampling=sampling, tokenizer=byte_tokenizer(), **settings
    )
    return module.actor_loss(module, batch, Totals(4, num_tokens)).value


def assert_equal(ours: Tensor, theirs: Tensor, our_input: Tensor, their_input: Tensor) -> None:
    """Compare losses and their gradients."""
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
    ours.backward()
    theirs.backward()
    assert float(their_input.grad.abs().max()) > 1e-3
    assert torch.allclose(our_input.grad, their_input.grad, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_policy_losses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, rows = CASES[name], drawn("logprobs", "old", "ref")
    theirs, ours = (rows["logprobs"].clone().requires_grad_() for _ in range(2))
    expected = trl.policy_loss(
        theirs, trl_inputs(rows), **{"epsilon_high": 0.28, "max_completion_length": LONGEST, **case.theirs}
    )
    batch = packed(behaviour_logprobs=rows["old"], ref_logprobs=rows["ref"], advantages=ADVANTAGES)
    assert_equal(our_loss(monkeypatch, ours, batch, case.ours), expected, ours, theirs)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo"])
def test_truncated_responses_are_masked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, rows = CASES[name], drawn("logprobs", "old", "ref")
    theirs, ours = (rows["logprobs"].clone().requires_grad_() for _ in range(2))
    is_cut = torch.tensor([False, True, False, False])
    kept = MASK & ~is_cut[:, None]  # what mask_truncated_completions makes of the mask
    inputs = {**trl_inputs(rows), "completion_mask": kept.long(), "num_items_in_batch": kept.sum()}
    expected = trl.policy_loss(theirs, inputs, epsilon_high=0.28, max_completion_length=LONGEST, **case.theirs)
    advantages = ADVANTAGES.masked_fill(is_cut, torch.nan)
    responses = {"response_ids": Ragged.from_list([[1] * length for length in LENGTHS])}
    samples = Samples(torch.arange(4), {**responses, "advantages": advantages})
    batch = packed(behaviour_logprobs=rows["old"], ref_logprobs=rows["ref"], advantages=advantages)
    counted = num_counted_tokens(samples, PolicyGradient.excluded_by)
    assert_equal(our_loss(monkeypatch, ours, batch, case.ours, num_tokens=counted), expected, ours, theirs)


def test_every_loss_of_trl_is_compared() -> None:
    import inspect

    from trl.trainer.grpo_trainer import GRPOTrainer

    source = inspect.getsource(GRPOTrainer._compute_loss)
    known = {"grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"}
    assert all(f'"{name}"' in source for name in known)
    assert {case.theirs["loss_type"] for case in CASES.values()} == known


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_corrections_equal_trls(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    level, beyond = mode.split("_")
    rows = drawn("logprobs", "old", "ref", "engine")
    theirs, ours = (rows["logprobs"].clone().requires_grad_() for _ in range(2))
    # TRL computes these ratios during generation; the loss receives them.
    apart = (rows["old"] - rows["engine"]) * MASK
    ratios = (apart if level == "token" else apart.sum(-1, keepdim=True)).exp()
    outside = (ratios < 0.7) | (ratios > 1.5)
    given = ratios.clamp(0.7, 1.5) if beyond == "truncate" else ratios.masked_fill(outside, 0.0)
    assert outside.any() and not outside.all()
    expected = trl.policy_loss(
        theirs, {**trl_inputs(rows), "importance_sampling_ratio": given}, loss_type="grpo", beta=0.04,
        use_vllm=True, vllm_importance_sampling_correction=True,
    )  # fmt: skip
    batch = packed(
        proximal_logprobs=rows["old"], behaviour_logprobs=rows["engine"], ref_logprobs=rows["ref"],
        advantages=ADVANTAGES,
    )  # fmt: skip
    bounds: dict[str, Any] = {"floor": 0.7, "cap": 1.5} if beyond == "truncate" else {"low": 0.7, "high": 1.5}
    correction = Correction(weigh=level, reject="none" if beyond == "truncate" else level, **bounds)
    settings = {"correction": correction, "kl_coef": 0.04,
                "train_options": runs.options(num_epochs=2)}  # fmt: skip
    assert_equal(our_loss(monkeypatch, ours, batch, settings), expected, ours, theirs)


def test_rloo(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = drawn("logprobs", "old", "ref")
    theirs, ours = (rows["logprobs"].clone().requires_grad_() for _ in range(2))
    expected = trl.response_loss(theirs, trl_inputs(rows), epsilon_low=0.2, epsilon_high=0.5)
    batch = packed(behaviour_logprobs=rows["old"], ref_logprobs=rows["ref"], advantages=ADVANTAGES)
    settings = {"ratio_level": "product", "kl": KL(place="reward"), "policy_loss": Clip(high=0.5)}
    assert_equal(our_loss(monkeypatch, ours, batch, settings), expected, ours, theirs)


@pytest.mark.parametrize(("divergence", "beta"), [("forward_kl", 0.0), ("reverse_kl", 1.0), ("js", 0.3)])
def test_distillation(divergence: Any, beta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(*MASK.shape, 11, generator=generator)
    states, head = torch.randn(*MASK.shape, 6, generator=generator), torch.randn(11, 6, generator=generator)
    theirs, ours = (logits.clone().requires_grad_() for _ in range(2))
    expected = trl.divergence_loss(theirs, states @ head.T, MASK, beta=beta, temperature=0.7)
    batch = packed()
    places = batch.response_mask.nonzero().squeeze(1)
    columns = {"teacher_states": torch.zeros(batch.num_tokens, 6).index_copy(0, places, states[MASK])}
    monkeypatch.setattr(distillation, "predicting_logits", lambda *_: ours[MASK])
    module = OnPolicyDistillation(
        tiny_model("llama"), tiny_model("llama"), divergence=divergence, mix=0.3, tokenizer=byte_tokenizer(),
        sampling=SamplingParams(temperature=0.7),
    )  # fmt: skip
    module._head = TeacherHead(head)
    loss = module.actor_loss(tiny_model("llama"), replace(batch, columns=columns), Totals(4, sum(LENGTHS))).value
    assert_equal(loss, expected, ours, theirs)
