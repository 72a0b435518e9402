"""Output of the demo: headings while it runs, tables at its end. Only the first process writes."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from rich.console import Console
from rich.table import Table
from transformers.utils import logging as transformers_logging

from examples.recorder import CALLS, Iteration, Recording, Switch, mean_seconds

HARMLESS_WARNINGS = (
    r".*torch.distributed.* is deprecated.*",  # torch's, about its own FSDP
    r".*does not have many workers.*",  # the data is in memory
)
SHOWN_WHILE_TRAINING = {"loss": "actor/loss", "reward": "reward", "held-out reward": "val/reward"}
"""Label next to the progress bar -> metric."""


def is_first_process() -> bool:
    """Return whether this is the process that the user started; Lightning tells the others their rank."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


console = Console(quiet=not is_first_process(), highlight=False)


class Progress(TQDMProgressBar):
    """Lightning's progress bar with fewer numbers."""

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Return the numbers next to the bar."""
        logged = trainer.callback_metrics
        return {label: f"{float(logged[name]):.3f}" for label, name in SHOWN_WHILE_TRAINING.items() if name in logged}


def silence_hints() -> None:
    """Hide notes on hardware and process groups, tips, bars for tiny files, and harmless warnings.

    Lines of iterations, which take the place of a bar where there is no terminal, are shown.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    lines = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    lines.setLevel(logging.INFO)
    lines.addFilter(lambda record: record.levelno > logging.INFO or record.getMessage().startswith("step "))
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    for pattern in HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", message=pattern)


def heading(text: str) -> None:
    """Print the heading of a stage."""
    console.print(f"\n[bold cyan]{text}[/]")


def say(text: str) -> None:
    """Print an explanation."""
    console.print(text, style="dim")


def show_rewards(before: float, after: float, num_held_out: int) -> None:
    """Show the share of right answers before and after GRPO."""
    table = _table("Held-out prompts answered right", "", "after the warm-up", "after GRPO")
    table.add_row(f"of {num_held_out}, one answer sampled for each", f"{before:.1%}", f"[bold green]{after:.1%}[/]")
    console.print(table)


def show_iterations(iterations: Sequence[Iteration], *, num_rows: int = 8) -> None:
    """Show the reward and the seconds of every call in ``num_rows`` parts of the run."""
    table = _table("Mean reward, and seconds of each call", "iterations", "reward", *CALLS.values())
    bounds = [round(len(iterations) * part / num_rows) for part in range(num_rows + 1)]
    for begin, end in pairwise(bounds):
        if part := iterations[begin:end]:
            _add_iterations(table, f"{begin + 1}-{end}", part)
    table.add_section()
    _add_iterations(table, "all", iterations)
    console.print(table)


def _add_iterations(table: Table, label: str, part: Sequence[Iteration]) -> None:
    seconds = mean_seconds(part)
    table.add_row(label, f"{fmean(i.reward for i in part):.2f}", *(f"{seconds[kind]:.3f}" for kind in CALLS))


def show_switches(recording: Recording, routes: Mapping[str, str]) -> None:
    """Show the cost of changing layouts; ``routes`` has the source and target layout of each call."""
    columns = ("before", "layouts", "times", "moved", "minimum", "ms", "GB/s")
    table = _table("Switches of layout, the mean of one", *columns)
    for call, switches in recording.switches_by_call().items():
        table.add_row(call, routes[call], str(len(switches)), *_means(switches))
    console.print(table)
    say("A model this small shows latency; for throughput: python -m benchmarks.reallocation")


def _means(switches: Sequence[Switch]) -> tuple[str, ...]:
    moved, seconds = fmean(s.bytes_moved for s in switches), fmean(s.seconds for s in switches)
    minimum = fmean(s.bytes_minimum for s in switches)
    return f"{moved / 1e6:.2f} MB", f"{minimum / 1e6:.2f} MB", f"{1e3 * seconds:.2f}", f"{moved / seconds / 1e9:.3f}"


def show_examples(rows: Sequence[tuple[str, str, str, str]]) -> None:
    """Show prompts, right answers, and the most likely answers of both models."""
    table = _table("Most likely answers to some of them", "prompt", "right", "after the warm-up", "after GRPO")
    for prompt, right, *answers in rows:
        table.add_row(prompt, right, *(f"[{'green' if a == right else 'red'}]{a}[/]" for a in answers))
    console.print(table)


def show_lines(title: str, lines: Mapping[str, str]) -> None:
    """Show paths or commands under a title, each whole in its line however narrow the output is, to be copied."""
    console.print(f"\n[bold]{title}[/]")
    width = max(map(len, lines))
    for what, text in lines.items():
        console.print(f"{what:{width}}  {text}", soft_wrap=True, markup=False)


def command_line(*arguments: str) -> str:
    """Return a command of the package as it can be typed where the demo was started."""
    script = Path(sys.executable).with_name("lightning-realloc")
    name = script.name if shutil.which(script.name) or not script.exists() else os.path.relpath(script)
    return shlex.join([name, *arguments])


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
