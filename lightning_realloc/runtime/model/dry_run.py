"""Run a forward of a copy without weights, and without some of its blocks, to check the model's code before its use."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_realloc.errors import ReallocError


class ForwardFailed(Exception):
    """A copy's forward raised an error: its code may need the weights, or modules that placeholders replace."""


def dry_run(copy: nn.Module, **inputs: Any) -> None:
    """Run a forward in evaluation mode, without gradients. The copy stays in that mode.

    Leaves the global random generator as it was.

    Raises:
        ForwardFailed: for an error of any class, except those of this package.
    """
    copy.eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            copy(use_cache=False, **inputs)
        except ReallocError:
            raise
        except Exception as error:  # of any class: a model's code may need what a copy does not have
            raise ForwardFailed(f"{type(error).__name__}: {error}") from error


class Placeholder(nn.Module):
    """Replaces a module; returns its first argument.

    Keeps the module's numbers and strings as attributes, because models read them from their blocks.
    """

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        for name, value in vars(replaced).items():
            if isinstance(value, str | int | float) and not name.startswith("_"):
                setattr(self, name, value)
        self.replaced = type(replaced).__name__
        self.train(replaced.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument."""
        return args[0] if args else next(iter(kwargs.values()))
