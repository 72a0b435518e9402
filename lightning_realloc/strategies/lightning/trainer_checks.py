"""Refuse a Trainer's callbacks, data, processes and settings that fail later, or do nothing without a word."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_realloc.errors import ConfigError


def check_started_processes(num_devices: int, num_nodes: int) -> None:
    """Raise MisconfigurationException if a launcher started another number of processes than the Trainer has devices.

    Args:
        num_devices: Devices of each node.
    """
    started = int(os.environ.get("WORLD_SIZE", num_devices * num_nodes))
    if started != num_devices * num_nodes:
        raise MisconfigurationException(
            f"{started} processes were started, but Trainer(devices={num_devices}, num_nodes={num_nodes}) asks for "
            f"{num_devices * num_nodes}; make both equal"
        )
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE", num_devices))
    if on_node != num_devices:
        raise MisconfigurationException(
            f"{on_node} processes were started on {socket.gethostname()}, but Trainer(devices={num_devices}, "
            f"num_nodes={num_nodes}) asks for {num_devices}; start the same number on every node"
        )


def warn_of_stale_addresses() -> None:
    """Warn if torchrun would start ranks again with a store in which the addresses of earlier ranks are left."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        rank_zero_warn(
            f"torchrun may start the ranks again (--max-restarts={restarts}), and would leave them the addresses of "
            f"ranks that have ended: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun on every node"
        )


def refuse_gradient_settings(trainer: Trainer, algorithm: str) -> None:
    """Raise MisconfigurationException for gradient clipping or accumulation by the Trainer of an algorithm."""
    given = []
    if trainer.gradient_clip_val:
        given.append(("gradient_clip_val", trainer.gradient_clip_val, f"max_grad_norm={trainer.gradient_clip_val}"))
    if trainer.accumulate_grad_batches != 1:
        given.append(("accumulate_grad_batches", trainer.accumulate_grad_batches, "micro_batch_tokens=..."))
    if given:
        settings = " and ".join(f"{name}={value}" for name, value, _ in given)
        raise MisconfigurationException(
            f"{settings} of the Trainer {'do' if len(given) > 1 else 'does'} not reach the calls of {algorithm}; leave "
            f"it out and use train_options=TrainOptions({', '.join(ours for _, _, ours in given)}) of {algorithm}"
        )


def refuse_ineffective_callbacks(callbacks: Iterable[object], algorithm: str) -> None:
    """Raise ConfigError for Lightning callbacks that average whole modules, suggest nothing or do nothing."""
    for callback in callbacks:
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            raise ConfigError(
                f"{type(callback).__name__} copies {algorithm} before its models are divided over ranks, and its copy "
                f"cannot follow them; use lightning_realloc.EMA(decay=...)"
            )
        if isinstance(callback, LearningRateFinder):
            raise ConfigError(
                f"the learning-rate finder reads the loss that training_step returns, and {algorithm} returns none: "
                f"each of its roles has a loss of its own; set learning_rate=, and compare runs of a few values"
            )
        if isinstance(callback, BatchSizeFinder):
            raise ConfigError(
                f"the batch-size finder cannot change a batch of {algorithm}, whose memory follows from "
                f"TrainOptions(micro_batch_tokens=...) and GenerationOptions(max_cache_bytes=...), not from "
                f"batch_size; leave it out, and lower these if memory is short"
            )
        interval = getattr(callback, "_train_time_interval", None)
        if isinstance(callback, ModelCheckpoint) and interval is not None:
            raise ConfigError(
                f"ModelCheckpoint(train_time_interval={interval}) would never save: Lightning looks at the time only "
                f"where it runs the optimizer itself, and {algorithm} runs its own; use every_n_train_steps=..."
            )


def refuse_foreign_callbacks(trainer: Trainer) -> None:
    """Raise ConfigError for callbacks of another library's trainer."""
    holder: Any = trainer  # its class declares no callbacks
    callbacks: list[Any] = holder.callbacks
    foreign = [callback for callback in callbacks if not isinstance(callback, Callback)]
    if not foreign:
        return
    # Lightning calls hooks of all callbacks on an error; on these that would raise another error and hide this one.
    holder.callbacks = [callback for callback in callbacks if callback not in foreign]
    kind = type(foreign[0])
    raise ConfigError(
        f"Trainer(callbacks=[...]) takes callbacks of Lightning, and a {kind.__name__} is one of {kind.__module__} "
        f"without their hooks; write a lightning.pytorch.Callback, whose on_train_batch_end(trainer, pl_module, "
        f"outputs, batch, batch_idx) runs after every step, or leave it out"
    )


def refuse_foreign_data(trainer: Any) -> None:
    """Raise ConfigError for a datamodule= that is not a data module. Lightning itself refuses a list."""
    given = trainer.datamodule
    if given is None or isinstance(given, LightningDataModule):
        return
    trainer.datamodule = None  # else Lightning calls its on_exception, and fails
    raise ConfigError(
        f"datamodule= takes a LightningDataModule, and this is a {type(given).__name__}; give rows as "
        f"PromptDataModule(rows, batch_size=...), or another data module of lightning_realloc, and a loader as "
        f"train_dataloaders="
    )


def refuse_sharded_module(module: nn.Module) -> None:
    """Raise ConfigError for a module without calls that shards itself, since every rank would train all of it."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) or parameter.is_meta:
            state = "divided over ranks" if isinstance(parameter, DTensor) else "on the meta device"
            raise ConfigError(
                f"{name} is {state} after configure_model() of {type(module).__name__}, and strategy='realloc' keeps a "
                f"module without calls whole on every rank; train it with Lightning's ModelParallelStrategy(), or make "
                f"whole weights in configure_model()"
            )
