"""Direct preference optimization: learn from pairs of responses, without a reward model and without sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lightning_realloc.algorithms.base.calls import compute, train
from lightning_realloc.algorithms.base.loaded_weights import ModelSource
from lightning_realloc.algorithms.base.pairs import (
    PairwiseModule,
    both_sides,
    chosen_tokens,
    known_logprobs,
    packed_logprobs,
    pair_metrics,
    pair_sums,
    sides,
)
from lightning_realloc.algorithms.base.referenced import ReferencedModule, ReferencedSettings
from lightning_realloc.algorithms.losses.functional import sequence_sums
from lightning_realloc.algorithms.losses.pair_metrics import calibration_error
from lightning_realloc.algorithms.losses.preference_losses import (
    OF_DIFFERENCES,
    OF_WHOLE_BATCH,
    Divergence,
    PairLossName,
    PairLossSettings,
    Pairs,
    pair_loss,
    policy_weights,
    rank_matches,
)
from lightning_realloc.algorithms.settings import (
    Unpack,
    check_not_negative,
    check_positive,
    check_share,
    check_single_step,
    check_type,
)
from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.samples import Column, Ragged, Samples
from lightning_realloc.batch.training import Average, Loss, Totals
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import ConfigError, require_choice
from lightning_realloc.runtime.parallel.packed_forward import token_logprobs

DPOLoss = PairLossName | Literal["sft"]
"""A loss of pairs, or the mean negative log-likelihood of the chosen responses' tokens, as a further term."""
Weighting = Literal["wpo"]
_NAMES: tuple[DPOLoss, ...] = (*get_args(PairLossName), "sft")


