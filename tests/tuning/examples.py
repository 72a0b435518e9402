"""A small decoder, a PPO dataflow and an estimator with round numbers, for tests of estimates and timelines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.dataflow.dataflow import Dataflow, ModelFunctionCall
from lightning_realloc.dataflow.execution_plan import CallPlan
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.cuts import TensorParallelCut, sharded
from lightning_realloc.layout.dims import Layout
from lightning_realloc.layout.model import ParamSpec
from lightning_realloc.report.known_models import find_known_model, is_shape, parse_shape
from lightning_realloc.strategies.pool.memory_check import describe_roles
from lightning_realloc.tuning.estimate.estimator import CallSeconds
from lightning_realloc.tuning.shapes.model_shape import ModelShape
from lightning_realloc.tuning.shapes.role_memory import RoleMemory

SMALL = "layers=4,hidden=64,intermediate=128,heads=8,kv_heads=2,vocabulary=256"

PPO_FLOW = Dataflow(
    (
        ModelFunctionCall("actor.generate", "generate", "actor", "roll_out", ("batch",), ("rollout",)),
        ModelFunctionCall("reward.infer", "infer", "reward", "judge", ("rollout",), ("scores",)),
        ModelFunctionCall("reference.infer", "infer", "reference", "score", ("rollout",), ("ref_logprobs",)),
        ModelFunctionCall("critic.infer", "infer", "critic", "value", ("rollout",), ("values",)),
        ModelFunctionCall(
            "estimate", "compute", None, "estimate", ("scores", "ref_logprobs", "values"), ("advantages",)
        ),
        ModelFunctionCall("actor.train", "train", "actor", "actor_loss", ("rollout", "advantages")),
        ModelFunctionCall("critic.train", "train", "critic", "critic_loss", ("rollout", "advantages")),
    )
)


@cache
def role_of(model: str, *, scores: bool = False) -> RoleMemory:
    """Return a built-in model, or a shape written out, as a role, with one output per token for ``scores``."""
    config = parse_shape(model) if is_shape(model) else find_known_model(model)
    role = Role(name="any", source=config, trained=True, task="sequence_classification" if scores else "causal_lm")
    return describe_roles([role], {})["any"]


def shape_of(model: str) -> ModelShape:
    """Return the sizes of a language model."""
    shape = role_of(model).shape
    assert shape is not None
    return shape


def roles_of(model: str, flow: Dataflow = PPO_FLOW) -> dict[str, RoleMemory]:
    """Return the roles of a dataflow, all with one model."""
    return {name: role_of(model, scores=name in ("critic", "reward")) for name in flow.roles}


def with_adapters(role: RoleMemory, *, rank: int) -> RoleMemory:
    """Return a role whose output projections have adapters: two of rank x 64 weights in each of 4 blocks."""
    params: list[ParamSpec] = []
    for param in role.model.params:
        if not param.name.endswith("o_proj.weight"):
            params.append(param)
            continue
        layer, (rows, columns) = param.name.removesuffix(".weight"), param.shape
        params.append(replace(param, name=f"{layer}.base_layer.weight"))
        down = ParamSpec(f"{layer}.lora_A.weight", (rank, columns), sharded(TensorParallelCut(1)), "block", param.block)
        params += [down, ParamSpec(f"{layer}.lora_B.weight", (rows, rank), sharded(), "block", param.block)]
    frozen = frozenset(param.name for param in params if ".lora_" not in param.name)
    return replace(role, model=replace(role.model, params=tuple(params)), frozen_params=frozen)


@dataclass(frozen=True)
class FixedEstimator:
    """Seconds by call, and by role for moves: an ``Estimator`` for timelines computed by hand."""

    dataflow: Dataflow
    seconds: Mapping[str, float]
    moves: Mapping[str, float] = field(default_factory=dict)
    cluster: ClusterSpec = field(default_factory=lambda: ClusterSpec.parse("h100:2x8"))
    sharers: Mapping[str, str] = field(default_factory=dict)

    def owner(self, role: str) -> str:
        return self.sharers.get(role, role)

    def call_seconds(self, call: str, plan: CallPlan) -> CallSeconds:
        return CallSeconds(compute=self.seconds[call])

    def move_seconds(self, role: str, source: Layout, target: Layout) -> float:
        return 0.0 if source == target else self.moves.get(role, 0.0)

    def slowdown(self, busy: int) -> float:
        return 1.0

    def offload_seconds(self, num_bytes: float) -> float:
        return num_bytes / self.cluster.host_bytes_per_s

    def resident_bytes(self, role: str, layout: Layout, *, is_home: bool) -> int:
        return 0

    def generates_in_copy(self, role: str, layout: Layout) -> bool:
        return False

    def active_bytes(self, call: str, plan: CallPlan) -> int:
        return 0
