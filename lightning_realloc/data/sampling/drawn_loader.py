"""Loader whose batches are drawn one by one, by a mixture of data sets and a curriculum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_realloc.batch.samples import Samples
from lightning_realloc.data.loader import BatchLoader, seeded_generator
from lightning_realloc.data.sampling.curriculum import Curriculum, PromptHistory
from lightning_realloc.data.sampling.mixture import Mixture


class DrawnLoader(BatchLoader):
    """Training batches of full size, drawn from data sets in the mixture's proportions.

    Without a curriculum, each set gives every row once before any comes again. With one, its history chooses the rows
    of each set. A batch depends on the rewards that were recorded before it is drawn, so all ranks must record the same
    rewards between the same batches. A sample's id is ``visits * len(table) + position``, where ``visits`` counts how
    often the row was drawn before.

    Args:
        table: Every row once, with ids 0, 1, ... in order.
        sets: Name of a data set -> number of its rows, which are adjacent in the table.
        mixture: Proportions of the sets.
        curriculum: Choice of rows by difficulty; None: all rows of a set equally often.
    """

    def __init__(
        self,
        table: Samples,
        *,
        batch_size: int,
        sets: Mapping[str, int],
        mixture: Mixture,
        curriculum: Curriculum | None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        super().__init__(table, batch_size=batch_size, seed=seed, shuffle=shuffle, drop_last=drop_last)
        ends = list(accumulate(sets.values()))
        assert ends[-1] == len(table), f"{sets} do not hold the table's {len(table)} rows"
        self._sets = {name: range(end - size, end) for (name, size), end in zip(sets.items(), ends, strict=True)}
        self._mixture, self._curriculum = mixture, curriculum
        self._num_drawn = dict.fromkeys(sets, 0)
        """Data set -> rows drawn from it."""
        self._num_batches = 0
        """Batches drawn so far."""
        self._history: PromptHistory | None = None
        if curriculum is not None:
            self._history = PromptHistory(curriculum, len(table), pass_batches=-(-len(table) // batch_size))
        self._orders: dict[str, tuple[int, Tensor]] = {}
        """Data set -> pass over it, and the order of its rows."""

    # ---- drawing
    def _order(self) -> list[int]:
        return []

    def _batch(self, order: Sequence[int], place: int) -> Samples:
        counts = self._mixture.counts(self._num_batches, self.batch_size, self._num_drawn)
        rows: list[int] = []
        visits: list[int] = []
        for name, count in counts.items():
            for row, visit in self._drawn(name, count):
                rows.append(row)
                visits.append(visit)
            self._num_drawn[name] += count
        self._num_batches += 1
        ids = self.table.ids[rows] + torch.tensor(visits) * len(self.table)
        return self.table.select(rows, ids=ids)

    def _drawn(self, name: str, count: int) -> list[tuple[int, int]]:
        """Return rows of a set for the next batch, with how often each was drawn before."""
        if not count:
            return []
        if self._history is not None:
            generator = seeded_generator(self.seed, name, "batch", self._num_batches)
            chosen = self._history.choose(self._order_of(name, 0), count, batch=self._num_batches, generator=generator)
            return list(zip(chosen, self._history.record_drawn(chosen, batch=self._num_batches), strict=True))
        size, first = len(self._sets[name]), self._num_drawn[name]
        places = (divmod(place, size) for place in range(first, first + count))
        return [(int(self._order_of(name, visit)[place]), visit) for visit, place in places]

    def _order_of(self, name: str, visit: int) -> Tensor:
        """Return the rows of a set in the order of a pass over them."""
        if name not in self._orders or self._orders[name][0] != visit:
            rows = torch.tensor(self._sets[name])
            if self.shuffle:
                generator = seeded_generator(self.seed, name, "pass", visit)
                rows = rows[torch.randperm(len(rows), generator=generator)]
            self._orders[name] = (visit, rows)
        return self._orders[name][1]

    # ---- measuring
    def record(self, prompt_ids: Tensor, rewards: Tensor) -> dict[str, float]:
        """Record the rewards of responses, and return metrics of them; the same on every rank.

        Args:
            prompt_ids: (B,) ids of the samples that the responses belong to.
            rewards: (B,) their rewards, NaN where one is missing.
        """
        groups: dict[int, list[float]] = {}
        for prompt, reward in zip(prompt_ids.tolist(), rewards.tolist(), strict=True):
            groups.setdefault(prompt, []).append(reward)
        metrics = self._set_metrics(groups) if len(self._sets) > 1 else {}
        if self._history is None:
            return metrics
        rows = {prompt: prompt % len(self.table) for prompt in sorted(groups)}
        found = [self._history.record(row, groups[prompt], batch=self._num_batches) for prompt, row in rows.items()]
        shares = [share for share in found if share is not None]
        if shares:
            metrics["curriculum/difficulty"] = 1.0 - sum(shares) / len(shares)
        compared = [values for values in map(_known, groups.values()) if len(values) > 1]
        if compared:
            metrics["curriculum/with_signal"] = sum(min(v) < max(v) for v in compared) / len(compared)
        return metrics | self._history.metrics(batch=self._num_batches)

    def _set_metrics(self, groups: Mapping[int, Sequence[float]]) -> dict[str, float]:
        """Return the mean reward of each set, and its share of the prompts."""
        metrics: dict[str, float] = {}
        for name, rows in self._sets.items():
            mine = [values for prompt, values in groups.items() if prompt % len(self.table) in rows]
            known = [value for values in mine for value in _known(values)]
            metrics[f"set_share/{name}"] = len(mine) / max(1, len(groups))
            if known:
                metrics[f"set_reward/{name}"] = sum(known) / len(known)
        return metrics

    # ---- checkpoints
    def state_dict(self) -> dict[str, Any]:
        """Return also the counts of drawn rows, and what was measured of them."""
        history = {} if self._history is None else {"history": self._history.state()}
        return {**super().state_dict(), "num_batches": self._num_batches, "drawn": dict(self._num_drawn), **history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch that was handed out last."""
        super().load_state_dict(state)
        self._num_batches, self._num_drawn = state["num_batches"], dict(state["drawn"])
        if self._history is not None:
            self._history.load(state["history"])

    def _identity(self) -> dict[str, Any]:
        curriculum = None if self._curriculum is None else asdict(self._curriculum)
        sets = {name: len(rows) for name, rows in self._sets.items()}
        return {**super()._identity(), "sets": sets, "mix": self._mixture.identity, "curriculum": curriculum}


def _known(rewards: Sequence[float]) -> list[float]:
    return [reward for reward in rewards if reward == reward]  # NaN is missing
