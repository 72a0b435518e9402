"""Measure a model's passes on the ranks of this run, block by block, within seconds.

Models of one block and of a few blocks run through the same code as the real model. Their difference gives the time of
a block; the rest is everything else. Ranks outside the measured layout sleep meanwhile, so that they take no time from
the measured ones.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.training import pack_columns
from lightning_realloc.generation.core.model_config import text_config_of
from lightning_realloc.layout import AXES, Layout, ModelLayout, ParallelDims
from lightning_realloc.runtime.measure.group_timer import GroupTimer
from lightning_realloc.runtime.measure.offload import OffloadCopier, make_copier
from lightning_realloc.runtime.model.training_mode import set_training_mode
from lightning_realloc.runtime.parallel.compiled import compiled_blocks
from lightning_realloc.runtime.parallel.model_spec import describe_model
from lightning_realloc.runtime.parallel.parallelize import divide_modules, needs_fsdp, parallelize
from lightning_realloc.runtime.parallel.shards import local_tensors
from lightning_realloc.runtime.parallel.tensor_parallel import slice_parameters
from lightning_realloc.runtime.transfer.agreement import TransportName
from lightning_realloc.strategies.measure.subjects import Machine, Subject
from lightning_realloc.tuning.estimate.pass_samples import (
    Grid,
    PassTimings,
    Point,
    Size,
    add_sharding_seconds,
    split_block_from_rest,
    surfaces,
    without_reduction,
    without_tp,
)
from lightning_realloc.tuning.estimate.profile import Curve, PassKey, PassKind, PassTimes

NUM_DECODE_STEPS, NUM_SHARDED_DECODE_STEPS = 6, 2
"""Decoding steps per measurement; fewer for FSDP shards, whose steps take long. The median is kept."""
RESERVE_S = 0.7
"""Seconds reserved for measuring the optimizer, reallocations and offload after the passes."""
OFFLOAD_SIZES_BYTES = (1 << 18, 1 << 22)
"""Sizes of the tensors whose offload is measured."""
MIN_CONTENTION_S = 0.01
"""Least seconds of a measurement with several busy ranks. A longer one hides that they start at different moments."""
NUM_REALLOCATIONS = 2
"""Timed reallocations, after one for warm-up. The fastest is kept."""
MAX_TOKEN_IDS = 256
"""Most different tokens of a measured pass. Raising it reaches more experts of mixtures with thousands of them."""
MAX_BASE_OVERRUN = 6.0
"""Most seconds of the unsharded passes, as a multiple of those for measuring. Without them there is no profile."""
MAX_BLOCKS, MAX_DECODE_BLOCKS = 3, 6
"""Most blocks of a measured model. More blocks divide the clock's noise by more, but take longer. Decoding reads all
weights at each step, and those of few blocks would stay in the processor's cache."""


class OutOfTimeError(Exception):
    """The passes that a profile cannot do without took longer than `MAX_BASE_OVERRUN` allows. Equal on all ranks."""


