"""Which held-out responses are right, and the scores of their questions, compared with counts by hand."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from lightning_realloc.algorithms.distillation import OnPolicyDistillation
from lightning_realloc.algorithms.rollout.accuracy import Accuracy
from lightning_realloc.algorithms.rollout.final_answers import adding_answers
from lightning_realloc.batch.samples import PROMPT_KEY, Ragged, Samples
from lightning_realloc.errors import ConfigError, RewardError
from lightning_realloc.generation import SamplingParams
from lightning_realloc.rewards import NumericAnswer, RewardFunctions, Shaped
from lightning_realloc.scores.bootstrap import intervals
from lightning_realloc.scores.question_scores import Response, pass_at_k
from tests.models import byte_tokenizer, tiny_model
from tests.scores.test_question_scores import majority_of_subsets
from tests.strategies import runs
from tests.workers import WorkerPool


def judged(rewards: list[float], **columns: torch.Tensor) -> Samples:
    """Return four responses to each of two prompts."""
    prompts = torch.tensor([0, 1]).repeat_interleave(4)
    return Samples(torch.arange(8), {"prompt_id": prompts, "rewards": torch.tensor(rewards), **columns})


def means(accuracy: Accuracy, samples: Samples) -> dict[str, float]:
    """Return every score."""
    return {name: score.value for name, score in intervals(accuracy.scores(samples, "rewards")).items()}


def test_prompts_count_alike_and_responses_without_a_reward_do_not_count() -> None:
    nan = math.nan
    samples = judged([1.0, 0.4, 0.0, 0.0, 1.0, 1.0, nan, 0.9])
    summary = means(Accuracy(), samples)
    # One of 4 and two of 3: 3 of 7. Two of 4 miss the right one in 3 of 6 draws; two of 3 never miss both.
    # The second prompt has no four responses.
    assert summary == pytest.approx({"accuracy": 3 / 7, "pass@2": (0.5 + 1.0) / 2, "pass@4": 1.0})
    lenient = means(Accuracy(threshold=0.4, ks=(1,)), samples)
    assert lenient == pytest.approx({"accuracy": 5 / 7, "pass@1": 0.75})
    assert means(Accuracy(), judged([nan] * 8)) == {}


def test_a_named_reward_function_decides_which_responses_are_right() -> None:
    columns = {"reward/right": torch.ones(8), "reward/short": torch.zeros(8)}
    assert means(Accuracy(function="right"), judged([0.5] * 8, **columns))["accuracy"] == 1.0
    with pytest.raises(ConfigError, match=r"function='rihgt' must be one of the reward functions \(right, short\)"):
        Accuracy(function="rihgt").scores(judged([0.5] * 8, **columns), "rewards")


def two_arguments(text: str, answer: str) -> str:
    """Be no reader of answers."""
    return text + answer


def test_invalid_settings_are_refused() -> None:
    wrong: Any
    for wrong in (math.nan, "high", None, True):
        with pytest.raises(ConfigError, match=f"threshold={wrong!r} must be a finite number"):
            Accuracy(threshold=wrong)
    for wrong in ((0,), (), (1.5,), 4, ("1",)):
        with pytest.raises(ConfigError, match=rf"ks={re.escape(repr(wrong))} must hold numbers of responses"):
            Accuracy(ks=wrong)
    assert Accuracy(threshold=1, ks=[1, 4]).ks == [1, 4]  # type: ignore[arg-type, comparison-overlap]
    with pytest.raises(ConfigError, match=r"pass@4 needs as many responses per prompt, and evaluation_sampling.n=1"):
        runs.grpo(accuracy=Accuracy(ks=(4,)))
    with pytest.raises(
        ConfigError, match=r"answer='bxoed' must be one of 'auto', 'number', 'boxed', 'text', a function"
    ):
        Accuracy(answer="bxoed")
    with pytest.raises(ConfigError, match=r"answer reader 'nowhere:read' cannot be imported .* check the spelling"):
        Accuracy(answer="nowhere:read")
    with pytest.raises(ConfigError, match=r"two_arguments cannot be called with .* write a function from the text"):
        Accuracy(answer=two_arguments)
    with pytest.raises(ConfigError, match=r"majority votes among several responses, and evaluation_sampling.n=1"):
        runs.grpo(accuracy=Accuracy(answer="boxed"))
    with pytest.raises(ConfigError, match="OnPolicyDistillation has no rewards"):
        OnPolicyDistillation(tiny_model("llama"), tiny_model("llama"), accuracy=Accuracy())


def test_questions_are_named_by_their_prompts_and_images() -> None:
    def names(prompts: list[object], **columns: Any) -> tuple[str, ...]:
        given = judged([1.0] * 8).with_columns(prompt=tuple(prompts[row // 4] for row in range(8)), **columns)
        return Accuracy().scores(given, "rewards").questions

    talk = [{"role": "user", "content": "2 + 2"}]
    first, second = names(["2 + 2", talk])
    assert set(names([[dict(reversed(talk[0].items()))], "2 + 2"])) == {first, second} != {first}
    single, again = names(["2 + 2", "2 + 2"])
    assert again == f"{single}-2" and single in (first, second)
    tokens = {PROMPT_KEY: torch.tensor([5, 6]).repeat_interleave(4)}
    assert names(["2 + 2", talk], **tokens) == (first, second), "whatever the tokenizer"
    written = Accuracy().scores(judged([1.0] * 8, **tokens), "rewards").questions
    assert len({*written, first, second}) == 4


def length_class(text: str) -> str | None:
    """Read one of two answers, or none."""
    return None if len(text) % 3 == 0 else str(len(text) % 3)


class LowTokens:
    """Reward low tokens, and read answers as a user's verifier does."""

    def __call__(self, completion_ids: list[list[int]], **columns: object) -> list[float]:
        """Return the rewards."""
        return runs.low_tokens(completion_ids)

    def final_answer(self, text: str) -> str | None:
        """Return the answer."""
        return length_class(text)


