"""Verifiers on correct, wrong and unusual answers."""

from __future__ import annotations

import importlib.util
import time
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_realloc.algorithms.base.loaded_weights import is_model_source
from lightning_realloc.errors import RewardError
from lightning_realloc.rewards import Format, Length, NumericAnswer, Regex, RewardFunctions, Shaped, exact_match
from lightning_realloc.rewards.named import NAMED_REWARDS
from lightning_realloc.rewards.verifiers import final_number, last_boxed


def judge(function: Any, *completions: str, **columns: Any) -> list[float | None]:
    ids = [list(range(len(text))) for text in completions]
    rewards: list[float | None] = function(
        prompts=[""] * len(completions), completions=list(completions), completion_ids=ids, **columns
    )
    return rewards


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", 42),
        ("The answer is 1,234.50 dollars.", Fraction("1234.5")),
        ("7 apples and 5 pears are 12.", 12),
        ("x2 = -3", -3),
        ("it is -3e2", -300),
        ("3/4", Fraction(3, 4)),
        (r"so $\frac{3}{4}$", Fraction(3, 4)),
        (r"so $-\dfrac{3}{ 4 }$", Fraction(-3, 4)),
        ("12%", Fraction(12, 100)),
        (r"12.5\%", Fraction(125, 1000)),
        (r"\boxed{5} after 17 steps", 5),
        (r"\boxed{1} or rather \boxed{\frac{1}{2}}, that is 0.6", Fraction(1, 2)),
        (r"3 + 4 = \boxed{7", 7),
        ("5 * 8 = 40\n#### 1,040\n", 1040),
        (".5", Fraction(1, 2)),
        ("1/0", 1),
        ("version 1.2.3", Fraction("1.2")),
        ("none", None),
        (r"\boxed{none} 5", None),
        ("- + e5 .", None),
        ("", None),
        # As math-verify reads them in a box, except for separators that it takes for products or sums.
        ("it is \u22125", -5),
        ("\u20135 and not \uff0d4", -4),
        ("5\u22123 or 5-3", 3),
        (r"\boxed{- 3}", -3),
        ("x = - 3", -3),
        ("from 7 - 3", 3),
        (r"\boxed{1{,}234{,}567}", 1234567),
        (r"\boxed{1\,234}", 1234),
        (r"1\;234 or 1\!234", 1234),
        ("1 234.5", Fraction("1234.5")),
        ("1\u202f234~567", 1234567),
        ("12 3456", 3456),
        ("-$5", -5),
        (r"\boxed{-\$1,234}", -1234),
        (r"$-5$ or $\$7$", 7),
        (r"\boxed{3\frac{1}{2}}", Fraction(7, 2)),
        (r"-3 \dfrac12", Fraction(-7, 2)),
        ("3 1/2", Fraction(7, 2)),
        ("of 2 3/2", Fraction(3, 2)),
        (r"\frac34", Fraction(3, 4)),
        (r"-\tfrac3{4}", Fraction(-3, 4)),
        (r"\cfrac{3} 4", Fraction(3, 4)),
        (r"\frac345", None),
        (r"\boxed{5\text{ cm}^2}", 5),
        (r"\boxed{\text{-5}}", -5),
        ("#### 5\nThis is 7 less 2.", 5),
        ("#### **$1 234** because 3 is wrong", 1234),
        (r"#### \frac34 of 100", Fraction(3, 4)),
        ("#### that is 12", 12),
        ("#### 3. Conclusion\nThe answer is 42", 42),
        ("#### **2) Sum**\n3 + 4 = 7", 7),
        ("#### 42.\nThis is 49 less 7.", 42),
        ("#### (42) are left of 50", 42),
        (r"\frac{}{2}", None),
        (r"\frac{3}{}", None),
        (r"\frac{}{}", None),
        (r"so 4 or \frac3{}", 4),
        (r"so \\boxed{42} of 50", 42),
        ("On day 1 250 people came", 250),
        (r"\boxed{x \approx 1 250}", 1250),
        ("that is x = -$1 250 000", -1250000),
        ("3 " + "1" * 5000 + "/7", None),
    ],
)
def test_the_final_number_of_a_text(text: str, number: Fraction | int | None) -> None:
    assert final_number(text) == number


@given(st.text(alphabet="0123456789.,-+/%eE {}\\boxedfrac#", max_size=40))
def test_any_text_has_a_final_number_or_none(text: str) -> None:
    number = final_number(text)
    assert number is None or isinstance(number, Fraction)


@given(st.integers(-(10**12), 10**12), st.text(alphabet="abc ,.\n", max_size=10))
def test_a_number_is_found_with_and_without_separators(number: int, around: str) -> None:
    assert final_number(f"{around} {number} ") == number
    assert final_number(f"{around} {number:,} ") == number


