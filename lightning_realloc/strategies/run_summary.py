"""Log a summary of a run before its first step: models, plan, memory, batch, learning rates, and checkpoints."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from functools import reduce

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import ReallocError
from lightning_realloc.remote_path import as_path
from lightning_realloc.strategies.algorithm_protocol import RunnableAlgorithm
from lightning_realloc.strategies.checkpoints.checkpoint_files import (
    checkpoint_files_in,
    checkpoints_in,
    newest_complete,
)
from lightning_realloc.strategies.largest_workload import rows_per_batch
from lightning_realloc.strategies.lightning.optimizer_hooks import LightningOptimizers
from lightning_realloc.strategies.placed_roles import PlacedRoles
from lightning_realloc.strategies.pool.builder import PoolBuilder
from lightning_realloc.trainers import trainer_callbacks
from lightning_realloc.tuning.memory.forecast import forecast_memory
from lightning_realloc.tuning.shapes.role_memory import RoleMemory

log = logging.getLogger(__name__)
TRL_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "GRPO": {"kl_coef": 0.0, "loss_average": "token", "sampling.max_new_tokens": 512},
    "RLOO": {"sampling.n": 2, "sampling.max_new_tokens": 512},
    "SFT": {},
    "DPO": {},
    "KTO": {},
    "RewardModel": {},
}
"""Algorithm -> its setting -> the default of TRL's trainer. TRL's learning rates decay linearly in all of them."""

OWN_DEFAULTS = ("kl", "ratio_level", "ratio_to", "loss_average")
"""Settings of losses that are None until an algorithm puts its own default in their place."""


def log_summary(placed: PlacedRoles, optimizers: LightningOptimizers) -> None:
    """Log models, plan, memory, batch, learning rates and checkpoints, unless ``enable_model_summary=False``."""
    trainer = placed.module.trainer
    if not trainer.is_global_zero or not any(isinstance(one, ModelSummary) for one in trainer_callbacks(trainer)):
        return
    try:
        rank_zero_info("\n  ".join(_summary_lines(placed, optimizers, trainer)))
    except ReallocError as error:  # a model that can be trained, but not be described
        log.debug("no summary of this run: %s", error)


def warn_of_earlier_checkpoint(trainer: Trainer, *, has_roles: bool) -> None:
    """Warn if training starts from nothing, though a checkpoint lies where this run writes its own.

    ``ckpt_path="last"`` finds only names of its own: no numbered checkpoint of a run that was killed before its first
    ``last.ckpt`` was complete. Checkpoints of roles are folders, those of another module are files.
    """
    if not trainer.is_global_zero or trainer.global_step or trainer.ckpt_path is not None:
        return
    found_in = checkpoints_in if has_roles else checkpoint_files_in
    folders = {getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks}
    newest = newest_complete(found_in(as_path(folder)) for folder in folders if folder)
    if newest is not None:
        rank_zero_warn(
            f"training starts from step 0, although {newest} is a complete checkpoint; to continue from it: "
            f"trainer.fit(..., ckpt_path={str(newest)!r}), or --ckpt_path={newest}"
        )


def _summary_lines(placed: PlacedRoles, optimizers: LightningOptimizers, trainer: Trainer) -> Iterator[str]:
    builder, plan, keeps_caches = placed.builder(), placed.pool.plan, placed.runner.engines.keeps_caches
    module, trained = builder.module, builder.dataflow.trained_roles
    ranks = f"{builder.facts.world_size} {builder.facts.device.type} rank{'s' if builder.facts.world_size > 1 else ''}"
    steps = f"{trainer.global_step}" + (f" of {trainer.max_steps}" if trainer.max_steps > 0 else "")
    yield f"{type(module).__name__} on {ranks}, precision {builder.facts.precision}, from step {steps}"
    sizes = (_size(name, role, is_trained=name in trained) for name, role in builder.describe_roles().items())
    yield f"models: {', '.join(sizes)}"
    offload = f"; offload {', '.join(plan.offload)}" if plan.offload else ""
    yield f"plan: {', '.join(f'{name} {call.to_text()}' for name, call in plan.calls)}{offload}"
    yield from _memory_line(builder, plan, keeps_caches=keeps_caches)
    yield from _first_iterations_line(builder, plan, keeps_graphs=keeps_caches)
    yield f"an iteration: {', '.join(_iteration(module, trainer, trained))}"
    if turns := getattr(module, "described_turns", None):
        yield f"a response: {turns}"
    if own := [f"{name}={value}" for name in OWN_DEFAULTS if (value := getattr(module, name, None)) is not None]:
        yield f"loss: {', '.join(own)}"
    rates = [f"{role} {made.param_groups[0]['lr']:g}" for role, made in optimizers.by_role().items()]
    schedule = "by schedule" if optimizers.schedules else "constant"
    yield f"learning rate: {', '.join([*rates, schedule])}"
    if differing := list(_differences(module, has_schedule=bool(optimizers.schedules))):
        yield f"other than TRL's default (in brackets): {', '.join(differing)}"
    yield f"checkpoints: {getattr(trainer.checkpoint_callback, 'dirpath', None) or 'none'}"


def _size(name: str, role: RoleMemory, *, is_trained: bool) -> str:
    if role.shares is not None:
        return f"{name} (the base of {role.shares})"
    trained = f" ({_count(role.model.num_elements - role.num_frozen)} trained)" if is_trained else ""
    packed = f" over {_gib(role.quantized_bytes)} of 4-bit weights" if role.quantized_bytes else ""
    return f"{name} {_count(role.model.num_elements)}{trained}{packed}"


def _memory_line(builder: PoolBuilder, plan: ExecutionPlan, *, keeps_caches: bool) -> Iterator[str]:
    """Yield the forecast peak of the fullest rank; nothing if there is no forecast."""
    flow, ranks = builder.dataflow, range(builder.facts.world_size)
    try:
        workload = builder.largest_workload()
        plan, settings = builder.for_forecast(plan)
        settings = settings.with_kept_caches(keeps_caches)
        forecast = forecast_memory(flow, plan, builder.describe_roles(), settings, workload, ranks=ranks)
    except ReallocError as error:
        log.debug("no forecast of memory: %s", error)
        return
    peak = forecast.iteration_peak
    without = "" if workload is not None else ", without activations and caches"
    kept = "; caches and CUDA graphs stay between generations" if keeps_caches else ""
    yield (
        f"memory: forecast peak of {_gib(peak.parts.total)} on rank {peak.rank} in {peak.phase}{without}; "
        f"a device has {_gib(builder.memory_budget)}{kept}{_shortage(peak.parts.total, builder.memory_budget)}"
    )


def _shortage(peak_bytes: int, budget_bytes: int) -> str:
    """Return the way out if a forecast peak does not fit."""
    if peak_bytes <= budget_bytes:
        return ""
    return (
        f"; {_gib(peak_bytes - budget_bytes)} too much for the longest samples: lightning-realloc plan searches for "
        f"layouts that fit, and shorter samples or smaller micro-batches need less"
    )


def _first_iterations_line(builder: PoolBuilder, plan: ExecutionPlan, *, keeps_graphs: bool) -> Iterator[str]:
    """Yield what the first iterations do in addition to later ones."""
    module, flow = builder.module, builder.dataflow
    backends = {role: module.train_options_of(role).compile for role in flow.trained_roles}
    extra = [f"blocks of {role} are compiled ({backend})" for role, backend in backends.items() if backend is not None]
    graphs = module.generation_options.cuda_graphs if builder.facts.device.type == "cuda" and keeps_graphs else False
    metrics = [
        f"capture_s/{call.name}"
        for call in flow.iteration_calls
        if call.kind == "generate" and graphs
        for dims in [plan.layout(call.name).dims]
        if dims.fsdp == dims.pp == dims.ep == 1 and (dims.tp == 1 or graphs == "collective")
    ]
    if metrics:
        extra.append(f"decoding steps are captured as CUDA graphs (seconds in {', '.join(metrics)})")
    if extra:
        yield f"the first iterations take longer: {' and '.join(extra)}"


def _iteration(module: RunnableAlgorithm, trainer: Trainer, trained: tuple[str, ...]) -> Iterator[str]:
    """Yield the samples of an iteration, if they are known, and the optimizer steps."""
    num_rows, sampling = rows_per_batch(trainer), getattr(module, "sampling", None)
    if num_rows is not None and sampling is not None:
        yield f"{num_rows} prompts x {sampling.n} responses = {num_rows * sampling.n} samples"
        yield f"at most {sampling.max_new_tokens} tokens each"
    elif num_rows is not None:
        yield f"{num_rows} samples"
    for role in trained:
        options = module.train_options_of(role)
        steps = options.num_epochs * options.num_minibatches
        yield f"{steps} optimizer step{'s' if steps > 1 else ''} of {role}"


def _differences(module: RunnableAlgorithm, *, has_schedule: bool) -> Iterator[str]:
    """Yield settings that have another value than TRL's default, with both."""
    names = (one.__name__ for one in type(module).__mro__)
    defaults = next((TRL_DEFAULTS[name] for name in names if name in TRL_DEFAULTS), None)
    for path, theirs in (defaults or {}).items():
        ours = reduce(getattr, path.split("."), module)
        if ours != theirs:
            yield f"{path}={ours} ({theirs})"
    if defaults is not None and not has_schedule:
        yield "constant learning rate (linear decay)"


def _count(num: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if num >= size:
            return f"{num / size:.3g}{unit}"
    return str(num)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{math.ceil(size / 2**20)} MiB"
