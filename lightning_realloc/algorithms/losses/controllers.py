"""Modules that keep state between iterations, whose buffers are part of every checkpoint.

They are updated from per-sample columns that every rank has, and so hold the same on every rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MOST_ERROR = 0.2
"""The largest relative error of the divergence that one iteration reacts to."""


class KLController(nn.Module):
    """The weight of the divergence from the reference: fixed, or steered towards a target.

    Source: Ziegler et al., arXiv:1909.08593, §2.2, eq. for the dynamic coefficient.

    Args:
        coefficient: The weight to begin with.
        target: The divergence to keep, in nats per response; None keeps the weight as it is.
        gain: How much of the (clipped) relative error the weight changes by in one iteration.
    """

    coefficient: Tensor
    """Scalar float64: the weight now."""

    def __init__(self, coefficient: float, *, target: float | None = None, gain: float = 0.1) -> None:
        super().__init__()
        self.target = target
        self.gain = gain
        self.register_buffer("coefficient", torch.tensor(coefficient, dtype=torch.float64))

    def update(self, kl: Tensor) -> None:
        """Move the weight up where the mean divergence per response is above the target, down where it is below.

        A divergence that is not finite leaves it as it is.
        """
        if self.target is None or not bool(kl.isfinite()):
            return
        error = ((kl.to(self.coefficient) - self.target) / self.target).clamp(-MOST_ERROR, MOST_ERROR)
        self.coefficient.mul_(1 + self.gain * error)


class RunningMoments(nn.Module):
    """Mean and standard deviation of all values seen so far, merged batch by batch without keeping any.

    Before the first values the mean is 0 and the deviation 1, so that normalising changes nothing.

    Source: Chan et al., "Updating formulae and a pairwise algorithm for computing sample variances", 1979, eq. 2.1.
    """

    count: Tensor
    """Scalar float64: how many values."""
    mean: Tensor
    """Scalar float64."""
    squares: Tensor
    """Scalar float64: the sum of the squared distances from the mean."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("count", "mean", "squares"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))

    @property
    def std(self) -> Tensor:
        """The population's standard deviation; 1 where there is none yet."""
        variance = self.squares / self.count.clamp(min=1)
        return torch.where(variance > 0, variance, 1.0).sqrt()

    def merged(self, count: Tensor | float, total: Tensor, total_squares: Tensor) -> RunningMoments:
        """Return what :meth:`update` would make of these moments, and leave them as they are."""
        other = RunningMoments().to(self.mean.device)
        for name, buffer in self.named_buffers():
            getattr(other, name).copy_(buffer)
        other.update(count, total, total_squares)
        return other

    def update(self, count: Tensor | float, total: Tensor, total_squares: Tensor) -> None:
        """Take in ``count`` more values, known by their sum and the sum of their squares.

        Sums that are not finite are left out: they would be part of all later moments.
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
