"""Muon for the matrices of a model's blocks, AdamW for all other weights, as one optimizer of a role.

torch.optim.Muon takes matrices alone, and a role has one optimizer. In a configuration of ``fit``:

    model:
      class_path: GRPO
      init_args:
        ...
        optimizer: {class_path: examples.muon.MuonAndAdamW, init_args: {lr: 1.0e-6}}
        weight_decay: 0.01
        no_decay: [norms, biases, embeddings]   # and these are for AdamW

To choose by name, override ``configure_optimizers`` and give groups: the matrices of the first group step by Muon. A
checkpoint and a change of plan keep the state of both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import AdamW, Muon, Optimizer


class MuonAndAdamW(Optimizer):
    """Steps by Muon on the matrices of the first group of parameters, by AdamW on all else.

    The first group holds the weights that decay, if ``weight_decay`` and ``no_decay`` are given; else all. Stacked
    experts have three dimensions, so they are for AdamW.

    Args:
        parameters: Parameters, or groups of them.
        lr: Learning rate of both: Muon's updates are scaled to the size of AdamW's (arXiv:2502.16982, section 2.2).
        weight_decay: Weight decay of groups that have none of their own.
    """

    def __init__(self, parameters: Any, lr: float = 1e-6, weight_decay: float = 0.0) -> None:
        given = list(parameters)
        first, *others = given if isinstance(given[0], dict) else [{"params": given}]
        parts = [[p for p in first["params"] if (p.ndim == 2) is matrix] for matrix in (True, False)]
        groups = [{**first, "params": part, "is_muon": muon} for part, muon in zip(parts, (True, False), strict=True)]
        groups += [{**group, "is_muon": False} for group in others]
        super().__init__([group for group in groups if group["params"]], {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take a step."""
        for group in self.param_groups:
            settings = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
            if group["is_muon"]:
                part: Optimizer = Muon(group["params"], adjust_lr_fn="match_rms_adamw", **settings)
            else:
                part = AdamW(group["params"], **settings)
            part.state = self.state
            part.step()
