"""What the pool's processes remember of a checked model changes with all that a dry run depends on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from lightning_realloc.errors import ConfigError
from tests.dry_runs import _described_once, _propagated_once, _remembered, structure
from tests.models import tiny_model
from tests.workers import WorkerPool


def _other_class(model: nn.Module) -> None:
    model.model.norm = nn.LayerNorm(64)


def _other_code(model: nn.Module) -> None:
    model.model.norm.forward = lambda hidden: hidden


def _other_attribute(model: nn.Module) -> None:
    model.model.norm.variance_epsilon = 1.0


def _other_shape(model: nn.Module) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight[:5])


def _other_configuration(model: nn.Module) -> None:
    model.config.hidden_act = "relu"


CHANGES = [_other_class, _other_code, _other_attribute, _other_shape, _other_configuration]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_has_another_structure(change: Callable[[nn.Module], None]) -> None:
    model = tiny_model("llama")
    assert structure(model) == structure(tiny_model("llama", seed=1))
    change(model)
    assert structure(model) != structure(tiny_model("llama"))


def test_a_patched_class_has_another_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    before = structure(model)
    monkeypatch.setattr(type(model.model.norm), "forward", lambda self, hidden: hidden)
    assert structure(model) != before


def test_only_models_that_passed_are_not_checked_again() -> None:
    checked: list[str] = []

    def check(model: nn.Module, answer: str | None) -> str | None:
        checked.append(str(answer))
        if answer == "refused":
            raise ConfigError(answer)
        return answer

    remembered, model = _remembered(check), tiny_model("llama")
    assert [remembered(model, answer) for answer in (None, None, "layer", "layer")] == [None, None, "layer", "layer"]
    for _ in range(2):
        with pytest.raises(ConfigError, match="refused"):
            remembered(model, "refused")
    assert checked == ["None", "layer", "layer", "refused", "refused"]


def _untie(model: nn.Module) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def _plan_otherwise(model: nn.Module) -> None:
    model._tp_plan = {}


@pytest.mark.parametrize("change", [_untie, _plan_otherwise, _other_configuration])
def test_a_changed_model_or_option_is_described_again(change: Callable[[nn.Module], None]) -> None:
    described: list[int] = []

    def describe(model: nn.Module, *, max_tp: int) -> int:
        described.append(max_tp)
        return len(described)

    known, changed = _described_once(describe), tiny_model("qwen2")  # whose head is tied
    change(changed)
    asked = [(tiny_model("qwen2"), 1), (tiny_model("qwen2", seed=1), 1), (tiny_model("qwen2"), 2), (changed, 1)]
    assert [known(model, max_tp=max_tp) for model, max_tp in asked] == [1, 1, 2, 3]


def _operations_of_new_meshes() -> list[tuple[list[str], list[float]]]:
    """Repeat operations on sharded tensors; return those that were not remembered, and their results."""
    propagate, found = ShardingPropagator.propagate_op_sharding_non_cached, []
    computed: list[str] = []

    def counted(propagator: ShardingPropagator, schema: object) -> object:
        computed.append(str(schema.op))  # type: ignore[attr-defined]
        return propagate(propagator, schema)  # type: ignore[arg-type]

    ShardingPropagator.propagate_op_sharding_non_cached = _propagated_once(counted)  # type: ignore[method-assign]
    for placement, factor in ((Shard(0), 2), (Shard(0), 2), (Shard(0), 0.5), (Replicate(), 2)):
        _clear_sharding_prop_cache()
        computed.clear()
        mesh = init_device_mesh("cpu", (2,))
        whole = DTensor.from_local(torch.arange(3), mesh, [placement])
        sums = torch._foreach_add([whole * factor], [whole])
        assert all(one.device_mesh is mesh and one.placements == (placement,) for one in sums)
        found.append((list(computed), sums[0].full_tensor().tolist()))
    ShardingPropagator.propagate_op_sharding_non_cached = propagate  # type: ignore[method-assign]
    return found


def test_outputs_of_known_operations_have_the_mesh_of_their_inputs(workers: WorkerPool) -> None:
    first, repeated, by_half, replicated = workers.run(_operations_of_new_meshes, world_size=2)[0]
    assert first[0] == replicated[0] == ["aten.mul.Tensor", "aten._foreach_add.List"]
    assert repeated[0] == [] and by_half[0] == first[0]  # its outputs are no integers
    assert first[1] == repeated[1] == [0, 3, 6] * 2
    assert by_half[1] == [0.0, 1.5, 3.0] * 2 and replicated[1] == [0, 3, 6]
