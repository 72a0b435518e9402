"""Ranks read their own regions of the weights from a folder: the same bits as whole models, without their memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.layout import Layout, ModelLayout
from lightning_realloc.runtime.measure.memory_stats import StorageMeter
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.model_spec import describe_model
from lightning_realloc.runtime.parallel.parallelize import parallelize
from lightning_realloc.runtime.parallel.shards import allocate_weights, fill_weights, local_tensors, take_weights
from lightning_realloc.strategies import ReallocStrategy
from tests.matrices import matrix, selected
from tests.models import byte_tokenizer, tiny_model, tiny_scorer
from tests.runtime.reference import local_part
from tests.strategies import runs
from tests.strategies.peft.peft_runs import LORA
from tests.workers import WorkerPool

LAYOUTS = ("fsdp4@0-3", "tp2@2-3", "dp2.tp2@0-3", "fsdp2.tp2@0-3", "dp4@3,1,2,0", "dp1@2", "dp2.fsdp2@0-3",
           "pp2.fsdp2@0-3", "pp2.tp2@0-3")  # fmt: skip
BOUNDARIES = ("fsdp2.tp2@0-3", "pp2.fsdp2@0-3")
DEVICE = torch.device("cpu")


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> list[Role]:
    """Roles from folders in bfloat16: biases, an odd vocabulary, tied weights, heads saved and new, adapters."""
    models: dict[str, Any] = {
        "biases": tiny_model("qwen2", tie_word_embeddings=False),
        "odd": tiny_model("llama", vocab_size=131),
        "tied": tiny_model("qwen2", vocab_size=129),
        "scorer": tiny_scorer("llama"),
        "fused": tiny_model("phi3"),
    }
    folders = {}
    for name, model in models.items():
        folders[name] = tmp_path_factory.mktemp(name)
        model.to(torch.bfloat16).save_pretrained(folders[name], max_shard_size="90KB" if name == "odd" else "5GB")
    policies = [Role(name=name, source=folders[name], trained=True) for name in ("biases", "odd", "tied", "fused")]
    return [
        *policies,
        Role(name="reward", source=folders["scorer"], trained=False, task="sequence_classification"),
        Role(name="critic", source=folders["odd"], trained=True, task="token_classification"),
        Role(name="adapted", source=folders["biases"], trained=True, peft=LORA),
    ]


def _read_all(roles: list[Role], layouts: list[str]) -> dict[str, dict[str, bool]]:
    """Return, by layout and role, whether this rank's tensors equal those of the whole model, in float32."""
    meshes, placed = MeshRegistry("cpu"), {text: Layout.parse(text) for text in layouts}
    meshes.create(list(placed.values()))
    facts: dict[str, dict[str, bool]] = {text: {} for text in layouts}
    for role in roles:
        whole = role.build(seed=5)
        model = describe_model(whole)
        for text, layout in placed.items():
            if dist.get_rank() in layout:
                deferred = role.build(seed=5, deferred=True)
                facts[text] |= _read(role.name, deferred, whole, ModelLayout(model, layout), meshes)
    return facts


def _read(name: str, model: Any, whole: Any, placed: ModelLayout, meshes: MeshRegistry) -> dict[str, bool]:
    """Return whether this rank's tensors and buffers equal those of the whole model."""
    rank, expected = dist.get_rank(), dict(whole.named_parameters())
    values = take_weights(model, dict.fromkeys(expected, torch.float32))
    parallelize(model, placed, meshes)
    allocate_weights(model, DEVICE)
    fill_weights(model, placed, rank, values)
    tensors, buffers = local_tensors(model), dict(model.named_buffers())
    return {
        name: list(tensors) == list(placed.names(rank))
        and all(
            torch.equal(tensor, local_part(expected[key].detach(), placed, key, rank))
            for key, tensor in tensors.items()
        ),
        f"{name} buffers": all(
            torch.equal(buffer, buffers[key]) for key, buffer in whole.named_buffers() if key in buffers
        ),
    }


@pytest.fixture(scope="module")
def read(workers: WorkerPool, roles: list[Role], request: pytest.FixtureRequest) -> list[dict[str, dict[str, bool]]]:
    """What every rank read in the selected layouts."""
    return workers.run(_read_all, roles, selected(request, "layout"), deadline_s=120.0)


