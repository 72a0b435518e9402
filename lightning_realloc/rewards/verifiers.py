"""Is a completion right? Ready-made answers to that, for what can be checked without a model."""

from __future__ import annotations

import importlib.util
import re
import threading
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal, get_args

from lightning_realloc.errors import RewardError
from lightning_realloc.rewards.numbers import final_number
from lightning_realloc.rewards.texts import completion_texts


def exact_match(
    prompts: Sequence[object], completions: Sequence[Any], answer: Sequence[object], **columns: object
) -> list[float]:
    """Return 1 where the completion is the ``answer``, apart from white space around it, and 0 elsewhere."""
    texts = completion_texts(completions)
    return [float(text.strip() == str(right).strip()) for text, right in zip(texts, answer, strict=True)]


NumberReader = Literal["math-verify", "plain", "auto"]


class NumericAnswer:
    r"""Rewards 1 where a completion's final answer is the number that it should be, 0 elsewhere.

    ``"plain"`` compares the last number of each text: in ``\boxed{}``, after ``####``, or else anywhere; see
    :func:`lightning_realloc.rewards.numbers.final_number`. ``"math-verify"`` compares expressions, as that package
    reads them. The reward does not apply where the answer that should be given cannot be read.

    Args:
        column: Which column of the data holds the right answers, as numbers or texts.
        reader: ``"auto"`` takes math-verify where it is installed.
        tolerance: Of plain numbers: how far they may be apart, as a share of the right one.
    """

    def __init__(self, *, column: str = "answer", reader: NumberReader = "auto", tolerance: float = 1e-6) -> None:
        if reader not in get_args(NumberReader):
            raise RewardError(f"reader={reader!r} must be one of {', '.join(map(repr, get_args(NumberReader)))}")
        if not 0 <= tolerance < 1:
            raise RewardError(f"tolerance={tolerance} is a share of the right number; it must lie in [0, 1)")
        there = importlib.util.find_spec("math_verify") is not None
        if reader == "math-verify" and not there:
            raise RewardError("reader='math-verify' needs a package: pip install math-verify, or set reader='plain'")
        self.column = column
        self.reader = "math-verify" if there and reader == "auto" else "plain" if reader == "auto" else reader
        self.tolerance = Fraction(tolerance)

    def required_columns(self) -> set[str]:
        """Return the column of the right answers."""
        return {self.column}

    def __call__(
        self, /, prompts: Sequence[object], completions: Sequence[Any], **columns: Sequence[object]
    ) -> list[float | None]:
        """Return what B completions earn."""
        judge = _same_expression if self.reader == "math-verify" else self._same_number
        pairs = zip(completion_texts(completions), columns[self.column], strict=True)
        return [judge(text, str(right)) for text, right in pairs]

    def _same_number(self, text: str, right: str) -> float | None:
        given, wanted = final_number(text), final_number(right)
        if wanted is None:
            return None
        return float(given is not None and abs(given - wanted) <= self.tolerance * abs(wanted))


def _same_expression(text: str, right: str) -> float | None:
    from math_verify import parse, verify

    # Its time limits are alarms, which only the main thread can set.
    may_wait = threading.current_thread() is threading.main_thread()
    parsing, verifying = (5, 5) if may_wait else (None, None)
    # A bare "1+x" would be read as the number in it.
    is_marked = any(mark in right for mark in (r"\boxed", "$", "####"))
    wanted = parse(right if is_marked else rf"\boxed{{{right}}}", parsing_timeout=parsing)
    if not wanted:
        return None
    given = parse(text, parsing_timeout=parsing)
    return float(bool(verify(wanted, given, timeout_seconds=verifying)))


class Regex:
    """Rewards 1 where a pattern is found in the completion, 0 elsewhere.

    Args:
        pattern: As Python's ``re`` reads it, options in front: ``(?is)...``. Begin with ``^`` and end with ``$`` to
            have it match the whole.
    """

    def __init__(self, pattern: str) -> None:
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise RewardError(f"pattern={pattern!r} is no regular expression: {error}") from error

    def __call__(self, /, prompts: Sequence[object], completions: Sequence[Any], **columns: object) -> list[float]:
        """Return what B completions earn."""
        return [float(self._pattern.search(text) is not None) for text in completion_texts(completions)]


class Format(Regex):
    """Rewards 1 where a completion is these tags in this order, each with something in it, and nothing between them.

    Args:
        tags: Their names: ``("think", "answer")`` for ``<think>...</think> <answer>...</answer>``.
        prompt_opens: Whether the prompt ends with the first tag's opening, so that the completion begins inside it.
    """

    def __init__(self, tags: Sequence[str] = ("think", "answer"), *, prompt_opens: bool = False) -> None:
        if not tags or isinstance(tags, str):
            raise RewardError(f"tags={tags!r} must be a list of one name or more")
        any_tag = "|".join(f"</?{re.escape(tag)}>" for tag in tags)
        inside = rf"(?=\s*[^\s<]|\s*<(?!/))(?:(?!{any_tag}).)+"
        parts = [f"<{re.escape(tag)}>{inside}</{re.escape(tag)}>" for tag in tags]
        begin = r"\s*"
        if prompt_opens:
            begin, parts[0] = "", parts[0].removeprefix(f"<{re.escape(tags[0])}>")
        super().__init__(r"(?s)\A" + begin + r"\s*".join(parts) + r"\s*\Z")


LengthUnit = Literal["tokens", "words", "characters"]


class Length:
    """Rewards 1 where a completion's length lies within bounds, 0 elsewhere.

    Args:
        minimum: The shortest that is rewarded.
        maximum: The longest; None: any.
        unit: What is counted.
    """

    def __init__(self, *, minimum: int = 0, maximum: int | None = None, unit: LengthUnit = "tokens") -> None:
        if unit not in get_args(LengthUnit):
            raise RewardError(f"unit={unit!r} must be one of {', '.join(map(repr, get_args(LengthUnit)))}")
        if maximum is not None and maximum < minimum:
            raise RewardError(f"minimum={minimum} and maximum={maximum} leave no length; set maximum >= minimum")
        self.minimum = minimum
        self.maximum = maximum
        self.unit = unit

    def __call__(
        self,
        /,
        prompts: Sequence[object],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        **columns: object,
    ) -> list[float]:
        """Return what B completions earn."""
        match self.unit:
            case "tokens":
                lengths = [len(ids) for ids in completion_ids]
            case "words":
                lengths = [len(text.split()) for text in completion_texts(completions)]
            case _:
                lengths = [len(text) for text in completion_texts(completions)]
        longest = float("inf") if self.maximum is None else self.maximum
        return [float(self.minimum <= length <= longest) for length in lengths]
