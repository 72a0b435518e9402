"""Verifiers: rule-based rewards for answers, numbers, patterns, formats and lengths."""

from __future__ import annotations

import importlib.util
import logging
import re
import threading
from collections.abc import Collection, Sequence
from fractions import Fraction
from typing import Any, Literal, get_args

from lightning_realloc.errors import RewardError, require_choice
from lightning_realloc.rewards.final_numbers import final_number
from lightning_realloc.rewards.final_numbers import last_boxed as last_boxed
from lightning_realloc.rewards.texts import completion_texts

log = logging.getLogger(__name__)
_GROUP = re.compile(r"\((?:[^()\\]|\\.)*\)")


def exact_match(
    prompts: Sequence[object], completions: Sequence[Any], answer: Sequence[object], **columns: object
) -> list[float | None]:
    """Return 1 where the completion equals the ``answer``, ignoring surrounding white space, and 0 elsewhere.

    It does not apply (None) to rows without an answer.

    Example:
        >>> exact_match(["2 + 2 =", "2 + 3 ="], [" 4", "6"], answer=["4", "5"])
        [1.0, 0.0]
    """
    texts = completion_texts(completions)
    pairs = zip(texts, answer, strict=True)
    return [None if right is None else float(text.strip() == str(right).strip()) for text, right in pairs]


exact_match.__dict__["skips_missing"] = True


NumberReader = Literal["math-verify", "plain", "auto"]
"""Comparison of answers: expressions with ``math-verify``, plain numbers, or ``math-verify`` if installed."""


class NumericAnswer:
    r"""Reward 1 if a completion's final answer equals the expected number, 0 otherwise.

    ``"plain"`` compares the final number of each text: in ``\boxed{}``, after ``####``, or else the last one; see
    :func:`final_number`. ``"math-verify"`` compares expressions as that package parses them. The reward does not apply
    (None) if the expected answer cannot be parsed.

    Args:
        column: Column of the data with the expected answers, as numbers or text.
        reader: ``"plain"``, ``"math-verify"``, or ``"auto"``: math-verify if it is installed.
        tolerance: Maximum relative error of plain numbers, as a fraction of the expected one.

    Example:
        >>> NumericAnswer(reader="plain")(["6 * 7 ="], [r"It is \boxed{42}."], answer=["42"])
        [1.0]
    """

    skips_missing = True

    def __init__(self, *, column: str = "answer", reader: NumberReader = "auto", tolerance: float = 1e-6) -> None:
        require_choice("reader", reader, get_args(NumberReader), RewardError)
        if not 0 <= tolerance < 1:
            raise RewardError(f"tolerance={tolerance} is a share of the right number; it must lie in [0, 1)")
        there = importlib.util.find_spec("math_verify") is not None
        if reader == "math-verify" and not there:
            raise RewardError("reader='math-verify' needs a package: pip install math-verify, or set reader='plain'")
        self.column = column
        self.reader = "math-verify" if there and reader == "auto" else "plain" if reader == "auto" else reader
        self.tolerance = Fraction(tolerance)

    def required_columns(self) -> set[str]:
        """Return the column of the expected answers."""
        return {self.column}

    def __call__(
        self, /, prompts: Sequence[object], completions: Sequence[Any], **columns: Sequence[object]
    ) -> list[float | None]:
        """Return the rewards of B completions."""
        judge = _same_expression if self.reader == "math-verify" else self._same_number
        pairs = zip(completion_texts(completions), columns[self.column], strict=True)
        return [None if right is None else judge(text, str(right)) for text, right in pairs]

    def final_answer(self, text: str) -> str | None:
        """Return a text's final answer, for majority votes: the same text for the same number or expression."""
        if self.reader == "math-verify":
            return _final_expression(text)
        number = final_number(text)
        # Python refuses to write integers of thousands of digits, but not as hexadecimal ones.
        return None if number is None else f"{number.numerator:x}/{number.denominator:x}"

    def _same_number(self, text: str, right: str) -> float | None:
        given, wanted = final_number(text), final_number(right)
        if wanted is None:
            return None
        return float(given is not None and abs(given - wanted) <= self.tolerance * abs(wanted))


def _same_expression(text: str, right: str) -> float | None:
    from math_verify import parse, verify

    limit_s = _math_verify_limit_s()
    # Without a mark, "1+x" would be read as the number in it.
    is_marked = any(mark in right for mark in (r"\boxed", "$", "####"))
    wanted = parse(right if is_marked else rf"\boxed{{{right}}}", parsing_timeout=limit_s)
    if not wanted:
        return None
    given = parse(text, parsing_timeout=limit_s)
    return float(bool(verify(wanted, given, timeout_seconds=limit_s)))


