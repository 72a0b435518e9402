"""Make the estimator and the plan evaluator of a running algorithm, from its models, lengths and measurements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lightning_realloc.batch.samples import Samples
from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.strategies.measure.profile_subject import Machine
from lightning_realloc.strategies.measure.profiling import Profile, ProfileRequest, num_cores, profile_models
from lightning_realloc.strategies.pool.builder import PoolBuilder
from lightning_realloc.strategies.pool.memory_check import with_callbacks
from lightning_realloc.tuning.candidates import PlanEvaluator
from lightning_realloc.tuning.estimate.estimator import Estimator
from lightning_realloc.tuning.estimate.hardware import CPU_EFFICIENCY, Efficiency
from lightning_realloc.tuning.estimate.measured import MeasuredEstimator
from lightning_realloc.tuning.estimate.roofline import RooflineEstimator
from lightning_realloc.tuning.memory.parts import MemorySettings, Workload, usable_bytes
from lightning_realloc.tuning.shapes.lengths import Lengths, TypicalLengths
from lightning_realloc.tuning.shapes.role_memory import RoleMemory
from lightning_realloc.tuning.timeline.simulator import Overlap


def make_estimator(
    dataflow: Dataflow,
    cluster: ClusterSpec,
    roles: Mapping[str, RoleMemory],
    settings: MemorySettings,
    workload: Workload,
    responses: tuple[int, ...],
    device: torch.device,
    profile: Profile | None,
) -> Estimator:
    """Return an estimator of the seconds of calls and reallocations.

    Args:
        dataflow: The algorithm's calls.
        cluster: Nodes, devices and memory of this run.
        roles: Role -> its description.
        settings: Bytes per element.
        workload: Sequences and tokens of an iteration.
        responses: Response lengths in tokens.
        device: This rank's device.
        profile: Measured passes; None estimates from data sheets alone.

    Raises:
        PlanError: for a role whose model has no decoder's config.
    """
    on_cpu = device.type == "cpu"
    roofline = RooflineEstimator(
        dataflow,
        cluster,
        roles,
        settings,
        workload,
        responses=responses,
        efficiency=CPU_EFFICIENCY if on_cpu else Efficiency(),
        cores_per_node=max(1, num_cores() // torch.get_num_threads()) if on_cpu else None,
    )
    return roofline if profile is None else MeasuredEstimator(roofline, profile.table, profile.models)


def profile_of(
    builder: PoolBuilder, machine: Machine, iterations: Sequence[Lengths], *, cache: Path | None, seconds: float
) -> Profile | None:
    """Measure the passes of the algorithm's models on these ranks, or read them from the cache. Collective.

    Args:
        builder: Builder of the algorithm's pool.
        machine: This rank.
        iterations: Lengths of some iterations.
        cache: Folder of cached profiles; None always measures.
        seconds: About the seconds that measuring may take; see `profile_models`.

    Returns:
        The profile; None if the time or a device's memory was too little.

    Raises:
        PlanError: for a role whose model has no decoder's config.
    """
    typical, module, dataflow = TypicalLengths.from_iterations(iterations), builder.module, _remaining_calls(builder)
    mean = max(1, round(sum(typical.responses) / len(typical.responses)))
    request = ProfileRequest(
        roles=module.roles(),
        described=builder.describe_roles(),
        dataflow=dataflow,
        workload=_workload(module, dataflow, typical, prompt_tokens=typical.prompt_tokens, response_tokens=mean),
        mean_response=mean,
        new_optimizer=module.new_optimizer,
        tp_plans=builder.tp_plans,
        compiled=_compiled(module, dataflow),
        seed=module.seed,
    )
    return profile_models(request, machine, cache, seconds=seconds)


def make_plan_evaluator(
    builder: PoolBuilder,
    plan: ExecutionPlan,
    iterations: Sequence[Lengths],
    *,
    callbacks: Iterable[object],
    overlap: Overlap,
    generation_parts: int = 1,
    profile: Profile | None = None,
) -> PlanEvaluator:
    """Return an evaluator of other plans for the algorithm that runs under ``plan``.

    Args:
        builder: Builder of the algorithm's pool.
        plan: The plan in use.
        iterations: Lengths of some iterations. Memory is checked for the longest response that sampling allows.
        callbacks: The Trainer's callbacks.
        overlap: Calls that may run at the same time.
        generation_parts: Chunks in which a generating rank sends its samples on.
        profile: Measured passes; None estimates seconds from data sheets alone.

    Raises:
        PlanError: see `make_estimator`.
    """
    dataflow, module = _remaining_calls(builder), builder.module
    cluster = cluster_of(builder.cluster, builder.world_size)
    roles = builder.describe_roles()
    _, settings = with_callbacks(callbacks, dataflow, plan, builder.memory_settings())
    typical = TypicalLengths.from_iterations(iterations)
    longest = max(*typical.responses, _longest_allowed(module, dataflow))
    load = _workload(module, dataflow, typical, prompt_tokens=typical.longest_prompt, response_tokens=longest)

    def estimate(lengths: TypicalLengths) -> Estimator:
        priced = _workload(
            module, dataflow, lengths, prompt_tokens=lengths.prompt_tokens, response_tokens=max(lengths.responses)
        )
        return make_estimator(dataflow, cluster, roles, settings, priced, lengths.responses, builder.device, profile)

    estimate(typical)  # raises errors now, not in the first search
    return PlanEvaluator(
        dataflow=dataflow,
        estimate=estimate,
        lengths=typical,
        roles=roles,
        settings=settings,
        workload=load,
        memory_budget=usable_bytes(builder.memory_budget),
        overlap=overlap,
        generation_parts=generation_parts,
    )


def _compiled(module: Any, dataflow: Dataflow) -> dict[str, str]:
    options = {role: module.train_options_of(role).compile for role in dataflow.trained_roles}
    return {role: backend for role, backend in options.items() if backend is not None}


def _remaining_calls(builder: PoolBuilder) -> Dataflow:
    """Return the dataflow without calls that were precomputed, whose models are freed."""
    return builder.dataflow.without(builder.module.answered_ahead)


def lengths_of(samples: Samples) -> Lengths | None:
    """Return the lengths of an iteration's prompts and responses; None if its samples do not have both."""
    if not len(samples) or "prompt_ids" not in samples or "response_ids" not in samples:
        return None
    prompts, responses = (samples.ragged(name).lengths.tolist() for name in ("prompt_ids", "response_ids"))
    return Lengths(tuple(prompts), tuple(responses))


