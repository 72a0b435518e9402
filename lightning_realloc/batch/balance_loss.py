"""Load-balancing loss of a mixture of experts, over all tokens of an optimizer step in all micro-batches and ranks.

The loss is ``E * sum_i f_i P_i`` for E experts: f_i is the number of times that expert i is chosen, P_i the sum of the
routers' probabilities of it, both divided by the number of tokens, over all layers together. Only P_i has a gradient,
a sum over tokens. f_i needs all tokens before the first backward pass.

Source: Fedus et al., arXiv:2101.03961, eq. 4; for f_i over the global batch, Qiu et al., arXiv:2501.11873.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


class BalanceLoss:
    """The loss of one optimizer step: first sums of this rank's forward passes, then its value and gradient.

    Args:
        num_experts: Experts of a layer, E.
        num_chosen: Experts of a token in a layer.
    """

    def __init__(self, num_experts: int, num_chosen: int, device: torch.device) -> None:
        self.sums = torch.zeros(2, num_experts, dtype=torch.float64, device=device)
        """(2, E) choices of each expert, and probabilities; to be summed over ranks before `settle`."""
        self._num_chosen = num_chosen
        self._slopes: Tensor | None = None

    @property
    def is_settled(self) -> bool:
        """Whether all tokens of the step were counted."""
        return self._slopes is not None

    def settle(self, *, weight: float, num_copies: int, gradient_scale: float) -> Tensor:
        """Fix f from `sums` over all ranks, and return the loss, without its weight. Passes add no more to the sums.

        Args:
            weight: Factor of the loss in that of the step.
            num_copies: Ranks that count each token.
            gradient_scale: Factor of the gradients of this rank's backward passes.
        """
        num_experts, num_rows = self.sums.shape[1], self.sums[0].sum() / self._num_chosen
        shares = self.sums[0] / num_rows
        self._slopes = (weight * gradient_scale * num_experts * num_copies / num_rows * shares).float()
        return num_experts * (shares * self.sums[1] / num_rows).sum()

    def follow(self, weights: Tensor, logits: Tensor, tokens: Tensor) -> Tensor:
        """Count the tokens of a router's pass, or return its weights with the loss's gradient of its logits attached.

        Args:
            weights: (n, k) weights of the chosen experts, which the rest of the pass depends on.
            logits: (n, E) of the router. As in transformers, its choices are the largest ones, whatever it does.
            tokens: (n,) times that each token counts.
        """
        if not self.is_settled:
            with torch.no_grad():
                probabilities = logits.float().softmax(-1)
                chosen = probabilities.topk(self._num_chosen).indices.flatten()
                counted = tokens.to(self.sums.dtype)
                self.sums[0].scatter_add_(0, chosen, counted.repeat_interleave(self._num_chosen))
                self.sums[1] += counted @ probabilities.to(self.sums.dtype)
        return cast(Tensor, _AddedGradient.apply(weights, logits, tokens, self))

    def gradient(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return the gradient of (n, E) logits, of tokens that count (n,) times."""
        assert self._slopes is not None, "the loss is settled before the first backward pass"
        probabilities = logits.float().softmax(-1)
        excess = self._slopes - (probabilities @ self._slopes)[:, None]
        return (probabilities * excess * tokens[:, None]).to(logits.dtype)


class _AddedGradient(torch.autograd.Function):
    """Passes weights on, and adds a loss's gradient to that of the logits that they were computed from.

    So each pipeline stage adds its layers' part, and f may be fixed between the two passes.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, logits: Tensor, tokens: Tensor, loss: BalanceLoss) -> Tensor:
        ctx.save_for_backward(logits, tokens)
        ctx.loss = loss
        return weights.clone()  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, tokens = ctx.saved_tensors
        return gradients[0], ctx.loss.gradient(logits, tokens), None, None
