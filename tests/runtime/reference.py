"""What must a laid-out model compute? The same as one process with the whole model, which this module runs beside it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_realloc.layout import Layout, ModelLayout
from lightning_realloc.runtime.gradients import clip_gradients
from lightning_realloc.runtime.mesh import MeshRegistry
from lightning_realloc.runtime.model_spec import describe_model
from lightning_realloc.runtime.parallelize import parallelize
from lightning_realloc.runtime.shards import local_tensor, local_tensors
from tests.models import tiny_model


class Case(NamedTuple):
    """A model, a layout of it, and how far from the reference it may be, relative to the largest element."""

    family: str
    layout: str
    overrides: dict[str, Any] = {}
    dtype: torch.dtype = torch.float32
    tolerance: float = 2e-5
    num_labels: int | None = None


def build(case: Case) -> nn.Module:
    """Return the case's model with its full weights, in training mode: the same on every call and rank."""
    if case.num_labels is None:
        return tiny_model(case.family, **case.overrides).to(case.dtype).train()
    from transformers import AutoModelForSequenceClassification

    config = tiny_model(case.family, **case.overrides).config
    config.num_labels = case.num_labels
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config).to(case.dtype).train()


def batch(case: Case, vocab_size: int) -> dict[str, Tensor]:
    """Return four rows of tokens that touch the first row of every rank's share of the vocabulary, padding too."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, vocab_size, (4, 10), generator=generator)
    for position, token in enumerate((0, -(-vocab_size // 4), vocab_size // 2, 3 * -(-vocab_size // 4))):
        ids[:, position] = token
    labels = ids if case.num_labels is None else torch.arange(4) % case.num_labels
    return {"input_ids": ids, "labels": labels}


def local_part(full: Tensor, model_layout: ModelLayout, name: str, rank: int) -> Tensor:
    """Return what ``rank`` must hold of a full tensor, put together from the regions of the layout."""
    local = torch.full(model_layout.local_shape(name, rank), float("nan"), dtype=full.dtype)
    for piece in model_layout.pieces(name, rank):
        source = tuple(slice(a, b) for a, b in zip(piece.region.starts, piece.region.stops, strict=True))
        target = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.region.shape, strict=True))
        local[target] = full[source]
    return local


def train_beside_the_reference(cases: list[Case], num_steps: int = 3) -> dict[str, list[str]]:
    """Train every case and one process with the whole model side by side; return what differed, by case.

    Each step compares the loss, every gradient before clipping, the total norm and every weight after the update.
    Collective over the world; ranks outside a layout only take part in making its groups.
    """
    meshes = MeshRegistry("cpu")
    differences: dict[str, list[str]] = {}
    for case in cases:
        layout = Layout.parse(case.layout)
        meshes.create([layout])
        if dist.get_rank() in layout:
            differences[f"{case.family} {case.layout} {case.overrides} {case.num_labels}"] = _train(
                case, layout, meshes, num_steps
            )
    return differences


def _train(case: Case, layout: Layout, meshes: MeshRegistry, num_steps: int) -> list[str]:
    rank = dist.get_rank()
    whole, model = build(case), build(case)
    model_layout = ModelLayout(describe_model(model), layout)
    parallelize(model, model_layout, meshes)
    inputs = batch(case, whole.config.vocab_size)
    rows = 4 // layout.data_parallel_size
    first = layout.data_parallel_index(rank) * rows
    mine = {name: tensor[first : first + rows] for name, tensor in inputs.items()}
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (whole, model)]
    found: list[str] = []
    for step in range(num_steps):
        expected_loss = whole(**inputs).loss
        expected_loss.backward()
        loss = model(**mine).loss
        loss.backward()
        mean_loss = loss.detach().clone()
        data_group = meshes.group(layout, "dp", "fsdp")
        if data_group is not None:
            dist.all_reduce(mean_loss, group=data_group)
            mean_loss /= layout.data_parallel_size
        found += _compare(f"step {step} loss", mean_loss, expected_loss.detach(), case.tolerance)
        for name, parameter in model.named_parameters():
            full = whole.get_parameter(name).grad
            assert full is not None
            expected = local_part(full, model_layout, name, rank)
            if parameter.grad is None:
                found += [] if expected.numel() == 0 else [f"step {step} {name} has no gradient"]
                continue
            got = local_tensor(parameter.grad)
            found += _compare(f"step {step} {name} gradient", got, expected, case.tolerance, scale=full)
        norm = clip_gradients(model, model_layout, meshes, max_norm=0.5)
        expected_norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        found += _compare(f"step {step} norm", norm, expected_norm.float(), 1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, tensor in local_tensors(model).items():
            full = whole.get_parameter(name).detach()
            expected = local_part(full, model_layout, name, rank)
            found += _compare(f"step {step} {name} weight", tensor, expected, case.tolerance, scale=full)
    return found


def _compare(what: str, got: Tensor, expected: Tensor, tolerance: float, scale: Tensor | None = None) -> list[str]:
    if got.shape != expected.shape:
        return [f"{what}: shape {tuple(got.shape)} instead of {tuple(expected.shape)}"]
    if not expected.numel():
        return []
    largest = (expected if scale is None else scale).abs().max().item()
    error = (got - expected).abs().max().item()
    return [] if error <= tolerance * largest + 1e-9 else [f"{what}: off by {error:.1e} of {largest:.1e}"]
