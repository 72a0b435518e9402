"""Choice of the draft depth: the most expected tokens per second, and zero where drafting does not pay.

The controller learns exponentially weighted acceptance per depth, and the seconds of a step as a line
``a + b * tokens`` for each bucket of rows (powers of two). It probes depths that are not in use for a few steps, since
their estimates grow old. The wait before a probe grows with its cost, and doubles whenever a probe changes nothing.

Pure: seconds and outcomes are arguments. Ranks of a tensor-parallel group that pass the same numbers decide alike.

Source of the objective: RLHFSpec (arXiv:2512.04752), expected accepted tokens against measured verification cost.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

FIRST_DEPTHS = ((1, 8), (4, 4), (math.inf, 2))
"""(most rows, depth): depths of the first drafts. Deeper ones lose more where drafts are rejected."""
SETTLING_STEPS = 3
"""Steps after a change between plain and drafted ones whose seconds are ignored, since caches are cold."""
MEMORY = 0.99
"""Factor on the weight of an observation per step. Closer to 1: less noise, and slower to follow the policy."""
MIN_WEIGHT = 4.0
"""Weight of priors and of old observations, in observations. Larger: a probe changes estimates less."""
FIRST_ACCEPTANCE = 0.8
"""Acceptance of the first drafted token before any is verified. Larger: deeper first drafts."""
MAX_SURPRISE = 1.5
"""Factor by which one step may differ from its expected seconds. Larger: a hiccup of the machine counts more."""
PACE_RATE = 0.05
"""Share of a step's deviation that is taken for a change of the machine, which slows steps of all sizes."""
SPREAD_OF_LAST = 6.0
"""Squared deviations by which the last of n samples is behind, over log(n). Larger: shallower drafts for many rows."""
MIN_GAIN = 0.04
"""Share by which drafting must beat plain steps, and twice what a change of depth must gain. Larger: less noise."""
REVIEW_STEPS = 8
"""Steps for which a choice holds, and steps of a probe. Larger: cheaper, and later to react."""
PROBE_SHARE = 0.005
"""Share of all seconds that probes of one kind may lose. Larger: changes of drafts and machine are seen earlier."""
MAX_BACKOFF = 4.0
"""Factor by which the wait before a probe may grow. Larger: cheaper, and later to see that drafts got better."""


def first_depth(num_rows: int) -> int:
    """Return the depth of the first drafts for so many rows."""
    return next(depth for rows, depth in FIRST_DEPTHS if num_rows <= rows)


class DraftOutcome(NamedTuple):
    """Result of one sample's draft."""

    limit: int
    """Most tokens that the draft was allowed to have."""
    num_drafted: int
    """Drafted tokens."""
    num_accepted: int
    """Tokens that the target accepted."""


class MeasuredStep(NamedTuple):
    """Size, seconds and drafts of one step."""

    number: int
    """Number of the step, from `DepthController.num_steps`."""
    num_rows: int
    """Running samples."""
    depth: int
    """Depth from `DepthController.decide`; 0: a plain step."""
    num_drafted: int
    """Drafted tokens that the step verified."""
    seconds: float = 0.0
    """Seconds of forward and verification."""
    drafting_s: float = 0.0
    """Seconds of drafting."""
    num_unread: int = 0
    """Tokens that the drafter had missed and read before drafting."""
    is_measured: bool = True
    """Whether other steps of its size will take about as long."""
    outcomes: Sequence[DraftOutcome] = ()
    """Results of all drafts; empty in a plain step."""