def cluster_of(cluster: ClusterSpec, world_size: int) -> ClusterSpec:
    """Return the part of a cluster that a run of ``world_size`` ranks uses."""
    per_node = cluster.devices_per_node
    if cluster.num_devices == world_size:
        return cluster
    if world_size % per_node == 0:
        return replace(cluster, num_nodes=world_size // per_node)
    return replace(cluster, num_nodes=1, devices_per_node=world_size)


def _workload(
    module: Any, dataflow: Dataflow, lengths: TypicalLengths, *, prompt_tokens: int, response_tokens: int
) -> Workload:
    options = module.train_options_of(next(iter(dataflow.trained_roles), ""))
    sampling = getattr(module, "sampling", None)
    return Workload(
        num_sequences=lengths.num_sequences,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        micro_batch_tokens=options.micro_batch_tokens,
        num_minibatches=options.num_minibatches,
        num_epochs=options.num_epochs,
        samples_per_prompt=1 if sampling is None else min(sampling.n, lengths.num_sequences),
    )


def _longest_allowed(module: Any, dataflow: Dataflow) -> int:
    """Return the most tokens of a response that the module's sampling allows; 1 if it does not generate."""
    sampling = getattr(module, "sampling", None)
    generates = any(call.kind == "generate" for call in dataflow.iteration_calls)
    return int(sampling.max_new_tokens) if generates and sampling is not None else 1
