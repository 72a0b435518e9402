"""Command line ``lightning-realloc fit | validate | test | predict | grpo | ppo | sft | dpo | reward | export | …``.

It is a LightningCLI whose model and data are chosen by class, with ``strategy="realloc"`` as default. ``grpo`` and its
neighbours run ``fit`` with a configuration made from short flags. The modules of `commands` and `report` hold the other
commands. User errors end with one message and exit code 2, and so does ``verify`` if a checkpoint is damaged. ``plan``
exits with 3 if no run of its plan can start, and ``doctor`` with 1 if something does not work.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import chain
from pathlib import Path
from pydoc import locate
from typing import Any, NoReturn

import torch
import yaml
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, _InstantiatorFn

import lightning_realloc
from lightning_realloc.commands.file_forms import UNNAMED, file_form, form_error, unnamed_class
from lightning_realloc.commands.output_checks import check_outputs
from lightning_realloc.commands.parsing import accept_moved_settings, describe_full_device, has_bf16, strategy_with
from lightning_realloc.commands.short_run import COMMANDS, read_command_line
from lightning_realloc.dataflow.repeated_keys import refuse_repeated_keys
from lightning_realloc.entry import OTHER_COMMANDS, run_other, summary_of
from lightning_realloc.errors import ConfigError, one_line_message
from lightning_realloc.lazy_names import FORMER_NAMES
from lightning_realloc.output_files import write_text
from lightning_realloc.setting_hints import (
    describe_unknown_settings,
    hint_for,
    loss_elsewhere,
    setting_defaults,
    settings_of,
)
from lightning_realloc.strategies.lightning.failures import (
    CALLER_ERRORS,
    end_started_ranks,
    raised_in,
)
from lightning_realloc.strategies.lightning.launch_options import LauncherName
from lightning_realloc.strategies.pool.precision import refuse_precision
from lightning_realloc_autoload import STRATEGIES

SHORT_NAMES: Sequence[type] = tuple(
    getattr(lightning_realloc, name)
    for name in (
        *("GRPO", "PPO", "SFT", "DPO", "KTO", "ORPO", "RewardModel", "ProcessReward"),
        *("RLOO", "ReMax", "ReinforcePlusPlus", "BestOfN", "OnlineDPO", "OnPolicyDistillation"),
        *("PromptDataModule", "SFTDataModule", "PreferenceDataModule", "BinaryFeedbackDataModule", "StepDataModule"),
        *("ReallocStrategy", "ParameterReallocation", "SaveHuggingFace", "PredictionWriter", "RolloutTable"),
        *("MemoryMonitor", "MetricAlarm", "Timeline", "AutoTuner", "TrackioLogger", "EMA", "Evaluation"),
    )
)
"""Classes that a configuration can name without their module: they are imported here. Others need the class path."""
_CHOICES = re.compile(r"Expected a typing\.Literal\[([^\]]*)\]")
_UNKNOWN_CLASS = re.compile(
    r"Expected a dot import path string: ([\w.+-]+)|"
    r"Problem with given class_path '([\w.]+)':\s+(?:module '.*' has no attribute|No module named)"
)
_UNION_LINE = re.compile(
    r"\n *(Does not validate against any of the Union subtypes|Subtypes: .*|Errors:|- Expected a <class 'NoneType'>"
    r"|Given value type: .*|Given value: .*)(?=\n|$)"
)
"""A line about how a value of an optional setting was tried. Between these, the sentence that helps is hard to find."""
_UNNAMED_CLASS = re.compile(r"but ([\w.]+) is abstract\n(?:.*\n){2}.*Given value: (.*)")
_UNKNOWN_OPTION = re.compile(
    r"Problem with given class_path '([\w.]+)':\s+(?:Option '|unrecognized arguments: --)([\w.]+)|"
    r"Option '(\w+)' is not accepted\. Got value: Namespace\(class_path='([\w.]+)'"  # of a callable, such as a reward
)
_UNKNOWN_KEY = re.compile(  # an option at the beginning is of a class that the outer parser's message names
    r"\sOption '([\w.]+)' is not accepted|does not accept option '([\w.]+)'|unrecognized arguments: --([\w.]+)|"
    r" is abstract\n(?:.*\n){2}.*Given value: (?:\{|NestedArg\(key=)'(\w+)'"  # no class_path
)
_ONE_LINE_ERRORS = (*CALLER_ERRORS, torch.OutOfMemoryError)
"""Exceptions that end a command with one line and exit code 2."""


accept_moved_settings()


class Parser(LightningArgumentParser):
    """Parser with shorter output: no usage before errors, and no list of all ``nn.Module`` subclasses in help."""

    def format_help(self, *args: Any, **options: Any) -> str:
        """Return the help without lists of known subclasses that fill pages."""
        return re.sub(r",\s+known\s+subclasses:[^()]{2000,}\)", ")", super().format_help(*args, **options))

    def dump(self, *args: Any, **options: Any) -> str:
        """Return a configuration as text, without the check that parsing has made: it takes half a second."""
        text: str = super().dump(*args, **{"skip_validation": True} | options)
        return text

    def parse_path(self, cfg_path: str | os.PathLike[str], *args: Any, **options: Any) -> Namespace:
        """Parse a configuration file; an error of its YAML names the file and the line."""
        with contextlib.suppress(OSError, UnicodeDecodeError):  # whose message is jsonargparse's
            try:
                refuse_repeated_keys(Path(cfg_path).read_text(encoding="utf-8"))
            except yaml.YAMLError as error:
                self.error(f"Problems parsing config {cfg_path}: {error}", error)
        parsed: Namespace = super().parse_path(cfg_path, *args, **options)
        return parsed

    def print_usage(self, file: Any = None) -> None:
        """Print nothing; only errors call it."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Leave out lines about unions; add our names for other libraries' settings, and similar settings or classes.

        A nested parser's message, which contains its hints already, is part of this one; the hints move to its end.
        """
        hints = list(_setting_hints(message))
        if not any(hints) and (ours := form_error(message)) is not None:
            super().error(ours, ex)
        if not hints:
            hints = [self._option_hint("".join(found)) for found in _UNKNOWN_KEY.findall(message)]
        if not any(hints):
            hints = [unnamed_class(path, value) for path, value in _UNNAMED_CLASS.findall(message)]
        hints += [_class_hint(first or second, message) for first, second in _UNKNOWN_CLASS.findall(message)]
        hints = list(filter(None, dict.fromkeys(hints)))
        if form := file_form(f"; {'; '.join(hints)}", sys.argv[1:]):
            hints.append(form.removeprefix("; "))
        for hint in hints:
            message = message.replace(f"; {hint}", "")
        message = _UNION_LINE.sub("", message)
        super().error("; ".join([message, *hints]), ex)

    def _option_hint(self, name: str) -> str:
        """Return our name for another library's option, the class with this option, or similar options; else empty."""
        last = name.rpartition(".")[2]
        for known in (name, last):  # OpenRLHF and verl have dotted names
            if (hint := hint_for(known)) is not None:
                return f"{known} is here {hint}"
        for cls in SHORT_NAMES:
            if (moved := getattr(cls, "names_elsewhere", {}).get(last)) is not None:
                return f"{last} is here {moved}"
        if owners := [cls.__name__ for cls in SHORT_NAMES if last in setting_defaults(cls)]:
            return f"{last} is a setting of {' or '.join(owners[:3])}; write it under the init_args of the class"
        near = difflib.get_close_matches(name, self._options(), n=3)
        return f"did you mean {' or '.join(near)}?" if near else ""

    def _options(self) -> list[str]:
        """Return the names of all options, of commands below this one as well."""
        below = [action.choices.values() for action in self._actions if isinstance(action.choices, dict)]
        return [option.dest for parser in (self, *chain(*below)) for option in parser._actions]


