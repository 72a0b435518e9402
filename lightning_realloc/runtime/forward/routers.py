"""Observe and replay the choice of experts in mixtures of experts: their load, records of choices, router replay.

A router is a module of transformers that returns (logits, weights, experts) for its tokens. `install_routers` lets each
of them follow a `RoutedPass`, a keyword argument of the forward that it is part of. So micro-batches of a pipeline that
take turns, and a backward pass that recomputes activations, keep to their own.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_realloc.batch.balance_loss import BalanceLoss
from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.training import TrainOptions
from lightning_realloc.errors import ConfigError
from lightning_realloc.runtime.forward.token_group import RowDivision
from lightning_realloc.runtime.model.adapter_layers import adapted_layers
from lightning_realloc.runtime.model.choice_biases import choice_biases
from lightning_realloc.runtime.model.stacked_experts import is_router
from lightning_realloc.runtime.model.structure import find_blocks, find_transformers_model

_ARGUMENT = "routed_pass"
_FORMULA = "load_balancing_loss_func"
"""Name by which transformers' models define the loss of `BalanceLoss`, in their modules."""
_TOPK = (torch.topk, Tensor.topk)
_UNCOMPILED: Callable[..., Any] = torch.compiler.disable(lambda function, *args, **kwargs: function(*args, **kwargs))
"""Calls a function outside of the program of a compiled block, which would be bound to one pass."""


@dataclass(frozen=True, slots=True)
class Routers:
    """Sizes of a model's routers, of all pipeline stages."""

    num_layers: int
    """Blocks with a router, L."""
    num_experts: int
    """Experts of each, E."""
    num_chosen: int
    """Experts of a token in a layer, k."""

    @property
    def dtype(self) -> torch.dtype:
        """Smallest integer type for the number of an expert and `unknown`."""
        return torch.uint8 if self.num_experts < 256 else torch.int16

    @property
    def unknown(self) -> int:
        """Stands for an expert that is not recorded: the largest number of the type."""
        return torch.iinfo(self.dtype).max

    @property
    def width(self) -> int:
        """Numbers of a token's record, one per layer and chosen expert: those of the first layer come first."""
        return self.num_layers * self.num_chosen

    def no_counts(self, device: torch.device) -> Tensor:
        """Return (L, E) zeros, to count tokens per expert."""
        return torch.zeros(self.num_layers, self.num_experts, dtype=torch.int64, device=device)

    def no_record(self, ids: Tensor) -> Tensor:
        """Return (n, L * k) records of the tokens (1, n) whose experts are unknown."""
        return torch.full((ids.shape[1], self.width), self.unknown, dtype=self.dtype, device=ids.device)

    def join(self, records: Sequence[Tensor | None], lengths: Sequence[int]) -> Tensor:
        """Return (N, L * k) records of sequences, cut to their lengths, or filled up with unknown experts."""
        joined = torch.full((sum(lengths), self.width), self.unknown, dtype=self.dtype)
        for part, record in zip(joined.split(list(lengths)), records, strict=True):
            if record is not None:
                part[: len(record)] = record[: len(part)]
        return joined

    def count(self, records: Tensor) -> Tensor:
        """Return the (L, E) tokens of each expert in (N, L * k) records."""
        chosen = records.long().view(-1, self.num_layers, self.num_chosen).transpose(0, 1).flatten(1)
        return self.no_counts(records.device).scatter_add_(1, chosen, torch.ones_like(chosen))