def test_boxes_may_hold_braces() -> None:
    assert last_boxed(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{1} \boxed{2") == "1"
    assert last_boxed(r"\boxed{1 \boxed{2}} } {") == "2"
    assert last_boxed(r"\boxed{\{1, 2\}, \}}") == r"\{1, 2\}, \}"
    assert last_boxed(r"\\boxed{1}") == "1"
    assert last_boxed("1") is None


def test_numbers_are_found_in_linear_time() -> None:
    began = time.process_time()
    for part in (r"\boxed{", "{", r"\text{", "1 ", "-$", " ", "= - ", r"\frac", "1/", "1 2/", "9", "1 234 ", "= "):
        final_number(part * 5_000)
    assert time.process_time() - began < 5  # half a second; a quadratic search takes 25 s for the first part alone


def test_numeric_answers_are_compared_as_numbers() -> None:
    function = NumericAnswer(reader="plain")
    completions = ["so 0.5", "1/2", "0.5000001", "0.51", "half", "9"]
    assert judge(function, *completions, answer=["0.5", 0.5, "1/2", 0.5, "0.5", "unknown"]) == [1, 1, 1, 0, 0, None]
    assert judge(NumericAnswer(reader="plain", tolerance=0.0), "0.3333", answer=["1/3"]) == [0.0]
    assert judge(NumericAnswer(reader="plain", tolerance=0.01), "0.3333", "0", answer=["1/3", "0"]) == [1.0, 1.0]
    with pytest.raises(RewardError, match=r"'NumericAnswer' needs the columns \['gold'\], the data has \['answer'\]"):
        RewardFunctions(NumericAnswer(column="gold")).check_columns(["answer"])


def test_rows_without_an_answer_are_skipped_and_named_where_no_other_reward_applies() -> None:
    for function in (exact_match, NumericAnswer(reader="plain"), NumericAnswer()):
        assert judge(function, "None", "2", answer=[None, "2"]) == [None, 1.0]
    rows = {"prompt": ("a", "b", "c"), "answer": ("1", None, None), "data_set": ("sums", "words", "words")}
    with pytest.raises(RewardError, match=r"2 rows of the data have no value in .*'b', 'data_set': 'words'"):
        RewardFunctions([exact_match, NumericAnswer()]).check_columns(rows)
    with pytest.raises(RewardError, match=r"1 rows of the data have no value in .*'prompt': 'c'"):
        RewardFunctions([exact_match, NumericAnswer(column="gold")]).check_columns(rows | {"gold": (None, "2", None)})
    for others in ([exact_match, Format()], [lambda completions, answer: [0.0] * len(answer)]):
        RewardFunctions(others).check_columns(rows)
    RewardFunctions(exact_match, alone=False).check_columns(rows)


def test_final_answers_are_equal_for_equal_numbers() -> None:
    read = NumericAnswer(reader="plain").final_answer
    assert read(r"\boxed{\frac12}") == read("so 0.5") == read("50%") == read("1 of them: 2/4")
    long = "1" * 4000 + "e999"  # Python writes no decimal integers of more than 4,300 digits
    assert len({read("0.5"), read("5"), read("-5"), read("no number"), read(long)}) == 5
    assert read("no number") is None


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs math-verify")
def test_math_verify_reads_expressions() -> None:
    function = NumericAnswer(reader="math-verify")
    texts = [r"$\boxed{\frac{2}{4}}$", r"\boxed{x+1}", r"\boxed{3}", r"\boxed{3}", "nothing"]
    assert judge(function, *texts, answer=["1/2", "1+x", "4", 3, "2"]) == [1.0, 1.0, 0.0, 1.0, 0.0]
    assert NumericAnswer().reader == "math-verify"
    same = [r"\boxed{\frac12}", r"so \boxed{0.5}", r"\boxed{x = 0.5}"]
    assert {function.final_answer(text) for text in same} == {"1/2"}
    assert function.final_answer(r"\boxed{1+x}") == function.final_answer(r"\boxed{x+1}") == "x + 1"
    assert function.final_answer(r"\boxed{x<3}") != function.final_answer(r"\boxed{3}")
    assert function.final_answer(r"\boxed{10.5^{999999999}}") is not None  # in no time, with a huge exponent
    assert function.final_answer("nothing") is function.final_answer("9" * 5000) is None


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is not None, reason="is about being without math-verify")
def test_without_math_verify_plain_numbers_are_compared() -> None:
    assert NumericAnswer().reader == "plain"
    with pytest.raises(RewardError, match="pip install math-verify, or set reader='plain'"):
        NumericAnswer(reader="math-verify")


def test_regular_expressions_are_searched_for() -> None:
    assert judge(Regex(r"^\d+$"), "12", "12a", "") == [1.0, 0.0, 0.0]
    assert judge(Regex("(?is)yes.no"), "well, YES\nno.", "no yes") == [1.0, 0.0]
    with pytest.raises(RewardError, match=r"pattern='\(' is not a regular expression"):
        Regex("(")


def test_a_pattern_mentions_texts_that_every_match_needs(caplog: pytest.LogCaptureFixture) -> None:
    texts = ["<|im_end|>", "<think>"]
    assert Regex(r"(?s)^<think>(a|b).*<\|im_end\|>$").mentioned(texts) == texts
    assert Regex(r"</answer>$").mentioned(texts) == [] == caplog.messages
    for pattern in (r"</answer>(<\|im_end\|>)?$", r"(?!.*<think>)a", r"\d+$|<\|im_end\|>", r"((a)<think>)*b"):
        caplog.clear()
        assert Regex(pattern).mentioned(texts) == []
        assert "which completions are decoded without" in caplog.text
    assert Format().mentioned(texts) == ["<think>"] == Format(["a", "think"]).mentioned(texts)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>2+2</think><answer>4</answer>", 1.0),
        ("\n<think>\n2 < 3 and\n<b>so</b></think>\n\n<answer> 4 </answer>\n", 1.0),
        ("<think>2+2</think><answer>4</answer> done", 0.0),
        ("so <think>2+2</think><answer>4</answer>", 0.0),
        ("<think>2+2</think> then <answer>4</answer>", 0.0),
        ("<answer>4</answer><think>2+2</think>", 0.0),
        ("<think>2</think><think>2</think><answer>4</answer>", 0.0),
        ("<think>a<answer>4</answer></think><answer>4</answer>", 0.0),
        ("<think>2+2</think><answer>4", 0.0),
        ("<think></think><answer>4</answer>", 0.0),
        ("<think> \n</think><answer>4</answer>", 0.0),
        ("4", 0.0),
    ],
)
def test_a_format_is_its_tags_in_order_and_nothing_else(text: str, reward: float) -> None:
    assert judge(Format(), text) == [reward]
    if text.lstrip().startswith("<think>"):
        assert judge(Format(prompt_opens=True), text.lstrip().removeprefix("<think>")) == [reward]