def _setting_hints(message: str) -> Iterator[str]:
    """Yield the answers of classes to unknown settings; to a dotted one by its first part, if no hint has the whole."""
    for path, name, other, of_callable in _UNKNOWN_OPTION.findall(message):
        if (base := path or of_callable) in UNNAMED:
            yield unnamed_class(base, f"'{name or other}': ...")
            continue
        cls, setting = locate(base), name or other
        if not isinstance(cls, type):
            continue
        first = setting.partition(".")[0]
        if first == setting or (first not in settings_of(cls) and hint_for(setting) is None):
            yield describe_unknown_settings(cls, [first])


def _class_hint(name: str, message: str) -> str:
    """Return our counterpart of an unknown class of a message, or a hint with the classes of similar names."""
    if '"policy_loss"' in message and (loss := loss_elsewhere(name)) is not None:
        return f"{name} is here {loss}"
    if name in STRATEGIES:
        return (
            f"{name!r} is a strategy with its defaults; to change one, write --trainer.strategy ReallocStrategy first"
        )
    choices = [choice for found in _CHOICES.findall(message) for choice in re.findall("'([^']*)'", found)]
    if choices and "." not in name and not name[0].isupper():
        near = difflib.get_close_matches(name, choices, n=1)
        return f"{name!r} is none of {', '.join(choices)}" + (f"; did you mean {near[0]}?" if near else "")
    packages = ("lightning_realloc.rewards", "lightning_realloc")
    known = {public: f"{package}.{public}" for package in packages for public in import_module(package).__all__}
    known |= {short.__name__: short.__name__ for short in SHORT_NAMES}
    wanted = name.rpartition(".")[2]
    wanted = FORMER_NAMES.get(wanted, wanted).rpartition(".")[2]
    near = [known[similar] for similar in difflib.get_close_matches(wanted, known, n=3)]
    way_out = f"did you mean {' or '.join(near)}?" if near else "write package.module.Class of one that can be imported"
    return f"there is no class {name}: {way_out}"


