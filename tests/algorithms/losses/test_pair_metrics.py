"""AUROC and calibration error of scores, compared with counting every comparison."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_realloc.algorithms.losses.pair_metrics import calibration_error, ranking_metrics

JUDGED = st.lists(st.tuples(st.sampled_from([-2e4, -1.0, 0.0, 0.5, 40.0, 50.0, 3e4]), st.booleans()), min_size=1)


@given(JUDGED)
def test_the_auroc_is_the_share_of_right_comparisons_for_scores_of_any_size(rows: list[tuple[float, bool]]) -> None:
    scores, good = (torch.tensor(column) for column in zip(*rows, strict=True))
    found = ranking_metrics(scores, good)
    pairs = [(a, b) for a, is_good in rows if is_good for b, other in rows if not other]
    if not pairs:
        assert found == {}
        return
    expected = sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs)
    assert float(found["auroc"]) == pytest.approx(expected, abs=1e-6)


def test_a_confident_and_right_model_has_no_calibration_error() -> None:
    assert float(calibration_error(torch.tensor([60.0, 70.0]))) == pytest.approx(0.0, abs=1e-6)
    # Equally confident, and wrong each time.
    assert float(calibration_error(torch.tensor([-60.0, -70.0]))) == pytest.approx(1.0, abs=1e-6)
