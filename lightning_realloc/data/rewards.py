"""How good is a completion? Reward functions with TRL's signature, several of them weighted.

A function is called with whole batches, ``f(prompts=..., completions=..., completion_ids=..., **columns)``, and
returns one number per completion; None says that it does not apply to that one. Functions written for TRL's
``GRPOTrainer`` work as they are. Source: https://huggingface.co/docs/trl/grpo_trainer
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import math
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_realloc.data.chat import is_conversation
from lightning_realloc.errors import ReallocError, RewardError

RewardFunction = Callable[..., Sequence[float | None]]
_GIVEN = frozenset({"prompts", "completions", "completion_ids"})


@dataclass(frozen=True, slots=True, eq=False)
class Rewards:
    """What a batch of completions earned."""

    total: Tensor
    """(B,) float32: the weighted sum over the functions that applied."""
    by_function: Mapping[str, Tensor]
    """Function name -> (B,) float32, unweighted; NaN where the function did not apply."""


class RewardFunctions:
    """One or more reward functions, judged together.

    Args:
        functions: Callables, or import paths of callables: ``package.module:name`` or ``package.module.name``.
        weights: One factor per function; all 1 by default.

    Raises:
        RewardError: for an import path that leads nowhere, no functions, or weights that do not match.
    """

    def __init__(
        self,
        functions: RewardFunction | str | Sequence[RewardFunction | str],
        *,
        weights: Sequence[float] | None = None,
    ) -> None:
        given = [functions] if isinstance(functions, str) or callable(functions) else list(functions)
        if not given:
            raise RewardError("at least one reward function is needed; got none")
        self.functions = tuple(import_function(item) if isinstance(item, str) else item for item in given)
        for function in self.functions:
            if not callable(function):
                raise RewardError(f"a reward function must be callable; {function!r} is a {type(function).__name__}")
        self.weights = tuple(float(weight) for weight in weights) if weights is not None else (1.0,) * len(given)
        if len(self.weights) != len(self.functions) or not all(map(math.isfinite, self.weights)):
            raise RewardError(
                f"{len(self.functions)} reward functions need as many finite weights; got {list(self.weights)}"
            )
        self.names = _unique_names(self.functions)

    def check_columns(self, columns: Collection[str]) -> None:
        """Refuse data without a column that a function asks for by name; call it before the first step.

        Raises:
            RewardError: naming the function and the columns it misses.
        """
        for name, function in zip(self.names, self.functions, strict=True):
            missing = sorted(_required(function) - set(columns) - _GIVEN)
            if missing:
                raise RewardError(
                    f"reward function {name!r} needs the columns {missing}, the data has {sorted(columns)}; "
                    f"add them to the data or give the function's parameters defaults"
                )

    def __call__(
        self,
        prompts: Sequence[object],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[object]],
    ) -> Rewards:
        """Return the rewards of a batch of B completions.

        Args:
            prompts: B texts or conversations. For conversations a function gets each completion as one too.
            completions: B texts.
            completion_ids: B lists of token ids.
            columns: Further columns of the data, B values each.

        Raises:
            RewardError: naming function, prompt and completion, when a function fails or returns anything but one
                finite number (or None) per completion, or when no function applies to a completion.
        """
        conversational = bool(prompts) and is_conversation(prompts[0])
        given: dict[str, Any] = {
            **{name: list(values) for name, values in columns.items()},
            "prompts": list(prompts),
            "completions": [_as_message(text) for text in completions] if conversational else list(completions),
            "completion_ids": [list(ids) for ids in completion_ids],
        }
        by_function = {
            name: torch.tensor(_judged(name, function, given), dtype=torch.float32)
            for name, function in zip(self.names, self.functions, strict=True)
        }
        values = torch.stack(list(by_function.values()))
        _refuse_unjudged(values.isnan().all(dim=0), self.names, given)
        total = (values * torch.tensor(self.weights)[:, None]).nansum(dim=0)
        return Rewards(total, by_function)


def exact_match(
    prompts: Sequence[object], completions: Sequence[Any], answer: Sequence[object], **columns: object
) -> list[float]:
    """Return 1 where the completion is the ``answer``, apart from white space around it, and 0 elsewhere."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [float(text.strip() == str(right).strip()) for text, right in zip(texts, answer, strict=True)]


