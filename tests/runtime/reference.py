"""Compare a distributed model with one process that computes with the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_realloc.layout import AXES, Layout, ModelLayout
from lightning_realloc.runtime.parallel.gradients import clip_gradients
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.model_spec import describe_model
from lightning_realloc.runtime.parallel.parallelize import parallelize
from lightning_realloc.runtime.parallel.shards import local_tensor, local_tensors
from tests.models import tiny_model

NUM_ROWS = 4
MAX_NORM = 0.5


@dataclass(frozen=True)
class Case:
    """A model, its layout, and the largest error allowed, relative to a tensor's largest element."""

    family: str
    layout: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    tp_plan: Mapping[str, str] | None = None
    num_labels: int | None = None  # a sequence-classification head instead of a language model's
    lora_modules: tuple[str, ...] = ()  # train adapters of these layers (or "experts.…") over frozen weights
    num_micro_batches: int = 1
    checkpointing: bool = False
    dtype: torch.dtype = torch.float32
    tolerance: float = 1e-5

    def build(self) -> nn.Module:
        """Return the model with its full weights, in training mode; the weights are equal on every call and rank."""
        model = tiny_model(self.family, **self.overrides)
        if self.num_labels is not None:
            from transformers import AutoModelForSequenceClassification

            model.config.num_labels = self.num_labels
            torch.manual_seed(0)
            model = AutoModelForSequenceClassification.from_config(model.config)
        model = with_lora(model, self.lora_modules)
        if self.checkpointing:
            model.gradient_checkpointing_enable()
        return model.to(self.dtype).train()

    def batch(self, vocab_size: int) -> dict[str, Tensor]:
        """Return rows of tokens that touch the first row of every rank's share of the vocabulary, and padding."""
        ids = torch.randint(0, vocab_size, (NUM_ROWS, 10), generator=torch.Generator().manual_seed(7))
        for position, token in enumerate((0, -(-vocab_size // 4), vocab_size // 2, 3 * (vocab_size // 4))):
            ids[:, position] = token
        labels = ids if self.num_labels is None else torch.arange(NUM_ROWS) % self.num_labels
        return {"input_ids": ids, "labels": labels}


def with_lora(model: nn.Module, modules: tuple[str, ...]) -> nn.Module:
    """Return the model with PEFT's random adapters of these modules and experts; without any, the model itself."""
    if not modules:
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    experts = [name for name in modules if name.startswith("experts.")]
    layers = [name for name in modules if name not in experts]
    config = LoraConfig(r=4, target_modules=layers, target_parameters=experts, init_lora_weights=False)
    return get_peft_model(model, config)


def local_part(full: Tensor, model_layout: ModelLayout, name: str, rank: int) -> Tensor:
    """Return the local tensor that ``rank`` must hold, assembled from the regions of the layout."""
    local = torch.full(model_layout.local_shape(name, rank), float("nan"), dtype=full.dtype)
    for piece in model_layout.pieces(name, rank):
        source = tuple(slice(a, b) for a, b in zip(piece.region.starts, piece.region.stops, strict=True))
        target = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.region.shape, strict=True))
        local[target] = full[source]
    return local


def train_beside_the_reference(cases: list[Case], num_steps: int = 2) -> dict[str, list[str]]:
    """Train every case next to one process with the whole model; return the differences by case.

    Each step compares the loss, every gradient before clipping, the total norm, and every weight after the update.
    Collective over the world; ranks outside a layout only take part in making its groups.
    """
    meshes = MeshRegistry("cpu")
    meshes.create([Layout.parse(case.layout) for case in cases])
    return {
        str(case): _Pair(case, meshes, case.tp_plan).train(num_steps)
        for case in cases
        if dist.get_rank() in Layout.parse(case.layout)
    }


class Pair:
    """The distributed model and the whole one. Differences are texts; no text means that both agree."""

    def __init__(self, case: Any, meshes: MeshRegistry, tp_plan: Mapping[str, str] | None = None) -> None:
        self.case, self.meshes, self.rank = case, meshes, dist.get_rank()
        self.whole, self.model = case.build(), case.build()
        if any(name.startswith("experts.") for name in case.lora_modules):
            from lightning_realloc.runtime.model.adapted_experts import add_factors

            add_factors(self.model)  # the whole model runs as PEFT does
        self.layout = Layout.parse(case.layout)
        self.model_layout = ModelLayout(describe_model(self.model, tp_plan=tp_plan), self.layout)
        self.ties = len(list(self.model.named_parameters(remove_duplicate=False)))
        parallelize(self.model, self.model_layout, meshes, tp_plan=tp_plan)
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (self.whole, self.model)]

    def train_whole(self, loss_of: Callable[[], Tensor]) -> float:
        """Set the gradients of the whole model and return its loss. The layout's first rank computes both for all."""
        first, group, made = self.layout.ranks[0], self.meshes.group(self.layout, *AXES), list[Any]([None])
        if self.rank == first:
            loss = loss_of()
            loss.backward()
            made = [(loss.item(), {name: parameter.grad for name, parameter in self.whole.named_parameters()})]
        if group is not None:
            dist.broadcast_object_list(made, src=first, group=group)
        loss_value, gradients = made[0]
        for name, parameter in self.whole.named_parameters():
            parameter.grad = gradients[name]
        return float(loss_value)

    def compare_gradients(self) -> list[str]:
        found = []
        for name, parameter in self.model.named_parameters():
            full = self.whole.get_parameter(name).grad
            if full is None:
                found += [] if parameter.grad is None else [f"{name} is frozen and has a gradient"]
                continue
            expected = local_part(full, self.model_layout, name, self.rank)
            if parameter.grad is not None:
                found += self.compare(f"gradient of {name}", local_tensor(parameter.grad), expected, full)
            elif expected.numel():
                found.append(f"no gradient of {name}")
        return found

    def compare_updates(self) -> list[str]:
        """Clip the gradients and step both optimizers; compare the total norm and every weight."""
        norm = clip_gradients(self.model, self.model_layout, self.meshes, MAX_NORM)
        expected_norm = torch.nn.utils.clip_grad_norm_(self.whole.parameters(), MAX_NORM)
        found = self.compare("norm", norm, expected_norm.to(norm.dtype))
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, tensor in local_tensors(self.model).items():
            full = self.whole.get_parameter(name).detach()
            found += self.compare(name, tensor, local_part(full, self.model_layout, name, self.rank), full)
        return found

    def compare(self, what: str, got: Tensor, expected: Tensor, whole: Tensor | None = None) -> list[str]:
        if got.shape != expected.shape:
            return [f"{what} has shape {tuple(got.shape)} instead of {tuple(expected.shape)}"]
        if not expected.numel():
            return []
        largest = (expected if whole is None else whole).abs().max().item()
        error = (got - expected).abs().max().item()
        close = error <= self.case.tolerance * largest + 1e-9
        return [] if close else [f"{what} is off by {error:.1e} of {largest:.1e}"]


