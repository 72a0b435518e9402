from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import Layout, ModelLayout
from lightning_realloc.runtime.parallel.gradients import (
    clip_gradients,
    first_bad_gradient,
    global_grad_norm,
    uneven_gradient,
)
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.model_spec import describe_model
from lightning_realloc.runtime.parallel.parallelize import parallelize
from lightning_realloc.runtime.parallel.shards import local_tensor
from tests.models import SIZES, tiny_model
from tests.runtime.reference import local_part
from tests.workers import WorkerPool

IDS = torch.arange(12).unsqueeze(0)


def _norms(layout_texts: list[str]) -> dict[str, tuple[float, float, bool]]:
    """Return norm, expected norm, and whether clipping scaled every gradient as on one process."""
    meshes, rank = MeshRegistry("cpu"), dist.get_rank()
    meshes.create([Layout.parse(text) for text in layout_texts])
    answers = {}
    for text in layout_texts:
        layout = Layout.parse(text)
        whole, model = tiny_model("qwen3"), tiny_model("qwen3")
        model_layout = ModelLayout(describe_model(model), layout)
        parallelize(model, model_layout, meshes)
        for each in (whole, model):
            each.model.layers[1].requires_grad_(False)  # frozen parameters have no gradient and count for nothing
            each(input_ids=IDS, labels=IDS).loss.backward()
        expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.25)
        norm = clip_gradients(model, model_layout, meshes, 0.25)
        clipped = all(
            torch.allclose(
                local_tensor(parameter.grad),
                local_part(whole.get_parameter(name).grad, model_layout, name, rank),
                rtol=1e-4,
                atol=1e-7,
            )
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        )
        after = global_grad_norm(model, model_layout, meshes).item()
        answers[text] = (norm.item(), expected.item(), clipped and after == pytest.approx(0.25, rel=1e-5))
    return answers


def test_the_norm_counts_every_element_once_in_every_layout(workers: WorkerPool) -> None:
    layouts = ["tp4@0-3", "fsdp2.tp2@0-3", "dp2.tp2@0-3", "dp2.fsdp2@0-3", "fsdp4@3,1,2,0", "dp4@0-3"]

    answers = workers.run(_norms, layouts)

    for text in layouts:
        norms = [answer[text][0] for answer in answers]
        assert len(set(norms)) == 1, "the same bits on every rank"
        assert norms[0] == pytest.approx(answers[0][text][1], rel=1e-6)
        assert all(answer[text][2] for answer in answers), text


def test_one_process_needs_no_group(workers: WorkerPool) -> None:
    ((norm, expected, clipped),) = workers.run(_norms, ["dp1"], world_size=1)[0].values()

    assert norm == pytest.approx(expected, rel=1e-6)
    assert clipped


def _spoilt(layout_texts: list[str]) -> list[tuple[float, str | None, bool]]:
    """Return norm, bad parameter, and whether clipping kept the gradients; only the last rank has NaN."""
    meshes, answers = MeshRegistry("cpu"), []
    meshes.create([Layout.parse(text) for text in layout_texts])
    for text in layout_texts:
        model = tiny_model("qwen2")
        model_layout = ModelLayout(describe_model(model), Layout.parse(text))
        parallelize(model, model_layout, meshes)
        model(input_ids=IDS, labels=IDS).loss.backward()
        assert first_bad_gradient(model, model_layout, meshes) is None
        gradients = [local_tensor(parameter.grad) for parameter in model.parameters()]
        if dist.get_rank() == dist.get_world_size() - 1:
            for name in ("model.layers.1.mlp.down_proj.weight", "model.norm.weight"):
                local_tensor(model.get_parameter(name).grad)[-1] = torch.nan
        before = [gradient.clone() for gradient in gradients]
        norm = clip_gradients(model, model_layout, meshes, 1e-3)
        kept = all(torch.equal(a, b) or b.isnan().any() for a, b in zip(gradients, before, strict=True))
        answers.append((norm.item(), first_bad_gradient(model, model_layout, meshes), kept))
    return answers


def test_a_nan_gradient_of_one_rank_is_named_on_all_and_others_are_unchanged(workers: WorkerPool) -> None:
    for answers in workers.run(_spoilt, ["dp2", "fsdp2", "tp2"], world_size=2):
        for norm, name, kept in answers:
            assert math.isnan(norm) and kept
            assert name == "model.layers.1.mlp.down_proj.weight"


def _clip_to_nothing() -> str:
    meshes, layout, model = MeshRegistry("cpu"), Layout.parse("dp1"), tiny_model("llama")
    with pytest.raises(LayoutError) as error:
        clip_gradients(model, ModelLayout(describe_model(model), layout), meshes, 0.0)
    return str(error.value)


def test_a_limit_that_is_not_positive_is_refused(workers: WorkerPool) -> None:
    assert "max_norm=0.0 must be positive" in workers.run(_clip_to_nothing, world_size=1)[0]


def _uneven(style: str) -> dict[str, tuple[str | None, bool]]:
    """Return the uneven gradient under each layout, and whether the gradients are those of one process."""
    found = {}
    meshes, rank = MeshRegistry("cpu"), dist.get_rank()
    layouts = [Layout.parse(text) for text in ("tp2@0-1", "dp2@0-1")]
    meshes.create(layouts)
    for layout in layouts:
        whole, model = (_apertus() for _ in range(2))
        plan = {"model.layers.*.mlp.act_fn": style}
        model_layout = ModelLayout(describe_model(model, tp_plan=plan), layout)
        parallelize(model, model_layout, meshes, tp_plan=plan)
        for each in (whole, model):
            each(input_ids=IDS, labels=IDS).loss.backward()
        equal = all(
            torch.allclose(
                local_tensor(parameter.grad),
                local_part(whole.get_parameter(name).grad, model_layout, name, rank),
                rtol=1e-3,
                atol=1e-6,
            )
            for name, parameter in model.named_parameters()
        )
        found[str(layout)] = (uneven_gradient(model, model_layout, meshes), equal)
    return found


def _apertus() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("apertus", **SIZES)).float()


@pytest.mark.parametrize("style", ["replicate", "replicated_with_grad_allreduce"])
def test_a_parameter_that_reads_a_part_of_the_features_shows_by_uneven_gradients(
    workers: WorkerPool, style: str
) -> None:
    is_wrong = style == "replicate"
    for found in workers.run(_uneven, style, world_size=2):
        name, equal = found["tp2@0-1"]
        assert (name is not None and ".mlp.act_fn." in name) is is_wrong
        assert equal is not is_wrong
        assert found["dp2@0-1"] == (None, True)