class AcceptanceByDepth:
    """Exponentially weighted acceptance of drafted tokens, by their place in the draft.

    A place that no draft reached is taken to be accepted as often as the place before it.
    """

    def __init__(self, max_depth: int) -> None:
        """Start with the priors for places 1 to ``max_depth``."""
        self._counts = [[0.0] * (max_depth + 1) for _ in range(4)]
        """Weighted drafts by the last place that was accepted, that was tried, that was drafted, that was allowed."""
        accepted, tried, _, _ = self._counts  # a prior that fades as drafts do
        accepted[1], tried[1] = FIRST_ACCEPTANCE * MIN_WEIGHT, MIN_WEIGHT
        self._last_step = 0
        self.tokens: list[float] = []
        """Expected tokens of a sample's step, the accepted ones and one more, by depth from 0."""
        self.drafted: list[float] = []
        """Expected length of a draft by depth from 0."""
        self.spread: list[float] = []
        """Standard deviation of a sample's tokens in a step by depth from 0."""
        self.estimate()

    def learn(self, outcomes: Sequence[DraftOutcome], step: int) -> None:
        """Learn from the drafts of one step."""
        keep = MEMORY ** (step - self._last_step)
        self._last_step = step
        weight = sum(self._counts[3])
        keep = max(keep, min(1.0, 4 * MIN_WEIGHT / weight)) if weight else 1.0  # one draft tells less than one step
        accepted, tried, drafted, allowed = self._counts = [[keep * n for n in own] for own in self._counts]
        for limit, num_drafted, num_accepted in outcomes:
            accepted[num_accepted] += 1.0
            tried[min(num_accepted + 1, limit)] += 1.0
            drafted[num_drafted] += 1.0
            allowed[limit] += 1.0

    def estimate(self) -> None:
        """Compute the expected tokens and lengths of all depths."""
        accepted, tried, drafted, allowed = (list(accumulate(own[:0:-1]))[::-1] for own in self._counts)
        chance, survival, reach = accepted[0] / tried[0], 1.0, 1.0
        tokens, lengths, squares, spread = [1.0], [0.0], 1.0, [0.0]
        for place in range(len(accepted)):
            chance = (accepted[place] + MIN_WEIGHT * chance) / (tried[place] + MIN_WEIGHT)
            reach = min(reach, (drafted[place] + reach) / (allowed[place] + 1.0))
            survival *= chance
            tokens.append(tokens[-1] + survival)
            lengths.append(lengths[-1] + reach)
            squares += survival * (2 * place + 3)
            spread.append(math.sqrt(max(squares - tokens[-1] ** 2, 0.0)))
        self.tokens, self.drafted, self.spread = tokens, lengths, spread


@dataclass(slots=True)
class CostLine:
    """Exponentially weighted least squares of seconds on a size."""

    weight: float = 0.0
    """Weighted number of observations."""
    mean_s: float = 0.0
    mean_size: float = 0.0
    _var: float = 0.0
    _cov: float = 0.0
    _last_step: int = 0

    def observe(self, size: float, seconds: float, step: int) -> None:
        """Learn from one step; drop hiccups among the first ones, those far above another one."""
        if self.weight < MIN_WEIGHT:
            if seconds * MAX_SURPRISE < self.mean_s:
                self.weight = self._var = self._cov = 0.0
            elif self.weight:
                seconds = min(seconds, MAX_SURPRISE * self.mean_s)
        kept = self.weight * MEMORY ** (step - self._last_step)
        self._last_step = step
        self.weight = max(kept, min(self.weight, MIN_WEIGHT)) + 1.0
        rate = 1.0 / self.weight
        size_off, seconds_off = size - self.mean_size, seconds - self.mean_s
        self.mean_size += rate * size_off
        self.mean_s += rate * seconds_off
        self._var += rate * ((1.0 - rate) * size_off * size_off - self._var)
        self._cov += rate * ((1.0 - rate) * size_off * seconds_off - self._cov)

    def through(self, size: float, seconds: float) -> tuple[float, float]:
        """Return ``a`` and ``b >= 0`` of ``a + b * size``; this point counts as one observation of the slope."""
        span = self.mean_size - size
        squares = self.weight * self._var + span * span
        if squares <= 0.0:
            return self.mean_s, 0.0
        slope = max((self.weight * self._cov + span * (self.mean_s - seconds)) / squares, 0.0)
        return self.mean_s - slope * self.mean_size, slope


