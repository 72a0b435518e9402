"""Responses of conversations whose environment shows images equal a loop over transformers' ``generate``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_realloc.batch.model_input import AnswerInput, ModelInput, joined_inputs
from lightning_realloc.generation import (
    Completion,
    Conversation,
    GenerationEngine,
    HFEngine,
    SamplingParams,
    Speculation,
    Turn,
)
from lightning_realloc.generation.speculative.lookup import HistoryDrafter
from tests.generation.test_extra_inputs import SETTINGS
from tests.generation.test_images import expected_response
from tests.matrices import matrix
from tests.vision_models import IMAGE, VISION_FAMILIES, prompt_with_images, tiny_vision_model

PARAMS = SamplingParams(max_new_tokens=90, temperature=0)
BOUNDS = Conversation(max_turns=3, max_turn_tokens=4)
PROMPTS: tuple[tuple[int, ...], ...] = ((), (1,), (2, 3))
"""Seeds of the images of each prompt."""
FAMILIES = [family for family in VISION_FAMILIES if family != "llava_onevision"]
CASES = [(family, name) for family in FAMILIES for name in SETTINGS]
FEW = [("llava", "few slots"), ("qwen2_5_vl", "history"), ("gemma3", "plain"), ("qwen3_vl", "pages that preempt")]
FEW += [("gemma3", "prompts above the budget of a step")]


def given_input(family: str, seeds: Sequence[int], **settings: Any) -> ModelInput:
    tokens, extras = prompt_with_images(family, seeds, **settings)
    return ModelInput(tuple(tokens), extras)


def drawing(family: str, *, seed: int = 10) -> Callable[[Turn], ModelInput]:
    """Return an environment that shows one image after the first turn, and two after the second."""

    def answer(turn: Turn) -> ModelInput:
        return given_input(family, [seed + turn.number, *[seed + 5] * (turn.number - 1)], first=(9, 10))

    return answer


def expected_conversation(
    family: str, model: nn.Module, prompt: ModelInput, *, seed: int = 10, num_turns: int = 3
) -> list[int]:
    """Return the response, each turn of which is read from the start by ``generate``."""
    ids, extras = list(prompt.token_ids), [prompt.extras]
    for number in range(1, num_turns + 1):
        ids += expected_response(family, model, ModelInput(tuple(ids), joined_inputs(extras)), 4)
        if number < num_turns:
            answer = drawing(family, seed=seed)(Turn(0, (), (), 0, number))
            ids += answer.token_ids
            extras.append(answer.extras)
    return ids[len(prompt.token_ids) :]


@pytest.mark.parametrize(("family", "setting"), matrix(CASES, *FEW))
@torch.no_grad()
def test_responses_equal_a_loop_over_transformers(family: str, setting: str) -> None:
    model, engine = tiny_vision_model(family), GenerationEngine(tiny_vision_model(family), **SETTINGS[setting])
    inputs = [given_input(family, seeds) for seeds in PROMPTS]
    expected = [expected_conversation(family, model, given) for given in inputs]
    for _ in range(2):  # the second call has a history
        made = engine.generate(inputs, replace(PARAMS, n=2), environment=drawing(family), conversation=BOUNDS)
        assert [list(one.token_ids) for one in made] == [one for one in expected for _ in range(2)]
    for one in made:
        assert [answer.input.token_ids.count(IMAGE) > 0 for answer in one.answers] == [True, True]
        for answer in one.answers:
            end = answer.begin + len(answer.input.token_ids)
            assert one.token_ids[answer.begin : end] == answer.input.token_ids
            assert not any(one.model_mask[answer.begin : end])


@pytest.mark.parametrize("family", matrix(FAMILIES, "qwen2_5_vl", "gemma3"))
@torch.no_grad()
def test_the_engine_hf_reads_images_of_answers_in_each_turn(family: str) -> None:
    model = tiny_vision_model(family)
    inputs = [given_input(family, seeds) for seeds in PROMPTS]
    made = HFEngine(model).generate(inputs, PARAMS, environment=drawing(family), conversation=BOUNDS)
    assert [list(one.token_ids) for one in made] == [expected_conversation(family, model, one) for one in inputs]


@pytest.mark.parametrize("family", matrix(FAMILIES, "qwen3_vl"))
@torch.no_grad()
def test_conversations_with_images_go_on_in_a_later_call(family: str) -> None:
    model, engine = tiny_vision_model(family), GenerationEngine(tiny_vision_model(family), max_slots=2)
    given = given_input(family, (1,))
    settings: dict[str, Any] = {"environment": drawing(family), "conversation": BOUNDS}
    made = engine.generate([given], replace(PARAMS, n=3), token_budget=14, **settings)
    unfinished = [one for one in made if one.finish_reason == "unfinished"]
    assert any(one.answers for one in unfinished), "after an image"
    done = [one for one in made if one.finish_reason != "unfinished"]
    done += engine.generate([], replace(PARAMS, n=3), resume=[_stored(one) for one in unfinished], **settings)
    assert [list(one.token_ids) for one in done] == [expected_conversation(family, model, given)] * 3


def _stored(one: Completion) -> Completion:
    """Return a completion as a checkpoint has it: positions of tokens are worked out again."""
    answers = [ModelInput(each.input.token_ids, each.input.extras, each.input.prompt_key) for each in one.answers]
    begins = [each.begin for each in one.answers]
    return replace(one, answers=tuple(map(AnswerInput, begins, answers)))


@torch.no_grad()
def test_history_tells_conversations_apart_by_the_images_of_answers() -> None:
    model, drafter = tiny_vision_model("llava"), HistoryDrafter()
    engine = GenerationEngine(model, speculation=Speculation(), drafter=drafter)
    given = given_input("llava", ())
    for seed in (10, 30, 10):
        (made,) = engine.generate([given], PARAMS, environment=drawing("llava", seed=seed), conversation=BOUNDS)
        assert list(made.token_ids) == expected_conversation("llava", model, given, seed=seed)
    first, second = (drawing("llava", seed=seed)(Turn(0, (), (), 0, 1)) for seed in (10, 30))
    assert first.token_ids == second.token_ids and first.prompt_key != second.prompt_key
    assert len(drafter._responses) == 5, "the first turn is shared, and the two after it are not"


@pytest.mark.parametrize("kind", [GenerationEngine, HFEngine])
@torch.no_grad()
def test_an_answer_without_room_after_it_ends_the_response(kind: Callable[..., GenerationEngine | HFEngine]) -> None:
    model, given = tiny_vision_model("gemma3"), given_input("gemma3", ())
    answer = drawing("gemma3")(Turn(0, (), (), 0, 1))
    params = replace(PARAMS, max_new_tokens=4 + len(answer.token_ids))
    (made,) = kind(model).generate([given], params, environment=drawing("gemma3"), conversation=BOUNDS)
    assert (len(made.token_ids), made.finish_reason, made.answers) == (4, "length", ())


@torch.no_grad()
def test_answers_whose_images_do_not_fit_their_tokens_fail_alone() -> None:
    family = "qwen2_5_vl"
    tokens, extras = prompt_with_images(family, (1,))

    def environment(turn: Turn) -> ModelInput | None:
        ids = [token for token in tokens if token != IMAGE] if turn.sample_id else tokens
        return None if turn.number > 1 else ModelInput(tuple(ids), extras)

    engine = GenerationEngine(tiny_vision_model(family))
    made = engine.generate([[5, 6], [5, 6]], PARAMS, sample_ids=[0, 1], environment=environment, conversation=BOUNDS)
    assert [one.finish_reason for one in made] == ["environment", "failure"]
    assert "cannot read the images of the environment's answer" in str(made[1].error)


@torch.no_grad()
def test_an_image_needs_a_token_after_it() -> None:
    values: dict[str, Tensor] = prompt_with_images("llava", (1,))[1]
    engine = GenerationEngine(tiny_vision_model("llava"))
    made = engine.generate([[5, 6]], PARAMS, environment=lambda turn: ModelInput((IMAGE,), values), conversation=BOUNDS)
    assert made[0].finish_reason == "failure" and "add a token after those of the images" in str(made[0].error)
