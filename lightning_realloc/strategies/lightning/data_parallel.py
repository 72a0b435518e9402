"""Train any LightningModule data-parallel: one process per device, equal weights, averaged gradients.

This class handles neither roles nor layouts; `ReallocStrategy` adds both.
"""

from __future__ import annotations

import atexit
import os
import signal
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.generation.core.capabilities import CAPABILITIES
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.parent_watch import end_with_parent, say_before_orphaned_end
from lightning_realloc.runtime.measure.allocators import expand_cuda_segments, keep_freed_memory
from lightning_realloc.runtime.measure.links import RunLinks, describe_links
from lightning_realloc.runtime.measure.nodes import check_nodes, describe_cluster, warn_of_other_processes
from lightning_realloc.runtime.messages.failure_store import explain_broken_connection, publish_start
from lightning_realloc.runtime.messages.objects import broadcast_object
from lightning_realloc.runtime.parallel.mesh import forget_groups
from lightning_realloc.seeds import global_seed
from lightning_realloc.strategies.checkpoints.safety.failed_saves import FailedSaves, SaveErrorAction
from lightning_realloc.strategies.checkpoints.safety.last_pointer import LatestSave
from lightning_realloc.strategies.lightning import failures
from lightning_realloc.strategies.lightning.file_checkpoints import CheckpointedStrategy
from lightning_realloc.strategies.lightning.launch_options import LaunchOptions, RemoteGPUs, make_launcher
from lightning_realloc.strategies.lightning.process_group import (
    allow_open_files,
    end_process_group,
    is_on_one_host,
    start_on_loopback,
    start_with_store,
)
from lightning_realloc.strategies.lightning.signals import StopRequest
from lightning_realloc.strategies.lightning.trainer_checks import (
    check_started_processes,
    refuse_foreign_callbacks,
    refuse_foreign_data,
    refuse_gradient_settings,
    refuse_ineffective_callbacks,
    refuse_sharded_module,
    warn_of_stale_addresses,
)
from lightning_realloc.strategies.pool.precision import for_samples

Value = TypeVar("Value")