class RoutedPass:
    """Experts of one forward. Not a dataclass: FSDP would copy it.

    Args:
        routers: Sizes of the model's routers.
        replayed: (n, L * k) records of the tokens, whose experts they are given again; None: none are.
        counts: (L, E) to which the tokens of each expert are added; None: they are not counted.
        counted: (n,) bool: tokens to count; None: all.
        records: Whether the choices are kept for `record`.
        known: (n, L * k) records that have the layers of earlier pipeline stages; None: this model has all layers.
        loads: (L, E) to which all tokens of each expert are added; None: they are not counted.
        balance: Loss that balances experts; None: there is none.
        times: (n,) times that each token counts in ``loads`` and ``balance``.
    """

    def __init__(
        self,
        routers: Routers,
        *,
        replayed: Tensor | None = None,
        counts: Tensor | None = None,
        counted: Tensor | None = None,
        records: bool = False,
        known: Tensor | None = None,
        loads: Tensor | None = None,
        balance: BalanceLoss | None = None,
        times: Tensor | None = None,
    ) -> None:
        self._routers, self._replayed, self._counts = routers, replayed, counts
        self._weights = None if counted is None else counted.long().repeat_interleave(routers.num_chosen)
        self._chosen: dict[int, Tensor] | None = {} if records else None
        self._known, self._loads, self._balance, self._times = known, loads, balance, times

    @property
    def arguments(self) -> dict[str, RoutedPass]:
        """Keyword arguments for the model's forward."""
        return {_ARGUMENT: self}

    def record(self) -> Tensor:
        """Return the (n, L * k) record of the forward."""
        assert self._chosen is not None, "only a pass with records=True has one"
        if self._known is None:
            return torch.cat([self._chosen[layer] for layer in range(self._routers.num_layers)], 1)
        size, record = self._routers.num_chosen, self._known.clone()
        for layer, experts in self._chosen.items():
            record[:, layer * size : (layer + 1) * size] = experts
        return record

    def replayed(self, layer: int) -> Tensor | None:
        """Return the (n, k) experts that a layer's tokens are given, `Routers.unknown` where they choose."""
        size = self._routers.num_chosen
        return None if self._replayed is None else self._replayed[:, layer * size : (layer + 1) * size]

    def observe(self, layer: int, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Count and keep the experts of a layer, unless a backward pass recomputes them.

        Returns:
            The (n, E) logits, (n, k) weights and (n, k) experts, where the weights have the gradient of the balance.
        """
        logits, weights, chosen = output
        self._observe_experts(layer, chosen.detach())
        if self._balance is not None and self._times is not None:
            weights = self._balance.follow(weights, logits, self._times)
        return logits, weights, chosen

    def _observe_experts(self, layer: int, experts: Tensor) -> None:
        if self._chosen is not None:
            self._chosen[layer] = experts.to(self._routers.dtype)
        if torch._C._current_graph_task_id() != -1:
            return
        chosen = experts.reshape(-1)
        if self._counts is not None:
            weights = torch.ones_like(chosen) if self._weights is None else self._weights
            self._counts[layer].scatter_add_(0, chosen, weights)
        if self._loads is not None and self._times is not None:
            self._loads[layer].scatter_add_(0, chosen, self._times.repeat_interleave(self._routers.num_chosen))


class RouterTap:
    """Replaces the forward of a router by one that follows the pass of the block around it."""

    def __init__(self, router: Any, layer: int, routers: Routers) -> None:
        self._forward, self._layer, self._routers = router.forward, layer, routers
        self._name = type(router).__name__
        self._pass: RoutedPass | None = None

    def enter_block(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the pass over from the arguments of the block's forward."""
        self._pass = kwargs.get(_ARGUMENT)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _UNCOMPILED(self.follow, *args, **kwargs)

    def follow(self, *args: Any, **kwargs: Any) -> Any:
        """Return the router's result, with the pass's experts if it replays some."""
        routed = self._pass
        if routed is None:
            return self._forward(*args, **kwargs)
        replayed = routed.replayed(self._layer)
        if replayed is None:
            output = self._forward(*args, **kwargs)
        else:
            with _GivenExperts(replayed, self._routers) as given:
                output = self._forward(*args, **kwargs)
            if given.num_replaced != 1:
                raise ConfigError(
                    f"{self._name} chooses experts by {given.num_replaced} calls of torch.topk over all of them, and "
                    f"router_replay replaces the result of one; set router_replay=False"
                )
        return routed.observe(self._layer, output)


class _GivenExperts(TorchFunctionMode):
    """Gives the choice of experts a fixed result: all that a router computes from it follows, by its own formula."""

    def __init__(self, experts: Tensor, routers: Routers) -> None:
        super().__init__()
        self._experts, self._shape = experts, (len(experts), routers.num_experts)
        self._unknown = routers.unknown
        self.num_replaced = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func not in _TOPK or made.indices.shape != self._experts.shape or args[0].shape != self._shape:
            return made
        self.num_replaced += 1
        experts = torch.where(self._experts == self._unknown, made.indices, self._experts.long())
        return torch.return_types.topk((args[0].gather(-1, experts), experts))


def install_routers(model: nn.Module) -> Routers | None:
    """Let the routers of a whole model follow a `RoutedPass`, and return their sizes; None without known routers.

    Copies of the model and its pipeline stages keep this.
    """
    holder = find_transformers_model(model)
    if holder is None or (known := routers_of(model)) is not None:
        return None if holder is None else known
    found = _find_routers(model)
    if found is None:
        return None
    routers = Routers(len(found), found[0][1].num_experts, found[0][1].top_k)
    for layer, (block, router) in enumerate(found):
        tap = RouterTap(router, layer, routers)
        vars(router)["forward"] = tap
        block.register_forward_pre_hook(tap.enter_block, with_kwargs=True)
    vars(holder)["routers"] = routers
    return routers


def _find_routers(model: nn.Module) -> list[tuple[nn.Module, Any]] | None:
    """Return each block with a router, and its router; None unless all are equal and one per block."""
    found: list[tuple[nn.Module, Any]] = [
        (block, module) for _, block in find_blocks(model) for module in block.modules() if is_router(module)
    ]
    sizes = {(router.num_experts, router.top_k) for _, router in found}
    is_known = len(sizes) == 1 and len({id(block) for block, _ in found}) == len(found)
    return found if is_known else None


def has_routers(model: nn.Module) -> bool:
    """Return whether a whole model, which may be without weights, has routers that `install_routers` knows."""
    return find_transformers_model(model) is not None and _find_routers(model) is not None


def describe_missing_routers(model: nn.Module) -> str:
    """Return the reason why tokens of a model without known routers cannot be given the experts of generation."""
    return (
        f"router_replay=True records the experts of tokens, and {type(model).__name__} has no routers that return "
        f"logits, weights and experts, as transformers' mixtures of experts do; leave it out"
    )


def routers_of(model: nn.Module) -> Routers | None:
    """Return the sizes of routers that follow a `RoutedPass`; None if there are none."""
    return next((vars(module)["routers"] for module in model.modules() if "routers" in vars(module)), None)


def balance_weight(model: nn.Module, asked: float | None, role: str) -> float:
    """Return the weight of the loss that balances a model's experts; 0 for none.

    Args:
        asked: The setting; None: as the config says, for the classes to which transformers adds the loss.

    Raises:
        ConfigError: for a model whose loss is not known here.
    """
    hf_model = find_transformers_model(model)
    modules = () if hf_model is None else [sys.modules.get(kind.__module__) for kind in type(hf_model).__mro__]
    has_formula = any(hasattr(module, _FORMULA) for module in modules)
    if asked is None:
        text: Any = None if hf_model is None else hf_model.config.get_text_config()
        adds = hf_model is not None and "output_router_logits" in inspect.signature(hf_model.forward).parameters
        asks = has_formula and adds and getattr(text, "output_router_logits", False)
        weight = float(getattr(text, "router_aux_loss_coef", 0.0)) if asks else 0.0
    else:
        weight = asked
    is_known = has_formula and (routers_of(model) or _find_routers(model)) is not None
    if weight and not is_known:
        source = "output_router_logits=True in its config" if asked is None else f"router_aux_loss_coef={asked}"
        raise ConfigError(
            f"{role} has {source}, and transformers defines no loss of {type(hf_model or model).__name__} that "
            f"balances experts by the logits of one router per block; set TrainOptions(router_aux_loss_coef=0)"
        )
    return weight


def check_balance(model: nn.Module, options: TrainOptions, role: str) -> None:
    """Raise ConfigError for a trained model that has no loss or no biases of the kind that its options name."""
    balance_weight(model, options.router_aux_loss_coef, role)
    found, rate = _find_routers(model), options.router_bias_update_rate
    sizes = None if found is None else [router.num_experts for _, router in found]
    if rate and (adapted_layers(model) or [len(bias) for bias in choice_biases(model)] != sizes):
        reason = (
            "trains adapters, over a base that stays as it is"
            if adapted_layers(model)
            else f"is a {type(model).__name__} without a buffer e_score_correction_bias for each router"
        )
        raise ConfigError(
            f"{role} has router_bias_update_rate={rate} and {reason}; leave it out, train whole weights of a model "
            f"such as DeepSeek-V3 or GLM-4-MoE, or balance experts by router_aux_loss_coef"
        )


def balance_loss_of(model: nn.Module, device: torch.device) -> BalanceLoss:
    """Return the loss of an optimizer step of a model that has a `balance_weight`."""
    routers = routers_of(model)
    assert routers is not None, "balance_weight refuses others"
    return BalanceLoss(routers.num_experts, routers.num_chosen, device)


def routing_arguments(model: nn.Module, packed: PackedBatch, division: RowDivision | None) -> dict[str, RoutedPass]:
    """Return the keyword arguments by which a model's routers follow a pack; none if there is nothing to do."""
    routers, experts, loads, loss = routers_of(model), packed.experts, packed.expert_loads, packed.balance_loss
    is_balanced = loads is not None or loss is not None
    if routers is None or (packed.expert_counts is None and experts is None and not is_balanced):
        return {}
    cut: Callable[[Tensor], Tensor] = (lambda row: row) if division is None else division.cut
    return RoutedPass(
        routers,
        replayed=None if experts is None else cut(experts),
        counts=packed.expert_counts,
        counted=cut(packed.response_mask),
        loads=loads,
        balance=loss,
        times=cut(packed.multiplicity) if is_balanced else None,
    ).arguments


def load_metrics(counts: Tensor) -> dict[str, float]:
    """Return the metrics of (L, E) tokens per expert; none if no token was counted.

    ``expert_load``: tokens of the busiest expert over their mean, in the most uneven layer. ``unused_experts``: share
    of experts without a token. ``expert_entropy``: entropy of a token's expert over that of a uniform choice, as a mean
    over layers.
    """
    if not int(counts.sum()):
        return {}
    shares = counts.double() / counts.sum(1, keepdim=True)
    entropy = torch.special.entr(shares).sum(1).mean() / math.log(counts.shape[1]) if counts.shape[1] > 1 else 1.0
    return {
        "expert_load": float(shares.max()) * counts.shape[1],
        "unused_experts": float((counts == 0).double().mean()),
        "expert_entropy": float(entropy),
    }