class DPO(ReferencedModule, PairwiseModule):
    """Train an actor to prefer what people preferred, compared with what a reference prefers.

    Source: Rafailov et al., arXiv:2305.18290. The other losses' sources: ``preference_losses.py``.

    Args:
        actor: The policy: a Hugging Face name or folder, a config, or a module.
        loss: ``"sigmoid"``, or another of ``PairLossName``, or ``"sft"``; several are added up.
        loss_weights: One per loss; None: all 1.
        beta: Strength of the pull to the reference.
        label_smoothing: Assumed share of wrong labels, in ``sigmoid`` (then conservative DPO), ``sigmoid_norm``,
            ``robust``, ``exo_pair``, ``aot`` and ``aot_unpaired``.
        divergence: Divergence from the reference: ``reverse_kl``, ``forward_kl``, ``js`` or ``alpha``.
        alpha: Parameter of the divergence ``alpha``; 1 is ``reverse_kl``.
        discopop_tau: Temperature of the transition between the two losses of ``discopop``. Below 0.1023, as by default,
            the loss rises with the margin around 0, where training starts.
        tail_weight: Weight of tokens of the longer response after the length of the shorter one.
        weighting: ``"wpo"`` weights pairs in training by the policy's probability of their responses
            (arXiv:2406.11827). It affects neither ``"sft"`` nor metrics of held-out pairs.
        settings: Settings of :class:`ReferencedModule` (reference, precomputing) and
            :class:`MultiModelModule` (learning rate, optimizer, schedule, training options, seed).
    """

    totals_of = ("chosen_tokens",)

    def __init__(
        self,
        actor: ModelSource,
        *,
        loss: DPOLoss | Sequence[DPOLoss] = "sigmoid",
        loss_weights: Sequence[float] | None = None,
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        divergence: Divergence = "reverse_kl",
        alpha: float = 0.5,
        discopop_tau: float = 0.05,
        tail_weight: float = 1.0,
        weighting: Weighting | None = None,
        **settings: Unpack[ReferencedSettings],
    ) -> None:
        super().__init__(actor, **settings)
        self.losses = _weighted(loss, loss_weights)
        check_positive(beta=beta, discopop_tau=discopop_tau)
        check_type(Real, alpha=alpha, label_smoothing=label_smoothing)
        check_share(tail_weight=tail_weight)
        require_choice("divergence", divergence, get_args(Divergence))
        _check_smoothing(self.losses, label_smoothing)
        _check_divergence(self.losses, divergence)
        whole = sorted(OF_WHOLE_BATCH.intersection(self.losses))
        if weighting is not None:
            require_choice("weighting", weighting, get_args(Weighting))
        if whole and weighting is not None:
            raise ConfigError(
                f"weighting={weighting!r} weighs pairs one by one, and loss={whole[0]!r} compares values of several "
                f"pairs; leave one of them out"
            )
        if whole:
            check_single_step(f"loss={whole[0]!r} compares pairs by their rank in the batch", self.train_options)
        self.settings = PairLossSettings(
            beta=beta, label_smoothing=label_smoothing, divergence=divergence, alpha=alpha, discopop_tau=discopop_tau
        )
        self.tail_weight = tail_weight
        self.weighting = weighting

    def calls(self) -> tuple[ModelFunctionCall, ...]:
        """Return the calls, with ``match`` only for losses that compare ranks over the whole batch."""
        calls = super().calls()
        if not OF_WHOLE_BATCH.intersection(self.losses):
            return tuple(call for call in calls if call.name != "match")
        return tuple(replace(call, needs=(*call.needs, "matches")) if call.kind == "train" else call for call in calls)

    def prepare_batch(self, batch: Samples) -> Samples:
        """Add the divisor of the likelihood of chosen responses."""
        return batch.with_columns(chosen_tokens=chosen_tokens(batch))

    # ---- the calls
    @compute(needs=("batch", "logprobs", "ref_logprobs"), produces="matches", whole_batch=True)
    def match(self, samples: Samples) -> Mapping[str, Column]:
        """Return values of equal rank: the pair's first match for a chosen sample, the second for a rejected one."""
        pairs = self._scored_pairs(samples)
        assert pairs.matches is not None, "this call is left out where no loss needs it"
        return {"matches": torch.stack(pairs.matches, dim=1).flatten()}

    @compute(needs=("batch", "logprobs", "ref_logprobs"), produces=("losses", "margins"), whole_batch=True)
    def measure(self, samples: Samples) -> Mapping[str, Column]:
        """Return every pair's loss and margin of implied rewards, for both of its samples."""
        pairs = self._scored_pairs(samples)
        losses = sum(weight * pair_loss(n, pairs, self.settings) for n, weight in self._pair_losses.items())
        nll = self._likelihood(known_logprobs(samples, "logprobs"))
        losses = losses + self.losses.get("sft", 0.0) * nll * (len(nll) / chosen_tokens(samples).sum())
        return {"losses": both_sides(losses.float()), "margins": both_sides(self._margins(pairs))}

    @train("actor", needs=("batch", "ref_logprobs"))
    def actor_loss(self, actor: nn.Module, batch: PackedBatch, totals: Totals) -> Loss:
        """Return one micro-batch's part of the mean loss over pairs."""
        said = token_logprobs(actor, batch, only_responses=True, with_collision=self.weighting is not None)
        logprobs = packed_logprobs(batch, said.logprobs)
        weights = (
            1.0 if said.collision is None else _policy_weights(packed_logprobs(batch, said.logprobs - said.collision))
        )
        matches = sides(batch["matches"]) if "matches" in batch.columns else None
        pairs = self._pairs(logprobs, packed_logprobs(batch, batch["ref_logprobs"]), matches)
        value = pairs.chosen.new_zeros(())
        for name, weight in self._pair_losses.items():
            value = value + weight * (weights * pair_loss(name, pairs, self.settings)).sum() / totals.num_groups
        metrics = pair_metrics(self._margins(pairs)) | self._reward_metrics(pairs)
        if "sft" in self.losses:
            nll = self._likelihood(logprobs).sum()
            value = value + self.losses["sft"] * nll / totals.sums["chosen_tokens"]
            metrics["nll"] = Average(nll, pairs.chosen_lengths.sum())
        if isinstance(weights, Tensor):
            metrics["policy_weight"] = Average(weights.sum(), len(weights))
        return Loss(value, metrics)

    def summarize(self, samples: Samples) -> dict[str, Tensor]:
        """Return also the calibration error of the margins.

        Implied rewards are known up to a constant per prompt, so they are not compared across prompts.
        """
        found = super().summarize(samples)
        return found and found | {"calibration_error": calibration_error(sides(samples.tensor("margins"))[0])}

    # ---- helpers
    @property
    def _pair_losses(self) -> dict[PairLossName, float]:
        return {name: weight for name, weight in self.losses.items() if name != "sft"}

    def _pairs(self, logprobs: Ragged, ref_logprobs: Ragged, matches: tuple[Tensor, Tensor] | None = None) -> Pairs:
        device = logprobs.values.device
        reference = pair_sums(ref_logprobs.to(device), tail_weight=self.tail_weight)
        lengths = sides(logprobs.lengths.to(device))
        return Pairs(*pair_sums(logprobs, tail_weight=self.tail_weight), *reference, *lengths, matches)

    def _scored_pairs(self, samples: Samples) -> Pairs:
        """Return all pairs of a batch, with their values of equal rank."""
        pairs = self._pairs(known_logprobs(samples, "logprobs"), known_logprobs(samples, "ref_logprobs"))
        for name in OF_WHOLE_BATCH.intersection(self.losses):
            pairs = replace(pairs, matches=rank_matches(name, pairs))
        return pairs

    def _likelihood(self, logprobs: Ragged) -> Tensor:
        return -pair_sums(logprobs)[0]

    def _margins(self, pairs: Pairs) -> Tensor:
        return self.settings.beta * (pairs.chosen_ratios - pairs.rejected_ratios)

    def _reward_metrics(self, pairs: Pairs) -> dict[str, Average]:
        """Return the mean implied rewards: beta times the log-ratios."""
        found = {"chosen_reward": pairs.chosen_ratios, "rejected_reward": pairs.rejected_ratios}
        return {
            name: Average(self.settings.beta * ratios.detach().sum(), len(ratios)) for name, ratios in found.items()
        }