class DataParallelStrategy(CheckpointedStrategy):
    """Lightning's model-parallel strategy, without its assumption of one model on one mesh.

    `ReallocStrategy` documents the settings.
    """

    is_distributed = True  # without it, Lightning silently skips samplers and sync_dist for classes not its own

    def __init__(
        self,
        *,
        cluster: ClusterSpec | str | None,
        launch: LaunchOptions,
        load_weights_only: bool,
        on_save_error: SaveErrorAction,
        process_group_backend: str | None,
        timeout: timedelta | None,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self._cluster = ClusterSpec.parse(cluster) if isinstance(cluster, str) else cluster
        self._launch = launch
        self._load_weights_only = load_weights_only
        self.failed_saves = FailedSaves(on_save_error)
        self._latest_file = LatestSave()
        self._sync_blocked = False
        self.stop = StopRequest()
        """Request to end the run, set by SIGTERM, Ctrl-C and Slurm's signal."""
        self.links: RunLinks | None = None
        """Links between the nodes; None where they are not measured."""
        self.store: TCPStore | None = None
        """Store that the launcher has opened for the ranks to meet; None: at ``MASTER_ADDR`` and ``MASTER_PORT``."""
        if launch.ray is not None and launch.ray.use_gpus:
            self._accelerator = RemoteGPUs()

    @abstractmethod  # so that LightningCLI does not offer this class; Lightning's own setup would wipe weights
    def setup(self, trainer: Trainer) -> None:
        """Move the module to its device, with the weights of rank 0."""
        assert self.model is not None
        refuse_sharded_module(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        broadcast_module(self.model)

    @property
    def dataflow(self) -> Dataflow | None:
        """The algorithm's calls; None for a LightningModule that declares none."""
        flow = getattr(self.lightning_module, "dataflow", None)
        return flow if isinstance(flow, Dataflow) else None

    @property
    def connected_module(self) -> LightningModule:
        """The LightningModule, which exists from `connect` on."""
        assert self.lightning_module is not None, "Lightning connects the module before it calls this"
        return self.lightning_module

    # ---- launching and processes
    def _configure_launcher(self) -> None:
        self._launcher = make_launcher(self, self._launch)

    def connect(self, model: LightningModule) -> None:
        """Connect the module, and refuse Trainer settings that would have no effect or fail later.

        Raises:
            ConfigError: for callbacks or data of other libraries, and for callbacks that do nothing for an algorithm.
            MisconfigurationException: for gradient clipping or accumulation by the Trainer of an algorithm.
        """
        super().connect(model)
        trainer: Any = model._trainer
        if trainer is None:
            return
        failures.report_failures(rank=self.local_rank, launcher=self._launcher)  # the global rank is not known yet
        refuse_foreign_callbacks(trainer)
        refuse_foreign_data(trainer)
        if self.dataflow is not None:
            refuse_ineffective_callbacks(trainer.callbacks, type(model).__name__)
            refuse_gradient_settings(trainer, type(model).__name__)

    def setup_environment(self) -> None:
        """Start the process group; with an external launcher, also check the number of processes.

        Raises:
            MisconfigurationException: if the launcher started another number of processes than the Trainer needs.
        """
        assert self.cluster_environment is not None
        if self.cluster_environment.creates_processes_externally:
            check_started_processes(self.num_processes, self.num_nodes)
            warn_of_stale_addresses()
        if not dist.is_initialized():
            atexit.register(end_process_group)
            allow_open_files(self.cluster_environment.world_size())
        with failures.ending_started_ranks(self._launcher), failures.naming_taken_port(self.cluster_environment):
            self._setup_distributed()
        # Ranks may be seeded differently, but must draw, shuffle and build alike.
        self.run_seed = self.broadcast(global_seed())
        self.stop.handle_signals(self.connected_module.trainer)
        failures.report_failures(rank=self.global_rank, launcher=self._launcher)
        if self.world_size > 1:
            publish_start(self.global_rank)
            self._find_nodes()
            if failures.is_started_by_torchrun():
                end_with_parent(os.getppid())
            say_before_orphaned_end(lambda: failures.log_way_to_resume(self.connected_module._trainer))
        if self.root_device.type == "cpu":
            keep_freed_memory()
        elif self.root_device.type == "cuda":
            warn_of_other_processes(self.root_device)
            if "vllm" not in CAPABILITIES.get(getattr(self.connected_module, "engine", ""), ()):  # vLLM maps weights
                expand_cuda_segments()
        names = ("data_parallel",)
        self._device_mesh = init_device_mesh(self.root_device.type, (self.world_size,), mesh_dim_names=names)
        self.connected_module._device_mesh = self._device_mesh

    def _setup_distributed(self) -> None:
        """Start the process group, and undo Lightning's binding of a gloo group to the device.

        To make a smaller group, torch calls a method of the bound group that gloo's groups lack.
        """
        environment = self.cluster_environment
        assert environment is not None and self.accelerator is not None
        on_one_host = is_on_one_host(environment, num_nodes=self.num_nodes)
        if not dist.is_initialized() and (self.store is not None or on_one_host):
            self.accelerator.setup_device(self.root_device)
            self.set_world_ranks()
            settings = environment, self._get_process_group_backend(), self.root_device, self._timeout
            if self.store is not None:
                start_with_store(self.store, *settings)
            else:
                start_on_loopback(*settings)
        super()._setup_distributed()  # does nothing to an existing group
        group = dist.group.WORLD
        if group is not None and dist.get_backend() == "gloo":
            group.bound_device_id = None

    def broadcast(self, obj: Value, src: int = 0) -> Value:
        """Return one rank's value, plain data, on every rank; Lightning's own method would unpickle it."""
        return cast(Value, broadcast_object(obj, src))

    def _find_nodes(self) -> None:
        """Check which ranks share a node, and measure links between nodes unless the cluster was given. Collective."""
        hosts = check_nodes(self.num_processes)
        if self.num_nodes > 1 and self._cluster is None:
            self.links = RunLinks(self.cluster, self.root_device, hosts)
            rank_zero_info(f"{describe_links(self.links.cluster)}; {self.links.start.describe()}")
            for line in self.links.start.warnings():
                rank_zero_warn(line)

    def on_train_start(self) -> None:
        """Begin a new epoch if the run resumes after the last batch of one; ``max_steps`` would count an empty one."""
        super().on_train_start()
        loop: Any = self.connected_module.trainer.fit_loop
        epochs, batches = loop.epoch_progress, loop.epoch_loop.batch_progress
        if loop.restarting and batches.is_last_batch and epochs.current.ready == epochs.current.processed:
            if epochs.current.completed < epochs.current.processed:
                epochs.increment_completed()
            _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]
            loop.reset_restart_stage()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Sampler arguments: all rows on every rank for an algorithm with calls, a share per rank for other modules."""
        if self.dataflow is not None:
            return {"num_replicas": 1, "rank": 0}
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def precision_plugin(self) -> Precision:
        """Lightning's precision plugin, replaced if it would cast the tensors of samples."""
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = for_samples(precision_plugin)

    @property
    def cluster(self) -> ClusterSpec:
        """Nodes, devices and memory, as given or detected on this machine, with links as measured last."""
        if self.links is not None:
            return self.links.cluster
        if self._cluster is None:
            self._cluster = describe_cluster(self.num_nodes, self.num_processes, self.root_device)
        return self._cluster

    def batch_to_device(self, batch: object, device: torch.device | None = None, dataloader_idx: int = 0) -> object:
        """Leave an algorithm's samples on the host, where ranks exchange them; each call moves the rows it works on."""
        place = device if self.dataflow is None else torch.device("cpu")
        return super().batch_to_device(batch, place, dataloader_idx)

    # An algorithm's calls choose their precision themselves. Lightning's evaluation loops use inference_mode with NCCL;
    # an FSDP2 module whose first forward runs under it cannot be trained afterwards.
    def training_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        """Run the module's step, under the precision's context only if the module declares no calls."""
        if self.dataflow is None:
            return super().training_step(*args, **kwargs)
        return self.connected_module.training_step(*args, **kwargs)

    def validation_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        """Run the module's step, see `_evaluate`."""
        return self._evaluate("validation_step", *args, **kwargs)

    def test_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        """Run the module's step, see `_evaluate`."""
        return self._evaluate("test_step", *args, **kwargs)

    def predict_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        """Run the module's step, see `_evaluate`."""
        return self._evaluate("predict_step", *args, **kwargs)

    def _evaluate(self, step: str, *args: object, **kwargs: object) -> STEP_OUTPUT:
        """Run a step under ``no_grad``, and the precision's context only if the module declares no calls."""
        owner = super() if self.dataflow is None else self.connected_module
        with torch.inference_mode(False), torch.no_grad():
            output: STEP_OUTPUT = getattr(owner, step)(*args, **kwargs)
            return output

    def on_exception(self, exception: BaseException) -> None:
        """Publish the error, or add to a broken connection those of the ranks that caused it; log how to resume."""
        super().on_exception(exception)
        trainer = self.connected_module._trainer  # None in a process that started the ranks by spawn or fork
        if isinstance(exception, SIGTERMException):  # on all ranks alike
            self.stop.end_with(exception, trainer)
        elif self.world_size > 1 and dist.is_initialized():
            explain_broken_connection(exception, self.global_rank)
        self._record_failure(exception)
        failures.log_way_to_resume(trainer, exception)
        say_before_orphaned_end(None)
        forget_groups()
        failures.dismiss_observer(self._launcher)

    def _record_failure(self, exception: BaseException) -> None:
        """Write down what this rank was doing."""

    def teardown(self) -> None:
        """Tear down, and end this process if its SIGTERM came after the last iteration."""
        super().teardown()
        say_before_orphaned_end(None)
        if self.stop.requested == signal.SIGTERM:
            self.stop.resend_if_unanswered(self.connected_module.trainer)

    # ---- gradients
    def post_backward(self, closure_loss: Tensor) -> None:
        """Average gradients over all ranks, once per optimizer step or after each manual backward pass.

        Gradients of earlier manual passes are already equal on all ranks, so averaging again does not change them.
        """
        if self.dataflow is None and not self._sync_blocked:
            assert self.model is not None
            average_gradients(self.model)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Skip gradient averaging inside, for accumulation."""
        self._sync_blocked = True
        sharded = [m for m in self.model.modules() if isinstance(m, FSDPModule)] if self.model is not None else []
        for module in sharded:
            module.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            self._sync_blocked = False
            for module in sharded:
                module.set_requires_gradient_sync(True, recurse=False)


def broadcast_module(module: nn.Module) -> None:
    """Copy the first rank's parameters and buffers to every rank. Collective over all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor, 0)


def average_gradients(module: nn.Module) -> None:
    """Replace every gradient by its mean over all ranks. Collective over all ranks.

    A parameter with a gradient on some ranks only counts as zero on the others, so that all ranks reduce the same
    tensors.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:
        return
    used = torch.tensor([p.grad is not None for p in trained], dtype=torch.uint8, device=trained[0].device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX)
    by_kind: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
    for parameter, is_used in zip(trained, used.tolist(), strict=True):
        if is_used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            by_kind[parameter.grad.dtype].append(parameter.grad)
    for gradients in by_kind.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        parts = torch.split(flat.div_(dist.get_world_size()), [gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [p.view_as(g) for p, g in zip(parts, gradients, strict=True)])
