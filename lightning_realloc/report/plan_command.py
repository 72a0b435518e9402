"""Command ``lightning-realloc plan``: find the best plan, compare plans, sweep cluster sizes, or check memory.

It works from configurations alone, without devices and weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import PlanError, ReallocError
from lightning_realloc.generation.core.capabilities import CAPABILITIES
from lightning_realloc.report.formats import gib
from lightning_realloc.report.model_source import read_roles
from lightning_realloc.report.plan_comparison import (
    NUM_PRICED_ITERATIONS,
    SweepEntry,
    compare_plans,
    gpu_hours,
    money,
    sweep_table,
)
from lightning_realloc.report.plan_report import (
    MAX_STATIC_PLANS,
    ROOFLINE_NOTE,
    alternatives_table,
    gap_sentence,
    memory_table,
    plan_table,
    report_title,
    seconds_with_error,
    setup_shortage,
    timeline_table,
)
from lightning_realloc.report.plan_request import PlanRequest, load_plan, parse_request
from lightning_realloc.runtime.model.image_inputs import IMAGE_FAMILIES
from lightning_realloc.strategies.generation_limits import (
    GenerationLimits,
    generation_limits,
    refuse_generation_layouts,
)
from lightning_realloc.strategies.pool.memory_check import memory_of_vllm, settings_of_precision
from lightning_realloc.tuning.estimate.hardware import CPU_EFFICIENCY
from lightning_realloc.tuning.estimate.roofline import RooflineEstimator
from lightning_realloc.tuning.memory.advice import find_excess
from lightning_realloc.tuning.memory.forecast import MemoryForecast, forecast_memory
from lightning_realloc.tuning.memory.parts import MemorySettings, Workload
from lightning_realloc.tuning.search.infeasible import NothingFitsError
from lightning_realloc.tuning.search.plan_search import SearchResult
from lightning_realloc.tuning.search.planning_task import PlanningTask
from lightning_realloc.tuning.search.pricing import PlanPricer, PricedPlan
from lightning_realloc.tuning.shapes.role_memory import RoleMemory

Write = Callable[[str], object]
"""Output function, such as ``sys.stdout.write``."""
FEASIBILITY_SEARCH_SECONDS = 2.0
"""CPU seconds of each search that only tests whether a plan fits; raising it finds tighter plans."""
WAYS_OUT_SECONDS = 15.0
"""CPU seconds after which an error's ways out are searched no further. Raising it names fewer devices."""
MAX_CLUSTER_SIZES = 16
"""Maximum number of consecutive cluster sizes to test; beyond it only doubled sizes are tested."""
EXIT_CANNOT_START = 3
"""Exit code if a plan was priced, but no run of it can start."""


def run_plan(arguments: Sequence[str], write: Write) -> int:
    """Run a command line and return its exit code; ``write`` receives the output.

    The code is 0 if runs can start: of the found plan, of both compared plans, or of at least one size of a sweep. Else
    it is `EXIT_CANNOT_START`.

    Raises:
        ReallocError: for an invalid command line, and in a check for a plan that does not fit.
    """
    request = parse_request(arguments)
    if request.flags.check is not None:
        check_plan(request, write)
        can_start = True
    elif request.flags.compare is not None:
        can_start = _compare(request, write)
    elif request.sweep:
        can_start = _sweep(request, write)
    else:
        can_start = _search(request, write)
    return 0 if can_start else EXIT_CANNOT_START


# ---- the best plan
def _search(request: PlanRequest, write: Write) -> bool:
    task = _task(request)
    pricer = _pricer(task, request)
    try:
        best, found = _best(pricer, request)
    except NothingFitsError as error:
        if not error.shortage:
            raise PlanError(f"{error}{_headroom_hint(request)}") from None
        begin = time.process_time()
        end = begin + WAYS_OUT_SECONDS
        enough = pricer.enough_nodes(lambda: time.process_time() > begin + WAYS_OUT_SECONDS / 2)
        ways_out = [*_lighter_that_fit(request, end), *_more_devices(task, request, enough, end)]
        raise PlanError(f"{error.shortage}; {'; or '.join(ways_out)}{_headroom_hint(request)}") from None
    if request.flags.save is not None:
        _save(best, request)
    subject = f"{request.flags.algorithm} on {request.flags.cluster}"
    write(f"{report_title(best, subject)}\n{_setting(request, task.roles)}\n")
    write(f"{_without_tensor_parallel(task)}{plan_table(best.plan)}\n")
    mixtures = any(role.shape is not None and role.shape.experts is not None for role in task.roles.values())
    seconds = seconds_with_error(best, has_mixtures=mixtures, unmeasured=_unmeasured(task, request))
    write(f"\n{seconds}\n{gap_sentence(found)}\n{_cost(best, request)}")
    timeline = timeline_table(best.timeline, num_devices=task.cluster.num_devices)
    write(f"\nTimeline of an iteration, in seconds\n{timeline}\n")
    write(f"\nMemory of the fullest ranks\n{memory_table(best)}\n")
    static, num_static = pricer.static(MAX_STATIC_PLANS), pricer.num_static_plans
    others = alternatives_table(best, pricer.heuristic(), static, num_tried=num_static)
    write(f"\nCompared with other plans\n{others}\n")
    if request.flags.save is not None:
        rejection = "" if best.can_start else "; --check rejects it, since it cannot start on such devices"
        write(f"\nThe plan is in {request.flags.save}{rejection}\n")
    return best.can_start