def test_answers_are_read_by_name_by_a_function_or_by_the_reward_function() -> None:
    wrapped = Shaped(LowTokens(), scale=2.0)
    functions = [RewardFunctions([runs.low_tokens, NumericAnswer(reader="plain"), wrapped])]
    numbers = Accuracy().reader(functions)
    assert numbers is not None and numbers("so 4") == numbers("8/2"), "the first function that reads answers"
    own = Accuracy(function="LowTokens").reader(functions)
    assert own is not None and own("two") is None and own("four") == "1"
    assert Accuracy(function="low_tokens").reader(functions) is None
    assert Accuracy(answer=None).reader(functions) is None
    assert Accuracy().reader([RewardFunctions(runs.low_tokens)]) is None
    boxed = Accuracy(answer="boxed").reader([])
    assert boxed is not None and boxed(r"2, or \boxed{{3}}") == "{3}"
    assert Accuracy(answer=length_class).reader(functions) is length_class


def test_answers_that_fail_or_are_never_found_are_named() -> None:
    samples = judged([0.0] * 8, final_answer=torch.full((8,), -1))
    with pytest.warns(UserWarning, match="none of 8 held-out responses has a final answer, so that maj@k is 0"):
        assert means(Accuracy(), samples)["maj@4"] == 0.0
    prompts = Samples(torch.tensor([7]), {}, {"prompt": ([{"role": "assistant", "content": "It is 4"}],)})
    rollout = Samples(torch.tensor([14, 15]), {
        "prompt_id": torch.tensor([7, 7]), "response_ids": Ragged.from_list([byte_ids("2."), byte_ids(" ")]),
    })  # fmt: skip
    read = NumericAnswer(reader="plain").final_answer
    hashes = adding_answers(None, prompts, byte_tokenizer(), read)(rollout).tensor("final_answer")
    for place, text in enumerate(("It is 42.", "It is 4 ")):
        alone = Samples(torch.tensor([0]), {
            "prompt_id": torch.tensor([0]), "response_ids": Ragged.from_list([byte_ids(text)]),
        })  # fmt: skip
        expected = adding_answers(None, alone, byte_tokenizer(), read)(alone).tensor("final_answer")
        assert hashes[place] == expected[0] >= 0, "the prompt's final message is part of the completion"
    with pytest.raises(
        RewardError, match=r"answer reader fail raised ValueError in test_accuracy.py, line \d+: no digit"
    ):
        adding_answers(None, prompts, byte_tokenizer(), fail)(rollout)