class _Pair(Pair):
    """Both models in training mode, on the same rows of tokens."""

    def train(self, num_steps: int) -> list[str]:
        found = [] if self._ties_survive() else ["ties are gone"]
        for step in range(num_steps):
            found += [f"step {step}: {difference}" for difference in self._step()]
        return found

    def _ties_survive(self) -> bool:
        names = [name for name, _ in self.model.named_parameters()]
        every_name = list(self.model.named_parameters(remove_duplicate=False))
        return names == [param.name for param in self.model_layout.model.params] and len(every_name) == self.ties

    def _step(self) -> list[str]:
        inputs = self.case.batch(self.whole.config.vocab_size)
        whole_loss = self.train_whole(lambda: self.whole(**inputs).loss)
        # Transformers computes losses in float32 whatever the weights are, here over other rows than there.
        loss_error = abs(self._backward(inputs).item() - whole_loss)
        found = [] if loss_error <= 1e-6 * abs(whole_loss) else [f"loss is off by {loss_error:.1e}"]
        return found + self.compare_gradients() + self.compare_updates()

    def _backward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Run the micro-batches; return the loss averaged over them and over the data-parallel ranks."""
        total = torch.zeros((), dtype=self.case.dtype)
        parts, num_shares = self.case.num_micro_batches, self.layout.data_parallel_size
        share = self.layout.data_parallel_index(self.rank)
        for index in range(parts):
            mine = {name: tensor.chunk(num_shares)[share].chunk(parts)[index] for name, tensor in inputs.items()}
            loss = self.model(**mine).loss / parts
            loss.backward()
            total += loss.detach()
        group = self.meshes.group(self.layout, "dp", "fsdp")
        if group is not None:
            dist.all_reduce(total, group=group)
        return total / num_shares