def _best(pricer: PlanPricer, request: PlanRequest, seconds: float | None = None) -> tuple[PricedPlan, SearchResult]:
    return pricer.search(seed=request.flags.seed or 0, seconds=seconds or request.seconds, clock=time.process_time)


def _lighter_that_fit(request: PlanRequest, end: float) -> Iterator[str]:
    """Yield flags of cheaper training with which a short search finds a plan that can start, with its bytes.

    No search begins after ``end``, in CPU seconds of the process.
    """
    for text, other in request.lighter():
        if time.process_time() > end:
            return
        try:
            best, _ = _best(_pricer(_task(other), other), other, FEASIBILITY_SEARCH_SECONDS)
        except ReallocError:  # nothing fits, or adapters do not fit the model
            continue
        if best.can_start:
            yield f"{text} fits with {gib(best.peak.parts.total)} a device"


def _more_devices(task: PlanningTask, request: PlanRequest, enough: int | None, end: float) -> Iterator[str]:
    """Yield a sufficient number of devices; ``enough`` is one of nodes, or None if none is known."""
    if enough is None:
        yield "no number of nodes that was tried suffices, use devices with more memory"
        return
    fewer, each = _fewer_nodes(task, request, enough, end), task.cluster.devices_per_node
    evidence = "have room for every call on all of them"
    if fewer is not None:
        evidence = "are the fewest tested on which a short search finds a plan"
    yield f"{fewer or enough} x {each} such devices {evidence}, or use devices with that much more memory"


def _fewer_nodes(task: PlanningTask, request: PlanRequest, enough: int, end: float) -> int | None:
    """Return the smallest tested number of nodes below ``enough`` on which a short search finds a plan; None: none.

    Several layouts may fit where a single one does not. More nodes are not always better, because some numbers divide
    models worse. So all numbers are tested in turn, or doubled ones if there are many. No search begins after ``end``,
    in CPU seconds of the process.
    """
    here = task.cluster.num_nodes
    tried = list(range(here + 1, enough))
    if len(tried) > MAX_CLUSTER_SIZES:
        tried = [size for size in (here << power for power in range(1, enough.bit_length())) if size < enough]
    for num_nodes in tried:
        if time.process_time() > end:
            break
        try:
            _best(_pricer(task.on_nodes(num_nodes), request), request, FEASIBILITY_SEARCH_SECONDS)
        except NothingFitsError:
            continue
        return num_nodes
    return None


def _without_tensor_parallel(task: PlanningTask) -> str:
    """Return a note about roles that no plan divides by tensor parallelism."""
    roles = [name for name, role in task.roles.items() if role.model.tp_refusal is not None]
    return f"  No tensor parallelism in {', '.join(roles)}: their model cannot run so.\n\n" if roles else ""


def _unmeasured(task: PlanningTask, request: PlanRequest) -> str | None:
    """Return the part of a plan whose estimates were never compared with measurements; None without one."""
    if request.is_cpu:
        return "CPUs"
    return "images" if task.workload is not None and task.workload.images is not None else None


def _cost(priced: PricedPlan, request: PlanRequest) -> str:
    price = request.flags.price_per_gpu_hour
    if price is None:
        return ""
    hours = f"{gpu_hours(priced):,.1f} GPU-hours"
    return f"{NUM_PRICED_ITERATIONS} iterations: {hours}, {money(priced, price):,.2f} at {price:g} an hour\n"


