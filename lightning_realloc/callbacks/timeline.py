"""Callback that records what every rank does in a run: calls, moves of weights, waiting, memory, and metrics.

The record lies next to the run's log. Reports and the dashboard read it.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_realloc.callbacks.auto_tuner import AutoTuner
from lightning_realloc.callbacks.loggers.writers import LoggerOutput, Picture, shows_pictures
from lightning_realloc.callbacks.phase import PhaseCallback
from lightning_realloc.callbacks.run_view import measure_links_again, run_view
from lightning_realloc.errors import ConfigError, ReallocError
from lightning_realloc.recording.evaluations import SCORES_FILE, EvaluationRecord
from lightning_realloc.recording.events import (
    DATA_SHEETS,
    MEASURED_PASSES,
    Event,
    PlanInstalled,
    PlanPredicted,
    RunEnded,
    RunStarted,
    SaveFailed,
    Validated,
    event_to_json,
)
from lightning_realloc.recording.iteration_picture import MAX_RANKS_OF_IMAGE, draw_iteration
from lightning_realloc.recording.iteration_record import FORMAT, WeightMove, is_detailed
from lightning_realloc.recording.pieces import TimePiece
from lightning_realloc.recording.rank_recorder import (
    EVENTS_FILE,
    METRICS_FILE,
    RECORD_FOLDER,
    JsonLines,
    RankRecorder,
    RecordClock,
    rank_file,
)
from lightning_realloc.recording.trace import write_trace
from lightning_realloc.remote_output import local_copy, require_writable
from lightning_realloc.remote_path import AnyPath, RemotePath, as_path
from lightning_realloc.runtime.measure.link_watch import LinkWatch
from lightning_realloc.runtime.measure.usage import EnergyMeter, resident_bytes
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.runtime.transfer.executor import ReallocationReport
from lightning_realloc.scores.question_scores import HELD_OUT, QuestionScores
from lightning_realloc.trainers import planned_iterations, trainer_callbacks
from lightning_realloc.tuning.candidates import PlanEvaluator

log = logging.getLogger(__name__)

PREDICTED_AFTER = 2
"""Iterations under a plan after which its prediction is made, by the lengths of the latest one."""
DETAILED_AFTER_PLAN = 3
"""Iterations after a change of plans whose pieces are written in any case."""
TRACE_FILE = "trace.json"
"""Name of the trace in the folder of the record."""
_IMAGE_NAME = "timeline"
"""Name of the pictures in loggers and of their files."""
_READER = "timeline"


class Timeline(PhaseCallback):
    """Record calls, moves of weights, waiting and memory of every rank, and the metrics of every iteration.

    With ``accuracy=`` of an algorithm, ``scores.jsonl`` in its folder has the results of each validation and test for
    every question, also outside of a fit. So it does with `Evaluation`, for each set.

    Over several hosts, it measures the links between them again when moves or calls become slow, and warns once of
    links that are slower than at the start, with their hosts.

    With environments, the record has the spans in which a rank waited for them, and how many samples waited over time.

    ``lightning-realloc report`` and ``lightning-realloc dashboard`` show the record. ``trace.json`` in its folder opens
    in https://ui.perfetto.dev: the recorded iterations next to the predicted one.

    Loggers get a picture ``timeline`` of an iteration, with a lane for each rank: an image in TensorBoard, SVG in
    Weights & Biases, Trackio and MLflow (``timeline/step_0000099.svg``). The first one is the third iteration of each
    plan, when times have settled.

    Args:
        folder: Folder of the record; None: ``record`` in the folder of the first logger with files, else in the
            Trainer's ``default_root_dir``. With several hosts, all of them must see it. Files at an address such as
            ``s3://bucket/x`` are written once a minute and at the end.
        predict: Whether to predict seconds and memory of the plan after its second iteration, to compare them with
            measured ones. It takes milliseconds, once for each plan.
        image_every_n_steps: Iterations between pictures in loggers; None: no pictures.

    Raises:
        ConfigError: if ``image_every_n_steps`` is below 1.

    Example:
        >>> from lightning_realloc import Timeline
        >>> timeline = Timeline()  # Trainer(strategy="realloc", callbacks=[timeline])
    """

    def __init__(
        self, folder: str | Path | None = None, *, predict: bool = True, image_every_n_steps: int | None = 100
    ) -> None:
        if image_every_n_steps is not None and image_every_n_steps < 1:
            raise ConfigError(f"image_every_n_steps={image_every_n_steps} must be at least 1; None logs no pictures")
        self.folder = None if folder is None else as_path(folder)
        self.predict = predict
        self.image_every_n_steps = image_every_n_steps
        self._record_folder: AnyPath | None = None
        self._recorder: RankRecorder | None = None
        self._events: JsonLines | None = None
        self._metrics: JsonLines | None = None
        self._energy: EnergyMeter | None = None
        self._now: Callable[[], float] = time.time
        self._plan: Any = None
        self._baseline_bytes: int | None = None
        """Memory before the models are built, which predictions leave out."""
        self._num_iterations = self._num_under_plan = self._num_failed_saves = 0
        self._logs_images = False
        self._output = LoggerOutput()
        self._link_watch: LinkWatch | None = None
        """Watches the links between nodes; None where they were not measured, and once some have become slow."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise ConfigError for a run without calls."""
        self._baseline_bytes = resident_bytes() if trainer.strategy.root_device.type == "cpu" else 0
        if stage == "fit" and getattr(trainer.strategy, "dataflow", None) is None:
            raise ConfigError(
                f"Timeline records the calls of this package's algorithms under strategy='realloc'; this is "
                f"{type(pl_module).__name__} under {type(trainer.strategy).__name__}, remove the callback"
            )
        if stage == "fit" and self.folder is not None:
            require_writable(self.folder, prefix="Timeline's folder: ", error=ConfigError)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the files of the record. Collective over all ranks."""
        run, strategy = run_view(trainer), trainer.strategy
        folder = self.folder or _default_folder(trainer)
        self._record_folder = folder
        if trainer.is_global_zero:  # all times are of its clock: hosts may differ
            self._now = RecordClock(folder).now
        shows_images = self.image_every_n_steps is not None and shows_pictures(trainer.loggers)
        ranks = gather_objects((_device_name(strategy.root_device), socket.gethostname(), self._now(), shows_images))
        *_, unix_s, self._logs_images = ranks[0]  # other ranks may have other loggers
        strategy.barrier("timeline")  # ranks leave it together: the zero of all clocks
        self._recorder = RankRecorder(folder / rank_file(trainer.global_rank), run.runner.record, time.monotonic())
        self._recorder.write_header(step=trainer.global_step, unix_s=unix_s, baseline_bytes=self._baseline_bytes)
        self._plan, self._num_iterations = None, 0
        self._link_watch = None if run.links is None else LinkWatch()
        self._energy = EnergyMeter.for_device(strategy.root_device)
        if trainer.is_global_zero:
            self._events, self._metrics = JsonLines(folder / EVENTS_FILE), JsonLines(folder / METRICS_FILE)
            started = RunStarted(
                format=FORMAT,
                unix_s=unix_s,
                step=trainer.global_step,
                max_steps=planned_iterations(trainer),
                algorithm=type(pl_module).__name__,
                devices=tuple(device for device, *_ in ranks),
                hosts=tuple(host for _, host, *_ in ranks),
                precision=str(strategy.precision_plugin.precision),
                roles={name: run.pool.specs[name].num_elements for name in run.pool.roles},
            )
            self._write(started)

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Record a change of plans."""
        plan = run_view(trainer).pool.plan
        if plan != self._plan:
            self._plan, self._num_under_plan = plan, 0
            if self._link_watch is not None:
                self._link_watch.restart()
            self._write(PlanInstalled(step=trainer.global_step, plan=self._plan.to_mapping()))

    def on_phase_start(self, trainer: Trainer, pl_module: LightningModule, phase: str) -> None:
        """Begin the peak memory of a call."""
        if self._recorder is not None:
            run_view(trainer).runner.peak_memory.take(_READER)

    def on_phase_end(self, trainer: Trainer, pl_module: LightningModule, phase: str) -> None:
        """Record the peak memory of a call."""
        if self._recorder is not None:
            peak = run_view(trainer).runner.peak_memory.take(_READER)
            if peak is not None:
                self._recorder.record_peak(phase, peak)

    def on_reallocate(
        self, trainer: Trainer, pl_module: LightningModule, phase: str, report: ReallocationReport
    ) -> None:
        """Record a move of weights."""
        if self._recorder is not None:
            self._recorder.record_move(phase, WeightMove(report.seconds, report.bytes_moved, report.bytes_minimum))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Write the iteration, its metrics, and once for each plan its prediction."""
        assert self._recorder is not None, "opened in on_train_start"
        self._num_under_plan += 1
        if self.predict and self._num_under_plan == PREDICTED_AFTER:
            self._predict(trainer)
        has_image = self._logs_images and self._is_image_due(trainer.global_step)
        detailed = has_image or is_detailed(self._num_iterations) or self._num_under_plan <= DETAILED_AFTER_PLAN
        energy_j = None if self._energy is None else self._energy.take()
        made = self._recorder.end_iteration(trainer.global_step, is_detailed=detailed, energy_j=energy_j)
        self._num_iterations += 1
        self._write_failed_saves(trainer)
        if has_image:
            self._log_image(trainer, made.pieces or ())
        self._write_metrics(trainer, lambda name: not name.startswith((*HELD_OUT, "test/")))
        if self._link_watch is not None:
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            if self._link_watch.record(metrics) and measure_links_again(run_view(trainer)):
                self._link_watch = None  # one warning is enough

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the validation out of the next iteration."""
        if self._recorder is not None:
            self._recorder.begin_validation()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the validation, the metrics of held-out samples, and the scores of questions."""
        if not trainer.sanity_checking:
            self._write_scores(trainer, _scores_of(pl_module, "val"))
        if self._recorder is None:
            return  # outside of a fit's training
        self._write(Validated(step=trainer.global_step, seconds=self._recorder.end_validation()))
        self._write_metrics(trainer, lambda name: name.startswith("val/"))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the scores of questions."""
        self._write_scores(trainer, _scores_of(pl_module, "test"))

    on_evaluation_start = on_validation_start

    def on_evaluation_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        metrics: Mapping[str, float],
        scores: Mapping[str, QuestionScores],
    ) -> None:
        """Write the evaluation of named sets, its metrics, and the scores of questions."""
        self._write_scores(trainer, scores)
        if self._recorder is not None:
            self._write(Validated(step=trainer.global_step, seconds=self._recorder.end_validation()))
            self._write_metrics(trainer, lambda name: name in metrics)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the end of the run, and the trace. Collective over all ranks."""
        self._end(trainer, None)
        trainer.strategy.barrier("timeline's end")  # all files are complete
        if trainer.is_global_zero:
            self._write_trace()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the error that ended the run."""
        self._end(trainer, f"{type(exception).__name__}: {exception}")

    # ---- the record
    def _write_trace(self) -> None:
        """Write the trace of the record; a failure is no failure of the run."""
        assert self._record_folder is not None, "set in on_train_start"
        try:
            with local_copy(self._record_folder, wanted=lambda name: name.endswith(".jsonl")) as folder:
                write_trace(folder, folder / TRACE_FILE)
                if isinstance(self._record_folder, RemotePath):
                    (self._record_folder / TRACE_FILE).upload(folder / TRACE_FILE)
        except Exception as error:  # stores raise errors of any class
            log.warning("no trace of this run: %s", error)

    def _write_metrics(self, trainer: Trainer, is_chosen: Callable[[str], bool]) -> None:
        if self._metrics is not None:
            values = {name: float(value) for name, value in trainer.callback_metrics.items() if is_chosen(name)}
            self._metrics.write({"step": trainer.global_step, "unix_s": self._now(), "metrics": values})

    def _write_scores(self, trainer: Trainer, scores: Mapping[str, QuestionScores]) -> None:
        """Write the scores of an evaluation, in a fit or alone. Collective over all ranks."""
        if not scores:
            return
        folder = self._record_folder if self._recorder is not None else self.folder or _default_folder(trainer)
        if trainer.is_global_zero and folder is not None:
            try:
                lines = JsonLines(folder / SCORES_FILE)
            except (OSError, ReallocError) as error:
                log.warning("the scores of step %d are not in the record: %s", trainer.global_step, error)
                return
            for name, one in scores.items():
                made = EvaluationRecord(name=name, step=trainer.global_step, unix_s=self._now(), scores=one)
                lines.write(made.to_json())
            lines.close()

    def _write_failed_saves(self, trainer: Trainer) -> None:
        saves = run_view(trainer).failed_saves.saves
        for one in saves[self._num_failed_saves :]:
            self._write(SaveFailed(**one._asdict()))
        self._num_failed_saves = len(saves)

    def _write(self, event: Event) -> None:
        if self._events is not None:
            self._events.write(event_to_json(event))

    def _end(self, trainer: Trainer, error: str | None) -> None:
        if self._recorder is None:
            return
        self._write_failed_saves(trainer)
        self._write(RunEnded(unix_s=self._now(), step=trainer.global_step, error=error))
        self._recorder.close()
        for file in (self._events, self._metrics):
            if file is not None:
                file.close()
        self._recorder = self._events = self._metrics = None

    # ---- images in loggers
    def _is_image_due(self, step: int) -> bool:
        assert self.image_every_n_steps is not None, "checked in on_train_start"
        return self._num_under_plan == DETAILED_AFTER_PLAN or step % self.image_every_n_steps == 0

    def _log_image(self, trainer: Trainer, pieces: Sequence[TimePiece]) -> None:
        """Give loggers a picture of all ranks. Collective over all ranks."""
        by_rank = gather_objects(pieces if trainer.global_rank < MAX_RANKS_OF_IMAGE else ())
        if trainer.is_global_zero:
            shown = dict(enumerate(by_rank[:MAX_RANKS_OF_IMAGE]))
            drawing = draw_iteration(shown, num_ranks=len(by_rank))
            step = trainer.fit_loop.epoch_loop._batches_that_stepped  # as loggers count the metrics of an iteration
            self._output.write_picture(trainer.loggers, Picture(_IMAGE_NAME, drawing, step))

    # ---- predictions
    def _predict(self, trainer: Trainer) -> None:
        """Record the prediction for the plan in use. Collective over all ranks."""
        run = run_view(trainer)
        if run.lengths is None:
            return
        tuner = next((one for one in trainer_callbacks(trainer) if isinstance(one, AutoTuner)), None)
        try:
            evaluator = tuner.evaluator if tuner is not None else None
            evaluator = evaluator or run.plan_evaluator([run.lengths])
            source = MEASURED_PASSES if tuner is not None and tuner.has_profile else DATA_SHEETS
            if trainer.is_global_zero:
                self._write(_prediction(evaluator, trainer, source))
        except ReallocError as error:  # on every rank: a model without a decoder's shape, for instance
            log.debug("no prediction of this plan: %s", error)


