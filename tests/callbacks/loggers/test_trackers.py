"""Metrics, tables and pictures of real runs in TensorBoard, MLflow, Trackio and Weights & Biases, without a network.

Packages that are not installed are skipped; `pip install "lightning-realloc[loggers]"` has those of two of them.
"""

from __future__ import annotations

import csv
import io
import logging
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_realloc.callbacks import RolloutTable, Timeline, TrackioLogger
from lightning_realloc.callbacks.loggers.logged_table import Table
from lightning_realloc.callbacks.loggers.writers import SCALE, LoggerOutput, Picture
from lightning_realloc.tuning.timeline.picture import WIDTH, lay_out
from tests.strategies import runs

SVG = "{http://www.w3.org/2000/svg}"
CALLS = {"actor.generate", "reference.infer", "actor.train"}
ODD_ROWS = (
    {"step": 7, "prompt": "| a\n\nb", "response": " 007", "reward": 0.25, "parts": {"a": [1, None]}},
    {"step": 7, "prompt": "ünïcödé 漢字 🙂 \x07", "response": "<script>" + "x" * 100_000, "reward": None, "parts": {}},
)
"""Cells that a careless writer changes: numbers with zeros, line breaks, markup, other scripts, and a long text."""


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the address of a database; without one, MLflow keeps a metric in a file, and `reward/a` needs a folder."""
    for package in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install mlflow-skinny sqlalchemy alembic")
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture(scope="module")
def trackio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))  # read at the first import
        yield pytest.importorskip("trackio", reason="Trackio is not installed: pip install trackio")


def train(folder: Path, logger: Logger, steps: int = 3) -> list[dict[str, str]]:
    """Train with tables and pictures; return the rows of the file that the table writes, too."""
    callbacks = [RolloutTable(every_n_steps=1, num_samples=2, path=folder / "own.csv"), Timeline(folder / "record")]
    trainer = runs.trainer(
        "realloc", 1, callbacks=callbacks, logger=logger, max_steps=steps, max_epochs=-1, log_every_n_steps=1
    )
    trainer.fit(runs.grpo(), runs.Batches(2))
    with (folder / "own.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == [str(step) for step in range(steps) for _ in range(2)]
    return rows


def names_of_bars(svg: str) -> set[str]:
    """Return the names of all bars in a well-formed picture."""
    tips = (title.text or "" for title in ET.fromstring(svg).iter(f"{SVG}title"))
    return {tip.rpartition(":")[0] for tip in tips}


def odd_content() -> tuple[Table, Picture]:
    return Table("rollouts", ODD_ROWS, 7), Picture("timeline", lay_out([], title='<"&> 漢字'), 7)


def test_tensorboard_shows_text_and_an_image(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="", version="tb")
    train(tmp_path, logger)
    logger.experiment.close()  # a later table opens a further file
    table, picture = odd_content()
    LoggerOutput().write_table([logger], table)
    LoggerOutput().write_picture([logger], picture)
    logger.experiment.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward")] == [0, 1, 2]
    assert [event.step for event in events.Tensors("rollouts/text_summary")] == [0, 1, 2, 7]
    images = events.Images("timeline")
    assert [image.step for image in images] == [2, 7]  # the iteration in which times have settled
    with Image.open(io.BytesIO(images[0].encoded_image_string)) as shown:
        assert shown.width == SCALE * WIDTH and len(shown.getcolors(1 << 20)) > 5


def test_mlflow_shows_files_of_each_step(mlflow: str, tmp_path: Path) -> None:
    logger = MLFlowLogger("tests", tracking_uri=mlflow, artifact_location=f"file:{tmp_path}/artifacts")
    own = train(tmp_path, logger)
    client, run = logger.experiment, logger.run_id
    assert run is not None
    assert [metric.step for metric in client.get_metric_history(run, "reward")] == [0, 1, 2]
    table, picture = odd_content()
    LoggerOutput().write_table([logger], table)  # the run has ended
    LoggerOutput().write_picture([logger], picture)
    tables = [file.path for file in client.list_artifacts(run, "rollouts")]
    assert tables == [f"rollouts/step_{step:07}.csv" for step in (0, 1, 2, 7)]
    texts = [Path(client.download_artifacts(run, path)).read_bytes().decode() for path in tables]
    assert [row for text in texts[:3] for row in csv.DictReader(io.StringIO(text, newline=""))] == own
    assert [list(row.values()) for row in csv.DictReader(io.StringIO(texts[3], newline=""))] == table.cells
    pictures = [file.path for file in client.list_artifacts(run, "timeline")]
    assert pictures == ["timeline/step_0000002.svg", "timeline/step_0000007.svg"]
    svgs = [Path(client.download_artifacts(run, path)).read_text(encoding="utf-8") for path in pictures]
    assert names_of_bars(svgs[0]) >= CALLS
    assert ET.fromstring(svgs[1]).attrib["aria-label"] == '<"&> 漢字'


def test_artifacts_that_mlflow_cannot_write_are_named(
    mlflow: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    logger = MLFlowLogger("no folder", tracking_uri=mlflow, artifact_location=f"file:{tmp_path}/file/artifacts")
    with caplog.at_level(logging.WARNING, logger="lightning_realloc"):
        LoggerOutput().write_table([logger], odd_content()[0])
    assert any(message.startswith("MLFlowLogger gets no rollouts (") for message in caplog.messages)


def test_trackio_shows_tables_and_pictures(trackio: Any, tmp_path: Path) -> None:
    from trackio.sqlite_storage import SQLiteStorage
    from trackio.utils import MEDIA_DIR

    logger = TrackioLogger("tests", auto_log_cpu=False, auto_log_gpu=False)
    logger.log_hyperparams({"learning_rate": 0.5, "layout": {"tp": 2}, "folder": tmp_path})
    own = train(tmp_path, logger)
    table, picture = odd_content()
    LoggerOutput().write_table([logger], table)  # the run has ended; it continues
    LoggerOutput().write_picture([logger], picture)
    logger.finalize("success")
    assert SQLiteStorage.get_runs("tests") == [logger.version]
    config = SQLiteStorage.get_run_config("tests", logger.version)
    assert config["learning_rate"] == 0.5 and config["layout"] == {"tp": 2}
    logs = SQLiteStorage.get_logs("tests", logger.version)
    assert [entry["step"] for entry in logs if "reward" in entry] == [0, 1, 2]
    tables = {entry["step"]: entry["rollouts"]["_value"] for entry in logs if "rollouts" in entry}
    assert [row for step in (0, 1, 2) for row in tables[step]] == own
    assert [list(row.values()) for row in tables[7]] == table.cells
    pictures = {entry["step"]: entry["timeline"] for entry in logs if "timeline" in entry}
    assert sorted(pictures) == [2, 7] and pictures[2]["_type"] == "trackio.html"
    page = (MEDIA_DIR / pictures[2]["file_path"]).read_text(encoding="utf-8")
    assert names_of_bars(page[page.index("<svg") : page.index("</svg>") + 6]) >= CALLS


def test_trackio_counts_a_second_fit_as_the_same_run(trackio: Any, tmp_path: Path) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    logger = TrackioLogger("tests of resuming", name="one", auto_log_cpu=False, auto_log_gpu=False)
    module = runs.grpo()
    for steps in (2, 4):
        trainer = runs.trainer("realloc", 1, logger=logger, max_steps=steps, max_epochs=-1, log_every_n_steps=1)
        path = tmp_path / "saved"
        trainer.fit(module, runs.Batches(2), ckpt_path=path if path.exists() else None, weights_only=False)
        trainer.save_checkpoint(path)
        module = runs.grpo()
    logs = SQLiteStorage.get_logs("tests of resuming", "one")
    assert [entry["step"] for entry in logs if "reward" in entry] == [0, 1, 2, 3]
    assert SQLiteStorage.get_runs("tests of resuming") == ["one"]


def test_wandb_shows_tables_and_pictures(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb", reason="Weights & Biases is not installed: pip install wandb")
    logger = WandbLogger(project="tests", save_dir=tmp_path, offline=True)
    train(tmp_path, logger)
    wandb.finish()
    (page,) = (tmp_path / "wandb").glob("offline-run-*/files/media/html/timeline_*.html")
    svg = page.read_text(encoding="utf-8")
    assert names_of_bars(svg[svg.index("<svg") :]) >= CALLS
    tables = list((tmp_path / "wandb").glob("offline-run-*/files/media/table/rollouts_*.table.json"))
    assert len(tables) == 3
