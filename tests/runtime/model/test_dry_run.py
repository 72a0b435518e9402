"""A dry run changes neither the random numbers of the program nor the class of the package's own errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_realloc.errors import ConfigError
from lightning_realloc.runtime.model.dry_run import ForwardFailed, dry_run


class Drops(nn.Module):
    """Draws a number to decide whether a layer is left out, and then raises an error."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, input_ids: Tensor, **options: Any) -> None:
        """Raise the error."""
        torch.rand([])
        assert not self.training
        assert not torch.is_grad_enabled()
        raise self.error


def test_a_dry_run_is_in_evaluation_mode_and_draws_no_random_numbers_of_the_program() -> None:
    before, ids = torch.get_rng_state(), torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(ForwardFailed, match="KeyError: 'weight'"):
        dry_run(Drops(KeyError("weight")).train(), input_ids=ids)
    with pytest.raises(ConfigError, match="no segments"):
        dry_run(Drops(ConfigError("no segments")).train(), input_ids=ids)
    assert torch.equal(torch.get_rng_state(), before)