@dataclass(slots=True)
class _Costs:
    """Cost lines of one bucket of rows; seconds are divided by the pace of the machine."""

    plain: CostLine = field(default_factory=CostLine)
    """Plain steps by rows."""
    verifying: CostLine = field(default_factory=CostLine)
    """Forward and verification of steps with drafts, by all tokens that they read."""
    by_depth: dict[int, CostLine] = field(default_factory=lambda: defaultdict(CostLine))
    """As ``verifying``, by depth, since seconds may leap where another kernel takes over."""
    drafting: CostLine = field(default_factory=CostLine)
    """Drafting by tokens per row."""

    def plain_s(self, num_rows: int) -> float:
        """Return the seconds of a plain step."""
        fixed_s, row_s = self._plain_line()
        return max(fixed_s + row_s * num_rows, 1e-9)

    def steps_s(self, num_rows: int, drafted: list[float]) -> list[float]:
        """Return the seconds of a step by depth, from 0, for expected lengths of drafts; none beats a plain step."""
        plain_s = self.plain_s(num_rows)
        if not self.verifying.weight:
            return [plain_s] * len(drafted)
        fixed_s, token_s = self.verifying.through(num_rows, plain_s)
        first_s, draft_s = self.drafting.through(0.0, 0.0)
        seconds = [plain_s]
        for depth in range(1, len(drafted)):
            size = num_rows * (1.0 + drafted[depth])
            step_s = fixed_s + token_s * size
            own = self.by_depth[depth]
            own_s, own_token_s = own.through(num_rows, plain_s)
            step_s += own.weight / (own.weight + 1.0) * (own_s + own_token_s * size - step_s)
            seconds.append(max(step_s, plain_s) + max(first_s + draft_s * drafted[depth], 0.0))
        return seconds

    def observe_draft(self, step: MeasuredStep, paced_s: float, pace: float) -> None:
        """Learn from a step that verified drafts, with its seconds over the pace."""
        size = step.num_rows + step.num_drafted
        self.verifying.observe(size, paced_s, step.number)
        self.by_depth[step.depth].observe(size, paced_s, step.number)
        length, drafting_s = step.num_drafted / step.num_rows, step.drafting_s / pace
        if self.drafting.weight >= MIN_WEIGHT:
            fixed_s, token_s = self.drafting.through(0.0, 0.0)
            drafting_s = min(drafting_s, MAX_SURPRISE * (fixed_s + token_s * length))
        self.drafting.observe(length, drafting_s, step.number)

    def fixed_share(self, num_rows: int) -> float:
        """Return the share of a plain step's seconds that does not depend on the number of rows."""
        return min(max(self._plain_line()[0] / self.plain_s(num_rows), 0.0), 1.0)

    def _plain_line(self) -> tuple[float, float]:
        """Return ``a`` and ``b`` of plain steps; a step of no rows is taken to cost half of the mean."""
        return self.plain.through(0.0, 0.5 * self.plain.mean_s)


@dataclass(slots=True)
class _Choice:
    """Depth in use for one bucket of rows, and its probes."""

    depth: int = -1
    """Depth in use; -1: none was chosen yet."""
    held: int = 0
    """Depth of the next steps: that in use, or that of a probe."""
    steps_left: int = 0
    """Steps until the next review."""
    probe_kind: str = ""
    """Kind of the running probe; empty: none."""
    probe_steps_left: int = 0
    last: dict[str, int] = field(default_factory=dict)
    """Kind of probe -> step from which the wait for the next one counts."""
    backoff: dict[str, float] = field(default_factory=dict)
    """Kind of probe -> factor of the wait before the next one."""

    def hold(self, depth: int, num_steps: int) -> int:
        """Use a depth for so many steps, the next one included."""
        self.held, self.steps_left = depth, num_steps - 1
        return depth

    def choose(self, depth: int, step: int) -> None:
        """Use a depth from this step on; a probe that changed nothing doubles its wait."""
        kind, self.probe_kind = self.probe_kind, ""
        if depth != self.depth:
            self.last.clear()
            self.backoff.pop(kind, None)
        elif kind:
            self.last[kind] = step
            self.backoff[kind] = min(2.0 * self.wait_factor(kind), MAX_BACKOFF)
        self.depth = depth

    def wait_factor(self, kind: str) -> float:
        """Return the factor on the wait before a probe; the first one of plain steps, measured long ago, is early."""
        return self.backoff.get(kind, 1.0 / MAX_BACKOFF if kind == "plain" else 1.0)