def _prediction(evaluator: PlanEvaluator, trainer: Trainer, source: str) -> PlanPredicted:
    run, task = run_view(trainer), evaluator.task
    plan, settings = run.pool.plan, task.settings.with_kept_caches(run.runner.engines.keeps_caches)
    simulated = task.timeline(plan, evaluator.estimator)
    peaks: dict[str, list[int]] = {}
    for entry in replace(task, settings=settings).forecast(plan).phases:
        peaks.setdefault(entry.phase, [0] * trainer.world_size)[entry.rank] = entry.parts.total
    return PlanPredicted.from_entries(
        simulated.entries,
        iteration=simulated.num_iterations - 1,
        step=trainer.global_step,
        source=source,
        seconds_per_iteration=simulated.seconds_per_iteration,
        peak_bytes={phase: tuple(sizes) for phase, sizes in peaks.items()},
        memory_budget=task.usable_bytes,
    )


def _scores_of(pl_module: LightningModule, stage: str) -> dict[str, QuestionScores]:
    """Return the latest scores of all loaders of a stage."""
    scores: Mapping[str, QuestionScores] = getattr(pl_module, "question_scores", {})
    return {name: one for name, one in scores.items() if name.partition("/")[0] == stage}


def _default_folder(trainer: Trainer) -> AnyPath:
    """Return the folder of a record in the one that the Trainer logs to. Collective over all ranks."""
    return as_path(trainer.log_dir or trainer.default_root_dir) / RECORD_FOLDER


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
