"""Train any LightningModule data-parallel: one process per device, equal weights, averaged gradients.

`ReallocStrategy` extends this class by roles and layouts. Here nothing is known of either.
"""

from __future__ import annotations

import atexit
import gc
import os
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from lightning_realloc.callbacks.ema import refuse_weight_averaging
from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.errors import ConfigError
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.runtime.measure.host_memory import keep_freed_memory
from lightning_realloc.runtime.messages.failure_store import clear_failure, explain_broken_connection
from lightning_realloc.runtime.parallel.mesh import forget_groups
from lightning_realloc.seeds import global_seed
from lightning_realloc.strategies.checkpoints.checkpoint import refuse_folder
from lightning_realloc.strategies.lightning.failures import dismiss_observer, end_with_parent, report_failures
from lightning_realloc.strategies.lightning.launchers import FullStateLauncher
from lightning_realloc.strategies.lightning.signals import StopRequest, set_exit_code
from lightning_realloc.strategies.pool.precision import for_samples


class DataParallelStrategy(ModelParallelStrategy):
    """Lightning's model-parallel strategy, without its assumption that there is one mesh for one model.

    Args:
        cluster: Nodes, devices and memory; by default what this machine shows.
        start_method: How processes start where nobody started them: ``popen``, ``spawn`` or ``fork``.
        load_weights_only: Refuse checkpoints that hold more than plain data, which could run code.
        process_group_backend: By default nccl on CUDA, gloo elsewhere.
        timeout: Of every collective.
    """

    is_distributed = True  # Lightning asks only its own classes; without it samplers and sync_dist are silently skipped

    def __init__(
        self,
        *,
        cluster: ClusterSpec | str | None,
        start_method: Literal["popen", "spawn", "fork"],
        load_weights_only: bool,
        process_group_backend: str | None,
        timeout: timedelta | None,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self._cluster = ClusterSpec.parse(cluster) if isinstance(cluster, str) else cluster
        self._start_method = start_method
        self._load_weights_only = load_weights_only
        self._sync_blocked = False
        self._is_watched = False
        self.stop = StopRequest()
        """Whether a rank received SIGTERM, and the run ends."""

    @abstractmethod  # abstract, so that LightningCLI does not offer this class; and Lightning's own would wipe weights
    def setup(self, trainer: Trainer) -> None:
        """Move the module to its device with the weights of rank 0."""
        assert self.model is not None
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        broadcast_module(self.model)

    @property
    def dataflow(self) -> Dataflow | None:
        """The algorithm's calls; None for a LightningModule that declares none."""
        flow = getattr(self.lightning_module, "dataflow", None)
        return flow if isinstance(flow, Dataflow) else None

    # ---- launching and processes
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self.cluster_environment.creates_processes_externally:
            return
        if self.num_processes * self.num_nodes == 1:
            return  # no launcher: works in notebooks, and no observer thread delays the end of the process
        if self._start_method == "popen":
            super()._configure_launcher()
        else:
            self._launcher = FullStateLauncher(self, start_method=self._start_method)

    def connect(self, model: LightningModule) -> None:
        """Take the module; refuse settings of its Trainer, where it has one, that have no effect or fail later."""
        super().connect(model)
        trainer: Any = model._trainer
        if trainer is None:
            return
        _refuse_foreign_callbacks(trainer)
        _refuse_foreign_data(trainer)
        if self.dataflow is not None:
            refuse_weight_averaging(trainer.callbacks, type(model).__name__)
        if self.dataflow is not None and (trainer.gradient_clip_val or trainer.accumulate_grad_batches != 1):
            raise MisconfigurationException(
                f"gradient_clip_val={trainer.gradient_clip_val} and accumulate_grad_batches="
                f"{trainer.accumulate_grad_batches} of the Trainer do not reach the calls of {type(model).__name__}; "
                f"use its train_options=TrainOptions(max_grad_norm=..., micro_batch_tokens=...) instead"
            )

    def setup_environment(self) -> None:
        """Start the process group; with external launchers also check what they started."""
        assert self.cluster_environment is not None
        assert self.lightning_module is not None
        if self.cluster_environment.creates_processes_externally:
            self._check_external_processes()
        if not dist.is_initialized():
            atexit.register(_end_process_group)
        self._setup_distributed()
        # Ranks that seed themselves apart still draw, shuffle and build alike.
        self.run_seed = self.broadcast(global_seed())
        self.stop.handle_sigterm(self.lightning_module.trainer)
        if self.world_size > 1:
            report_failures(rank=self.global_rank, launcher=self._launcher)
            clear_failure(self.global_rank)
            if self._is_started_by_a_rank and not self._is_watched:
                self._is_watched = True
                end_with_parent(self, type(self).is_running)
        if self.root_device.type == "cpu":
            keep_freed_memory()
        self._device_mesh = init_device_mesh(
            self.root_device.type, (self.world_size,), mesh_dim_names=("data_parallel",)
        )
        self.lightning_module._device_mesh = self._device_mesh

    def is_running(self) -> bool:
        """Whether calls are under way."""
        return False

    @property
    def _is_started_by_a_rank(self) -> bool:
        """Whether Lightning's launcher started this process, from the script that its parent runs as a rank."""
        environment = self.cluster_environment
        is_started = isinstance(environment, LightningEnvironment) and environment.creates_processes_externally
        return is_started and self.local_rank > 0

    def _check_external_processes(self) -> None:
        started = int(os.environ.get("WORLD_SIZE", self.num_processes * self.num_nodes))
        if started != self.num_processes * self.num_nodes:
            raise MisconfigurationException(
                f"{started} processes were started, but Trainer(devices={self.num_processes}, "
                f"num_nodes={self.num_nodes}) asks for {self.num_processes * self.num_nodes}; make both equal"
            )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """A loader's share: everything for an algorithm with calls, which take theirs; else a part per rank."""
        if self.dataflow is not None:
            return {"num_replicas": 1, "rank": 0}
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def precision_plugin(self) -> Precision:
        """Lightning's plugin; where that would take samples apart, one that does not."""
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = for_samples(precision_plugin)

    @property
    def cluster(self) -> ClusterSpec:
        """Nodes, devices and memory: what was given, else what this machine shows."""
        if self._cluster is None:
            base = ClusterSpec.local(self.num_processes, "h100" if self.root_device.type == "cuda" else "cpu")
            self._cluster = _with_memory(base, self.num_nodes, self.root_device)
        return self._cluster

    # An algorithm's calls choose their precision themselves. And an FSDP2 module whose first forward runs under
    # inference_mode, as Lightning's evaluation loops use with NCCL, cannot be trained afterwards.
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step, in the context of the precision only where it declares no calls."""
        if self.dataflow is None:
            return super().training_step(*args, **kwargs)
        return self.lightning_module.training_step(*args, **kwargs)  # type: ignore[union-attr]

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run under ``no_grad``, in the context of the precision only where the module declares no calls."""
        with torch.inference_mode(False), torch.no_grad():
            if self.dataflow is None:
                return super().validation_step(*args, **kwargs)
            return self.lightning_module.validation_step(*args, **kwargs)  # type: ignore[union-attr]

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run under ``no_grad``, in the context of the precision only where the module declares no calls."""
        with torch.inference_mode(False), torch.no_grad():
            if self.dataflow is None:
                return super().test_step(*args, **kwargs)
            return self.lightning_module.test_step(*args, **kwargs)  # type: ignore[union-attr]

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run under ``no_grad``, in the context of the precision only where the module declares no calls."""
        with torch.inference_mode(False), torch.no_grad():
            if self.dataflow is None:
                return super().predict_step(*args, **kwargs)
            return self.lightning_module.predict_step(*args, **kwargs)  # type: ignore[union-attr]

    def on_exception(self, exception: BaseException) -> None:
        """Let the other ranks know, and this one, where all it knows is that another one is gone."""
        super().on_exception(exception)
        set_exit_code(exception)
        forget_groups()
        dismiss_observer(self._launcher)
        if self.world_size > 1 and dist.is_initialized():
            explain_broken_connection(exception, self.global_rank, self.world_size)

    def teardown(self) -> None:
        """Let a SIGTERM end this process that came too late to end the run."""
        super().teardown()
        if self.stop.is_requested:
            self.stop.resend_if_unanswered(self.lightning_module.trainer)  # type: ignore[union-attr]

    # ---- checkpoints: one file that rank 0 writes
    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """False: weights are read before they are sent to all ranks."""
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        """True: Lightning restores optimizers itself."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state."""
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's state."""
        state: dict[str, Any] = getattr(optimizer, "_optimizer", optimizer).state_dict()
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint on rank 0."""
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint.

        Raises:
            CheckpointError: for a folder, which holds several models.
        """
        refuse_folder(Path(checkpoint_path))
        weights_only = self._load_weights_only if weights_only is None else weights_only
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the module's state."""
        assert self.lightning_module is not None
        self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of all optimizers."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def full_state_dict(self) -> dict[str, Any]:
        """Return the module's state with full tensors on rank 0. Collective over all ranks."""
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    # ---- gradients
    def post_backward(self, closure_loss: Tensor) -> None:
        """Average gradients over all ranks: once per optimizer step, or at each backward pass that is called by hand.

        What earlier backward passes left is equal everywhere by then, and stays as it is.
        """
        if self.dataflow is None and not self._sync_blocked:
            assert self.model is not None
            average_gradients(self.model)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Leave gradients unreduced inside, for accumulation."""
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
    """Give every rank the first rank's parameters and buffers. Collective over all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor, 0)


def average_gradients(module: nn.Module) -> None:
    """Replace every gradient by its mean over all ranks. Collective over all ranks.

    A parameter that took no part in this rank's step but did in another's counts as zero here, so that all ranks
    reduce the same tensors.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:
        return
    used = torch.tensor([p.grad is not None for p in trained], dtype=torch.uint8, device=trained[0].device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX)
    by_kind: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
    for parameter, anybody in zip(trained, used.tolist(), strict=True):
        if anybody:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            by_kind[parameter.grad.dtype].append(parameter.grad)
    for gradients in by_kind.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [p.view_as(g) for p, g in zip(parts, gradients, strict=True)])


def _end_process_group() -> None:
    """End what this process started of ``torch.distributed``; Lightning does so for NCCL alone.

    A thread of gloo may still hold the last reference to a tensor. Where it lets go only while the interpreter shuts
    down, it cannot take the interpreter's lock any more, and aborts the process.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # a group's threads end with the last reference to it, and models have circular ones


def _with_memory(base: ClusterSpec, num_nodes: int, device: torch.device) -> ClusterSpec:
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // base.devices_per_node
    return replace(base, num_nodes=num_nodes, device_memory_bytes=memory)


def _refuse_foreign_callbacks(trainer: Trainer) -> None:
    """Raise ConfigError for callbacks of another library's trainer."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    foreign = [callback for callback in callbacks if not isinstance(callback, Callback)]
    if not foreign:
        return
    # Lightning asks all callbacks to take note of an error, and these would hide it by another one.
    trainer.callbacks = [callback for callback in callbacks if callback not in foreign]  # type: ignore[attr-defined]
    kind = type(foreign[0])
    raise ConfigError(
        f"Trainer(callbacks=[...]) takes callbacks of Lightning, and a {kind.__name__} is one of {kind.__module__}: it "
        f"has none of their hooks; write a lightning.pytorch.Callback, whose on_train_batch_end(trainer, pl_module, "
        f"outputs, batch, batch_idx) comes after every step, or leave it out"
    )


def _refuse_foreign_data(trainer: Any) -> None:
    """Raise ConfigError for rows or a loader where a data module is to be given. Of a list Lightning itself says it."""
    given = trainer.datamodule
    if given is None or isinstance(given, LightningDataModule):
        return
    trainer.datamodule = None  # Lightning has it take note of errors, too
    raise ConfigError(
        f"datamodule= takes a LightningDataModule, and this is a {type(given).__name__}; give rows as "
        f"PromptDataModule(rows, batch_size=...), or another data module of lightning_realloc, and a loader as "
        f"train_dataloaders="
    )
