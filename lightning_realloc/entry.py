"""Entry of the command line: answer ``--help`` and ``--version`` at once, and leave the rest to `cli` or a command.

`cli` imports torch, Lightning and transformers, which takes seconds. It is named rather than imported, because it and
the commands import their sentences from here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pkgutil import resolve_name
from textwrap import TextWrapper

from lightning_realloc.errors import ReallocError, one_line_message

SUMMARIES: Mapping[str, Mapping[str, str]] = {
    "Train, in one line": {
        "grpo": "Train a model on rewards by GRPO, in one line.",
        "ppo": "Train a model on rewards by PPO with a critic, in one line.",
        "sft": "Fine-tune a model on given responses, in one line.",
        "dpo": "Train a model on preference pairs by DPO, in one line.",
        "reward": "Train a reward model on preference pairs, in one line.",
    },
    "Train from a configuration, as LightningCLI does": {
        "fit": "Run the full optimization routine.",
        "validate": "Perform one evaluation epoch over the validation set.",
        "test": "Perform one evaluation epoch over the test set.",
        "predict": "Run inference on the data.",
    },
    "Plan, and look at runs and models": {
        "plan": "Find the best plan for models and a cluster that need not be there, and compare plans.",
        "report": "Show how a run learns and where its time goes: an HTML file, Markdown or JSON.",
        "runs": "List the runs of a folder with score, reward, time and settings, and name those that got worse.",
        "dashboard": "Serve the report of running runs in the browser, and follow them.",
        "chat": "Talk to a model: a folder that training has written, a folder of adapters, or a Hugging Face name.",
        "eval": "Evaluate a model on named sets: accuracy, pass@k and maj@k with intervals, for reports to compare.",
        "export": "Write one role of a checkpoint as a folder that Hugging Face's from_pretrained reads.",
        "verify": "Check every file of checkpoints, and print one line for each.",
        "doctor": "Check this machine and installation; takes up to a minute. Exit code 1: something does not work.",
    },
}
"""Title -> command -> its first sentence."""
OTHER_COMMANDS: Mapping[str, str] = {
    "export": "commands.checkpoint_commands:run_export",
    "verify": "commands.checkpoint_commands:run_verify",
    "plan": "report.plan_command:run_plan",
    "doctor": "commands.doctor:run_doctor",
    "chat": "commands.chat_command:run_chat",
    "eval": "commands.eval_command:run_eval",
    "report": "commands.report_command:run_report",
    "runs": "commands.report_command:run_runs",
    "dashboard": "commands.dashboard_command:run_dashboard",
}
"""Command -> its function of the arguments and an output function, imported when it runs; it returns the exit code."""
_WITHOUT_MODELS = ("report", "runs", "dashboard")
"""Commands that start in a second, since they need neither torch nor Lightning."""


def summary_of(command: str) -> str:
    """Return the sentence about a command."""
    return next(commands[command] for commands in SUMMARIES.values() if command in commands)


def help_text() -> str:
    """Return the text of ``lightning-realloc --help``."""
    lines = ["usage: lightning-realloc [-h] [--version] COMMAND ...", ""]
    for title, commands in SUMMARIES.items():
        lines.append(f"{title}:")
        for name, summary in commands.items():
            lines += TextWrapper(100, initial_indent=f"  {name:<11}", subsequent_indent=" " * 13).wrap(summary)
        lines.append("")
    lines.append("lightning-realloc COMMAND --help lists the flags of a command.")
    return "\n".join(lines) + "\n"


def run_command_line() -> int:
    """Run the command line of this process, and return its exit code."""
    if sys.argv[1:] in (["-h"], ["--help"]):
        sys.stdout.write(help_text())
        return 0
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"lightning-realloc {version('lightning-realloc')}\n")
        return 0
    if len(sys.argv) > 1 and sys.argv[1] in _WITHOUT_MODELS:
        try:
            return run_other(sys.argv[1], sys.argv[2:])
        except ReallocError as error:
            sys.stderr.write(one_line_message(error, 0))
            return 2
    code: int = resolve_name("lightning_realloc.cli:main")()
    return code


def run_other(name: str, arguments: Sequence[str]) -> int:
    """Run a command and return its exit code; errors are raised."""
    command = resolve_name(f"lightning_realloc.{OTHER_COMMANDS[name]}")
    try:
        code: int = command(arguments, _write_at_once)
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 1
    return code


def _write_at_once(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
