"""Do rounds get rarer while nothing moves, and no rarer than the first rank to end allows?"""

from __future__ import annotations

import pytest

from lightning_realloc.generation.migration_costs import next_round_s
from lightning_realloc.generation.rank_load import LiveSample, RankLoad, StepCurve


def loads(*remaining_tokens: float) -> list[RankLoad]:
    """Return ranks of one sample each, whose every step takes a second."""
    curve = StepCurve(((1.0, 1.0),))
    samples = [LiveSample(rank, 1, tokens) for rank, tokens in enumerate(remaining_tokens)]
    return [RankLoad(sample.sample_id, (sample,), (), curve, 0) for sample in samples]


@pytest.mark.parametrize(("num_quiet", "seconds"), [(0, 16.0), (1, 32.0), (2, 64.0), (3, 64.0), (50, 64.0)])
def test_rounds_get_rarer_while_nothing_moves(num_quiet: int, seconds: float) -> None:
    assert next_round_s(loads(400.0, 900.0), 16.0, num_quiet) == seconds


def test_a_rank_that_will_soon_be_idle_is_met_in_time() -> None:
    assert next_round_s(loads(160.0, 900.0), 16.0, num_quiet=5) == 40.0  # a quarter of what is left
    assert next_round_s(loads(20.0, 900.0), 16.0, num_quiet=5) == 16.0
    assert next_round_s(loads(0.0, 900.0), 16.0, num_quiet=5) == 16.0
