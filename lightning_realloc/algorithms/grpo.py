"""Group-relative policy optimization and its published variants."""

from __future__ import annotations

from lightning_realloc.algorithms.losses.kl import KL
from lightning_realloc.algorithms.rollout.policy_gradient import PolicyDefaults, PolicyGradient
from lightning_realloc.generation import SamplingParams


class GRPO(PolicyGradient):
    """Train an actor on rewards, each compared with those of other responses to the same prompt.

    Source: Shao et al., arXiv:2402.03300. Settings for Dr. GRPO, DAPO, GSPO or CISPO: docs/online-algorithms.md.

    It has the settings of :class:`PolicyGradient`. Defaults: ``sampling=SamplingParams(n=8)``, ``advantages="group"``,
    ``kl_coef=0`` and so no reference, and ``loss_average="token"`` as in DAPO; the paper's is ``"sequence"``.
    """

    defaults = PolicyDefaults(
        kl=KL(0.0, estimator="k3", place="loss"), sampling=SamplingParams(n=8), advantages="group", loss_average="token"
    )
