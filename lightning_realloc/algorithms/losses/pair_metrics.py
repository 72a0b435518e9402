"""Ranking and calibration metrics of scores, over a whole set of responses.

torchmetrics takes values between 0 and 1. A sigmoid maps all large scores to 1, so scores are replaced by their ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics.classification import BinaryAUROC, BinaryCalibrationError

NUM_BINS = 15
"""Bins of the calibration error, as in Guo et al., arXiv:1706.04599."""


def ranking_metrics(scores: Tensor, good: Tensor) -> dict[str, Tensor]:
    """Return the area under the ROC curve of (B,) scores; {} if all responses are good, or all are bad.

    It is the probability that a random good response scores above a random bad one; equal scores count half.

    Args:
        scores: Any numbers.
        good: (B,) bool.
    """
    good = good.to(scores.device)
    if bool(good.all()) or not bool(good.any()):
        return {}
    _, ranks = torch.unique(scores, return_inverse=True)
    return {"auroc": BinaryAUROC().to(scores.device)(ranks.double() / len(scores), good.long())}


def calibration_error(margins: Tensor) -> Tensor:
    """Return the expected calibration error of ``s(|margin|)`` as the probability of ordering a pair correctly.

    Args:
        margins: (P,) chosen scores less rejected scores, in nats of log-odds.

    Source: Guo et al., arXiv:1706.04599, eq. 3.
    """
    metric = BinaryCalibrationError(n_bins=NUM_BINS).to(margins.device)
    found: Tensor = metric(margins.abs().sigmoid(), (margins > 0).long())
    return found