class DepthController:
    """Decides the draft depth of every step. One per engine: its estimates outlive a generation.

    Example::

        controller = DepthController(max_depth=8)
        depth = controller.held_depth(num_rows=4)
        if depth is None:
            depth = controller.decide(num_rows=4)
        ...  # draft, verify
        controller.record(MeasuredStep(controller.num_steps, 4, depth, num_drafted=16, seconds=0.02, drafting_s=0.001))
    """

    def __init__(self, max_depth: int) -> None:
        """Choose among 0, the powers of two and ``max_depth``."""
        self._depths = sorted({min(1 << power, max_depth) for power in range(max_depth.bit_length() + 1)})
        """Depths above 0 to choose from; few, so that each is measured often."""
        self._costs: dict[int, _Costs] = defaultdict(_Costs)
        """Bucket of rows -> cost lines."""
        self._acceptance = {seen: AcceptanceByDepth(max_depth) for seen in (False, True)}
        """Whether prompts were seen before -> acceptance."""
        self._choices: dict[tuple[bool, int], _Choice] = defaultdict(_Choice)
        """(Whether prompts were seen before, bucket of rows) -> depth in use."""
        self._seen_prompts = False
        self._pace = 1.0
        """Seconds of a step now, over those of a first step of the same size."""
        self._unread = (0.0, 0.0)
        """Missed tokens that the drafter read, and the seconds for them; each observation halves the earlier ones."""
        self._streak = 0
        """Measured steps in a row of the last one's kind: positive for drafted steps, negative for plain ones."""
        self.num_steps = 0
        """Steps begun."""

    def begin(self, *, seen_prompts: bool) -> None:
        """Start a generation. Drafts for prompts seen before are better at once, and are learnt apart."""
        self._seen_prompts = seen_prompts
        for choice in self._choices.values():
            choice.probe_kind, choice.steps_left = "", 0

    def held_depth(self, num_rows: int, *, may_probe: bool = True) -> int | None:
        """Begin a step; return the depth that still holds for it, None where `decide` has to be called.

        ``may_probe``: whether the step may belong to a probe; False where it is not measured.
        """
        self.num_steps += 1
        choice = self._choices[self._seen_prompts, _bucket(num_rows)]
        if not may_probe and choice.probe_kind:
            return max(choice.depth, 0)
        choice.steps_left -= 1
        return None if choice.steps_left < 0 else choice.held

    def decide(
        self,
        num_rows: int,
        *,
        num_unread: int = 0,
        remaining_tokens: float = math.inf,
        horizon: float = math.inf,
        may_probe: bool = True,
    ) -> int:
        """Return the depth of this step and the next ones; 0: plain steps.

        Args:
            num_unread: Tokens that the drafter missed and would have to read first.
            remaining_tokens: Expected tokens to come of the longest sample.
            horizon: Expected length of its response; infinite if other samples wait for its slot.
            may_probe: Whether a probe, or the first drafts for so many rows, may begin.
        """
        bucket, acceptance = _bucket(num_rows), self._acceptance[self._seen_prompts]
        costs, choice = self._costs[bucket], self._choices[self._seen_prompts, bucket]
        is_new = costs.verifying.weight < MIN_WEIGHT
        if costs.plain.weight < MIN_WEIGHT or (is_new and not may_probe):
            return choice.hold(0, 1)
        acceptance.estimate()
        steps_s = costs.steps_s(num_rows, acceptance.drafted)
        slack = costs.fixed_share(num_rows) * math.sqrt(SPREAD_OF_LAST * math.log(num_rows) / max(horizon, 1.0))
        speeds = [
            tokens / (step_s * (1.0 + slack * spread / math.sqrt(tokens)))
            for tokens, spread, step_s in zip(acceptance.tokens, acceptance.spread, steps_s, strict=True)
        ]
        if choice.probe_kind and self._continues_probe(choice, speeds):
            return choice.hold(choice.held, min(2, choice.probe_steps_left))
        depths = [depth for depth in self._depths if not is_new or depth == 1 or depth <= first_depth(num_rows)]
        best = _fastest(speeds, depths, choice.depth)
        read, reading_s = self._unread[0], self._unread[1] / self._pace
        if not read:  # as long as for drafting
            read, reading_s = num_rows * (1.0 + costs.drafting.mean_size), costs.drafting.mean_s
        catch_up_s = num_unread * reading_s / read
        if best and catch_up_s:
            saved_s = remaining_tokens * (1.0 / speeds[0] - 1.0 / speeds[best])
            best = best if catch_up_s < saved_s else 0
        choice.choose(best, self.num_steps)
        probe = self._due_probe(choice, depths, speeds, steps_s, catch_up_s) if may_probe else None
        if probe is not None:
            return choice.hold(probe, 2)
        if not best:  # nothing but a probe can change that
            return choice.hold(0, 4 * REVIEW_STEPS)
        return choice.hold(best, 1 if is_new else REVIEW_STEPS)

    def record(self, step: MeasuredStep) -> None:
        """Learn from a step; steps are recorded in order, and may be left out."""
        if step.outcomes:
            self._acceptance[self._seen_prompts].learn(step.outcomes, step.number)
        if not step.is_measured:
            return
        is_drafted, rows, costs = step.num_drafted > 0, step.num_rows, self._costs[_bucket(step.num_rows)]
        self._streak = max(self._streak, 0) + 1 if is_drafted else min(self._streak, 0) - 1
        if step.num_unread:
            self._learn_unread(step, costs)
        elif abs(self._streak) <= SETTLING_STEPS:
            return
        elif is_drafted:
            own = costs.by_depth[step.depth]
            fixed_s, token_s = own.through(rows, costs.plain_s(rows))
            paced_s = self._paced(step.seconds, fixed_s + token_s * (rows + step.num_drafted), own)
            costs.observe_draft(step, paced_s, self._pace)
        else:
            paced_s = self._paced(step.seconds, costs.plain_s(rows), costs.plain)
            costs.plain.observe(rows, paced_s, step.number)
            if step.depth:  # nothing was found to draft
                costs.drafting.observe(0.0, step.drafting_s / self._pace, step.number)

    def _continues_probe(self, choice: _Choice, speeds: list[float]) -> bool:
        """Return whether the running probe has steps left; one of another depth ends early where it is far too slow."""
        choice.probe_steps_left -= 2
        is_far_too_slow = choice.held and choice.depth and speeds[choice.held] * MAX_SURPRISE <= speeds[choice.depth]
        return choice.probe_steps_left > 0 and not is_far_too_slow

    def _learn_unread(self, step: MeasuredStep, costs: _Costs) -> None:
        """Learn the seconds for which the drafter reads missed tokens, unless these are too few to tell from noise."""
        read, reading_s = self._unread
        if 4 * step.num_unread < read:
            return
        drafting_s = self._pace * costs.drafting.mean_s
        if not drafting_s:
            share = step.num_unread / (step.num_unread + step.num_rows + step.num_drafted)
            drafting_s = (1.0 - share) * step.drafting_s
        reading_s = 0.5 * reading_s + max(step.drafting_s - drafting_s, 0.0)
        self._unread = 0.5 * read + step.num_unread, reading_s

    def _paced(self, seconds: float, expected_s: float, line: CostLine) -> float:
        """Return a step's seconds over the pace, hiccups cut off; learn the pace where the line is known."""
        paced_s = seconds / self._pace
        if line.weight < MIN_WEIGHT or expected_s <= 0.0:
            return paced_s
        ratio = min(max(paced_s / expected_s, 1.0 / MAX_SURPRISE), MAX_SURPRISE)
        self._pace *= ratio**PACE_RATE
        return ratio * expected_s

    def _due_probe(
        self, choice: _Choice, depths: list[int], speeds: list[float], steps_s: list[float], catch_up_s: float
    ) -> int | None:
        """Begin a probe that is due, and return its depth; None: none is due."""
        depth = choice.depth
        kinds = {"draft": max(depths, key=speeds.__getitem__)}
        if depth:
            place = self._depths.index(depth)
            around = {"shallower": self._depths[:place][-1:], "deeper": self._depths[place + 1 :][:1]}
            kinds = {"plain": 0} | {kind: near[0] for kind, near in around.items() if near and near[0] in depths}
        for kind, probe in kinds.items():
            lost_s = REVIEW_STEPS * steps_s[probe] * max(1.0 - speeds[probe] / speeds[depth], MIN_GAIN)
            lost_s += 0.0 if depth else catch_up_s
            wait = lost_s / (PROBE_SHARE * steps_s[depth]) * choice.wait_factor(kind)
            if self.num_steps - choice.last.setdefault(kind, self.num_steps) >= wait:
                choice.probe_kind, choice.probe_steps_left = kind, REVIEW_STEPS
                return probe
        return None


def _fastest(speeds: Sequence[float], depths: Sequence[int], in_use: int) -> int:
    """Return the fastest of some depths: that in use if about as fast, 0 if none pays."""
    best = max(depths, key=speeds.__getitem__)
    if in_use in depths and speeds[best] < (1.0 + MIN_GAIN / 2) * speeds[in_use]:
        best = in_use
    margin = MIN_GAIN / 2 if in_use > 0 else MIN_GAIN
    return best if speeds[best] >= (1.0 + margin) * speeds[0] else 0


def _bucket(num_rows: int) -> int:
    """Return the bucket of a number of rows: 1, 2, 3 to 4, 5 to 8 and so on."""
    return (num_rows - 1).bit_length()