def _final_expression(text: str) -> str | None:
    from math_verify import parse

    found = parse(text, parsing_timeout=_math_verify_limit_s())
    if not found:
        return None
    answer: Any = found[0]  # an expression of sympy, or text that is none
    if type(answer).__name__ == "Equality":  # x = 3 is the answer 3
        answer = answer.rhs
    try:
        text = str(answer).strip()
        is_short = type(answer).__name__ == "Float" and "e" not in text  # a huge exponent makes a huge fraction
        return str(Fraction(text)) if is_short else text
    except ValueError:  # an integer of thousands of digits
        return None


def _math_verify_limit_s() -> int | None:
    """Return its time limit; None outside of the main thread, which alone can set the SIGALRM that it uses."""
    return 5 if threading.current_thread() is threading.main_thread() else None


class Regex:
    """Reward 1 if a pattern is found in the completion, 0 otherwise.

    Args:
        pattern: Regular expression of Python's ``re``, with flags in front: ``(?is)...``. Use ``^`` and ``$`` to match
            the whole completion.

    Example:
        >>> Regex(r"\\d+")(["How many?"], ["About 12."])
        [1.0]
    """

    def __init__(self, pattern: str) -> None:
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise RewardError(f"pattern={pattern!r} is not a regular expression: {error}") from error

    def mentioned(self, texts: Collection[str]) -> list[str]:
        """Return those of ``texts`` that every match needs: outside of groups, in a pattern without alternatives.

        A warning names others that occur in the pattern; a group may be optional.
        """
        pattern = outside = self._pattern.pattern
        while (shorter := _GROUP.sub("", outside)) != outside:
            outside = shorter
        has_alternatives = re.search(r"(?<!\\)\|", outside) is not None
        found = [text for text in texts if text in pattern or re.escape(text) in pattern]
        needed = [text for text in found if not has_alternatives and (text in outside or re.escape(text) in outside)]
        if found and not needed:
            log.warning(
                "pattern=%r names %s, which completions are decoded without; set keep_special_tokens=True to keep them",
                pattern,
                ", ".join(map(repr, found)),
            )
        return needed

    def __call__(self, /, prompts: Sequence[object], completions: Sequence[Any], **columns: object) -> list[float]:
        """Return the rewards of B completions."""
        return [float(self._pattern.search(text) is not None) for text in completion_texts(completions)]


class Format(Regex):
    """Reward 1 if a completion consists of these tags in this order, none of them empty, with nothing in between.

    Args:
        tags: Tag names: ``("think", "answer")`` for ``<think>...</think> <answer>...</answer>``.
        prompt_opens: Whether the prompt ends with the first opening tag, so that the completion begins inside it. A run
            raises RewardError for such prompts without it.

    Example:
        >>> Format()(["2 + 2 ="], ["<think>Easy.</think> <answer>4</answer>"])
        [1.0]
    """

    def __init__(self, tags: Sequence[str] = ("think", "answer"), *, prompt_opens: bool = False) -> None:
        if not tags or isinstance(tags, str):
            raise RewardError(f"tags={tags!r} must be a list of at least one name")
        any_tag = "|".join(f"</?{re.escape(tag)}>" for tag in tags)
        inside = rf"(?=\s*[^\s<]|\s*<(?!/))(?:(?!{any_tag}).)+"
        parts = [f"<{re.escape(tag)}>{inside}</{re.escape(tag)}>" for tag in tags]
        begin = r"\s*"
        self.first_tag = "" if prompt_opens else f"<{tags[0]}>"
        if prompt_opens:
            begin, parts[0] = "", parts[0].removeprefix(f"<{re.escape(tags[0])}>")
        super().__init__(r"(?s)\A" + begin + r"\s*".join(parts) + r"\s*\Z")


LengthUnit = Literal["tokens", "words", "characters"]
"""Unit of a completion's length."""


class Length:
    """Reward 1 if a completion's length lies within bounds, 0 otherwise.

    Args:
        minimum: Minimum length.
        maximum: Maximum length; None for no maximum.
        unit: Unit of the length.

    Example:
        >>> Length(maximum=3, unit="words")(["Hi"], ["Good morning", "A very long answer"], [[1], [2]])
        [1.0, 0.0]
    """

    def __init__(self, *, minimum: int = 0, maximum: int | None = None, unit: LengthUnit = "tokens") -> None:
        require_choice("unit", unit, get_args(LengthUnit), RewardError)
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
        """Return the rewards of B completions."""
        match self.unit:
            case "tokens":
                lengths = [len(ids) for ids in completion_ids]
            case "words":
                lengths = [len(text.split()) for text in completion_texts(completions)]
            case _:
                lengths = [len(text) for text in completion_texts(completions)]
        longest = float("inf") if self.maximum is None else self.maximum
        return [float(self.minimum <= length <= longest) for length in lengths]
