"""Find the checkpoint that ``ckpt_path="last"`` means in an object store, before the Trainer looks for it.

Lightning lists local folders only, and would start from step 0. Launchers see the arguments of ``fit`` before it does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies.launchers.launcher import _Launcher

from lightning_realloc.errors import CheckpointError, describe_error
from lightning_realloc.remote_path import AnyPath, RemotePath, as_path, is_remote
from lightning_realloc.retries.causes import way_out
from lightning_realloc.strategies.checkpoints.checkpoint_files import FILE_SUFFIX, ROLES_FILE


class InProcessLauncher(_Launcher):
    """Launcher that starts no process: there is one rank, or all exist already."""

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether it works in a notebook."""
        return True

    def launch(
        self, function: Callable[..., Any], *args: object, trainer: Trainer | None = None, **kwargs: object
    ) -> Any:
        """Call the function."""
        args, kwargs = with_last_resolved(trainer, function, args, kwargs)
        return function(*args, **kwargs)

    def kill(self, signum: int) -> None:
        """Do nothing: there are no processes."""


def with_last_resolved(
    trainer: Trainer | None, function: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the arguments of a Trainer's method, with `resolve_last` of its ``ckpt_path``."""
    if trainer is None:
        return args, kwargs
    bound = inspect.signature(function).bind(*args, **kwargs)
    if "ckpt_path" in bound.arguments:
        bound.arguments["ckpt_path"] = resolve_last(trainer, bound.arguments["ckpt_path"])
    return bound.args, bound.kwargs


def resolve_last(trainer: Trainer, ckpt_path: str | None) -> str | None:
    """Return the address of the newest ``last`` checkpoint for ``"last"``, and any other path as it is.

    ``"last"`` stays for local folders, and where there is no complete one.

    Raises:
        CheckpointError: if a store cannot be read. The run would start from step 0, and replace its checkpoints.
    """
    if ckpt_path != "last":
        return ckpt_path
    try:
        newest = max(_last_checkpoints(trainer), default=None)
    except Exception as error:  # stores raise errors of any class
        raise CheckpointError(
            f"ckpt_path='last' is not known, since the store cannot be read: {describe_error(error)}; "
            f"{way_out(error) or 'start again when it answers'}, or leave ckpt_path out to start from the beginning"
        ) from error
    return ckpt_path if newest is None else str(newest[1])


def _last_checkpoints(trainer: Trainer) -> Iterator[tuple[float, AnyPath]]:
    """Yield age and path of the ``last`` checkpoints, folders and files, at every callback's address."""
    for callback in trainer.checkpoint_callbacks:
        name = callback.CHECKPOINT_NAME_LAST if isinstance(callback, ModelCheckpoint) else None
        folder = getattr(callback, "dirpath", None)
        if folder is None and not trainer.loggers:  # where Lightning then saves
            folder = f"{trainer.default_root_dir}/checkpoints"
        if folder is None or not is_remote(folder):
            continue
        if name is None:  # OnExceptionCheckpoint, which has one path
            name = as_path(getattr(callback, "ckpt_path", "")).name
        if name:
            yield from _checkpoints_named(name, as_path(folder))


def _checkpoints_named(name: str, folder: AnyPath) -> Iterator[tuple[float, AnyPath]]:
    assert isinstance(folder, RemotePath), "Lightning finds those in local folders"
    try:
        found = [path for path in folder.iterdir() if path.name.startswith(name)]
    except FileNotFoundError:  # nothing has been saved
        return
    for path in found:
        marker = path if path.suffix == FILE_SUFFIX and path.is_file() else path / ROLES_FILE
        with suppress(FileNotFoundError):  # of an unfinished save
            yield marker.modified_s(), path
