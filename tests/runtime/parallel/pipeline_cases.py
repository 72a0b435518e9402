"""Compare a pipeline with one process that computes with the whole model."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_realloc import limits
from lightning_realloc.batch.packing import PackedBatch, pack
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.dataflow.pipeline_schedule import ScheduleName
from lightning_realloc.layout import Layout, ModelLayout
from lightning_realloc.runtime.forward import tiled_logits
from lightning_realloc.runtime.forward.tiled_logits import DeferredLogits
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.runtime.model.training_mode import enable_activation_checkpointing, set_training_mode
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.model_spec import describe_model
from lightning_realloc.runtime.parallel.packed_forward import packed_logits, token_logprobs
from lightning_realloc.runtime.parallel.parallelize import parallelize
from lightning_realloc.runtime.parallel.pipeline import PipelineStage, pipeline_infer, pipeline_train
from lightning_realloc.runtime.parallel.shards import local_tensors
from lightning_realloc.runtime.transfer.executor import Reallocation
from tests.models import tiny_model
from tests.runtime.reference import Pair, local_part, with_lora

TOKENS_PER_MICRO_BATCH = ((5, 3), (9,), (2, 4, 4), (7, 1), (3,))
"""Response lengths of up to five micro-batches, all different; every prompt has two tokens."""


@dataclass(frozen=True)
class Case:
    """A model, a layout with pp > 1, and the micro-batches of each data-parallel rank."""

    family: str
    layout: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    num_layers: int = 2
    num_micro_batches: int = 3
    token_classifier: bool = False  # with a head of one score per token, as a critic has
    lora_modules: tuple[str, ...] = ()
    checkpointing: bool = False
    schedule: ScheduleName = "1f1b"
    tile_rows: int | None = None  # compute logits in tiles of so many tokens
    tolerance: float = 1e-5

    def build(self) -> nn.Module:
        """Return the model with its full weights: the same on every call and rank."""
        sizes = {"num_hidden_layers": self.num_layers, "tie_word_embeddings": False, **self.overrides}
        if self.family == "gpt2":
            sizes["n_layer"] = sizes.pop("num_hidden_layers")
        model: nn.Module = tiny_model(self.family, **sizes)
        if self.token_classifier:
            from transformers import AutoModelForTokenClassification

            torch.manual_seed(0)
            model.config.num_labels = 1
            model = AutoModelForTokenClassification.from_config(model.config)
        model = with_lora(model, self.lora_modules)
        if self.checkpointing:
            enable_activation_checkpointing(model)
        return model

    def batches(self, num_shares: int) -> list[list[PackedBatch]]:
        """Return the micro-batches of every data-parallel rank."""
        generator = torch.Generator().manual_seed(7)
        shares = []
        for share in range(num_shares):
            rows = [TOKENS_PER_MICRO_BATCH[(n + share) % 5] for n in range(self.num_micro_batches)]
            shares.append([_packed(lengths, generator) for lengths in rows])
        return shares


def _packed(lengths: tuple[int, ...], generator: torch.Generator) -> PackedBatch:
    def rows(sizes: list[int]) -> Ragged:
        return Ragged.from_list([torch.randint(3, 128, (size,), generator=generator) for size in sizes])

    columns = {"prompt_ids": rows([2] * len(lengths)), "response_ids": rows(list(lengths))}
    return pack(Samples(torch.arange(len(lengths)), columns))


def move_weights_between_layouts(
    family: str, pairs: list[tuple[str, str]], overrides: Mapping[str, Any] | None = None
) -> list[str]:
    """Reallocate a tied model's weights to another layout and back; return the tensors that are not bitwise equal."""
    meshes, rank = MeshRegistry("cpu"), dist.get_rank()
    meshes.create([Layout.parse(text) for pair in pairs for text in pair])
    settings: dict[str, Any] = {
        "rank": rank, "world_size": dist.get_world_size(), "dtype": torch.float32, "device": "cpu",
        "transport": "direct",
    }  # fmt: skip
    found = []
    whole = Case(family, "pp2", {"tie_word_embeddings": True, **(overrides or {})}, num_layers=4).build()
    spec = describe_model(whole)
    for source_text, target_text in pairs:
        model = copy.deepcopy(whole)
        source, target = (ModelLayout(spec, Layout.parse(text)) for text in (source_text, target_text))
        if rank in source.layout:
            parallelize(model, source, meshes)
        held = local_tensors(model) if rank in source.layout else {}
        there = Reallocation(source, held, target, **settings)
        there.run()
        moved = {name: tensor.clone() for name, tensor in there.target_tensors.items()}
        for tensor in held.values():
            tensor.zero_()
        Reallocation(target, moved, source, **settings, target_tensors=held).run()
        for layout, tensors in ((target, moved), (source, held)):
            for name, tensor in tensors.items():
                expected = local_part(whole.get_parameter(name).detach(), layout, name, rank)
                if not torch.equal(tensor, expected):
                    found.append(f"{source_text} -> {target_text}: {name} under {layout.layout}")
    return found


