"""What can be told about any model without running it: its repeated blocks, and which names share a parameter.

And how one is copied.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import nn


def find_blocks(model: nn.Module) -> tuple[tuple[str, nn.Module], ...]:
    """Return the repeated blocks of a model with their names, in order.

    They are the elements of the outermost module lists whose classes transformers names as not to be split, or, for
    models that name none, of the list with the most parameters. () when there is no list.
    """
    lists = _outermost_lists(model)
    whole = set(getattr(model, "_no_split_modules", None) or ())
    named = [(name, blocks) for name, blocks in lists if any(type(block).__name__ in whole for block in blocks)]
    if not named and lists:
        named = [max(lists, key=lambda item: sum(parameter.numel() for parameter in item[1].parameters()))]
    return tuple((f"{name}.{index}", block) for name, blocks in named for index, block in enumerate(blocks))


def _outermost_lists(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    lists: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer, _ in lists):
            lists.append((name, module))
    return lists


def tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return, by the owner's name, every name of each parameter; the owner's is the one ``named_parameters`` gives."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {group[0]: tuple(group) for group in names.values()}


def copied(model: nn.Module, instead: Mapping[int, object] | None = None) -> nn.Module:
    """Return a deep copy of a model; ``instead`` maps the id of what is not to be copied to what stands there for it.

    Every module has a dozen ordered dicts of hooks, which are nearly always empty and take ``deepcopy`` most of its
    time; they are made anew.
    """
    hooks: dict[int, object] = {
        id(value): OrderedDict()
        for module in model.modules() for value in vars(module).values() if type(value) is OrderedDict and not value
    }  # fmt: skip
    return copy.deepcopy(model, {**hooks, **(instead or {})})


def copied_without_weights(model: nn.Module) -> nn.Module:
    """Return a deep copy whose parameters have shapes but no storage; buffers are real copies, ties are kept."""
    without_storage = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        for parameter in model.parameters()
    }
    return copied(model, without_storage)
