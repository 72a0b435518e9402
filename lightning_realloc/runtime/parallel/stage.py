"""Which part of a model does a pipeline stage hold, and how do hidden states get into it and out of it?

A stage is the whole model with the modules of other stages replaced by stand-ins without parameters. Names, block
indices and buffers (rotary frequencies) stay, so a reallocation finds every parameter under its own name, and the
model is called as it always is. When hidden states travel, and where to, is `pipeline`'s business.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import ModelLayout
from lightning_realloc.layout.model import stage_blocks
from lightning_realloc.runtime.model.structure import find_blocks, tied_names


class StagePassage:
    """What goes into one forward pass of a stage and what comes out of it; its stand-ins share one."""

    def __init__(self, index: int, count: int, width: int) -> None:
        self.index = index
        self.count = count
        self.width = width
        """Features of a hidden state."""
        self.departing: Tensor | None = None
        """(1, N, D): what the stage's last block made in the last pass; None before, and on the last stage."""
        self.entered_blocks = False
        """Whether the pass under way has come to where the hidden states from the stage before come in."""
        self._input_ids: Tensor | None = None
        self._received: Tensor | None = None

    @contextmanager
    def open(self, input_ids: Tensor, received: Tensor | None) -> Iterator[None]:
        """Let the model be called inside, on these tokens only, and give its first block what was ``received``."""
        self._input_ids, self._received = input_ids, received
        self.departing, self.entered_blocks = None, False
        try:
            yield
        finally:
            self._input_ids = self._received = None

    @property
    def received(self) -> Tensor:
        """The (1, N, D) hidden states from the stage before."""
        assert self._received is not None, "check_call refuses a model that is called outside of a passage"
        return self._received

    def check_call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a call that other stages do not take part in: the hidden states would be of other tokens."""
        if self._input_ids is None:
            raise LayoutError(
                f"{type(model).__name__} is stage {self.index} of {self.count} of a pipeline, and cannot be called by "
                "itself; run it in a training or inference call, or give the call a layout with pp=1"
            )
        given = kwargs.get("input_ids", args[0] if args else None)
        if given is None or given.data_ptr() != self._input_ids.data_ptr() or given.shape != self._input_ids.shape:
            shape = None if given is None else tuple(given.shape)
            raise LayoutError(
                f"under pp={self.count} a method must call its model on the tokens of the micro-batch it is given, "
                f"which other stages run too, of shape {tuple(self._input_ids.shape)}; it gave others, of shape "
                f"{shape}; pass batch.input_ids, or give the call a layout with pp=1"
            )


class _StandIn(nn.Module):
    """In the place of a module whose parameters lie on another stage; hands on its first argument.

    Keeps the numbers and names that the module had as attributes, which models read from their blocks.
    """

    passage: StagePassage

    def __init__(self, replaced: nn.Module, passage: StagePassage) -> None:
        super().__init__()
        for name, value in vars(replaced).items():
            if isinstance(value, str | int | float) and not name.startswith("_"):
                setattr(self, name, value)
        self.passage = passage
        self.replaced = type(replaced).__name__
        self.train(replaced.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else next(iter(kwargs.values()))


class _ForeignInput(_StandIn):
    """In the place of what comes before the blocks: zeros of the right shape, which nothing is computed from.

    The model looks at their shape and dtype, for positions and masks.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.passage.entered_blocks:
            raise LayoutError(
                f"pp={self.passage.count} puts what a model registers before its blocks on the first stage, and this "
                f"one runs such a module ({self.replaced}) behind them, on the last; use pp=1"
            )
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        ids = next((tensor for tensor in tensors if tensor.dtype in (torch.int64, torch.int32)), None)
        width = getattr(self, "embedding_dim", None) or getattr(self, "out_features", None)
        if ids is not None:
            return self.passage.received.new_zeros(*ids.shape, width or self.passage.width)
        return self.passage.received.new_zeros(*tensors[0].shape[:-1], width or tensors[0].shape[-1])


class _Inlet(_StandIn):
    """In the place of the block before the stage's first: what came before it is on another stage, and arrived."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.passage.entered_blocks = True
        return self.passage.received


class _Outlet(_StandIn):
    """In the place of the block after the stage's last: what arrives here goes on to another stage.

    Downstream only stand-ins follow, whose output nobody reads; the backward pass starts from here.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        departing: Tensor = super().forward(*args, **kwargs)
        self.passage.departing = departing
        return departing.detach()