class Profiler:
    """Measures passes, contention between busy ranks, and reallocations. All methods are collective over all ranks.

    Args:
        machine: This rank.
        seconds: Time after which no more degrees are measured. Unsharded passes may take `MAX_BASE_OVERRUN` times it.
    """

    def __init__(self, machine: Machine, *, seconds: float = math.inf) -> None:
        self._machine, self._options = machine, machine.options
        self._full_models: dict[tuple[str, int], nn.Module] = {}
        self._bases: dict[tuple[str, int], PassTimings] = {}
        self._probed: dict[str, PassTimings] = {}
        """Probe passes on one rank, from which additions are computed; by the subject's key."""
        self._additions: dict[tuple[str, ParallelDims], PassTimings] = {}
        self._crowding: dict[int, Curve] = {}
        self._optimizers: dict[str, Curve] = {}
        """Seconds by elements, for each kind and settings of optimizer."""
        self._seconds = seconds
        self._timer = GroupTimer(
            meshes=machine.meshes,
            device=self._options.facts.device,
            rank=self._options.facts.rank,
            world_size=self._options.facts.world_size,
            clock=machine.clock,
        )

    def measure_passes(self, wanted: Mapping[Subject, Sequence[ParallelDims]], grid: Grid) -> dict[PassKey, PassTimes]:
        """Measure the passes of models under some degrees, on the first ranks while all others wait.

        Tensor parallelism divides the computation, so it is measured at every size. Sharding and replicas add the
        communication of weights and gradients, which is the same for every size. So each pair of their degrees is
        measured at one size, without tensor parallelism, and added to the tensor-parallel time. If the time is too
        short, tensor parallelism is left out first, then shards and replicas; of each the largest groups first.

        Args:
            wanted: Model -> the degrees to measure.
            grid: Sizes of the passes.

        Raises:
            OutOfTimeError: if even the unsharded passes take too long.
        """
        tasks: list[tuple[tuple[int, int, int], Callable[[], None]]] = []
        representatives: dict[Subject | None, Subject] = {}
        self._timer.limit_s = MAX_BASE_OVERRUN * self._seconds
        for number, (subject, dims) in enumerate(wanted.items()):
            self._measure_base(subject, 1, grid)
            for tp in sorted({one.tp for one in dims if one.tp > 1}):
                tasks.append(((1, tp, number), partial(self._measure_base, subject, tp, grid)))
            if representatives.setdefault(subject.bare, subject) is subject:
                for one in {without_tp(each) for each in dims} - {ParallelDims()}:
                    tasks.append(((0, one.size, one.fsdp), partial(self._measure_addition, subject, one, grid)))
        self._timer.limit_s = math.inf
        for _, task in sorted(tasks, key=lambda task: task[0]):
            if not self.is_late:
                task()
        found: dict[PassKey, PassTimes] = {}
        for subject, dims in wanted.items():
            for one in dims:
                passes = self._combine(subject, representatives[subject.bare], one, grid)
                found |= {PassKey(subject.key, kind, one): times for kind, times in passes.items()}
        return found

    @property
    def crowding(self) -> dict[int, Curve]:
        """Slowdown of passes by busy ranks of a node: tensor-parallel degree -> curve of factors over busy ranks."""
        return dict(self._crowding)

    @property
    def is_late(self) -> bool:
        """Whether the time for measuring is used up; equal on all ranks."""
        return self._timer.elapsed_s >= self._seconds - RESERVE_S

    def _combine(
        self, subject: Subject, representative: Subject, dims: ParallelDims, grid: Grid
    ) -> dict[PassKind, PassTimes]:
        """Return a model's passes under some degrees; {} if a part of them was not measured.

        Args:
            subject: The model.
            representative: A model with the same blocks, with which the additions of shards and replicas were measured.
            dims: The degrees.
            grid: Sizes of the passes.
        """
        base, alone = self._bases.get((subject.key, dims.tp)), without_tp(dims)
        added = self._additions.get((representative.key, alone), {} if alone.size == 1 else None)
        if base is None or added is None:
            return {}
        outside = subject.num_outside / max(1, representative.num_outside)
        return surfaces(add_sharding_seconds(base, dims, added, self._crowding, outside), grid)

    def _measure_base(self, subject: Subject, tp: int, grid: Grid) -> None:
        """Measure a model under tensor parallelism alone; its blocks with the bare model, whose head is small."""
        layout, bare = Layout(ParallelDims(tp=tp), tuple(range(tp))), subject.bare or subject
        self._machine.meshes.create([layout])
        if tp not in self._crowding:
            self._crowding[tp] = self._measure_contention(bare, tp, grid.micro_batches[-1])
        if (bare.key, tp) not in self._bases:
            self._bases[bare.key, tp] = self._read(bare, layout, _passes(bare, grid))
        blocks, points = self._bases[bare.key, tp], _passes(subject, grid)
        whole = self._pass_seconds(subject, 1, layout, points)
        base = {
            point: (blocks[point][0], max(0.0, seconds - blocks[point][0]))
            for point, seconds in zip(points, whole, strict=True)
        }
        self._bases[subject.key, tp] = base | self._read(subject, layout, _steps(subject, grid))

    def _measure_addition(self, subject: Subject, dims: ParallelDims, grid: Grid) -> None:
        """Measure the seconds that replicas and shards add to a block and to the rest. Negative ones are noise."""
        layout = Layout(dims, tuple(range(dims.size)))
        self._machine.meshes.create([layout])
        probes = [point for point in _probes(subject, grid) if dims.dp == 1 or point.kind.startswith("train")]
        if subject.key not in self._probed:
            alone = [point for point in _probes(subject, grid) if point.kind != "train_last"]
            self._probed[subject.key] = self._read(subject, Layout(ParallelDims(), (0,)), alone)
        base, crowding = self._probed[subject.key], self._crowding[1](dims.size)
        added = {}
        for point, (block, rest) in self._read(subject, layout, probes).items():
            without = base[Point(without_reduction(point.kind), point.size)]
            added[point] = max(0.0, block - crowding * without[0]), max(0.0, rest - crowding * without[1])
        self._additions[subject.key, dims] = added

    def _measure_contention(self, subject: Subject, tp: int, size: Size) -> Curve:
        """Return the slowdown of a pass by busy ranks, in groups of ``tp`` ranks that run it at the same time."""
        busiest = min(self._options.facts.world_size, self._options.facts.cluster.devices_per_node)
        counts = sorted({tp, min(2 * tp, busiest), max(tp, busiest // 2 // tp * tp), busiest // tp * tp})
        layouts = [Layout(ParallelDims(dp=count // tp, tp=tp), tuple(range(count))) for count in counts]
        self._machine.meshes.create(layouts)
        point = Point("infer", size)
        alone = self._pass_seconds(subject, 1, layouts[0], [point])[0]
        count = max(1, math.ceil(MIN_CONTENTION_S / alone)) if alone else 1
        taken = [self._pass_seconds(subject, 1, layout, [point], in_a_row=count)[0] for layout in layouts]
        return Curve.from_samples((busy, max(1.0, took / taken[0])) for busy, took in zip(counts, taken, strict=True))

    def measure_reallocation(self, subject: Subject, *, transport: TransportName) -> tuple[str, Curve]:
        """Return the transport that was used, and seconds over the bytes that the busiest rank writes or receives."""
        world = self._options.facts.world_size
        source = Layout(ParallelDims(fsdp=world), tuple(range(world)))
        target = Layout(ParallelDims(dp=world), tuple(range(world)))
        self._machine.meshes.create([source, target])
        name, size, seconds = self._time_reallocation(subject, self._depths(subject)[1], source, target, transport)
        return name, Curve(((float(size), seconds),))

    def measure_offload(self) -> Curve:
        """Return the seconds to copy offloaded bytes back to the device, one rank at a time."""
        layout, device = Layout(ParallelDims(), (0,)), self._options.facts.device
        points = []
        for size in OFFLOAD_SIZES_BYTES:
            here = torch.zeros(size, dtype=torch.uint8, device=device)
            seconds = self._timer.time_slowest(layout, partial(_copy_back_work, here, make_copier(device)))[0]
            points.append((float(size), seconds))
        return Curve.from_samples(points)

    # ---- one layout
    def _read(self, subject: Subject, layout: Layout, points: Sequence[Point]) -> PassTimings:
        """Measure passes with few and with more blocks."""
        if not points:
            return {}
        shallow, deep = self._depths(subject, decodes=all(point.kind == "decode" for point in points))
        few, many = (self._pass_seconds(subject, depth, layout, points) for depth in (shallow, deep))
        return {
            point: split_block_from_rest(shallow, a, deep, b) for point, a, b in zip(points, few, many, strict=True)
        }

    def _pass_seconds(
        self, subject: Subject, depth: int, layout: Layout, points: Sequence[Point], *, in_a_row: int = 1
    ) -> list[float]:
        """Return the seconds of passes through ``depth`` blocks, each of ``in_a_row`` repetitions together."""

        def works() -> Iterator[Callable[[], object] | float]:
            for work in self._work_items(subject, depth, layout, points):
                yield work if in_a_row == 1 or isinstance(work, float) else partial(_repeat, work, in_a_row)

        found = self._timer.time_slowest(layout, works, count=len(points))
        if self._timer.has_passed_limit:
            raise OutOfTimeError
        return found

    def _work_items(
        self, subject: Subject, depth: int, layout: Layout, points: Sequence[Point]
    ) -> Iterator[Callable[[], object] | float]:
        """Yield the work to time on this rank, or the seconds of decoding, which measures itself."""
        models: dict[bool, nn.Module] = {}
        for kind, size in points:
            trains = kind.startswith("train")
            if trains not in models:
                models[trains] = self._parallel_model(subject, depth, layout, trains=trains)
            pack = _pack(size, self._options.facts.device, text_config_of(models[trains]).vocab_size)
            if kind == "decode":
                yield self._decode_seconds(subject, models[False], layout, size)
            elif kind == "infer":
                yield self._infer_pass(subject, models[False], pack)
            else:
                yield self._train_pass(subject, models[True], pack, is_last=kind == "train_last")
        for model in models.values():
            model.zero_grad(set_to_none=True)  # passes without gradient sync accumulate gradients

    def _infer_pass(self, subject: Subject, model: nn.Module, pack: Callable[[], PackedBatch]) -> Callable[[], object]:
        def run() -> object:
            with torch.no_grad():
                return subject.forward(model, pack()).to("cpu")

        return run

    def _train_pass(
        self, subject: Subject, model: nn.Module, pack: Callable[[], PackedBatch], *, is_last: bool
    ) -> Callable[[], object]:
        is_wrapped = isinstance(model, FSDPModule)

        def run() -> None:
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(is_last)
            # Backward runs inside, too, since activation checkpointing recomputes the forward pass in it.
            with compiled_blocks(model, subject.compile):
                with self._machine.forward_context(is_wrapped):
                    loss = subject.forward(model, pack()).float().sum()
                loss.backward()
            if is_last:
                model.zero_grad(set_to_none=True)

        return run

    def _decode_seconds(self, subject: Subject, model: nn.Module, layout: Layout, size: Size) -> float:
        assert subject.decode is not None, "only models that generate have points of decoding"
        meshes = self._machine.meshes
        self._timer.max_over_group(meshes.group(layout, *AXES))
        num_steps = NUM_DECODE_STEPS if not layout.is_sharded else NUM_SHARDED_DECODE_STEPS
        seconds = subject.decode(model, meshes.batch_group(layout), size, num_steps)
        return median(seconds)

    # ---- models
    def _depths(self, subject: Subject, *, decodes: bool = False) -> tuple[int, int]:
        """Return the numbers of blocks of the two models whose times are compared."""
        return 1, max(2, min(subject.num_blocks, MAX_DECODE_BLOCKS if decodes else MAX_BLOCKS))

    def _full_model(self, subject: Subject, depth: int) -> nn.Module:
        """Return an undivided model that is ready for training passes without dropout, and so for all others."""
        if (subject.key, depth) not in self._full_models:
            model = subject.build(depth).requires_grad_(True)
            set_training_mode(model, dropout=False)
            self._full_models[subject.key, depth] = model
        return self._full_models[subject.key, depth]

    def _parallel_model(self, subject: Subject, depth: int, layout: Layout, *, trains: bool) -> nn.Module:
        """Return this rank's part of a model: the undivided model itself, or a sharded or converted copy."""
        whole, dims, copy_dtype = self._full_model(subject, depth), layout.dims, self._options.copy_dtype
        is_divided = dims.tp * dims.num_shards * dims.ep > 1 or (trains and dims.dp > 1)
        if not is_divided and (trains or all(one.dtype == copy_dtype for one in whole.parameters())):
            return whole
        copied = copy.deepcopy(whole)
        return self._divide_for_training(subject, copied, layout) if trains else self._divide(subject, copied, layout)

    def _divide(self, subject: Subject, model: nn.Module, layout: Layout) -> nn.Module:
        machine, options = self._machine, self._options
        model = model.to(options.copy_dtype).requires_grad_(False)
        target = _layout_of(subject, model, layout)
        if needs_fsdp(model, layout):
            return parallelize(model, target, machine.meshes, tp_plan=subject.tp_plan)
        if divide_modules(model, layout, machine.meshes, tp_plan=subject.tp_plan):
            slice_parameters(model, target, options.facts.rank)
        return model

    def _divide_for_training(self, subject: Subject, model: nn.Module, layout: Layout) -> nn.Module:
        machine, options = self._machine, self._options
        policy = options.mixed_precision if needs_fsdp(model, layout) else None
        target = _layout_of(subject, model, layout)
        return parallelize(model, target, machine.meshes, mixed_precision=policy, tp_plan=subject.tp_plan)

    # ---- reallocations and steps
    def _time_reallocation(
        self, subject: Subject, depth: int, source: Layout, target: Layout, transport: TransportName
    ) -> tuple[str, float, float]:
        machine, options = self._machine, self._options
        model = copy.deepcopy(self._full_model(subject, depth)).requires_grad_(False)
        spec = describe_model(model, tp_plan=subject.tp_plan, max_tp=max(source.dims.tp, target.dims.tp))
        home, copied = ModelLayout(spec, source), ModelLayout(spec, target)
        if options.facts.world_size > 1:
            parallelize(model, home, machine.meshes, tp_plan=subject.tp_plan)
        reallocation = options.reallocation(home, local_tensors(model), copied, role=subject.key, transport=transport)
        reallocation.run()
        took = min(reallocation.run().seconds for _ in range(NUM_REALLOCATIONS))
        size = spec.num_elements * options.copy_dtype.itemsize
        reallocation.release()
        by_push = reallocation.transport == "push"  # every rank writes only its shard, and others read it
        busiest_bytes = size / options.facts.world_size if by_push else size
        return reallocation.transport, busiest_bytes, self._timer.max_over_ranks([took])[0]

    def measure_optimizer(self, subject: Subject) -> Curve:
        """Return the seconds of clipping and an optimizer step over a rank's elements, measured once per optimizer."""
        layout, model = Layout(ParallelDims(), (0,)), self._full_model(subject, self._depths(subject)[1])
        chosen = subject.new_optimizer([nn.Parameter(torch.zeros(1))])
        kind = f"{type(chosen).__qualname__} {chosen.defaults}"
        if kind not in self._optimizers:
            elements = sum(parameter.numel() for parameter in model.parameters())
            took = self._timer.time_slowest(layout, lambda: [self._optimizer_step(subject, copy.deepcopy(model))])[0]
            self._optimizers[kind] = Curve(((float(elements), took),))
        return self._optimizers[kind]

    def _optimizer_step(self, subject: Subject, model: nn.Module) -> Callable[[], object]:
        parameters = list(model.parameters())
        optimizer = subject.new_optimizer(parameters)
        gradients = [torch.full_like(parameter, 1e-3) for parameter in parameters]

        def run() -> None:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return run


def _layout_of(subject: Subject, model: nn.Module, layout: Layout) -> ModelLayout:
    return ModelLayout(describe_model(model, tp_plan=subject.tp_plan, max_tp=layout.dims.tp), layout)


def _repeat(work: Callable[[], object], count: int) -> None:
    for _ in range(count):
        work()


def _copy_back_work(here: Tensor, copier: OffloadCopier) -> list[Callable[[], object]]:
    """Offload a tensor's bytes, and return the work that copies them back."""
    pairs = [(here, copier.allocate(here.numel()))]
    copier.copy_out(pairs)

    def run() -> None:
        copier.start_copy_back(pairs)
        copier.wait()

    return [run]


def _pack(size: Size, device: torch.device, vocabulary: int) -> Callable[[], PackedBatch]:
    """Return a function that packs sequences of equal lengths, as a call does before every forward pass.

    Their tokens differ: routers send equal ones to the same few experts, whose weights alone would be read.
    """
    count, each = size.sequences, size.prompt + size.response
    tokens = (torch.arange(count * each) % min(vocabulary, MAX_TOKEN_IDS)).view(count, each)
    prompts, responses = tokens[:, : size.prompt], tokens[:, size.prompt :]
    samples = Samples(
        torch.arange(count),
        {
            "prompt_ids": Ragged(prompts.flatten(), torch.full((count,), size.prompt)),
            "response_ids": Ragged(responses.flatten(), torch.full((count,), size.response)),
        },
    )
    return lambda: pack_columns(samples, device)


def _passes(subject: Subject, grid: Grid) -> list[Point]:
    kinds: list[PassKind] = ["infer", "train"] if subject.is_trained else ["infer"]
    return [Point(kind, size) for kind in kinds for size in grid.micro_batches]


def _steps(subject: Subject, grid: Grid) -> list[Point]:
    return [] if subject.decode is None else [Point("decode", size) for size in grid.decoding]


def _probes(subject: Subject, grid: Grid) -> list[Point]:
    kinds: list[PassKind] = ["infer", "train", "train_last"] if subject.is_trained else ["infer"]
    points = [Point(kind, grid.probe) for kind in kinds]
    return [*points, Point("decode", grid.probe_step)] if subject.decode is not None else points