class _Refusal(BaseException):
    """Carries one of our errors through jsonargparse, which treats any Exception as a type mismatch."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Instantiator(_InstantiatorFn):
    """Constructs a model or a data module as Lightning does, and lets our errors pass jsonargparse."""

    def __call__(self, class_type: type, *args: Any, applied_instantiation_links: Any, **kwargs: Any) -> Any:
        try:
            links = applied_instantiation_links
            return super().__call__(class_type, *args, applied_instantiation_links=links, **kwargs)
        except CALLER_ERRORS as error:
            raise _Refusal(error) from error


def _construct(class_type: type, *args: Any, **kwargs: Any) -> Any:
    try:
        return class_type(*args, **kwargs)
    except CALLER_ERRORS as error:
        raise _Refusal(error) from error


def _refuse_function_calls(reward: object) -> None:
    """Raise ConfigError for a ``class_path`` among rewards that names a function: jsonargparse would call it."""
    if isinstance(reward, list | tuple):
        for each in reward:
            _refuse_function_calls(each)
    if isinstance(reward, Namespace):
        reward = vars(reward)
    if not isinstance(reward, dict):
        return
    path = reward.get("class_path")
    if isinstance(path, str) and not isinstance(locate(path), type):
        raise ConfigError(
            f"reward: class_path={path!r} names a function, which would be called now; to use the function "
            f"itself as the reward, write reward: {path}"
        )
    for each in reward.values():
        _refuse_function_calls(each)


class ReallocCLI(LightningCLI):
    """LightningCLI for algorithms with several models, which build their optimizers themselves."""

    def __init__(self, args: Sequence[str] | None = None, **options: Any) -> None:
        defaults: dict[str, Any] = {
            "subclass_mode_model": True,
            "subclass_mode_data": True,
            # Lightning would build an optimizer from parameters() before there are models.
            "auto_configure_optimizers": False,
            # A random default would differ between processes that Lightning did not start.
            "seed_everything_default": 0,
            "trainer_defaults": {"strategy": "realloc"},
            "save_config_kwargs": {"overwrite": True},
            "parser_class": Parser,
        }
        given = list(args) if args is not None else None
        self._first_argument = next(iter(sys.argv[1:] if given is None else given), None)
        super().__init__(LightningModule, LightningDataModule, args=given, **defaults | options)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add ``--launcher`` and ``--max_failures``, which set the strategy's settings of these names."""
        shown = "How ranks start, in place of the strategy's launcher: popen, spawn, fork or ray."
        parser.add_argument("--launcher", type=LauncherName | None, help=shown)
        shown = "Lost ranks or machines after which --launcher=ray starts again from the last checkpoint."
        parser.add_argument("--max_failures", type=int | None, help=shown)

    def before_instantiate_classes(self) -> None:
        """Refuse precisions, whose own errors would name another class, and rewards that would be called."""
        self._set_launcher()
        strategy = self._get(self.config, "trainer.strategy")
        if str(getattr(strategy, "class_path", "")).endswith("ReallocStrategy"):
            refuse_precision(str(self._get(self.config, "trainer.precision")))
        _refuse_function_calls(self._get(self.config, "model.init_args.reward"))

    def _set_launcher(self) -> None:
        """Write ``--launcher`` and ``--max_failures`` into the strategy's settings."""
        names = ("launcher", "max_failures")
        options = {name: value for name in names if (value := self._get(self.config, name)) is not None}
        trainer = self._get(self.config, "trainer")
        if options and trainer is not None:
            trainer.strategy = strategy_with(trainer.strategy, options)

    def instantiate_classes(self) -> None:
        """Construct the model, the data and the Trainer; our errors are raised unchanged."""
        try:
            super().instantiate_classes()
        except _Refusal as refusal:
            raise refusal.error from None

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Construct the Trainer; ConfigError for values that Lightning refuses by a TypeError or ValueError."""
        try:
            return super().instantiate_trainer(**kwargs)
        except (TypeError, ValueError) as error:
            if raised_in(error) != "lightning":
                raise
            raise ConfigError(f"trainer: {error}") from error

    def _run_subcommand(self, subcommand: str) -> None:
        ckpt_path = self._get(self.config, "ckpt_path")
        check_outputs(self.trainer, subcommand, ckpt_path=ckpt_path)
        try:
            super()._run_subcommand(subcommand)
        except _ONE_LINE_ERRORS:
            end_started_ranks(self.trainer.strategy.launcher)  # they fail alike; report the error last
            raise

    def _add_instantiators(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # its successor is no method of Lightning's parser yet
            self.parser.add_instantiator(_Instantiator(cli=self, key="model"), LightningModule, subclasses=True)
            self.parser.add_instantiator(_Instantiator(cli=self, key="data"), LightningDataModule, subclasses=True)
            self.parser.add_instantiator(_construct, object, subclasses=True)  # last: strategies, options, callbacks

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Return a parser; without its options, which take a while to add, if another subcommand was named first."""
        if self._first_argument in self.subcommands() and subcommand != self._first_argument:
            self._subcommand_method_arguments[subcommand] = []
            return self.init_parser(**kwargs)
        return super()._prepare_subcommand_parser(klass, subcommand, **kwargs)

    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        super()._add_subcommands(parser, **kwargs)
        # For lists of commands only: LightningCLI's subcommands are Trainer methods, so `run` handles these itself.
        action = parser._subcommands_action
        assert action is not None, "LightningCLI has just added subcommands"
        for name in (*COMMANDS, *OTHER_COMMANDS):
            action.add_subcommand(name, ArgumentParser(description=summary_of(name)), help=summary_of(name))