def _save(priced: PricedPlan, request: PlanRequest) -> None:
    path = request.flags.save
    comment = ""
    if not priced.can_start:
        comment = f"This plan cannot start on {request.flags.cluster}: {setup_shortage(priced)}."
    try:
        priced.plan.save(path, comment=comment)
    except OSError as error:
        raise PlanError(f"--save={path} cannot be written ({error.strerror}); name another file") from None


# ---- other modes
def _compare(request: PlanRequest, write: Write) -> bool:
    task = _task(request)
    pricer = _pricer(task, request)
    files = tuple(request.flags.compare)
    first, second = (_priced_file(pricer, file, request) for file in files)
    plans = {"A": first, "B": second}
    unfit = [name for name, plan in plans.items() if not plan.can_run]
    cannot = f": {' and '.join(unfit)} cannot start on such devices" if unfit else ""
    write(f"{request.flags.algorithm} on {request.flags.cluster}{cannot}\n{_setting(request, task.roles)}\n")
    write(f"{compare_plans(first, second, (files[0], files[1]), request.flags.price_per_gpu_hour)}\n")
    return not unfit


def _priced_file(pricer: PlanPricer, file: str, request: PlanRequest) -> PricedPlan:
    plan = load_plan(file, request)
    try:
        return pricer.price(plan)
    except PlanError as error:
        raise PlanError(f"plan file {file} under --algorithm={request.flags.algorithm}: {error}") from error


def _sweep(request: PlanRequest, write: Write) -> bool:
    task = _task(request)
    sizes = []
    for num_nodes in request.sweep:
        here = task.on_nodes(num_nodes)
        best, found, refusal = None, None, ""
        try:
            best, found = _best(_pricer(here, request), request)
        except NothingFitsError as error:
            refusal = str(error)
        devices = here.cluster.num_devices
        sizes.append(SweepEntry(num_nodes=num_nodes, num_devices=devices, best=best, found=found, refusal=refusal))
    can_start = any(size.best is not None and size.best.can_start for size in sizes)
    head = "Best plans found" if can_start else "No plan that was found can start on such devices"
    write(f"{head}: {request.flags.algorithm} on {request.flags.cluster} with other numbers of nodes\n")
    write(f"{_setting(request, task.roles)}\n{sweep_table(sizes, request.flags.price_per_gpu_hour)}\n")
    return can_start


def check_plan(request: PlanRequest, write: Write) -> None:
    """Write the memory table of a plan; PlanError, after the table, if the plan does not fit."""
    flow = request.dataflow
    plan = load_plan(request.flags.check, request).completed(flow)
    world_size = 1 + max(rank for layout in plan.layouts for rank in layout.ranks)
    plan.check(flow, request.num_devices or world_size)
    if request.run is not None:
        refuse_generation_layouts(request.run.module, flow, plan)
    roles = _roles(request, is_priced=False)
    plan.check_models(flow, {name: role.model for name, role in roles.items()})
    workload = _with_images(request, roles)

    def forecast(wanted: PlanRequest, roles: Mapping[str, RoleMemory], candidate: ExecutionPlan) -> MemoryForecast:
        return forecast_memory(flow, candidate, roles, _settings(wanted), workload, ranks=range(world_size))

    def lighter() -> Iterator[tuple[str, Callable[[ExecutionPlan], MemoryForecast]]]:
        for text, other in request.lighter():
            with suppress(ReallocError):  # adapters may not fit the model
                yield text, partial(forecast, other, _roles(other, is_priced=False))

    current, budget = partial(forecast, request, roles), request.memory_budget
    if request.run is not None:
        write(f"{request.flags.algorithm} of {request.run.files}\n{_setting(request, roles)}\n")
    write(f"{current(plan).summary()}\n")
    excess = None if budget is None else find_excess(flow, plan, current, budget_bytes=budget, lighter=lighter)
    if excess is not None:
        raise PlanError(excess)


# ---- shared by all modes
def _roles(request: PlanRequest, *, is_priced: bool) -> dict[str, RoleMemory]:
    roles = read_roles(
        request.sources,
        request.dataflow,
        is_priced=is_priced,
        adapters=request.adapters,
        shares=request.shares,
        train_vision=request.flags.train_vision,
    )
    load, trained = _with_images(request, roles), request.dataflow.trained_roles
    return {
        name: role.with_images(load.images, load.longest, is_trained=name in trained) for name, role in roles.items()
    }


