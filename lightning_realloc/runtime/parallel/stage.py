"""Reduce a model to one pipeline stage, and pass hidden states into and out of it.

A stage is the whole model with the modules of other stages replaced by placeholders without parameters. Names, block
indices and buffers (rotary frequencies) stay. So a reallocation finds every parameter under its name, and the model is
called as usual. A stage of several runs of blocks replaces those of its modules that a run does not use while it runs.
`pipeline` schedules the exchange of hidden states between stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import ModelLayout
from lightning_realloc.runtime.model.dry_run import Placeholder
from lightning_realloc.runtime.model.image_inputs import IMAGE_PARAMETERS, blocks_with_image_features
from lightning_realloc.runtime.model.structure import find_blocks, tied_names


class _Child(NamedTuple):
    """A place in the tree of modules."""

    parent: nn.Module
    name: str

    def put(self, module: nn.Module | None) -> nn.Module | None:
        """Put a module in this place, without FSDP's or torch's checks; return the one that was there."""
        children: dict[str, nn.Module | None] = self.parent._modules
        before, children[self.name] = children[self.name], module
        return before


class StageIO:
    """Input and output of one forward pass of a stage, shared by its placeholders."""

    def __init__(self, index: int, count: int, width: int) -> None:
        self.index = index
        self.count = count
        self.width = width
        """Size of a hidden state."""
        self.output: Tensor | None = None
        """(1, N, D) hidden states after the stage's last block; None before a pass and on the last stage."""
        self.has_entered_blocks = False
        """Whether the current pass has reached the first block, where the previous stage's hidden states enter."""
        self.replaced: tuple[Mapping[_Child, nn.Module], ...] = ()
        """For each run of blocks of the stage: modules of the stage that it does not use, and their placeholders."""
        self._input_ids: Tensor | None = None
        self._received: Tensor | None = None

    @contextmanager
    def open(self, input_ids: Tensor, received: Tensor | None, *, run: int | None = None) -> Iterator[None]:
        """Allow calls of the model inside the block, on these tokens only, with ``received`` as input of its blocks.

        Args:
            run: Run of blocks that the model consists of; None: the stage's first.
        """
        self._input_ids, self._received = input_ids, received
        self.output, self.has_entered_blocks = None, False
        replaced = self.replaced[0 if run is None else run // self.count]
        own = {place: place.put(placeholder) for place, placeholder in replaced.items()}
        try:
            yield
        finally:
            for place, module in own.items():
                place.put(module)
            self._input_ids = self._received = None

    @property
    def received(self) -> Tensor:
        """(1, N, D) hidden states of the previous stage."""
        assert self._received is not None, "check_call refuses a call outside of open()"
        return self._received

    def check_call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise LayoutError for a call in which the other stages do not take part."""
        if self._input_ids is None:
            raise LayoutError(
                f"{type(model).__name__} is stage {self.index} of {self.count} of a pipeline, and cannot be called by "
                "itself; run it in a training or inference call, or give the call a layout with pp=1"
            )
        segments = kwargs.get("packed_segments")  # they know the whole row, of which a rank may run a slice
        given = kwargs.get("input_ids", args[0] if args else None) if segments is None else segments.row
        if given is None or given.data_ptr() != self._input_ids.data_ptr() or given.shape != self._input_ids.shape:
            shape = None if given is None else tuple(given.shape)
            raise LayoutError(
                f"under pp={self.count} a method must call its model on the tokens of its micro-batch, "
                f"which other stages run too, of shape {tuple(self._input_ids.shape)}; it gave others, of shape "
                f"{shape}; pass batch.input_ids, or give the call a layout with pp=1"
            )


class _Placeholder(Placeholder):
    """Replaces a module whose parameters lie on another stage.

    Saved buffers stay, under their names: the first rank writes them into files that hold the whole model.
    """

    def __init__(self, replaced: nn.Module, io: StageIO) -> None:
        super().__init__(replaced)
        self.io = io
        for path, module in replaced.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    holder: nn.Module = self
                    for part in path.split(".") if path else ():
                        if part not in holder._modules:
                            holder.add_module(part, nn.Module())
                        holder = holder.get_submodule(part)
                    holder.register_buffer(name, buffer)


class _InputPlaceholder(_Placeholder):
    """Replaces a module before the blocks; returns zeros of the right shape.

    The model reads only their shape and dtype, for positions and masks.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.io.has_entered_blocks:
            raise LayoutError(
                f"pp={self.io.count} puts modules registered before the blocks on the first stage, and this model "
                f"runs such a module ({self.replaced}) after them, on the last; use pp=1"
            )
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        ids = next((tensor for tensor in tensors if tensor.dtype in (torch.int64, torch.int32)), None)
        width = getattr(self, "embedding_dim", None) or getattr(self, "out_features", None)
        if ids is not None:
            return self.io.received.new_zeros(*ids.shape, width or self.io.width)
        return self.io.received.new_zeros(*tensors[0].shape[:-1], width or tensors[0].shape[-1])


class _StageInput(_Placeholder):
    """Replaces the block before the stage's first; returns the hidden states received from the previous stage."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.io.has_entered_blocks = True
        return self.io.received


class _StageOutput(_Placeholder):
    """Replaces the block after the stage's last; stores its input as the stage's output.

    Only placeholders follow, whose output is not used. The backward pass starts from the stored output.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = super().forward(*args, **kwargs)
        self.io.output = output
        return output.detach()


def cut_stage(model: nn.Module, model_layout: ModelLayout, rank: int) -> None:
    """Replace the modules whose parameters lie on other stages by placeholders, in place.

    ``model`` has all its modules; tensor parallelism may be installed already. The remaining parameters are those of
    ``model_layout.names(rank)``.

    Raises LayoutError, on every rank alike, for a model that cannot be divided into stages.
    """
    _refuse_indivisible(model, model_layout)
    layout = model_layout.layout
    index, pp = layout.coordinate(rank).pp, layout.dims.pp
    io = StageIO(index, pp, _hidden_size(model))
    by_run = [_placeholders(model, model_layout, run, io) for run in range(index, layout.dims.num_runs, pp)]
    unused = {
        name: placeholder
        for name, placeholder in by_run[0].items()
        if all(_is_inside(name, replaced) for replaced in by_run)
        # A tied weight keeps its names, and its module the class by which optimizers group parameters.
        and not _holds(model.get_submodule(name), name, index, model_layout.stages)
    }
    io.replaced = tuple(
        {_place(model, name): one for name, one in replaced.items() if unused.get(name) is not one}
        for replaced in by_run
    )
    for name, placeholder in unused.items():
        _place(model, name).put(placeholder)
    for name, _ in list(model.named_parameters()):
        parent, _, own = name.rpartition(".")
        if own in IMAGE_PARAMETERS and index not in model_layout.stages(name):
            model.get_submodule(parent).register_parameter(own, None)
    vars(model)["stage_io"] = io
    model.register_forward_pre_hook(io.check_call, with_kwargs=True)


def _placeholders(model: nn.Module, model_layout: ModelLayout, run: int, io: StageIO) -> dict[str, _Placeholder]:
    """Return a placeholder for every module that only other runs of blocks use."""
    own = model_layout.model.stage_blocks(model_layout.layout.dims.num_runs)[run]
    found: dict[str, _Placeholder] = {}
    blocks = dict(find_blocks(model))
    for number, (name, block) in enumerate(blocks.items()):
        if number not in own:
            kind = {own.start - 1: _StageInput, own.stop: _StageOutput}.get(number, _Placeholder)
            found[name] = kind(block, io)
    for name, other in _modules_of_other_runs(model, model_layout, run):
        if name not in blocks:
            found[name] = (_InputPlaceholder if other < run else _Placeholder)(model.get_submodule(name), io)
    return found


def _place(model: nn.Module, name: str) -> _Child:
    parent, _, child = name.rpartition(".")
    return _Child(model.get_submodule(parent), child)


def _is_inside(name: str, modules: Mapping[str, nn.Module]) -> bool:
    return any(name == outer or name.startswith(f"{outer}.") for outer in modules)


def get_stage_io(model: nn.Module) -> StageIO:
    """Return the `StageIO` of a model that `cut_stage` has reduced to a stage."""
    io = vars(model).get("stage_io")
    if not isinstance(io, StageIO):
        raise LayoutError(f"{type(model).__name__} is not a pipeline stage; lay it out with pp > 1 by parallelize")
    return io


def _refuse_indivisible(model: nn.Module, model_layout: ModelLayout) -> None:
    """Raise LayoutError for models that would fail on one stage while the others wait for it."""
    layout = model_layout.layout
    pp = layout.dims.pp
    name = type(model).__name__
    lists = {block.rpartition(".")[0] for block, _ in find_blocks(model)}
    if len(lists) != 1:
        raise LayoutError(
            f"pp={pp} divides one list of blocks, and {name} has {len(lists)} ({', '.join(sorted(lists))}); use pp=1"
        )
    trained = {stage for name, p in model.named_parameters() if p.requires_grad for stage in model_layout.stages(name)}
    if trained and len(trained) < pp:
        frozen = min(set(range(pp)) - trained)
        raise LayoutError(
            f"pp={pp} would leave stage {frozen} of {name} without a parameter that is trained; "
            "use a smaller pp, or freeze fewer layers"
        )
    (blocks,) = lists
    first, added = len(model_layout.model.stage_blocks(layout.dims.num_runs)[0]), blocks_with_image_features(model)
    if added > first:
        raise LayoutError(
            f"pp={pp} gives the tower of {name} and the first {first} of its blocks to the first stage, and features "
            f"of images are added after the first {added}; use a smaller pp"
        )
    for owner, names in tied_names(model).items():
        homes = {alias.removeprefix(f"{blocks}.").partition(".")[0] for alias in names}
        if len(homes) > 1 and model_layout.model.param(owner).section != "ends":
            raise LayoutError(
                f"pp={pp}: {' and '.join(names)} are tied, and {owner} alone would lie on its stage; "
                "untie them or use pp=1"
            )
    for module_name, module in model.named_modules():
        direct = [own for own, _ in module.named_parameters(recurse=False) if own not in IMAGE_PARAMETERS]
        if direct and len(_runs_that_use(module, module_name, model_layout)) > 1:
            raise LayoutError(
                f"pp={pp}: {module_name or name} holds the parameter {direct[0]!r} and modules of other stages, so "
                "it cannot be replaced on one of them; move the parameter into a module of its own or use pp=1"
            )


def _modules_of_other_runs(
    model: nn.Module, model_layout: ModelLayout, index: int, prefix: str = ""
) -> list[tuple[str, int]]:
    """Return the outermost modules that only another run of blocks uses, with that run.

    One that holds a tied weight of this run has no modules inside.
    """
    found = []
    for child_name, child in model.get_submodule(prefix).named_children():
        name = f"{prefix}.{child_name}" if prefix else child_name
        runs = _runs_that_use(child, name, model_layout)
        is_leaf = not any(True for _ in child.children())
        if len(runs) == 1 and index not in runs and (is_leaf or not _holds(child, name, index, model_layout.runs)):
            found.append((name, min(runs)))
        elif runs - {index}:
            found += _modules_of_other_runs(model, model_layout, index, name)
    return found


def _runs_that_use(module: nn.Module, name: str, model_layout: ModelLayout) -> set[int]:
    """Return the runs that use parts of a module: the first one embeddings, the last one their tied head."""
    found = set()
    for parameter, _ in module.named_parameters(prefix=name, remove_duplicate=False):
        is_tied_name = model_layout.model.param(parameter).name != parameter
        found.add(model_layout.runs(parameter)[-1 if is_tied_name else 0])
    return found


def _holds(module: nn.Module, name: str, index: int, places: Callable[[str], tuple[int, ...]]) -> bool:
    """Return whether the stage or run ``index`` is among the ``places`` of a module's parameters."""
    return any(index in places(parameter) for parameter, _ in module.named_parameters(prefix=name))


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
