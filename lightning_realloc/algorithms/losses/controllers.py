"""Modules with state between iterations: weight of the divergence, running moments of returns.

Their buffers are part of checkpoints. They are updated from columns that every rank has, so all ranks agree.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_realloc.algorithms.settings import given

MOST_ERROR = 0.2
"""Bound on the relative error of the divergence in one update."""


class KLController(nn.Module):
    """Weight of the divergence from the reference: fixed, or steered towards a target.

    Source: Ziegler et al., arXiv:1909.08593, §2.2, eq. for the dynamic coefficient.

    Args:
        coefficient: Initial weight.
        target: Divergence to keep, in nats per response; None keeps the weight fixed.
        gain: Relative change of the weight per clipped relative error, in one iteration; None: 0.1.
    """

    coefficient: Tensor
    """Scalar float64: the current weight."""

    def __init__(self, coefficient: float, *, target: float | None = None, gain: float | None = None) -> None:
        super().__init__()
        self.target = target
        self.gain = given(gain, 0.1)
        self.register_buffer("coefficient", torch.tensor(coefficient, dtype=torch.float64))

    def update(self, kl: Tensor) -> None:
        """Raise the weight if the mean divergence per response is above the target, lower it if it is below.

        A divergence that is not finite changes nothing.
        """
        if self.target is None or not bool(kl.isfinite()):
            return
        error = ((kl.to(self.coefficient) - self.target) / self.target).clamp(-MOST_ERROR, MOST_ERROR)
        self.coefficient.mul_(1 + self.gain * error)


class RunningMoments(nn.Module):
    """Mean and standard deviation of all values so far, merged batch by batch.

    Before the first values the mean is 0 and the deviation 1, so normalizing changes nothing.

    Source: Chan et al., "Updating formulae and a pairwise algorithm for computing sample variances", 1979, eq. 2.1.
    """

    count: Tensor
    """Scalar float64: number of values."""
    mean: Tensor
    """Scalar float64: their mean."""
    squares: Tensor
    """Scalar float64: sum of squared deviations from the mean."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("count", "mean", "squares"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))

    @property
    def std(self) -> Tensor:
        """Population standard deviation; 1 before values differ."""
        variance = self.squares / self.count.clamp(min=1)
        return torch.where(variance > 0, variance, 1.0).sqrt()

    def merged(self, count: Tensor | float, total: Tensor, total_squares: Tensor) -> RunningMoments:
        """Return the moments after :meth:`update`, without changing these."""
        other = RunningMoments().to(self.mean.device)
        for name, buffer in self.named_buffers():
            getattr(other, name).copy_(buffer)
        other.update(count, total, total_squares)
        return other

    def update(self, count: Tensor | float, total: Tensor, total_squares: Tensor) -> None:
        """Add ``count`` values, given by their sum and sum of squares.

        Sums that are not finite are ignored, since they would spoil all later moments.
        """
        count = torch.as_tensor(count).to(self.count)
        if not bool(count > 0) or not bool(total.isfinite() & total_squares.isfinite()):
            return
        total, total_squares = total.to(self.mean), total_squares.to(self.mean)
        mean = total / count
        squares = (total_squares - total * mean).clamp(min=0)
        both = self.count + count
        apart = mean - self.mean
        self.squares.add_(squares + apart.square() * self.count * count / both)
        self.mean.add_(apart * count / both)
        self.count.copy_(both)

    def normalize(self, values: Tensor) -> Tensor:
        """Return ``(values - mean) / std``, in the values' own dtype."""
        return ((values - self.mean.to(values.device)) / self.std.to(values.device)).to(values.dtype)

    def denormalize(self, values: Tensor) -> Tensor:
        """Return ``values * std + mean``, in the values' own dtype."""
        return (values * self.std.to(values.device) + self.mean.to(values.device)).to(values.dtype)