def cut_stage(model: nn.Module, model_layout: ModelLayout, rank: int) -> None:
    """Replace the modules whose parameters lie on other stages, in place; only this rank's stage is left.

    ``model`` has all its modules, and forwards that belong to tensor parallelism already. The parameters that stay
    are those of ``model_layout.names(rank)``.

    Raises LayoutError, on every rank alike, for a model that cannot be divided so.
    """
    _refuse_indivisible(model, model_layout)
    layout = model_layout.layout
    index = layout.coordinate(rank).pp
    passage = StagePassage(index, layout.dims.pp, _hidden_size(model))
    blocks = find_blocks(model)
    own = stage_blocks(len(blocks), layout.dims.pp)[index]
    for number, (name, block) in enumerate(blocks):
        if number not in own:
            kind = {own.start - 1: _Inlet, own.stop: _Outlet}.get(number, _StandIn)
            _replace(model, name, kind(block, passage))
    for name in _foreign_modules(model, model_layout, index):
        replaced = model.get_submodule(name)
        section = model_layout.model.param(next(n for n, _ in replaced.named_parameters(prefix=name))).section
        kind = _ForeignInput if section == "input" else _StandIn
        _replace(model, name, kind(replaced, passage))
    vars(model)["passage"] = passage
    model.register_forward_pre_hook(passage.check_call, with_kwargs=True)


def passage_of(model: nn.Module) -> StagePassage:
    """Return what `cut_stage` left in the model."""
    passage = vars(model).get("passage")
    if not isinstance(passage, StagePassage):
        raise LayoutError(f"{type(model).__name__} is not a pipeline stage; lay it out with pp > 1 by parallelize")
    return passage


def _refuse_indivisible(model: nn.Module, model_layout: ModelLayout) -> None:
    """Refuse by name what would otherwise go wrong on one stage while the others wait for it."""
    pp = model_layout.layout.dims.pp
    name = type(model).__name__
    lists = {block.rpartition(".")[0] for block, _ in find_blocks(model)}
    if len(lists) != 1:
        raise LayoutError(
            f"pp={pp} divides one list of blocks, and {name} has {len(lists)} ({', '.join(sorted(lists))}); use pp=1"
        )
    trained = {model_layout.stage(owner) for owner, p in model.named_parameters() if p.requires_grad}
    if trained and len(trained) < pp:
        frozen = min(set(range(pp)) - trained)
        raise LayoutError(
            f"pp={pp} would leave stage {frozen} of {name} without a parameter that is trained; "
            "use a smaller pp, or freeze fewer layers"
        )
    (blocks,) = lists
    for owner, names in tied_names(model).items():
        homes = {alias.removeprefix(f"{blocks}.").partition(".")[0] for alias in names}
        if len(names) > 1 and len(homes) > 1:
            raise LayoutError(
                f"pp={pp}: {' and '.join(names)} are tied, and {owner} alone would lie on its stage; "
                "untie them or use pp=1"
            )
    for module_name, module in model.named_modules():
        direct = [own for own, _ in module.named_parameters(recurse=False)]
        if direct and len({model_layout.stage(p) for p, _ in module.named_parameters(prefix=module_name)}) > 1:
            raise LayoutError(
                f"pp={pp}: {module_name or name} holds the parameter {direct[0]!r} beside modules of other stages, so "
                "it cannot be replaced on one of them; move the parameter into a module of its own or use pp=1"
            )


def _foreign_modules(model: nn.Module, model_layout: ModelLayout, index: int, prefix: str = "") -> list[str]:
    """Return the outermost modules all of whose parameters lie on other stages."""
    found = []
    for child_name, child in model.get_submodule(prefix).named_children():
        name = f"{prefix}.{child_name}" if prefix else child_name
        stages = {model_layout.stage(parameter) for parameter, _ in child.named_parameters(prefix=name)}
        if stages and index not in stages:
            found.append(name)
        elif len(stages) > 1:
            found += _foreign_modules(model, model_layout, index, name)
    return found


def _replace(model: nn.Module, name: str, stand_in: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    model.get_submodule(parent)._modules[attribute] = stand_in


def _hidden_size(model: nn.Module) -> int:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    width = getattr(text, "hidden_size", None)
    if not isinstance(width, int):
        raise LayoutError(
            f"a pipeline needs the width of the hidden states, and {type(model).__name__} has no config.hidden_size; "
            "set it, or use pp=1"
        )
    return width