def fail(text: str) -> str:
    """Raise for a text that this reader did not expect."""
    raise ValueError("no digit")


def byte_ids(text: str) -> list[int]:
    """Return the tokens of a text."""
    return list(byte_tokenizer().encode(text))


class OneByOne(runs.Batches):
    """The same prompts as one batch, each in a batch of its own."""

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Samples]:
        (batch,) = super().__iter__()
        yield from (batch.select([row]) for row in range(len(batch)))


def evaluate(algorithm: str, settings: dict[str, Any], one_by_one: bool) -> tuple[dict[str, float], ...]:
    """Return the validation metrics on held-out prompts, four responses each; expected ones; and those of training."""
    world_size = runs.world_size()
    sampling = SamplingParams(n=4, max_new_tokens=6, stop_token_ids=runs.SAMPLING.stop_token_ids)
    accuracy = Accuracy(threshold=0.5, **settings)
    reward = runs.low_tokens if settings else LowTokens()
    module = getattr(runs, algorithm)(evaluation_sampling=sampling, accuracy=accuracy, reward=reward)
    trainer = runs.trainer("realloc", world_size)
    batches = (OneByOne if one_by_one else runs.Batches)(1, size=3)
    (validated,) = trainer.validate(module, batches, verbose=False)
    trainer.fit(module, runs.Batches(1))
    tokens = module.tokens[0] or [[]] * 12  # PPO's are not known in evaluation
    decoded = [length_class(module.tokenizer.decode(row, skip_special_tokens=True)) for row in tokens]
    judged = zip(module.rewards[0], decoded, strict=True)
    responses = [Response(reward >= 0.5, answer) for reward, answer in judged]
    groups = [responses[begin : begin + 4] for begin in (0, 4, 8)]
    right = [sum(one.is_right for one in group) for group in groups]
    expected = {
        "val/accuracy": sum(right) / 12,
        "val/pass@2": sum(pass_at_k(4, count, 2) for count in right) / 3,
        "val/pass@4": sum(count > 0 for count in right) / 3,
        "val/num_questions": 3.0,
    }
    for k in (2, 4) if module.tokens[0] else ():
        expected[f"val/maj@{k}"] = float(sum(majority_of_subsets(group, k) for group in groups) / 3)
    scores = {name: value for name, value in validated.items() if "@" in name or "accuracy" in name}
    return scores | {"val/num_questions": validated["val/num_questions"]}, expected, dict(trainer.logged_metrics)


def test_validation_logs_the_same_scores_on_any_number_of_ranks_and_in_any_batches(workers: WorkerPool) -> None:
    run = partial(workers.run, evaluate, init_process_group=False)
    results = {
        "grpo": run("grpo", {}, False, world_size=2) + run("grpo", {}, True, world_size=1),
        "ppo": run("ppo", {"answer": "tests.algorithms.rollout.test_accuracy:length_class"}, False, world_size=2),
    }
    for algorithm, found in results.items():
        first, expected, _ = found[0]
        assert {name: first[name] for name in expected} == pytest.approx(expected), algorithm
        assert 0.0 < expected["val/accuracy"] < 1.0 and 0.0 < first["val/maj@4"] < 1.0, algorithm
        scores = ["val/accuracy", *(f"val/{kind}@{k}" for kind in ("pass", "maj") for k in (2, 4))]
        assert all(first[f"{name}/low"] <= first[name] <= first[f"{name}/high"] for name in scores)
        ends = [f"{name}/{end}" for name in scores for end in ("low", "high")]
        assert first.keys() == {*scores, *ends, "val/num_questions"}
        for others, _, trained in found:
            assert others == first, algorithm
            assert not any("@" in name for name in trained)
