"""What steps tell of drafts: what these come to, what steps take, and whether drafting pays.

Not every step is learnt from, and outcomes never right behind a forward, where the caches are full of weights and the
same takes twice as long: many steps are at once, before the next plan. Which ones, and for how many others each stands,
is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lightning_realloc.generation.speculative.acceptance import AcceptanceRates
from lightning_realloc.generation.speculative.draft_planner import PLAN_STEPS, TRY_STEPS, DraftPlanner
from lightning_realloc.generation.speculative.draft_step import DraftStep
from lightning_realloc.generation.speculative.draft_worth import Payoff
from lightning_realloc.generation.speculative.foresight import GOLDEN, DraftOutcome, Foresight
from lightning_realloc.generation.speculative.step_costs import LEAST_S, effective_tokens, look_ups_of

_SETTLED = 6
"""Plain steps in a row after which another one takes as long as it does among its like: right behind verifying ones it
takes up to a fifth longer."""
_FEW = 2
"""Samples that are learnt from in a step of all of them, and fewer in a step of fewer: each sample's outcomes are to
count alike, and not those most of samples that run with few others, late in their responses. One for every step made
the tokens of n-gram drafts for 32 samples look 3 to 7 % more than they were."""
_MANY = 8
"""The most of them: in the first `_MANY_STEPS` steps of an engine, since few drafts tell too little of what depths come
to (the second generation of 16 samples took four tokens ahead for 6 % more than they were), and in long steps."""
_MANY_STEPS = 64
_ALL_OF = 4
"""Samples of which a model's drafts are all told of: they are few, and each takes long."""
_PER_SECOND = 100
"""Samples that are learnt from in a step, for every second that a plain one takes: that takes 0.15 % as long."""
_FEWER = 4
"""Times fewer of a step at most: in a long tail it is still learnt."""
_MOST_TOGETHER = 2
"""Times fewer samples than at most, down to which it is told from a step how uneven they are: the last ones are drafted
for as no others are."""
_COUNTED_EVERY = 4
"""Steps of which one is counted to tell how uneven samples are."""
_FEW_STEPS = 256
"""Steps of an engine that are all learnt from; half as many are once drafting begins anew, and from two samples each.
Behind those one sample tells enough of look-ups."""
_TELLING_FOR = 8
"""Steps in a row that are learnt from, or are not."""
_FREE_TRIES = 5
"""Behind the first generation, whatever they lose: it says too little of what steps take."""
_RESTED = 24
"""Plain steps in a row that are all learnt from: more than a pause has."""