def import_function(
    path: str, *, what: str = "reward function", error: type[ReallocError] = RewardError
) -> Callable[..., Any]:
    """Return what ``package.module:name`` or ``package.module.name`` names.

    Raises:
        RewardError: (or another ``error``, about a ``what``) when the module cannot be imported or has no such name.
    """
    module_name, _, name = path.replace(":", ".").rpartition(".")
    if not module_name or not name:
        raise error(f"a {what}'s import path is 'package.module:name'; got {path!r}")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as problem:
        raise error(
            f"{what} {path!r} cannot be imported ({problem}); "
            f"check the spelling and that its folder is installed or on PYTHONPATH"
        ) from problem
    return function  # type: ignore[no-any-return]


def _judged(name: str, function: RewardFunction, given: Mapping[str, Any]) -> list[float]:
    """Return what one function says about the batch, NaN for None."""
    try:
        returned = function(**_accepted(function, given))
    except Exception as error:
        raise RewardError(
            f"reward function {name!r} raised {type(error).__name__}{_line(error)}: {error}; "
            f"it was given {_batch(given)}"
        ) from error
    numbers = _as_list(name, returned)
    if len(numbers) != len(given["completions"]):
        raise RewardError(
            f"reward function {name!r} must return one number per completion; it returned {len(numbers)} for "
            f"{_batch(given)}"
        )
    return [_as_number(name, number, index, given) for index, number in enumerate(numbers)]


def _accepted(function: RewardFunction, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that the function takes: all, unless it names them one by one."""
    parameters = _parameters(function)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return dict(given)
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in given.items() if name in names}


def _required(function: RewardFunction) -> set[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name for p in _parameters(function) if p.kind in kinds and p.default is inspect.Parameter.empty}


def _parameters(function: RewardFunction) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def _as_list(name: str, returned: object) -> list[object]:
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise RewardError(f"reward function {name!r} must return a list of numbers; it returned {values!r}")
    return list(values)


def _as_number(name: str, value: Any, index: int, given: Mapping[str, Any]) -> float:
    if value is None:
        return math.nan
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardError(
            f"reward function {name!r} must return finite numbers, or None where it does not apply; it returned "
            f"{value!r} for {_completion(index, given)}"
        )
    return number


def _refuse_unjudged(unjudged: Tensor, names: Sequence[str], given: Mapping[str, Any]) -> None:
    if bool(unjudged.any()):
        index = int(unjudged.nonzero()[0])
        raise RewardError(
            f"at least one reward function must apply to every completion; all of {list(names)} returned None for "
            f"{_completion(index, given)}"
        )


def _unique_names(functions: Sequence[RewardFunction]) -> tuple[str, ...]:
    names: list[str] = []
    for function in functions:
        name = getattr(function, "__name__", type(function).__name__)
        candidates = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
        names.append(next(candidate for candidate in candidates if candidate not in names))
    return tuple(names)


def _as_message(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def _line(error: Exception) -> str:
    """Say in which line of the function; nothing where calling it was what failed."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is this module's call
    return f" in {Path(frames[0].filename).name}, line {frames[0].lineno}" if frames else ""


def _batch(given: Mapping[str, Any]) -> str:
    """Say how much a function was given, and to which prompts: a group's completions share one."""
    shown = list(dict.fromkeys(_short(prompt) for prompt in given["prompts"]))
    listed = ", ".join(shown[:3]) + (", ..." if len(shown) > 3 else "")
    return f"{len(given['completions'])} completions of {'the prompt' if len(shown) == 1 else 'the prompts'} {listed}"


def _completion(index: int, given: Mapping[str, Any]) -> str:
    return f"the completion {_short(given['completions'][index])} of the prompt {_short(given['prompts'][index])}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
