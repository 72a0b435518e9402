"""Warnings about how a run learns, each with its numbers and advice. Pure.

Means of the first and the last fifth of a run are compared, relative to the noise within them. So a short or noisy run
gets no warning by chance. Iterations count as independent; they are correlated, which lowers the errors that are
estimated here, and all limits leave room for that. A share that is too large in every iteration counts early.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from lightning_realloc.report.runs.charts import Json, finding, quantity
from lightning_realloc.report.runs.run_folder import RunFolder
from lightning_realloc.report.runs.series import Series, Values

MIN_POINTS = 30
"""Points that a metric needs before a warning is given; fewer give warnings by chance."""
MIN_POINTS_LEVEL = 3
"""Points from which a share gets a warning if all of them are too large; fewer are those of a warm-up."""
MIN_POINTS_FLAT = 100
"""Points before a reward counts as flat: a policy hardly moves in fewer iterations."""
FIFTH = 0.2
"""Share of the run at its start and at its end whose means are compared."""
NOTICEABLE_ERRORS, CLEAR_ERRORS = 2.0, 5.0
"""Standard errors of a difference: below the first it is noise, above the second it is certain despite correlation."""
SOLVED_GROUPS = 0.5
"""Share of groups with equal rewards at which a flat reward is put down to them instead."""
COLLAPSED_SHARE, COLLAPSED_NATS = 0.2, 0.15
"""Entropy has collapsed below this share of its start and this many nats per token. Random text of a language model
has 1 to 3 nats, trained reasoning models 0.2 to 0.5; Cui et al. (arXiv:2505.22617) see no further learning near 0."""
RUNAWAY_NATS, RUNAWAY_GROWTH = 0.1, 3.0
"""KL per token runs away above this many nats, if it has grown this many times since the middle of the run. It always
grows from 0 at the start, so the middle counts; published runs end at 0.001 to 0.05 nats."""
FAR_NATS = 1.0
"""KL per token at which the actor writes other text than the reference, however it came there."""
MIN_SKIPPED, SKIPPED_SHARE = 3, 0.02
"""Skipped optimizer steps, in all and per iteration, from which a warning is given: fp16 skips one or two at first."""
EQUAL_GROUPS = 0.7
"""Share of groups without differing rewards above which most of the rollout teaches nothing."""
TRUNCATED_SHARE = 0.3
"""Share of truncated responses above which the limit, not the actor, ends many."""
LONGER_FACTOR = 2.0
"""Growth of responses that counts as an explosion if the reward does not rise with it."""
SHORTER_SHARE = 0.25
"""Share of their first length to which responses have collapsed if the reward does not rise with it."""
FAILED_REWARDS = 0.05
"""Share of samples without a reward above which the reward function needs attention."""

Metrics = Mapping[str, Series]


def find_unusual(run: RunFolder) -> list[Json]:
    """Return the warnings that apply to a run, its failure first."""
    return [*_failure(run), *(one for check in _CHECKS for one in check(run.metrics))]


def errors_apart(first: Values, last: Values) -> float:
    """Return the difference of two means in units of its standard error; 0 for equal constants."""
    error = math.sqrt(sum(part.var(ddof=1) / len(part) for part in (first, last) if len(part) > 1))
    difference = float(last.mean() - first.mean())
    if error < 1e-12:
        return 0.0 if abs(difference) < 1e-12 else math.copysign(math.inf, difference)
    return difference / error


def _ends(series: Series | None, min_points: int = MIN_POINTS) -> tuple[Values, Values] | None:
    """Return the first and the last fifth, None if there are too few points."""
    if series is None or len(series.finite().steps) < min_points:
        return None
    return series.part(0.0, FIFTH), series.part(1.0 - FIFTH, 1.0)


def _level(series: Series | None) -> tuple[float, str] | None:
    """Return the share that a metric has reached and its period in words: the last fifth, or all of a short run."""
    if (ends := _ends(series)) is not None:
        return float(ends[1].mean()), "in the last fifth of the run"
    values = () if series is None else series.finite().values
    if len(values) < MIN_POINTS_LEVEL:
        return None
    return float(min(values)), f"(or more) in each of {len(values)} iterations"


def num_if_short(metrics: Metrics) -> int | None:
    """Return the iterations of a run that is too short for most warnings; None for a longer one."""
    number = max((len(series.finite().steps) for series in metrics.values()), default=0)
    return number if number < MIN_POINTS else None


def _reward(metrics: Metrics) -> Series | None:
    """Return the reward without penalties for divergence, which shorter responses lower by themselves."""
    return metrics.get("score", metrics.get("reward"))


def _failure(run: RunFolder) -> Iterator[Json]:
    for event in run.record.last.events if run.record is not None else ():
        error = getattr(event, "error", None)
        if error:
            advice = "The log of the rank that failed first names the cause; resume from the newest checkpoint."
            yield finding("failed", f"The run ended with an error: {error}", advice)


def _not_finite(metrics: Metrics) -> Iterator[Json]:
    for name, series in metrics.items():
        broken = ~np.isfinite(series.values)
        if broken.any() and name.endswith(("loss", "grad_norm", "reward")):
            text = f"{name} is not finite in {broken.sum()} iterations, first in {series.steps[broken][0]:.0f}."
            yield finding("not-finite", text, "Lower the learning rate, or train in bf16 or fp32 instead of fp16.")


def _flat_reward(metrics: Metrics) -> Iterator[Json]:
    ends = _ends(_reward(metrics), MIN_POINTS_FLAT)
    if ends is None:
        return
    first, last = ends
    name = "reward before penalties (score)" if "score" in metrics else "reward"
    apart, numbers = errors_apart(first, last), f"from {first.mean():.4g} to {last.mean():.4g}"
    if apart < -CLEAR_ERRORS:
        text = f"The {name} falls, {numbers} (first to last fifth of the run, {-apart:.0f} standard errors)."
        yield finding("reward-falls", text, "Lower the learning rate, or raise kl_coef; compare with val/reward.")
    elif abs(apart) < NOTICEABLE_ERRORS and not _is_solved(metrics):
        text = f"The {name} is flat: {numbers}, within {NOTICEABLE_ERRORS:.0f} standard errors of its noise."
        advice = (
            "Read some responses (RolloutTable): the reward may miss right answers. Else raise the learning rate or n, "
            "or use easier prompts."
        )
        yield finding("reward-flat", text, advice)


def _is_solved(metrics: Metrics) -> bool:
    """Return whether the reward stays because most groups have equal rewards, for which there is another warning."""
    ends = _ends(metrics.get("frac_reward_zero_std"))
    return ends is not None and ends[1].mean() > SOLVED_GROUPS


def _entropy_collapse(metrics: Metrics) -> Iterator[Json]:
    for name, series in metrics.items():
        ends = _ends(series) if name.rpartition("/")[2] == "entropy" else None
        if ends is None:
            continue
        first, last = (float(part.mean()) for part in ends)
        if last < COLLAPSED_NATS and last < COLLAPSED_SHARE * first:
            text = f"{name} collapses: from {first:.3g} to {last:.3g} nats per token, the actor hardly explores."
            advice = "Set entropy_coef, raise the temperature or the upper clip range, or lower the learning rate."
            yield finding("entropy-collapse", text, advice)


def _kl_runaway(metrics: Metrics) -> Iterator[Json]:
    for name, series in metrics.items():
        ends = _ends(series) if name in ("actor/kl", "kl_k3") else None
        if ends is None:
            continue
        tokens = metrics.get("response_length") if name == "kl_k3" else None  # which is a sum over a response
        per_token = 1.0 if tokens is None else 1.0 / max(1.0, tokens.final_mean())
        middle, last = (per_token * float(part.mean()) for part in (series.part(0.4, 0.6), ends[1]))
        if last > RUNAWAY_NATS and last > RUNAWAY_GROWTH * max(middle, 0.0):
            text = f"{name} runs away: {middle:.3g} in the middle of the run, {last:.3g} nats per token at its end."
            advice = "Raise kl_coef or lower the learning rate; the actor leaves the text that the reference writes."
            yield finding("kl-runaway", text, advice)
        elif last > FAR_NATS:
            text = f"{name} is {last:.3g} nats per token at the end: the actor is far from its reference."
            advice = "Check that the reference is the model that training began with; else raise kl_coef."
            yield finding("kl-far", text, advice)


def _skipped_steps(metrics: Metrics) -> Iterator[Json]:
    for name, series in metrics.items():
        if not name.endswith("/skipped_steps"):
            continue
        values = series.finite().values
        skipped = float(values.sum())
        if skipped >= MIN_SKIPPED and skipped > SKIPPED_SHARE * len(values):
            text = f"{name}: {skipped:.0f} optimizer steps in {len(values)} iterations were skipped for their gradient."
            yield finding("skipped-steps", text, "Lower the learning rate, or train in bf16 instead of fp16.")


def _equal_groups(metrics: Metrics) -> Iterator[Json]:
    level = _level(metrics.get("frac_reward_zero_std"))
    if level is None or level[0] <= EQUAL_GROUPS:
        return
    reward = _reward(metrics)
    at = "" if reward is None else f", at a mean reward of {reward.final_mean():.3g}"
    text = f"{quantity(level[0], 'share')} of the groups {level[1]} have equal rewards and teach nothing{at}."
    advice = "Use prompts that are solved sometimes, raise n or the temperature, or set dynamic_sampling."
    yield finding("equal-groups", text, advice)


def _truncated(metrics: Metrics) -> Iterator[Json]:
    level = _level(metrics.get("stopped/length"))
    if level is not None and level[0] > TRUNCATED_SHARE:
        text = f"{quantity(level[0], 'share')} of the responses {level[1]} reach max_new_tokens."
        advice = "Raise max_new_tokens, ask for shorter answers, or check that the model ends its responses (EOS)."
        yield finding("truncated", text, advice)


def _length_change(metrics: Metrics) -> Iterator[Json]:
    ends, rewards = _ends(metrics.get("response_length")), _ends(_reward(metrics))
    if ends is None or rewards is None or errors_apart(*rewards) >= NOTICEABLE_ERRORS:
        return
    first, last = (float(part.mean()) for part in ends)
    lengths = f"from {first:.3g} to {last:.3g} tokens"
    unmoved = f"and the reward does not rise with it ({rewards[0].mean():.4g} to {rewards[1].mean():.4g})."
    if last > LONGER_FACTOR * first and errors_apart(*ends) > CLEAR_ERRORS:
        advice = "Penalize length, set missing_eos_penalty, or average the loss over tokens instead of responses."
        yield finding("length-explosion", f"Responses grow {lengths}, {unmoved}", advice)
    elif last < SHORTER_SHARE * first and errors_apart(*ends) < -CLEAR_ERRORS:
        advice = (
            "Read some responses: the actor may end at once to escape a penalty. Set min_new_tokens, or lower the "
            "learning rate."
        )
        yield finding("length-collapse", f"Responses shrink {lengths}, {unmoved}", advice)


def _failed_rewards(metrics: Metrics) -> Iterator[Json]:
    for name, series in metrics.items():
        level = _level(series) if name.startswith("reward_failures/") else None
        if level is not None and level[0] > FAILED_REWARDS:
            text = f"{name.partition('/')[2]} gives no reward for {quantity(level[0], 'share')} of the samples."
            yield finding("failed-rewards", text, "The log names its errors; these samples are left out.")


_CHECKS: tuple[Callable[[Metrics], Iterator[Json]], ...] = (
    _not_finite,
    _flat_reward,
    _entropy_collapse,
    _kl_runaway,
    _skipped_steps,
    _equal_groups,
    _truncated,
    _length_change,
    _failed_rewards,
)
