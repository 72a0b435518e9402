"""Refuse layouts of a generating call whose ranks cannot follow the algorithm's options, before a model is built."""

from __future__ import annotations

from typing import TypedDict

from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.core.capabilities import CAPABILITIES
from lightning_realloc.layout import Layout
from lightning_realloc.strategies.algorithm_protocol import RunnableAlgorithm


class GenerationLimits(TypedDict, total=False):
    """Fields of a `PlanningTask` about layouts of generation; those that are left out are True."""

    generates_in_stages: bool
    generates_in_lockstep: bool
    generates_in_tensor_parallel: bool


def option_without_lockstep(algorithm: RunnableAlgorithm) -> str | None:
    """Return an option of generation that ranks cannot follow which run each block together; None if there is none.

    The text continues "cannot ...".
    """
    speculation = algorithm.speculation
    if "sharded" not in CAPABILITIES[algorithm.engine]:
        return f"generate by engine={algorithm.engine!r}"
    if algorithm.generation_options.batch_invariant:
        return "generate with batch_invariant=True"
    drafts = speculation is not None and speculation.drafter == "blocks"
    return "draft by its own first blocks" if drafts else None


def option_without_stages(algorithm: RunnableAlgorithm) -> str | None:
    """Return an option, with its value, that needs all layers of a model on a rank; None if stages can generate."""
    options, speculation = algorithm.generation_options, algorithm.speculation
    asked = {
        f"engine={algorithm.engine!r}": "stages" not in CAPABILITIES[algorithm.engine],
        "batch_invariant=True": options.batch_invariant,
        "drafting by the first blocks": speculation is not None and speculation.drafter == "blocks",
    }
    return next((option for option, is_set in asked.items() if is_set), None)


def generation_limits(algorithm: RunnableAlgorithm) -> GenerationLimits:
    """Return the layouts in which the options of an algorithm let it generate."""
    vllm = algorithm.generation_options.vllm
    divides = "tensor_parallel" in CAPABILITIES[algorithm.engine] and (vllm is None or vllm.address is None)
    return {
        "generates_in_stages": option_without_stages(algorithm) is None,
        "generates_in_lockstep": option_without_lockstep(algorithm) is None,
        "generates_in_tensor_parallel": divides,
    }


def refuse_generation_layouts(algorithm: RunnableAlgorithm, dataflow: Dataflow, plan: ExecutionPlan) -> None:
    """Raise GenerationError for a plan in which a call of an iteration cannot follow an option of generation."""
    for call in dataflow.iteration_calls:
        if call.kind == "generate":
            refuse_generation_layout(algorithm, call.name, plan.layout(call.name))


def refuse_generation_layout(algorithm: RunnableAlgorithm, call: str, layout: Layout) -> None:
    """Raise GenerationError for a layout of a call whose ranks cannot follow an option of generation."""
    runs_in = f"{call} runs in the layout {layout}"
    asked = option_without_stages(algorithm)
    if layout.count(*Layout.stage_axes) > 1 and asked is not None:
        raise GenerationError(
            f"{runs_in}, whose ranks hold a stage each, and {asked} needs all layers on a rank; leave it out, or give "
            f"{call} a layout with pp=1"
        )
    server = None if algorithm.generation_options.vllm is None else algorithm.generation_options.vllm.address
    if server is not None and len(layout.ranks) > 1:
        raise GenerationError(
            f"{runs_in} of {len(layout.ranks)} ranks, which would all give weights to the server {server}; give it a "
            f"layout of one rank, or leave address out"
        )
    asked = option_without_lockstep(algorithm)
    if layout.runs_in_lockstep and asked is not None:
        raise GenerationError(
            f"{runs_in}, whose blocks are run by all ranks together, and cannot {asked}; give it a layout with fsdp=1 "
            f"and ep=1, or leave this setting out"
        )