class DraftLearner:
    """Learns from steps as they run, for one engine.

    Args:
        planner: Whose costs, depth profile and unevenness learn.
        payoff: Learns what drafting gained; it is learnt from more steps while that is in doubt.
        foresight: Learns what it may spend, from the seconds of steps without drafts.
        costs_a_forward: Whether a token ahead takes a forward of a model.
        agree: Where ranks share a tensor-parallel model: returns the first one's numbers; None: this rank's own count.
    """

    def __init__(
        self,
        planner: DraftPlanner,
        payoff: Payoff,
        foresight: Foresight,
        *,
        costs_a_forward: bool,
        agree: Callable[[Sequence[float]], Sequence[float]] | None,
    ) -> None:
        self.rates = AcceptanceRates()
        self.most_rows = 0
        """Most samples that ran at a time in this generation."""
        self._planner = planner
        self._payoff = payoff
        self._foresight = foresight
        self._costs_a_forward = costs_a_forward
        self._agree = agree
        self._last: DraftStep | None = None
        """The last step whose drafts were learnt from."""
        self._untaught: list[DraftStep] = []
        """Steps whose drafts are learnt from before the next plan."""
        self._untold: list[DraftStep] = []
        """Steps whose seconds are, once they are agreed on."""
        self._is_first = True
        """Whether this is the first generation, or before it."""
        self._num_steps = 0
        self._num_plain = 0
        """Steps in a row that verified nothing."""
        self._num_not_told = 0
        """Plain ones of them since the last one that was told of."""
        self._num_drafted = 0
        """Steps that verified something since there were many in a row that did not."""

    def begin(self) -> None:
        """A generation starts."""
        self.most_rows = 0

    def begin_step(self, step: DraftStep) -> None:
        """Take that a step begins."""
        self._num_steps = step.number
        self.most_rows = max(self.most_rows, len(step.running))

    def keep_outcome(self, step: DraftStep) -> None:
        """Take a step that ended, to learn later what its drafts came to."""
        step.drafted_before = not self._num_plain
        if any(step.lengths):
            self._num_drafted = 1 if self._num_plain > _RESTED else self._num_drafted + 1
            self._num_plain = 0
        else:
            self._num_plain += 1
        step.is_settled = self._num_plain > _SETTLED
        step.is_told = self._is_telling(step)
        if step.drafts and (step.is_told or (self._costs_a_forward and len(step.running) <= _ALL_OF)):
            step.drafts = [draft.without_laws() for draft in step.drafts]
            self._untaught.append(step)

    def keep_seconds(self, step: DraftStep) -> bool:
        """Take a step whose seconds are known; return whether it is time to learn from those that were kept."""
        is_alone = self._agree is None
        if is_alone and not step.is_told:
            if step.depth:
                self._planner.costs.take_preparing(step.preparing_s)
            else:
                self._num_not_told += 1
            return False
        if not step.depth:
            step.stands_for, self._num_not_told = 1 + self._num_not_told, 0
        self._untold.append(step)
        # Ranks agree on several at once; what may not pay is judged step by step.
        most = 3 * PLAN_STEPS if is_alone else PLAN_STEPS
        return len(self._untold) >= most or (is_alone and self._is_doubtful(step))

    def learn_before_plan(self) -> None:
        """Learn from all that was kept; ranks that agree on seconds do so in other steps, all in the same ones."""
        self.learn_outcomes()
        if self._agree is None:
            self.learn_seconds()

    def end(self) -> None:
        """End the generation."""
        self.learn_outcomes()
        self._planner.unevenness.end_generation()
        if self._is_first and self.most_rows:  # when code and kernels ran for the first time
            self._is_first = False
            if not self._costs_a_forward:
                self._planner.costs.doubt()
                self._payoff.allow(_FREE_TRIES * TRY_STEPS)

    def teach(self, outcomes: Iterable[DraftOutcome]) -> None:
        """Learn from what drafts came to, or would have."""
        for outcome in outcomes:
            outcome.teach(self.rates, self._planner.profile)

    def learn_outcomes(self) -> None:
        """Learn from what drafts came to since the last time."""
        for step in self._untaught:
            rows = range(len(step.drafts)) if step.looks or step.is_try else self._some(step, self._num_told_of(step))
            self.teach(step.outcome(row, self._last) for row in rows)
            self._last = step
            is_even = _MOST_TOGETHER * len(step.running) >= self.most_rows
            if is_even and step.number % _COUNTED_EVERY == 1 and any(step.lengths):
                self._planner.unevenness.count(step.running, step.emitted)
        self._untaught.clear()

    def learn_seconds(self) -> None:
        """Learn from what the steps that were kept took. Collective where ranks have to agree."""
        seconds = [
            value for step in self._untold for value in (step.seconds, step.drafting_s, step.preparing_s, step.first_s)
        ]
        # No less than 0, where a clock went back.
        agreed = iter([max(value, 0.0) for value in (seconds if self._agree is None else self._agree(seconds))])
        looked_up_s = num_look_ups = rows_of_look_ups = 0.0
        of_steps = zip(agreed, agreed, agreed, agreed, strict=True)
        for step, (measured_s, drafting_s, preparing_s, first_s) in zip(self._untold, of_steps, strict=True):
            step_s = max(measured_s, LEAST_S)
            if step.is_try and step.depth:
                self._payoff.take_try(step.gained_s(), step_s + drafting_s + preparing_s)
            elif step.depth and not step.num_missed:  # what is missed is read once, however long drafting goes on
                # What prepares many steps is spread over them: else the first ones of a generation would not pay.
                shared_s = self._planner.costs.take_preparing(preparing_s)
                self._payoff.learn(len(step.running), step.gained_s(), step_s + drafting_s + shared_s)
            elif not step.depth:
                self._foresight.spend(drafting_s, step.stands_for * step_s)
                self._payoff.save(len(step.running), step_s, num_steps=step.stands_for)
            self._learn_step_cost(step, step_s)
            if self._costs_a_forward:
                self._learn_drafting_cost(step, drafting_s, first_s)
            elif step.drafted_before and step.drafts:
                looked_up_s += drafting_s
                own = look_ups_of(len(step.running), sum(map(len, step.drafts)))
                num_look_ups += own
                rows_of_look_ups += own * len(step.running)
        if num_look_ups:
            self._planner.costs.drafting.observe(rows_of_look_ups / num_look_ups, looked_up_s / num_look_ups)
        self._untold.clear()

    def _learn_step_cost(self, step: DraftStep, step_s: float) -> None:
        """Learn what reading so many tokens takes."""
        costs, num_rows = self._planner.costs, len(step.running)
        if any(step.lengths):
            if not step.drafted_before and costs.verifying.known:
                return  # it pays for the change
            size = effective_tokens(num_rows, num_rows + sum(step.lengths), max(step.lengths))
            costs.verifying.observe(size, step_s)
        elif step.is_settled or not costs.plain.knows(num_rows):
            costs.plain.observe(num_rows, step_s)

    def _learn_drafting_cost(self, step: DraftStep, drafting_s: float, first_s: float) -> None:
        """Learn what drafting so many tokens takes a model."""
        costs, num_rows = self._planner.costs, len(step.running)
        drafted = [len(draft) for draft in step.drafts]
        if not any(drafted):
            return
        further = max(drafted) - 1
        if further:
            costs.drafting.observe(num_rows, (drafting_s - first_s) / further)
        if step.num_missed:
            costs.catching_up.observe(step.num_missed, first_s - costs.first_s(num_rows))
        elif step.drafted_before:
            costs.first.observe(num_rows, first_s)

    # ---- which steps are told of
    def _is_telling(self, step: DraftStep) -> bool:
        """Return whether it is learnt from this step: half of them say enough where drafting pays, and a quarter where
        it rests for long."""
        if self._is_new or step.looks or step.is_try or step.num_missed:
            return True
        num_rows, turn = len(step.running), step.number // _TELLING_FOR
        if step.depth:
            return not turn % 2 or not self._payoff.pays(num_rows)
        return not turn % 4 or self._num_plain <= _RESTED or step.drafting_s > 0.0 or self._is_doubtful(step)

    @property
    def _is_new(self) -> bool:
        """Whether little is known: of steps, or of what drafts come to by now."""
        return self._num_steps < _FEW_STEPS or (not self._num_plain and self._num_drafted < _FEW_STEPS // 2)

    def _is_doubtful(self, step: DraftStep) -> bool:
        """Return whether the next step depends on what this one took."""
        num_rows = len(step.running)
        return self._payoff.is_doubtful(num_rows) if step.depth else not self._planner.costs.plain.knows(num_rows)

    def _num_told_of(self, step: DraftStep) -> int:
        """Return how many samples are learnt from in a step of all of them."""
        if step.number < _MANY_STEPS:
            return _MANY
        least = _FEW if self._is_new or self._costs_a_forward else 1
        # Not by the seconds that it took here: ranks have to learn alike.
        step_s = self._planner.costs.plain.seconds(len(step.running))
        return max(least, min(int(_PER_SECOND * step_s), _MANY))

    def _some(self, step: DraftStep, most: int) -> range:
        """Return samples to learn from in this step, ``most`` of them if all run, others in every step."""
        num_rows = len(step.running)
        return _spread(step.number, num_rows, -(-min(self.most_rows, _FEWER * num_rows) // most))


def _spread(step: int, num_rows: int, stride: int) -> range:
    """Return one sample of every ``stride``, others in every step; now and then none where there are fewer.

    What is done every so many steps must not see the same ones each time: multiples of the golden ratio spread evenly
    whichever of them are taken.
    """
    return range(int(stride * (step * GOLDEN % 1.0)), num_rows, stride)
