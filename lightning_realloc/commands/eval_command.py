"""Command ``lightning-realloc eval``: evaluate a model on named sets, as `Evaluation` does during training."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import lightning as L

from lightning_realloc.algorithms.evaluation.evaluation_set import MAX_NEW_TOKENS, EvaluationSet
from lightning_realloc.algorithms.evaluation.named_evaluation import Evaluation
from lightning_realloc.algorithms.rollout.accuracy import Accuracy
from lightning_realloc.algorithms.rollout.final_answers import AUTO
from lightning_realloc.algorithms.sft import SFT
from lightning_realloc.callbacks.timeline import Timeline
from lightning_realloc.commands.chat_session import model_folder, model_sources
from lightning_realloc.commands.command_parser import CommandParser
from lightning_realloc.commands.parsing import has_bf16
from lightning_realloc.commands.rewards_and_sets import describe_names, has_own_rule, named_sets, reward_setting
from lightning_realloc.commands.short_run import data_setting
from lightning_realloc.data.sources import DatasetSource
from lightning_realloc.data.tokenizers import load_tokenizer
from lightning_realloc.errors import ConfigError
from lightning_realloc.generation import SamplingParams
from lightning_realloc.generation.core.capabilities import EngineName
from lightning_realloc.output_files import write_problem
from lightning_realloc.remote_path import expand_home
from lightning_realloc.scores.bootstrap import intervals
from lightning_realloc.scores.question_scores import QuestionScores
from lightning_realloc.strategies.checkpoints.checkpoint_files import ROLES_FILE
from lightning_realloc.strategies.checkpoints.export import export_checkpoint
from lightning_realloc.tables import aligned

EXPORTED = "exported"
"""Folder in the output for the model of a checkpoint."""
RECORD = "record"
"""Folder in the output for ``scores.jsonl``, where reports look for it."""


class _EvaluatedModel(SFT):
    """The actor of a run, placed as in training, without training."""

    def validation_step(self, *batch: object) -> None:
        """Leave everything to `Evaluation`."""


def eval_parser() -> CommandParser:
    """Return the parser of ``lightning-realloc eval``."""
    parser = CommandParser("eval")
    add = parser.add_argument
    add("model", metavar="MODEL", help="Folder of a model, adapters, a run or a checkpoint, or a Hugging Face name.")
    sets = (
        "File, folder or hub name of the rows, reasoning-gym:NAME or lm-eval:TASK; names its metrics. May be repeated."
    )
    add("--set", dest="sets", action="append", default=[], metavar="[NAME=]DATA", help=sets)
    reward = f"Rule for right responses; may be repeated, and rewards are added up: {describe_names(models=False)}."
    add("--reward", action="append", default=[], metavar="REWARD", help=reward)
    add("--threshold", type=float, default=1.0, help="Smallest reward of a right response. Default: %(default)s.")
    add("--answer", default=AUTO, help="Final answers for maj@k: number, boxed, text or module:function.")
    add("--n", type=int, default=1, help="Responses per prompt. Default: %(default)s.")
    add("--ks", type=int, nargs="+", metavar="K", help="Values of k. Default: powers of two below n, and n.")
    tokens = "Most tokens of a response. Default: %(default)s."
    add("--max-new-tokens", type=int, default=MAX_NEW_TOKENS, metavar="N", help=tokens)
    add("--temperature", type=float, help="0 takes the most likely token. Default: 0; 1 for several responses.")
    add("--seed", type=int, default=0, help="Seed of the sampling. Default: %(default)s.")
    add("--limit", type=int, metavar="N", help="Number of rows of each set, the first ones. Default: all.")
    add("--prompt-column", metavar="NAME", default="prompt", help="Column with the prompts. Default: %(default)s.")
    add("--split", metavar="SPLIT", help="Split of the data sets. Default: train.")
    add("--config-name", metavar="NAME", help="Configuration of the data sets on the hub, such as main.")
    add("--engine", choices=get_args(EngineName), default="native", help="Default: %(default)s.")
    add("--devices", type=int, default=1, metavar="N", help="Number of devices. Default: %(default)s.")
    add("--output", metavar="FOLDER", default="runs/eval", help="Scores, for reports. Default: %(default)s.")
    return parser


def run_eval(arguments: Sequence[str], write: Callable[[str], object]) -> int:
    """Evaluate a model, write a table and ``scores.jsonl``, and return the exit code.

    Raises:
        ReallocError: for a wrong command line, a model that cannot be loaded, and sets that cannot be used.
    """
    flags = eval_parser().parse(arguments)
    evaluation = Evaluation(_sets(flags))
    output = expand_home(Path(flags.output))
    if problem := write_problem(output):
        raise ConfigError(f"--output: {problem}")
    source, adapters, tokenizer = model_sources(_model_folder(flags.model, output))
    module = _EvaluatedModel(source, peft_config=adapters, tokenizer=load_tokenizer(tokenizer), engine=flags.engine)
    trainer = L.Trainer(
        strategy="realloc",
        devices=flags.devices,
        precision="bf16-mixed" if has_bf16() else None,
        callbacks=[evaluation, Timeline(output / RECORD)],
        default_root_dir=output,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.validate(module, range(1), verbose=False)  # one batch, which nothing reads
    if trainer.is_global_zero:
        write(f"{_table(module.question_scores)}\n")
        write(f"scores of every question: {output / RECORD}; to compare: lightning-realloc report A --compare B\n")
    return 0


def _sets(flags: argparse.Namespace) -> dict[str, EvaluationSet]:
    if not flags.sets:
        raise ConfigError("eval needs --set: a file, a folder or the name of a data set, as in --set gsm=test.jsonl")
    named = named_sets(flags.sets, "--set")
    if not flags.reward and not all(map(has_own_rule, named.values())):
        raise ConfigError(f"eval needs --reward: {describe_names(models=False)}")
    temperature = (0.0 if flags.n == 1 else 1.0) if flags.temperature is None else flags.temperature
    sampling = SamplingParams(n=flags.n, max_new_tokens=flags.max_new_tokens, temperature=temperature, seed=flags.seed)
    ks = None if flags.ks is None else tuple(flags.ks)
    accuracy = Accuracy(threshold=flags.threshold, ks=ks, answer=flags.answer)
    reward = reward_setting(flags.reward) if flags.reward else None
    others = {"accuracy": accuracy, "prompt_column": flags.prompt_column, "limit": flags.limit}
    return {
        name: EvaluationSet(_rows(data, flags), reward=reward, sampling=sampling, **others)
        for name, data in named.items()
    }


def _rows(data: str, flags: argparse.Namespace) -> str | DatasetSource:
    if has_own_rule(data):
        return data
    setting: Any = data_setting(data, flags.split, flags.config_name, flag="--set")
    return setting if isinstance(setting, str) else DatasetSource(**setting)


def _model_folder(given: str, output: Path) -> str:
    """Return the folder of a model; that of a checkpoint is written by the first process, which starts the others."""
    checkpoint = expand_home(Path(given))
    if not (checkpoint / ROLES_FILE).is_file():
        return model_folder(given)
    folder = output / EXPORTED
    if int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) == 0:
        export_checkpoint(checkpoint, folder)
    return str(folder)


def _table(scores: Mapping[str, QuestionScores]) -> str:
    rows = [("score", "value", "95 % interval", "questions")]
    for prefix, one in scores.items():
        for name, found in intervals(one).items():
            interval = f"{found.low:.3g} to {found.high:.3g}"
            rows.append((f"{prefix}/{name}", f"{found.value:.3g}", interval, str(len(one.questions))))
    return aligned(rows)
