"""Steps of optimizers in a resumed run."""

from __future__ import annotations

import pytest
import torch
from torch.optim import Adam

from lightning_realloc.errors import CheckpointError
from lightning_realloc.strategies.lightning.optimizer_hooks import naming_missing_state


def test_state_that_a_checkpoint_lacks_is_named_with_the_checkpoint() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = Adam([weight], foreach=False)
    optimizer.step()
    del optimizer.state[weight]["exp_avg_sq"]
    with pytest.raises(KeyError), naming_missing_state(optimizer, resumed_from=None):
        optimizer.step()
    with (
        pytest.raises(CheckpointError, match=r"runs/last\.ckpt lacks 'exp_avg_sq' of the state that Adam keeps for"),
        naming_missing_state(optimizer, resumed_from="runs/last.ckpt"),
    ):
        optimizer.step()
    with pytest.raises(KeyError, match="mine"), naming_missing_state(optimizer, resumed_from="runs/last.ckpt"):
        optimizer.state[weight]["exp_avg_sq"] = torch.ones(2)
        optimizer.state.clear()
        raise KeyError("mine")
