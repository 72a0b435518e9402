"""Contents and output files of RolloutTable, on one rank and on two, for several algorithms and strategies."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from lightning_realloc.algorithms.best_of_n import BestOfN
from lightning_realloc.batch.samples import Samples
from lightning_realloc.callbacks import RolloutTable, Timeline
from lightning_realloc.callbacks.loggers.logged_table import markdown
from lightning_realloc.errors import ConfigError
from lightning_realloc.recording.pieces import ENVIRONMENTS
from lightning_realloc.recording.reader import read_run
from lightning_realloc.report.runs.conversations import read_conversations
from tests.environments.guessing import Guessing, chat_model, chat_tokenizer
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs
from tests.strategies.calls.test_agents import SAMPLING, Games
from tests.workers import WorkerPool

APART = runs.calls(actor_train="dp1@0", actor_generate="dp1@1", reference_infer="dp1@1")


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


class RecordedBestOfN(runs.Recorded, BestOfN):
    """Records its training samples, which are fewer than it generates."""


def best_of_n() -> RecordedBestOfN:
    """Return an instance with the initial weights of `runs.grpo`."""
    return RecordedBestOfN(
        tiny_model("llama"), runs.low_tokens, sampling=runs.SAMPLING, learning_rate=1e-2, tokenizer=byte_tokenizer()
    )  # fmt: skip


def show(folder: str, options: Mapping[str, Any], algorithm: str) -> list[dict[str, str]]:
    """Train four iterations with a table every two, and of the first; return the rows of the first three samples."""
    world_size = runs.world_size()
    module, seen = best_of_n() if algorithm == "best_of_n" else getattr(runs, algorithm)(), []

    def summarize(samples: Samples) -> dict[str, Tensor]:
        seen.append(samples.sorted_by_id())
        return type(module).summarize(module, samples)

    module.summarize = summarize
    table = RolloutTable(every_n_steps=2, num_samples=3, path=Path(folder) / "rollouts.csv")
    trainer = runs.trainer(
        runs.ReallocStrategy(**options), world_size, callbacks=[table], max_steps=4, max_epochs=-1
    )  # fmt: skip
    trainer.fit(module, runs.Batches(2))
    decode, column = byte_tokenizer().decode, "scores" if algorithm == "ppo" else "rewards"
    return [
        {"response": decode(tokens, skip_special_tokens=True), "reward": f"{reward:.6g}"}
        for samples in (seen[0], *seen[1::2])
        for tokens, reward in list(zip(runs.rows_of_tokens(samples), samples.tensor(column).tolist(), strict=True))[:3]
    ]


@pytest.mark.parametrize(
    ("world_size", "options", "algorithm"),
    [
        pytest.param(1, {}, "grpo", marks=pytest.mark.exhaustive),
        pytest.param(2, {"plan": "static"}, "grpo", marks=pytest.mark.exhaustive),
        pytest.param(2, {"max_staleness": 1}, "grpo", marks=pytest.mark.exhaustive),
        (1, {}, "ppo"),
        pytest.param(2, {"overlap": "none"}, "ppo", marks=pytest.mark.exhaustive),
        pytest.param(2, {"plan": "static"}, "best_of_n", marks=pytest.mark.exhaustive),
        (2, {"plan": APART, "overlap": "iterations", "max_staleness": 1}, "grpo"),
    ],
)
def test_the_first_samples_are_shown_with_their_rewards(
    workers: WorkerPool, tmp_path: Path, world_size: int, options: dict[str, Any], algorithm: str
) -> None:
    expected, *_ = workers.run(show, str(tmp_path), options, algorithm, world_size=world_size, init_process_group=False)
    rows = read(tmp_path / "rollouts.csv")
    name = "score" if algorithm == "ppo" else "reward"
    assert [{"response": row["response"], "reward": row[name]} for row in rows] == expected
    shown = [0, 1, 2] if algorithm == "best_of_n" else [0, 0, 1]
    second = [number + 6 for number in shown]
    assert [row["prompt"] for row in rows] == [f"prompt {number}" for number in (*shown, *second, *second)]
    assert [file.name for file in tmp_path.iterdir()] == ["rollouts.csv"], "one file, whatever the ranks"


def show_games(folder: str) -> float:
    """Train one iteration of games with a table of the first four, and a record; return a rank's share of waiting."""
    table, record = RolloutTable(num_samples=4, path=Path(folder) / "rollouts.csv"), Timeline(folder)
    module = runs.RecordedGRPO(
        chat_model(), tokenizer=chat_tokenizer(), sampling=SAMPLING, learning_rate=1e-2, environment=Guessing
    )
    trainer = runs.trainer(runs.ReallocStrategy("static"), runs.world_size(), callbacks=[table, record], max_steps=1)
    trainer.fit(module, Games())
    return float(trainer.logged_metrics["waiting_share/actor.generate"])


def test_conversations_with_environments_are_shown(workers: WorkerPool, tmp_path: Path) -> None:
    shares = workers.run(show_games, str(tmp_path), world_size=2, init_process_group=False)
    rows = read(tmp_path / "rollouts.csv")
    assert len(rows) == 4
    problems: list[str] = []
    talks = read_conversations(tmp_path / "rollouts.jsonl", problems)
    assert len(talks) == 4 and not problems
    for row, talk in zip(reversed(rows), talks, strict=True):
        said = [message["text"] for message in talk["messages"]]
        assert talk["step"] == int(row["step"]) and ["finish_reason", row["finish_reason"]] in talk["facts"]
        assert said[0] == "Guess" and all(text in row["conversation"] for text in said[1:])
    check_waiting(tmp_path, shares)
    left_out = {"user:", "assistant:", "?"}  # roles, and a special token that the column response lacks
    for row in rows:
        turns = re.findall(r"^(?:assistant says: |user: )(.*?)(?: \[reward.*)?$", row["conversation"], re.MULTILINE)
        told = [word for word in " ".join(turns).split() if word not in left_out]
        response = [word for word in row["response"].split() if word not in left_out]
        # a turn that is cut off is in the response alone, and the environment's last word in the conversation alone
        shared = min(len(told), len(response))
        assert shared > 0 and told[:shared] == response[:shared]


