"""The weight of the divergence, computed by hand, and merged moments compared with moments of all values."""

from __future__ import annotations

import pytest
import torch

from lightning_realloc.algorithms.losses.controllers import KLController, RunningMoments


def test_the_weight_moves_towards_the_target_by_hand() -> None:
    # target 6: KL 6.6 is 10 % above, 0.1 * 0.1: up by 1 %. KL 60 counts as 20 %: up by 2 %. KL 3 as -20 %: down by 2 %.
    controller = KLController(0.5, target=6.0, gain=0.1)
    for kl, factor in ((6.6, 1.01), (60.0, 1.02), (3.0, 0.98), (6.0, 1.0)):
        before = float(controller.coefficient)
        controller.update(torch.tensor(kl))
        assert float(controller.coefficient) == pytest.approx(before * factor, rel=1e-6)


def test_without_a_target_the_weight_stays_and_checkpoints_hold_either() -> None:
    fixed = KLController(0.25)
    fixed.update(torch.tensor(100.0))
    assert float(fixed.coefficient) == 0.25
    other = KLController(1.0, target=1.0)
    other.load_state_dict(fixed.state_dict())
    assert float(other.coefficient) == 0.25


def test_values_that_are_not_finite_change_no_state() -> None:
    controller, moments = KLController(0.5, target=1.0), RunningMoments()
    moments.update(2, torch.tensor(3.0), torch.tensor(5.0))
    for bad in (torch.nan, torch.inf):
        controller.update(torch.tensor(bad))
        moments.update(2, torch.tensor(bad), torch.tensor(1.0))
        moments.update(2, torch.tensor(1.0), torch.tensor(bad))
    assert float(controller.coefficient) == 0.5
    assert (float(moments.count), float(moments.mean), float(moments.std)) == (2.0, 1.5, 0.5)


def test_moments_merged_batch_by_batch_are_those_of_all_values() -> None:
    generator = torch.Generator().manual_seed(0)
    moments = RunningMoments()
    assert (float(moments.mean), float(moments.std)) == (0.0, 1.0)
    batches = [torch.randn(size, generator=generator, dtype=torch.float64) * 3 + 5 for size in (1, 7, 40)]
    for batch in batches:
        ahead = moments.merged(len(batch), batch.sum(), batch.square().sum())
        before = float(moments.count)
        moments.update(len(batch), batch.sum(), batch.square().sum())
        assert float(moments.count) == before + len(batch)
        assert float(ahead.std) == float(moments.std)
    everything = torch.cat(batches)
    assert float(moments.mean) == pytest.approx(everything.mean().item())
    assert float(moments.std) == pytest.approx(everything.std(correction=0).item())
    moments.update(0, torch.tensor(0.0), torch.tensor(0.0))
    assert float(moments.count) == 48.0


def test_normalizing_by_hand_and_back() -> None:
    # values 1, 3: mean 2, deviation 1
    moments = RunningMoments()
    moments.update(2, torch.tensor(4.0), torch.tensor(10.0))
    values = torch.tensor([2.0, 4.5])
    assert moments.normalize(values).tolist() == [0.0, 2.5]
    assert moments.denormalize(moments.normalize(values)).tolist() == values.tolist()
    assert moments.normalize(values).dtype == torch.float32
    # nothing recorded yet, or constant values: only the mean is subtracted
    assert RunningMoments().normalize(values).tolist() == values.tolist()