def _run_short(name: str, arguments: Sequence[str]) -> int:
    """Run ``fit`` with the configuration of a short command line, or write that configuration to a file."""
    asked = read_command_line(name, arguments, precision=lambda: "bf16-mixed" if has_bf16() else None)
    sys.argv[1:] = asked.fit_arguments  # ranks that Lightning starts repeat this command line
    if asked.save_config is None:
        ReallocCLI()
        return 0
    sys.argv.append("--print_config=skip_default")
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            ReallocCLI()
    except SystemExit as end:  # also after printing
        if end.code:
            raise
    try:
        asked.save_config.parent.mkdir(parents=True, exist_ok=True)
        write_text(asked.save_config, output.getvalue())
    except OSError as error:
        raise ConfigError(
            f"--save-config={asked.save_config} cannot be written ({error.strerror}); name another file"
        ) from None
    sys.stdout.write(f"{asked.save_config} written; lightning-realloc fit --config {asked.save_config} does the same\n")
    return 0


def run(args: Sequence[str]) -> int:
    """Run a command and return its exit code; errors are raised."""
    if args and args[0] in COMMANDS:
        return _run_short(args[0], args[1:])
    if args and args[0] in OTHER_COMMANDS:
        return run_other(args[0], args[1:])
    ReallocCLI()
    return 0


def main() -> int:
    """Run the command line of this process, and return its exit code."""
    if os.getcwd() not in sys.path:  # reward functions have import paths, often next to the configuration
        sys.path.insert(0, os.getcwd())
    try:
        return run(sys.argv[1:])
    except _ONE_LINE_ERRORS as error:
        rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
        shown = describe_full_device(error) if isinstance(error, torch.OutOfMemoryError) else str(error)
        form = "" if sys.argv[1] in OTHER_COMMANDS else file_form(shown, sys.argv[1:])
        written = ConfigError(shown + form)
        written.is_shared = getattr(error, "is_shared", False)
        sys.stderr.write(one_line_message(written, rank))
        sys.stderr.flush()
        return 2


if __name__ == "__main__":
    sys.exit(main())