def check_waiting(folder: Path, shares: Sequence[float]) -> None:
    """Check that every rank recorded how its games waited for their environments, within the generating call."""
    largest = 0.0
    for (iteration,) in read_run(folder).last.ranks.values():
        assert iteration.pieces is not None
        ((call, samples),) = iteration.waiting
        generating = [one for one in iteration.pieces if one.name in (call, ENVIRONMENTS)]
        begin, end = generating[0].start, generating[-1].end
        assert begin <= samples.begin and samples.begin + (len(samples.means) - 1) * samples.bin_s <= end
        assert max(samples.means) > 0.0
        waited_s = sum(one.seconds for one in generating if one.kind == "environment")
        largest = max(largest, waited_s / (end - begin))
    assert list(shares) == pytest.approx([largest] * 2, rel=0.3, abs=0.05)  # of the call's seconds by another clock


class Tables(WandbLogger):
    """Records tables for Weights & Biases without its package."""

    def __init__(self) -> None:
        self.tables: list[tuple[int, list[str], list[list[str]]]] = []

    @property
    def name(self) -> str:
        """A name."""
        return "tables"

    @property
    def version(self) -> str:
        """A version."""
        return "0"

    @property
    def experiment(self) -> None:
        """No run."""

    @property
    def save_dir(self) -> None:
        """Nowhere."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Leave metrics out."""

    def log_hyperparams(self, *args: Any, **options: Any) -> None:
        """Leave settings out."""

    def log_text(
        self, key: str, columns: Any = None, data: Any = None, dataframe: Any = None, step: Any = None
    ) -> None:
        """Keep a table."""
        assert key == "rollouts"
        self.tables.append((step, columns, data))

    def finalize(self, status: str) -> None:
        """Do nothing."""


def show_everywhere(folder: str) -> Any:
    """Return each logger's tables for supervised pairs, in a run and in one resumed from its checkpoint."""
    tables = Tables()

    def run(steps: int, **options: Any) -> str:
        loggers = [CSVLogger(folder, name="", version="csv"), TensorBoardLogger(folder, name="", version="tb"), tables]
        table = RolloutTable(every_n_steps=1, num_samples=2, path=f"{folder}/own.csv")
        trainer = runs.trainer("realloc", 1, callbacks=[table], logger=loggers, max_steps=steps, max_epochs=-1)
        trainer.fit(runs.sft(), runs.Batches(3, responses=True), **options)
        trainer.save_checkpoint(f"{folder}/at-{steps}.ckpt", weights_only=False)
        return f"{folder}/at-{steps}.ckpt"

    checkpoint = run(1)
    run(2, ckpt_path=checkpoint)
    return tables.tables


def test_every_logger_shows_the_table_and_a_resumed_run_continues_it(workers: WorkerPool, tmp_path: Path) -> None:
    (tables,) = workers.run(show_everywhere, str(tmp_path), world_size=1, init_process_group=False)
    own = read(tmp_path / "own.csv")
    assert [row["step"] for row in own] == ["0", "0", "1", "1"]  # as in metrics.csv
    assert [row["prompt"] for row in own[:2]] == ["prompt 0", "prompt 1"]
    assert read(tmp_path / "csv" / "rollouts.csv") == own
    assert [step for step, *_ in tables] == [0, 1]
    assert [dict(zip(columns, cells, strict=True)) for _, columns, rows in tables for cells in rows] == own
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    (tag,) = (tag for tag in events.Tags()["tensors"] if tag.startswith("rollouts"))
    texts = [event.tensor_proto.string_val[0].decode() for event in events.Tensors(tag)]
    assert [text.count("\n") for text in texts] == [3, 3]
    assert f"| 1 | {own[3]['prompt']} |" in texts[1]


def test_each_row_is_one_line_of_markdown() -> None:
    rows = [{"step": 1, "response": "a|b\nc", "reward": None}, {"step": 1, "response": "d" * 2000, "reward": 0.25}]
    header, rule, first, second = markdown(rows).split("\n")
    assert (header, rule) == ("| step | response | reward |", "| --- | --- | --- |")
    assert first == "| 1 | a\\|b ⏎ c |  |"
    assert second == f"| 1 | {'d' * 999}… | 0.25 |"


class Elsewhere:
    """Stand-in for a Trainer before a fit."""

    def __init__(self, strategy: object, *loggers: Logger) -> None:
        self.strategy = strategy
        self.loggers = loggers


def test_a_table_without_a_logger_or_path_is_refused() -> None:
    trainer: Any = Elsewhere(runs.ReallocStrategy())
    with pytest.raises(ConfigError, match=r"the loggers are: none; add one, or give path='rollouts.csv'"):
        RolloutTable().setup(trainer, runs.grpo(), "fit")
    RolloutTable(path="rollouts.csv").setup(trainer, runs.grpo(), "fit")
    RolloutTable().setup(trainer, runs.grpo(), "validate")
    with pytest.raises(ConfigError, match="this is RecordedGRPO under object"):
        RolloutTable(path="rollouts.csv").setup(Elsewhere(object()), runs.grpo(), "fit")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_samples=0 must be at least 1"):
        RolloutTable(num_samples=0)