def score(model: nn.Module, batch: PackedBatch, *, classifies: bool) -> Tensor:
    """Return the (N,) values that an algorithm uses: logprobs of responses, or a critic's values."""
    if classifies:
        return packed_logits(model, batch)[:, 0]
    return token_logprobs(model, batch, only_responses=True).logprobs


def pipeline_beside_the_reference(cases: list[Case]) -> dict[str, list[str]]:
    """Infer and train every case next to one process with the whole model; return the differences by case.

    Collective over the world; ranks outside a layout only take part in making its groups.
    """
    meshes = MeshRegistry("cpu")
    meshes.create([Layout.parse(case.layout) for case in cases])
    return {str(case): _Pair(case, meshes).run() for case in cases if dist.get_rank() in Layout.parse(case.layout)}


class _Pair(Pair):
    """The stage that this rank has, and the whole model."""

    def __init__(self, case: Case, meshes: MeshRegistry) -> None:
        super().__init__(case, meshes)
        self.stage = PipelineStage(self.model, self.model_layout, meshes)
        self.num_shares = self.layout.data_parallel_size
        shares = case.batches(self.num_shares)
        self.mine, self.all = shares[self.layout.data_parallel_index(self.rank)], [b for share in shares for b in share]

    def run(self) -> list[str]:
        names = [name for name, _ in self.model.named_parameters()]
        found = [] if tuple(names) == self.model_layout.names(self.rank) else [f"parameters {names}"]
        for step in range(2):
            found += [f"step {step}: {difference}" for difference in self._infer() + self._train()]
        return found + self._tied_weights_that_differ()

    def _tied_weights_that_differ(self) -> list[str]:
        """Return the parameters on several stages whose bits differ after the steps. Collective over the pipeline."""
        tied = [name for name in self.model_layout.names(self.rank) if len(self.model_layout.stages(name)) > 1]
        weights = {name: local_tensors(self.model)[name].tolist() for name in tied}
        found = [theirs for theirs in gather_objects(weights, self.meshes.group(self.layout, "pp")) if theirs]
        return [] if all(theirs == found[0] for theirs in found) else [f"{tied} differ between stages"]

    def _infer(self) -> list[str]:
        self.model.eval()
        self.whole.eval()
        with self._tiles():
            got = pipeline_infer(self.stage, self.mine, self._score)
        if not self.stage.is_last:
            return [] if got is None else ["an earlier stage has results"]
        with torch.no_grad():
            expected = [self._score(self.whole, batch) for batch in self.mine]
        assert got is not None
        return [d for one, other in zip(got, expected, strict=True) for d in self.compare("inference", one, other)]

    @contextmanager
    def _tiles(self) -> Iterator[None]:
        """Compute logits in tiles, and check that the last stage has computed no others."""
        rows = self.case.tile_rows
        if rows is None:
            yield
            return
        seen, compute = [], DeferredLogits.compute

        def seeing(logits: DeferredLogits, states: Tensor) -> Any:
            seen.append(len(states))
            return compute(logits, states)

        def never(logits: DeferredLogits) -> Tensor:
            raise AssertionError("all logits at once")

        with (
            mock.patch.object(limits, "TILE_ELEMENTS", rows * 128),
            mock.patch.object(limits, "TILED_ROWS_PER_WIDTH", 0),
            mock.patch.object(tiled_logits, "TILE_ELEMENTS", rows * 128),
            mock.patch.object(DeferredLogits, "compute", seeing),
            mock.patch.object(DeferredLogits, "whole", never),
        ):
            yield
        assert max(seen, default=0) == (rows if self.stage.is_last else 0)

    def _score(self, model: nn.Module, batch: PackedBatch) -> Tensor:
        return score(model, batch, classifies=self.case.token_classifier)

    def _loss(self, model: nn.Module, batch: PackedBatch) -> Tensor:
        return self._score(model, batch).square().sum() / 10

    def _train(self) -> list[str]:
        set_training_mode(self.model, dropout=False)
        set_training_mode(self.whole, dropout=False)
        losses: list[Tensor] = []
        with self._tiles():
            pipeline_train(
                self.stage,
                self.mine,
                lambda model, number: self._recorded(losses, model, number),
                schedule=self.case.schedule,
            )
        self.train_whole(lambda: torch.stack([self._loss(self.whole, batch) for batch in self.all]).sum())
        found = []
        if self.stage.is_last:
            with torch.no_grad():
                expected = torch.stack([self._loss(self.whole, batch) for batch in self.mine])
            found += self.compare("loss", torch.stack(losses), expected)
        return found + self.compare_gradients() + self.compare_updates()

    def _recorded(self, losses: list[Tensor], model: nn.Module, number: int) -> Tensor:
        loss = self._loss(model, self.mine[number])
        losses.append(loss.detach())
        layout = self.layout
        return loss * layout.count(*layout.replica_axes, *layout.shard_axes)  # over which gradients are averaged
