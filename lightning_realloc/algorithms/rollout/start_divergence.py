"""Warn if the first rollout diverges from a reference that has the weights with which the actor starts.

KL is 0 then, apart from rounding. Another value means that the penalty pulls the actor to a model that nobody chose, or
that the engine computes other probabilities than the model.
"""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_realloc.algorithms.base.initial_weights import changes_base
from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.algorithms.base.rollout_columns import num_model_tokens
from lightning_realloc.batch.samples import Samples
from lightning_realloc.generation.core.capabilities import CAPABILITIES

START_KL = "kl_at_start"
"""Metric of the actor's loss while the first rollout is awaited: divergence from the reference per token."""
MAX_KL_IN_FLOAT32 = 1e-4
"""Nats per token up to which a divergence in float32 is rounding. Less: rounding of large models is warned of."""
MAX_KL_IN_16_BIT = 2e-2
"""The same if weights or products have 16 bits or fewer, or another engine computes the rollout."""


def starts_as(reference: Role, actor: Role) -> bool:
    """Return whether a reference has the weights with which an actor starts. Ask before the models are built."""
    if reference.shares == actor.name:
        return not changes_base(actor)
    is_named = isinstance(reference.source, str | Path) and isinstance(actor.source, str | Path)
    has_source = str(reference.source) == str(actor.source) if is_named else reference.source is actor.source
    return has_source and (reference.peft, reference.quantization) == (actor.peft, actor.quantization)


def rounding_limit(actor: nn.Module, *, precision: str, engine: str) -> float:
    """Return the divergence in nats per token up to which it is rounding.

    Args:
        actor: Model with the weights as they are held.
        precision: The Trainer's.
        engine: Engine of the rollout.
    """
    is_wide = all(weight.is_floating_point() and weight.dtype.itemsize >= 4 for weight in actor.parameters())
    exact = is_wide and precision in ("32-true", "64-true") and "same_logprobs" in CAPABILITIES[engine]
    return MAX_KL_IN_FLOAT32 if exact else MAX_KL_IN_16_BIT


def mean_divergence(samples: Samples, logged: Tensor | None) -> float | None:
    """Return the divergence from the reference in nats per token of the model; None if it is not known.

    Args:
        samples: Samples of an iteration; with the divergence in their rewards, they have the sum of each response.
        logged: The metric `START_KL`, if the divergence is in the loss.
    """
    sums = next((samples.tensor(name) for name in ("kl_k3", "kl_k1") if name in samples), None)
    if sums is None:
        return None if logged is None else float(logged)
    known = ~sums.isnan()
    return float(sums[known].sum()) / max(1, int(num_model_tokens(samples).to(sums.device)[known].sum()))


def warn_of_divergence(kl: float, limit: float) -> None:
    """Warn of a divergence of the first rollout, in nats per token, if it is above a limit."""
    if abs(kl) <= limit:  # k1 may be negative
        return
    rank_zero_warn(
        f"KL to the reference is {kl:.2g} nats per token in the first rollout, and rounding explains up to {limit:g}, "
        f"although actor and reference have the same source. Likely causes: weights that configure_model or a callback "
        f"changed in one of them (give the model to start from as actor= and leave reference out); a method of a "
        f"subclass that scores with another temperature, or with dropout; an engine that computes this model "
        f"differently (compare with engine='hf')"
    )
