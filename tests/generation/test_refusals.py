"""Requests, settings and models that an engine cannot serve are refused with the rule and the way out."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation import Conversation, GenerationEngine, HFEngine, SamplingParams
from tests.models import tiny_model

GREEDY = SamplingParams(max_new_tokens=20, temperature=0)


@pytest.mark.parametrize(
    ("prompts", "arguments", "message"),
    [
        ([[5], []], {}, "prompt 1 is empty"),
        ([[5], [5] * 128], {}, "prompt 1 holds 128 tokens .* max_position_embeddings of 128; shorten .* at most 127"),
        ([[5] * 40], {}, "max_length of 40"),
        ([[5, 128]], {}, "prompt 0 holds token ids from 5 to 128, the model's vocabulary has 128"),
        ([[True, 5]], {}, r"prompt 0 must be a list of token ids; it is \[True, 5\]"),
        (["text"], {}, r"prompt 0 must be a list of token ids; it is 'text', .* tokenizer\(texts\)\[\"input_ids\"\]"),
        ("text", {}, "prompt 0 must be a list of token ids; it is 't'"),
        ([5, 6], {}, "prompt 0 must be a list of token ids; it is 5"),
        ([[5], [5.0]], {}, r"prompt 1 must be a list of token ids; it is \[5.0\]"),
        ([[5], [6]], {"sample_ids": [3]}, "2 prompts with n=1 need 2 distinct sample_ids, got 1"),
        ([[5], [6]], {"sample_ids": [3, 3]}, "got 2 of which 1 distinct"),
        ([[5], [6]], {"length_hints": [3]}, "length_hints must hold one number per prompt: got 1 for 2"),
        ([[5], [6]], {"token_limits": [3, 0]}, r"token_limits\[1\]=0 must be at least 1"),
        ([[5], [6]], {"token_limits": ["a", 2]}, r"token_limits=\['a', 2\] must be a list of whole numbers, one for"),
        (
            [[5], [6]],
            {"token_limits": [2.0, 3.0]},
            r"token_limits=\[2.0, 3.0\] must be a list of whole numbers, one for",
        ),
        ([[5], [6]], {"token_limits": 5}, "token_limits=5 must be a list with one number for each prompt"),
        (
            [[5], [6]],
            {"length_hints": [3, None]},
            r"length_hints\[1\]=None must be a number of tokens, 0 where none is",
        ),
        ([[5], [6]], {"length_hints": [math.nan, 3]}, r"length_hints\[0\]=nan must be a number of tokens"),
        (
            [[5], [6]],
            {"sample_ids": [1.7, 2.2]},
            r"sample_ids=\[1.7, 2.2\] must be a list of whole numbers, one for each",
        ),
        ([[5], [6]], {"sample_ids": 5}, "sample_ids=5 must be a list of whole numbers, one for each new completion"),
        ([[5]], {"on_finished": 5}, "on_finished=5 must be a function or None"),
        ([[5]], {"may_stop": 5}, "may_stop=5 must be a function or None"),
        (None, {}, "prompts must be a list of lists of token ids; it is a NoneType"),
        ([[5]], {"resume": [{"sample_id": 3}]}, "resume must hold completions of an earlier call; it holds dict"),
        ([[5]], {"resume": 5}, "resume must be a list of unfinished completions of an earlier call; it is a int"),
        ([[5]], {"environment": 5}, "environment=5 cannot be called with a Turn"),
        ([[5]], {"environment": Conversation}, "environment=<class .*Conversation'> cannot be called with a Turn"),
        ([[5]], {"environment": print, "conversation": 5}, r"conversation=5 is a int; write Conversation\(...\)"),
        ([[5]], {"conversation": Conversation()}, "bounds a conversation without environment"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(
    prompts: list[list[int]], arguments: dict[str, Any], message: str
) -> None:
    engine = GenerationEngine(tiny_model("llama"), max_length=40 if "max_length" in message else None)
    with pytest.raises(GenerationError, match=message):
        engine.generate(prompts, GREEDY, **arguments)


@pytest.mark.parametrize("engine_class", [GenerationEngine, HFEngine])
def test_sampling_parameters_of_the_wrong_type_are_refused(engine_class: Any) -> None:
    for params in ({"n": 2}, {}):
        with pytest.raises(GenerationError, match=r"params={.*} is a dict; write SamplingParams\(...\)"):
            engine_class(tiny_model("llama")).generate([[5]], params)
