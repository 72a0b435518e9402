"""Curriculum: prompts are drawn by the share of right answers that was measured when they were drawn before."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_realloc.errors import DataError, require_choice

CurriculumName = Literal["balanced", "rest"]
"""Names of curricula with their default constants."""


def _check(name: str, value: object, *, least: float, most: float = 1e9, why: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        limits = f"of at least {least:g}" if most >= 1e9 else f"between {least:g} and {most:g}"
        raise DataError(f"{name}={value!r} must be a number {limits}{why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """Draw prompts that are neither too easy nor too hard, by what was measured of them before.

    A prompt's share is its mean reward, scaled to 0 (all wrong) to 1 (all right). Prompts without a share come first.
    """

    target: float = 0.5
    """Share of prompts that are drawn most often."""
    spread: float = 0.25
    """Distance from the target, as a standard deviation, at which prompts are drawn less often; infinity: never."""
    solved: float = 1.0
    """Smallest share of a solved prompt, which rests."""
    hopeless: float = 0.0
    """Largest share of a hopeless prompt, which rests."""
    rest: float = 1.0
    """Length of a rest, in passes over the data: as many batches as hold all rows once."""
    rest_growth: float = 2.0
    """Factor of the rest if a prompt is found solved again, or hopeless again."""
    max_rest: float = 8.0
    """Longest rest, in passes over the data."""
    revisit: float = 0.1
    """Share of a batch that is kept for the prompts drawn longest ago, resting ones included."""
    new: float = 1.0
    """Share of a batch that new prompts get, while there are any."""
    min_responses: int = 4
    """Responses that a share is measured over; smaller groups are joined with earlier ones of their prompt."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """Rewards of a wrong and of a right response, which become 0 and 1."""

    def __post_init__(self) -> None:
        low, high = self._checked_range()
        object.__setattr__(self, "reward_range", (low, high))
        for name in ("target", "solved", "hopeless", "revisit", "new"):
            _check(name, getattr(self, name), least=0.0, most=1.0)
        _check("spread", self.spread, least=1e-3, most=math.inf)
        _check("rest", self.rest, least=0.0)
        _check("rest_growth", self.rest_growth, least=1.0)
        _check("max_rest", self.max_rest, least=self.rest, why=f", since rest={self.rest}")
        if not self.hopeless < self.target < self.solved:
            raise DataError(
                f"hopeless={self.hopeless}, target={self.target} and solved={self.solved} must be in this order, "
                f"without equal ones: prompts between hopeless and solved are drawn, those near the target most often"
            )
        if isinstance(self.min_responses, bool) or not isinstance(self.min_responses, Integral):
            raise DataError(f"min_responses={self.min_responses!r} must be a whole number of at least 1")
        _check("min_responses", self.min_responses, least=1)

    def _checked_range(self) -> tuple[float, float]:
        found = self.reward_range
        if not isinstance(found, Sequence) or len(found) != 2 or not all(isinstance(one, Real) for one in found):
            raise DataError(f"reward_range={found!r} must be two numbers: the rewards of a wrong and a right response")
        low, high = map(float, found)
        if not math.isfinite(high - low) or low >= high:
            raise DataError(
                f"reward_range=({low}, {high}) must be finite and rise: from the reward of a wrong response to that of "
                f"a right one"
            )
        return low, high

    def share_of(self, reward: float) -> float:
        """Return a reward as a share, 0 for a wrong and 1 for a right response."""
        low, high = self.reward_range
        return min(1.0, max(0.0, (reward - low) / (high - low)))


CURRICULA: Mapping[str, Curriculum] = {"balanced": Curriculum(), "rest": Curriculum(spread=math.inf)}
"""Name -> curriculum. ``rest`` prefers no prompts, and only lets solved and hopeless ones rest."""


def resolve_curriculum(setting: Curriculum | CurriculumName | None) -> Curriculum | None:
    """Return the curriculum of a setting; DataError for another name or type."""
    if setting is None or isinstance(setting, Curriculum):
        return setting
    if isinstance(setting, type):
        raise DataError(f"curriculum={setting.__name__} is a class; make an object of it, as in {setting.__name__}()")
    require_choice("curriculum", setting, (*get_args(CurriculumName), "a Curriculum(...)"), DataError)
    return CURRICULA[setting]


class PromptHistory:
    """Shares of prompts, when they were drawn last, and how long they rest.

    Args:
        settings: Thresholds.
        num_rows: Number of prompts.
        pass_batches: Batches that hold all rows once.
    """

    def __init__(self, settings: Curriculum, num_rows: int, *, pass_batches: int) -> None:
        self._settings = settings
        self._pass_batches = pass_batches
        self._has_warned = False
        """Whether rewards outside of ``reward_range`` were warned of."""
        self._state = {
            "shares": torch.full((num_rows,), math.nan, dtype=torch.float64),
            "num_responses": torch.zeros(num_rows, dtype=torch.int64),
            "visits": torch.zeros(num_rows, dtype=torch.int64),
            "drawn_at": torch.full((num_rows,), -1, dtype=torch.int64),
            "waits": torch.zeros(num_rows, dtype=torch.bool),
            "rests_until": torch.zeros(num_rows, dtype=torch.float64),
            "rest": torch.zeros(num_rows, dtype=torch.float64),
        }

    # ---- drawing
    def choose(self, rows: Tensor, count: int, *, batch: int, generator: torch.Generator) -> list[int]:
        """Return ``count`` of the rows for a batch. A row is in it twice only if there are too few rows.

        Args:
            rows: Rows to choose from, in the order in which new ones are drawn.
            batch: Number of batches drawn before.
            generator: Draws among rows whose rest is over.
        """
        state = self._state
        is_new = state["visits"][rows] == 0
        # A response whose reward is missing never ends the wait.
        waits = state["waits"][rows] & (batch - state["drawn_at"][rows] < self._pass_batches)
        is_free = ~is_new & ~waits
        is_ready = is_free & (state["rests_until"][rows] <= batch)
        num_new = max(math.ceil(self._settings.new * count), count - int(is_ready.sum()))
        chosen = rows[is_new][: min(count, num_new)].tolist()
        repeats = int((state["visits"][rows] - 1).clamp(min=0).sum())
        share, left = self._settings.revisit, count - len(chosen)
        num_due = math.floor(share * (repeats + left)) - math.floor(share * repeats)
        free = rows[is_free]
        chosen += free[state["drawn_at"][free].argsort(stable=True)][:num_due].tolist()
        is_ready &= ~torch.isin(rows, torch.tensor(chosen, dtype=torch.int64))
        chosen += self._preferred(rows[is_ready], count - len(chosen), batch=batch, generator=generator)
        return self._filled_up(chosen, rows, count)

    def _preferred(self, rows: Tensor, count: int, *, batch: int, generator: torch.Generator) -> list[int]:
        """Return rows drawn without replacement, by their distance from the target and the time since they were drawn.

        Source: Efraimidis and Spirakis, 2006, https://doi.org/10.1016/j.ipl.2005.11.003, in logarithms.
        """
        shares = self._state["shares"][rows].nan_to_num(nan=self._settings.target)
        weights = torch.exp(-((shares - self._settings.target) / self._settings.spread).square() / 2)
        weights = weights * (batch - self._state["drawn_at"][rows])
        uniform = torch.rand(len(rows), dtype=torch.float64, generator=generator)
        drawn: list[int] = rows[(-uniform.log() / weights).argsort(stable=True)[:count]].tolist()
        return drawn

    def _filled_up(self, chosen: list[int], rows: Tensor, count: int) -> list[int]:
        """Return the chosen rows, and those that are missing: whose rests end first, then those drawn longest ago."""
        if len(chosen) == count:
            return chosen
        waits, until, drawn = (self._state[name].tolist() for name in ("waits", "rests_until", "drawn_at"))
        others = sorted(set(rows.tolist()) - set(chosen), key=lambda row: (waits[row], until[row], drawn[row], row))
        found = [*chosen, *others]
        return [found[place % len(found)] for place in range(count)]

    def record_drawn(self, rows: Sequence[int], *, batch: int) -> list[int]:
        """Record that a batch holds these rows, and return how often each was drawn before."""
        before = []
        for row in rows:
            before.append(int(self._state["visits"][row]))
            self._state["visits"][row] += 1
        self._state["drawn_at"][list(rows)] = batch
        self._state["waits"][list(rows)] = True
        return before

    # ---- measuring
    def record(self, row: int, rewards: Sequence[float], *, batch: int) -> float | None:
        """Record the rewards of responses to a prompt, and return their share; None if all rewards are missing (NaN).

        ``batch``: number of batches drawn so far.
        """
        state, known = self._state, [self._settings.share_of(reward) for reward in rewards if not math.isnan(reward)]
        state["waits"][row] = False
        if not known:
            return None
        self._warn_of_range(rewards)
        earlier = min(int(state["num_responses"][row]), max(0, self._settings.min_responses - len(known)))
        before = float(state["shares"][row]) * earlier if earlier else 0.0
        share = (before + sum(known)) / (earlier + len(known))
        self._let_rest(row, share, earlier + len(known), batch=batch)
        state["shares"][row], state["num_responses"][row] = share, earlier + len(known)
        return sum(known) / len(known)

    def _warn_of_range(self, rewards: Sequence[float]) -> None:
        """Warn once of rewards outside of ``reward_range``, which count as its ends."""
        low, high = self._settings.reward_range
        margin = 1e-6 * (high - low)
        outside = [reward for reward in rewards if reward < low - margin or reward > high + margin]
        if outside and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"a reward of {outside[0]:g} lies outside of the curriculum's reward_range=({low:g}, {high:g}), and "
                f"counts as its nearer end; write Curriculum(reward_range=(...)) with the rewards of a wrong and of a "
                f"right response"
            )

    def _let_rest(self, row: int, share: float, num_responses: int, *, batch: int) -> None:
        settings, state = self._settings, self._state
        is_solved, is_hopeless = share >= settings.solved, share <= settings.hopeless
        rest = 0.0
        if (is_solved or is_hopeless) and num_responses >= settings.min_responses:
            before, earlier = float(state["rest"][row]), float(state["shares"][row])
            is_again = before > 0 and (earlier >= settings.solved if is_solved else earlier <= settings.hopeless)
            rest = min(settings.max_rest, before * settings.rest_growth) if is_again else settings.rest
        state["rest"][row] = rest
        state["rests_until"][row] = batch + rest * self._pass_batches if rest else 0.0

    def metrics(self, *, batch: int) -> dict[str, float]:
        """Return the shares of prompts that rest, and of those that were never drawn."""
        return {
            "curriculum/resting": float((self._state["rests_until"] > batch).float().mean()),
            "curriculum/new": float((self._state["visits"] == 0).float().mean()),
        }

    # ---- checkpoints
    def state(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return {name: column.clone() for name, column in self._state.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state`."""
        self._state = {name: state[name].clone() for name in self._state}
