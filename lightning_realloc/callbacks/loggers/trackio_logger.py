"""Lightning logger for Trackio, which keeps runs in a folder, in a Space of Hugging Face, or on a server."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from lightning_realloc.errors import ConfigError

if TYPE_CHECKING:
    import trackio


class TrackioLogger(Logger):
    """Log metrics and settings to Trackio; `RolloutTable` and `Timeline` add tables and pictures.

    ``trackio show`` opens the dashboard. Runs lie in ``~/.cache/huggingface/trackio``, or in the folder that the
    environment variable ``TRACKIO_DIR`` names before the first import of trackio.

    Args:
        project: Name of the project, a group of runs.
        name: Name of the run; None: Trackio chooses one.
        space_id: Space of Hugging Face that gets the run, such as ``"user/runs"``; None: the run stays on this machine.
        resume: Whether a run of this name continues: ``"never"``, ``"allow"`` if there is one, or ``"must"``.
        **options: Further arguments of ``trackio.init``, such as ``group="rewards"``.

    Raises:
        ConfigError: without the package trackio.

    Example:
        >>> from lightning_realloc import TrackioLogger
        >>> # Trainer(strategy="realloc", logger=TrackioLogger("sorting", name="first"))
    """

    def __init__(
        self,
        project: str = "lightning_logs",
        name: str | None = None,
        *,
        space_id: str | None = None,
        resume: Literal["never", "allow", "must"] = "never",
        **options: Any,
    ) -> None:
        if find_spec("trackio") is None:
            raise ConfigError("TrackioLogger needs the package trackio; pip install trackio")
        super().__init__()
        self._project, self._name = project, name
        self._options: dict[str, Any] = {"space_id": space_id, "resume": resume, **options}
        self._run: trackio.Run | None = None

    @property
    def name(self) -> str:
        """The project, by which Lightning names folders."""
        return self._project

    @property
    def version(self) -> str | None:
        """The run's name; None on other ranks than the first, if it was not given."""
        _ = self.experiment
        return self._name

    @property
    @rank_zero_experiment
    def experiment(self) -> trackio.Run:
        """The run, which starts with its first use. After a fit has ended, a further one continues it."""
        if self._run is None:
            import trackio

            self._run = trackio.init(self._project, self._name, **self._options)
            self._name, self._options["resume"] = self._run.name, "allow"
        return self._run

    @rank_zero_only
    def log_hyperparams(self, params: Mapping[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Add to the run's settings."""
        added = vars(params) if isinstance(params, Namespace) else params
        self.experiment.config.update(added)
        self._options["config"] = {**(self._options.get("config") or {}), **added}  # a continued run replaces them

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log metrics of a step."""
        self.experiment.log(dict(metrics), step=step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write what is buffered, and end the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None
