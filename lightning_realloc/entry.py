"""Entry of the command line: answer ``--help`` and ``--version`` at once, and leave the rest to `cli`.

`cli` imports torch, Lightning and transformers, which takes seconds. It is named rather than imported, because it and
the commands import their sentences from here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.metadata import version
from pkgutil import resolve_name
from textwrap import TextWrapper

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
        "dashboard": "Serve the report of running runs in the browser, and follow them.",
        "chat": "Talk to a model: a folder that training has written, a folder of adapters, or a Hugging Face name.",
        "export": "Write one role of a checkpoint as a folder that Hugging Face's from_pretrained reads.",
        "verify": "Check every file of checkpoints, and print one line for each.",
        "doctor": "Check this machine and installation; takes up to a minute. Exit code 1: something does not work.",
    },
}
"""Title -> command -> its first sentence."""


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
    code: int = resolve_name("lightning_realloc.cli:main")()
    return code
