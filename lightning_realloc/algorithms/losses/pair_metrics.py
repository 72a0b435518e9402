"""Ranking and calibration metrics of scores, over a whole set of responses.

The curves are torchmetrics'. It takes values between 0 and 1, and large scores are all 1 in a sigmoid: ranks keep
them apart.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics.classification import BinaryAUROC, BinaryCalibrationError

NUM_BINS = 15
"""Of the calibration error, as in Guo et al., arXiv:1706.04599."""


def ranking_metrics(scores: Tensor, good: Tensor) -> dict[str, Tensor]:
    """Return the area under the ROC curve of (B,) scores, nothing where all responses are good or none is.

    It is the chance that any good response scores above any bad one, of other prompts too; equal scores count half.

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
    """Return the expected calibration error of ``s(|margin|)`` as the probability of having ordered a pair right.

    Args:
        margins: (P,) by how much the chosen response scores higher, in nats of log-odds.

    Source: Guo et al., arXiv:1706.04599, eq. 3.
    """
    metric = BinaryCalibrationError(n_bins=NUM_BINS).to(margins.device)
    found: Tensor = metric(margins.abs().sigmoid(), (margins > 0).long())
    return found