@pytest.mark.parametrize("layout", matrix(LAYOUTS, *BOUNDARIES))
def test_every_rank_reads_the_regions_of_its_layout(layout: str, read: list[dict[str, dict[str, bool]]]) -> None:
    assert any(facts[layout] for facts in read)
    for facts in read:
        assert all(facts[layout].values()), facts[layout]


def _read_experts(folder: Path, layouts: list[str]) -> dict[str, dict[str, bool]]:
    return _read_all([Role(name="experts", source=folder, trained=True)], layouts)


def test_every_rank_reads_its_own_experts(workers: WorkerPool, tmp_path: Path) -> None:
    tiny_model("mixtral").to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="50KB")
    read = workers.run(
        _read_experts, tmp_path, ["fsdp4.ep2@3,1,2,0", "dp4.ep4", "pp2.tp2", "fsdp2.tp2.ep2@2,0,1,3"], deadline_s=120.0
    )
    assert all(all(facts.values()) for found in read for facts in found.values()), read


class BuiltWhole(runs.RecordedPPO):
    """PPO that extends `configure_model`, so that models are built whole."""

    def configure_model(self) -> None:
        """Build the models."""
        super().configure_model()


def _train(kind: type[runs.RecordedPPO], folder: Path, source: str, precision: str) -> list[dict[str, float]]:
    """Return the metrics of two iterations of PPO in layouts of all kinds."""
    actor: Any = folder if source == "folder" else tiny_model("llama", vocab_size=131).config
    plan = runs.calls(actor_generate="dp2", actor_train="fsdp2", critic_infer="tp2", critic_train="tp2",
                      reference_infer="pp2")  # fmt: skip
    record = runs.Record()
    trainer = runs.trainer(ReallocStrategy(plan), 2, callbacks=[record], precision=precision)
    settings: dict[str, Any] = {"sampling": runs.SAMPLING, "tokenizer": byte_tokenizer(), "learning_rate": 1e-2}
    trainer.fit(kind(actor, runs.low_tokens, critic=actor, reference=actor, **settings), runs.Batches(2))
    return record.logged


@pytest.mark.parametrize(
    ("source", "precision"),
    matrix(
        [("folder", "32-true"), ("folder", "bf16-mixed"), ("config", "bf16-true")],
    ),
)
def test_training_equals_that_of_models_that_are_built_whole(
    source: str, precision: str, roles: list[Role], workers: WorkerPool
) -> None:
    folder = next(role.source for role in roles if role.name == "odd")
    found, whole = (
        workers.run(_train, kind, folder, source, precision, world_size=2, init_process_group=False)
        for kind in (runs.RecordedPPO, BuiltWhole)
    )
    assert found == whole
    assert len(found[0]) == 2 and found[0][0] != found[0][1]


def _peak_bytes(folder: Path, layout_text: str) -> tuple[int, int, int]:
    """Return the peak bytes while a model is read, those of this rank's shard, and those of the largest tensor."""
    meshes, layout, rank = MeshRegistry("cpu"), Layout.parse(layout_text), dist.get_rank()
    meshes.create([layout])
    meter = StorageMeter()
    meter.start()
    before = meter.current_bytes
    model = Role(name="actor", source=folder, trained=True).build(seed=0, deferred=True)
    placed = ModelLayout(describe_model(model), layout)
    values = take_weights(model, {name: torch.float32 for name, _ in model.named_parameters()})
    parallelize(model, placed, meshes)
    allocate_weights(model, DEVICE)
    fill_weights(model, placed, rank, values)
    meter.stop()
    largest = max(param.numel for param in placed.model.params)
    return meter.take_peak() - before, 4 * placed.num_local_elements(rank), 4 * largest


@pytest.mark.parametrize("shards", matrix(["fsdp4@0-3", "tp4@0-3", "fsdp2.tp2@0-3"], "fsdp2.tp2@0-3"))
def test_a_rank_needs_memory_for_its_shard_and_one_tensor(shards: str, tmp_path: Path, workers: WorkerPool) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}
    tiny_model("llama", num_key_value_heads=4, **sizes).to(torch.bfloat16).save_pretrained(tmp_path)
    for peak, shard, largest in workers.run(_peak_bytes, tmp_path, shards):
        assert shard <= peak <= 1.15 * (shard + largest)