def _settings(request: PlanRequest) -> MemorySettings:
    if (precision := request.flags.precision) not in ("bf16-mixed", "bf16-true", "32-true"):
        raise PlanError(f"precision={precision!r} cannot be used here; use bf16-mixed, bf16-true or 32-true")
    settings = settings_of_precision(precision)
    if request.run is not None and "vllm" in CAPABILITIES[request.run.module.engine]:
        given = request.run.module.generation_options, None if request.is_cpu else request.memory_budget
        settings = replace(settings, engine=memory_of_vllm(*given))
    if request.cluster is None or not request.is_cpu:
        return settings
    return replace(settings, builds_on_device=True, shares_memory=request.cluster.num_nodes == 1)


def _task(request: PlanRequest) -> PlanningTask:
    cluster, budget = request.cluster, request.memory_budget
    assert cluster is not None and budget is not None, "only a check needs no cluster"
    roles = _roles(request, is_priced=True)
    limits: GenerationLimits = {} if request.run is None else generation_limits(request.run.module)
    return PlanningTask(
        dataflow=request.dataflow,
        roles=roles,
        cluster=cluster,
        settings=_settings(request),
        workload=_with_images(request, roles),
        memory_budget=budget,
        headroom=request.headroom,
        generation_chunks=request.flags.generation_chunks,
        **limits,
    )


def _pricer(task: PlanningTask, request: PlanRequest) -> PlanPricer:
    estimator = RooflineEstimator(
        task.dataflow,
        task.cluster,
        task.roles,
        task.settings,
        task.workload or request.workload,
        efficiency=CPU_EFFICIENCY if request.is_cpu else None,
    )
    return PlanPricer(task, estimator)


def _with_images(request: PlanRequest, roles: Mapping[str, RoleMemory]) -> Workload:
    """Return the workload with the images of the request, as the first trained model reads them.

    Raises:
        PlanError: for images of a model without a tower, or of a family that cannot be run with images.
    """
    count, load, name = request.flags.images_per_prompt, request.workload, request.dataflow.trained_roles[0]
    tower = roles[name].tower
    if tower is None or tower.family not in IMAGE_FAMILIES:
        if not count:
            return load
        raise PlanError(
            f"--images-per-prompt={count}, but {name}={request.sources[name]} is not of a family that reads images "
            f"({', '.join(sorted(IMAGE_FAMILIES))}); leave the flag out, or name a model that is"
        )
    found = request.images.read(tower)
    return load if found is None else request.with_images(found[0])


def _lengths(request: PlanRequest, roles: Mapping[str, RoleMemory]) -> Iterator[str]:
    """Yield the numbers and lengths of sequences, and a sentence about the images of a model that reads them."""
    load = _with_images(request, roles)
    images = 0 if load.images is None else math.ceil(load.images.tokens)
    lengths = f"{load.prompt_tokens - images}{f' + {images:,}' if images else ''} + {load.response_tokens} tokens"
    yield f"{load.num_sequences} sequences of {lengths}, {request.flags.precision}"
    towers = [name for name, role in roles.items() if role.tower is not None]
    if load.images is not None:
        yield request.images.describe(roles[request.dataflow.trained_roles[0]])
    elif towers:
        yield (
            request.images.note
            or f"prompts without images, which {', '.join(towers)} could read: add --images-per-prompt 1"
        )


def _setting(request: PlanRequest, roles: Mapping[str, RoleMemory]) -> str:
    by_model: dict[str, list[str]] = {}
    for role, source in request.sources.items():
        by_model.setdefault(source, []).append(role)
    models = "; ".join(f"{', '.join(roles)}: {source}" for source, roles in by_model.items())
    device = "" if request.memory_budget is None else f", {gib(request.memory_budget)} a device{_headroom(request)}"
    lengths, *images = _lengths(request, roles)
    lines = [
        models,
        *([f"adapters in {', '.join(request.adapters)}: {request.flags.peft}"] if request.adapters else []),
        f"{lengths}{device}",
        *images,
        *request.notes,
        *([ROOFLINE_NOTE] if request.flags.check is None else []),
    ]
    return "".join(f"  {line}\n" for line in lines)


def _headroom(request: PlanRequest) -> str:
    return f", {request.headroom:.0%} head-room kept" if request.headroom else ""


def _headroom_hint(request: PlanRequest) -> str:
    """Return a hint for error messages that plans leave some memory free."""
    return f"; {request.headroom:.0%} of a device are kept free, --headroom 0 fills it" if request.headroom else ""
