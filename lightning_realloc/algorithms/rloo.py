"""REINFORCE with the other responses' mean reward as the baseline."""

from __future__ import annotations

from lightning_realloc.algorithms.losses.kl import KL
from lightning_realloc.algorithms.rollout.policy_gradient import PolicyDefaults, PolicyGradient
from lightning_realloc.generation import SamplingParams


class RLOO(PolicyGradient):
    """Train an actor on rewards, each less the mean of the other responses to the prompt. A response is one action.

    Source: Ahmadian et al., arXiv:2402.14740.

    It has the settings of :class:`PolicyGradient`. Defaults: ``sampling=SamplingParams(n=4)``,
    ``advantages="leave_one_out"``, ``ratio_level="product"``, and ``kl=KL(0.05, place="reward")``, which subtracts the
    response's divergence from its reward.
    """

    defaults = PolicyDefaults(
        kl=KL(0.05, estimator="k3", place="reward"),
        sampling=SamplingParams(n=4),
        advantages="leave_one_out",
        ratio_level="product",
    )
