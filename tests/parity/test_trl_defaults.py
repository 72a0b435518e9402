"""The summary of a run compares with the defaults that TRL's trainers have."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from lightning_realloc.strategies.run_summary import TRL_DEFAULTS

pytest.importorskip("trl")
NAMES = {"kl_coef": "beta", "sampling.n": "num_generations", "sampling.max_new_tokens": "max_completion_length"}
"""Our setting -> TRL's."""


def test_the_table_of_defaults_is_that_of_trl() -> None:
    from trl import DPOConfig, GRPOConfig, RewardConfig, RLOOConfig, SFTConfig

    configs: dict[str, Any] = {
        "GRPO": GRPOConfig, "RLOO": RLOOConfig, "DPO": DPOConfig, "SFT": SFTConfig, "RewardModel": RewardConfig
    }  # fmt: skip
    for algorithm, config in configs.items():
        theirs = {one.name: one.default for one in fields(config)}
        assert str(getattr(theirs["lr_scheduler_type"], "value", theirs["lr_scheduler_type"])) == "linear"
        for ours, value in TRL_DEFAULTS[algorithm].items():
            if ours == "loss_average":
                assert (value, theirs["loss_type"]) == ("token", "dapo")  # arXiv:2503.14476, eq. 8
            else:
                assert theirs[NAMES[ours]] == value