def _policy_weights(aligned: Ragged) -> Tensor:
    lengths = aligned.lengths.to(aligned.values.device)
    return policy_weights(sequence_sums(aligned) / lengths)


def _weighted(loss: DPOLoss | Sequence[DPOLoss], weights: Sequence[float] | None) -> dict[DPOLoss, float]:
    names: list[DPOLoss] = [loss] if isinstance(loss, str) else list(loss)
    for name in names:
        require_choice("loss", name, _NAMES)
    weights = [1.0] * len(names) if weights is None else list(weights)
    if not names or len(set(names)) != len(names) or len(weights) != len(names):
        raise ConfigError(
            f"loss={names} with loss_weights={weights}: name at least one loss, each once, and give one weight each"
        )
    check_not_negative(**{f"loss_weights of {name}": w for name, w in zip(names, weights, strict=True)})
    if set(names) >= OF_WHOLE_BATCH:
        raise ConfigError("loss names both 'aot' and 'aot_unpaired', which rank pairs differently; choose one")
    return dict(zip(names, weights, strict=True))


def _check_smoothing(losses: Mapping[DPOLoss, float], smoothing: float) -> None:
    if not 0 <= smoothing < 0.5:
        raise ConfigError(
            f"label_smoothing={smoothing} must lie between 0 and 0.5, not included: from half of the labels wrong on, "
            f"they say nothing"
        )
    if "exo_pair" in losses and smoothing == 0:
        raise ConfigError("loss='exo_pair' needs label_smoothing above 0, since it takes its logarithm; set 0.001")


def _check_divergence(losses: Mapping[DPOLoss, float], divergence: Divergence) -> None:
    without = sorted(set(losses) - OF_DIFFERENCES - {"sft"})
    if divergence != "reverse_kl" and without:
        raise ConfigError(
            f"divergence={divergence!r} leaves an unknown term in each response's reward, which only the losses of "
            f"their difference cancel ({', '.join(sorted(OF_DIFFERENCES))}); loss={without[0]!r} needs 'reverse_kl'"
        )