def test_a_format_is_checked_in_linear_time() -> None:
    long = "\n" * 100_000
    assert judge(Format(prompt_opens=True), long, long + "</think>") == [0.0, 0.0]
    assert judge(Format(), long, f"<think>{long}a", f"<think>a</think>{long}b") == [0.0, 0.0, 0.0]


def test_a_format_may_have_other_tags_but_at_least_one() -> None:
    assert judge(Format(["a.b"]), "<a.b>x</a.b>", "<acb>x</acb>") == [1.0, 0.0]
    for tags in ([], "think"):
        with pytest.raises(RewardError, match="must be a list of at least one name"):
            Format(tags)


def test_lengths_are_counted_in_their_unit() -> None:
    words = Length(minimum=2, maximum=3, unit="words")
    assert judge(words, "a", "a b", "a b c", "a b c d") == [0.0, 1.0, 1.0, 0.0]
    assert judge(Length(maximum=3, unit="characters"), "abc", "abcd") == [1.0, 0.0]
    tokens = Length(minimum=2)
    assert tokens(["", ""], ["long text", "x"], [[1], [1, 2]]) == [0.0, 1.0]
    with pytest.raises(RewardError, match="minimum=4 and maximum=3 leave no length"):
        Length(minimum=4, maximum=3)
    with pytest.raises(RewardError, match="unit='bytes' must be one of"):
        Length(unit="bytes")  # type: ignore[arg-type]


def test_the_last_message_of_a_conversation_is_checked() -> None:
    messages = [[{"role": "assistant", "content": "4"}]]
    for function in (NumericAnswer(reader="plain"), exact_match, Regex("4"), Length(maximum=1, unit="characters")):
        assert function(prompts=[""], completions=messages, completion_ids=[[1]], answer=["4"]) == [1.0]  # type: ignore[operator]


@pytest.mark.parametrize("name", NAMED_REWARDS)
def test_short_names_stand_for_reward_functions(name: str) -> None:
    (function,) = RewardFunctions(name).functions
    shaped = Shaped(name, scale=0.5)
    assert not is_model_source(name) and type(shaped.function) is type(function)


def test_short_names_judge_by_their_rules() -> None:
    texts = ["<think>1</think> <answer>so: 4</answer>", "4"]
    judged = {
        name: RewardFunctions(name)(["2 + 2 ="] * 2, texts, [[1], [2]], {"answer": ["4", "4"]}).total.tolist()
        for name in ("exact", "math", "number", "format")
    }
    assert judged == {"exact": [0, 1], "math": [1, 1], "number": [1, 1], "format": [1, 0]}
