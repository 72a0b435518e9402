from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import Layout, ModelLayout
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.model_spec import describe_model
from lightning_realloc.runtime.parallel.parallelize import parallelize
from lightning_realloc.runtime.parallel.shards import bind_tensors, local_tensors, reshard, weightless_copy
from tests.matrices import matrix
from tests.models import tiny_model
from tests.runtime.reference import local_part
from tests.workers import WorkerPool

IDS = torch.arange(10).unsqueeze(0)


def _shards_through_a_model_s_life(layout_text: str) -> dict[str, bool]:
    meshes, rank, layout = MeshRegistry("cpu"), dist.get_rank(), Layout.parse(layout_text)
    meshes.create([layout])
    whole, model = tiny_model("qwen2"), tiny_model("qwen2")
    model_layout = ModelLayout(describe_model(model), layout)
    parallelize(model, model_layout, meshes)
    shards = local_tensors(model)
    facts = {
        "names": list(shards) == [param.name for param in model_layout.model.params],
        "values": all(
            torch.equal(shards[name], local_part(full.detach(), model_layout, name, rank))
            for name, full in whole.named_parameters()
        ),
    }
    with torch.no_grad():
        before = model(input_ids=IDS).logits
    facts["gathered root is resharded"] = _same_storage(local_tensors(model), shards)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    facts["stable over a step"] = _same_storage(local_tensors(model), shards)
    with torch.no_grad():
        model(input_ids=IDS)  # leaves the root gathered, so that the next write would have no effect
    for name, full in whole.named_parameters():
        shards[name].copy_(local_part(full.detach(), model_layout, name, rank))
    reshard(model)
    with torch.no_grad():
        facts["written weights are used"] = torch.equal(model(input_ids=IDS).logits, before)
    return facts


def _same_storage(tensors: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return (
        all(tensors[name].data_ptr() == others[name].data_ptr() for name in others) and tensors.keys() == others.keys()
    )


@pytest.mark.parametrize("layout", matrix(["fsdp4@0-3", "fsdp2.tp2@0-3", "dp2.tp2@0-3", "tp4@0-3"], "fsdp2.tp2@0-3"))
def test_local_tensors_share_storage_with_the_regions_of_the_layout(workers: WorkerPool, layout: str) -> None:
    for facts in workers.run(_shards_through_a_model_s_life, layout):
        assert all(facts.values()), facts


def test_bound_tensors_are_shared_and_ties_stay_tied() -> None:
    model = tiny_model("qwen2")
    weightless = weightless_copy(model)
    storage = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    bind_tensors(weightless, storage)

    assert weightless.lm_head.weight is weightless.model.embed_tokens.weight
    assert _same_storage(local_tensors(weightless), storage)
    assert not any(parameter.requires_grad for parameter in weightless.parameters())
    with torch.no_grad():
        assert torch.equal(weightless(IDS).logits, model(IDS).logits)
        storage["model.norm.weight"].mul_(2)
        assert not torch.equal(weightless(IDS).logits, model(IDS).logits)


def test_binding_tensors_under_other_names_is_refused() -> None:
    weightless = weightless_copy(tiny_model("qwen2"))
    tensors = dict(weightless.named_parameters())
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    with pytest.raises(LayoutError, match=r"missing \['model.embed_tokens.weight'\], unknown \['lm_head.weight'\]"):
        bind_tensors(weightless, tensors)
