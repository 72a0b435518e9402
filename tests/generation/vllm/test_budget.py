"""Budgets of vLLM's calls: the order of messages, what is cut, and a process that ends meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_realloc.algorithms.base.generation_options import GenerationOptions
from lightning_realloc.errors import ConfigError, GenerationError
from lightning_realloc.generation import (
    Completion,
    Conversation,
    RolloutBudget,
    SamplingParams,
    Turn,
    VLLMEngine,
    VLLMOptions,
)
from lightning_realloc.generation.vllm.inside.child_requests import RequestLoop
from lightning_realloc.generation.vllm.messages import EngineLost
from tests.generation.vllm.counting_engine import CountingEngine
from tests.generation.vllm.stand_in import notes, stand_in
from tests.models import tiny_model

GREEDY = SamplingParams(max_new_tokens=20, temperature=0)


def engine_with(folder: Path, behaviour: str = "", *, max_slots: int = 3, restarts: int = 1) -> VLLMEngine:
    """Return an engine on a stand-in."""
    options = VLLMOptions(python=stand_in(folder, behaviour), restarts=restarts)
    return VLLMEngine(tiny_model("llama"), max_slots=max_slots, options=options)


def lengths(completions: list[Completion]) -> list[tuple[int, str]]:
    """Return the number of tokens and the finish reason of each."""
    return [(len(one.token_ids), one.finish_reason) for one in completions]


def run_loop(
    limits: list[int], budget: Mapping[str, float | None] | None, answers: Callable[[], bool], *, most_running: int = 2
) -> tuple[list[dict[str, Any]], CountingEngine]:
    """Return all messages of requests of these lengths, and the engine that ran them."""
    engine, said = CountingEngine([]), list[dict[str, Any]]()
    requests = [{"index": index, "prompt": [5], "max_tokens": limit} for index, limit in enumerate(limits)]
    loop = RequestLoop(
        engine, most_running=most_running, add=engine.add_request, say=lambda message: said.append(dict(message)),
        response_of=lambda one: {"index": int(one.request_id), "tokens": len(one.outputs[0].token_ids)},
        receive=lambda: {"stop": answers()},
    )  # fmt: skip
    said.append({"done": loop.run(requests, budget)})
    return [message for message in said if "alive" not in message], engine


def test_finished_responses_come_before_the_question_and_cut_ones_after_it() -> None:
    # Both requests run from the first step, which reads; the second step gives the first tokens. Nine tokens are made
    # after step 6, when the first request has its four and the second one five.
    said, engine = run_loop([4, 9, 9], {"tokens": 9, "seconds": None}, lambda: True)
    assert said == [
        {"response": {"index": 0, "tokens": 4}},
        {"spent": 6},
        {"response": {"index": 1, "tokens": 5, "reason": "unfinished"}},
        {"done": {"num_steps": 6}},
    ], "the third request has begun and has no token: it has no response"
    assert engine.aborted == ["internal-1", "internal-2"] and not engine.has_unfinished_requests()


def test_a_refused_question_is_asked_again_after_the_next_response_alone() -> None:
    answers = iter([False, False, True])
    said, _ = run_loop([3, 6, 8, 30], {"tokens": 4, "seconds": None}, lambda: next(answers), most_running=4)
    kinds = ["spent" if "spent" in message else message.get("response", {}).get("index") for message in said]
    # Four tokens are made after two steps; responses end after steps 4, 7 and 9.
    assert kinds == ["spent", 0, "spent", 1, "spent", 2, 3, None]
    assert [message["spent"] for message in said if "spent" in message] == [2, 4, 7]


@pytest.mark.parametrize("budget", [None, {"tokens": 12, "seconds": None}, {"tokens": None, "seconds": 3600.0}])
def test_a_call_that_ends_within_its_budget_or_by_its_last_token_is_not_asked_about(budget: Any) -> None:
    said, engine = run_loop([6, 6], budget, lambda: pytest.fail("nothing is open"))
    assert [message["response"]["index"] for message in said[:-1]] == [0, 1] and not engine.aborted


def test_spent_seconds_are_noticed_after_the_first_step() -> None:
    said, _ = run_loop([6, 6], {"tokens": None, "seconds": 0.0}, lambda: True)
    assert said == [{"spent": 1}, {"done": {"num_steps": 1}}]


def test_a_rank_that_has_gone_ends_the_loop() -> None:
    engine = CountingEngine([])
    loop = RequestLoop(
        engine, most_running=2, add=engine.add_request, say=lambda message: None, receive=lambda: None,
        response_of=lambda output: {},
    )  # fmt: skip
    with pytest.raises(ConnectionError, match="the rank has closed the connection"):
        loop.run([{"index": 0, "prompt": [5], "max_tokens": 9}], {"tokens": 1, "seconds": None})


def test_cut_responses_continue_first_with_the_log_probabilities_and_versions_they_had(tmp_path: Path) -> None:
    engine, finished = engine_with(tmp_path), list[Completion]()
    engine.weights_updated(4)
    made = engine.generate([[5], [6], [7], [8]], GREEDY, token_budget=7, token_limits=[2, 9, 9, 9],
                           on_finished=finished.append)  # fmt: skip
    # Three run: 3, 6 tokens, and 8 with the step after the first one has ended; the fourth has begun and read.
    assert lengths(made) == [(2, "length"), (3, "unfinished"), (3, "unfinished"), (0, "unfinished")]
    assert [one.sample_id for one in finished] == [0, 1, 2, 3] and engine.stats.generated_tokens == 8
    assert engine.stats.prefill_tokens == 3
    engine.weights_updated(5)
    unfinished = [one for one in made if one.finish_reason == "unfinished"]
    rest = engine.generate([[9]], GREEDY, resume=unfinished, token_limits=[4, 9, 9, 9])
    assert [one.token_ids for one in rest[1:]] == [tuple(range(first, first + 9)) for first in (7, 8, 9)]
    assert [one.versions for one in rest[1:]] == [(4,) * 3 + (5,) * 6] * 2 + [(5,) * 9]
    requests = [json.loads(note) for note in notes(tmp_path, "request")][4:]
    assert [request["prompt"] for request in requests] == [[6, 7, 8, 9], [7, 8, 9, 10], [8], [9]]
    assert [request["max_tokens"] for request in requests] == [6, 6, 9, 4]


def test_parts_of_a_response_are_drawn_by_different_numbers(tmp_path: Path) -> None:
    engine, params = engine_with(tmp_path), SamplingParams(max_new_tokens=20, seed=3)
    (begun,) = engine.generate([[5]], params, token_budget=4)
    (longer,) = engine.generate([], params, resume=[begun], token_budget=4)
    engine.generate([], params, resume=[begun])
    engine.generate([], params, resume=[longer])
    first, second, again, third = (json.loads(note)["seed"] for note in notes(tmp_path, "request"))
    assert len({first, second, third}) == 3 and again == second, "by the response so far alone"


def test_a_spent_budget_ends_a_call_only_once_it_may_stop(tmp_path: Path) -> None:
    finished: list[int] = []
    made = engine_with(tmp_path).generate(
        [[5], [6], [7]], GREEDY, token_budget=7, token_limits=[4, 6, 20],
        on_finished=lambda one: finished.append(one.sample_id), may_stop=lambda: 1 in finished,
    )  # fmt: skip
    assert lengths(made) == [(4, "length"), (6, "length"), (6, "unfinished")] and finished == [0, 1, 2]
    # Seven tokens after three steps of three and one that reads; then after each response.
    assert notes(tmp_path, "asked") == ["4", "5", "7"]


def test_a_conversation_goes_on_between_turns_and_inside_one(tmp_path: Path) -> None:
    params = SamplingParams(max_new_tokens=40, stop_token_ids=(12, 32, 52))

    def environment(turn: Turn) -> list[int] | None:
        return [20 * turn.number + 8] if turn.number < 3 else None

    talk: dict[str, Any] = {"environment": environment, "conversation": Conversation(max_turns=5)}
    engine = engine_with(tmp_path)
    (whole,) = engine.generate([[9]], params, **talk)
    assert whole.token_ids == (10, 11, 12, 28, 29, 30, 31, 32, 48, 49, 50, 51, 52)
    for budget in (1, 2, 3, 4):
        (part,), num_calls = engine.generate([[9]], params, token_budget=budget, **talk), 1
        while part.finish_reason == "unfinished":
            (part,) = engine.generate([], params, resume=[part], token_budget=budget, **talk)
            num_calls += 1
        assert (part.token_ids, part.model_mask, part.logprobs) == (whole.token_ids, whole.model_mask, whole.logprobs)
        assert part.finish_reason == "environment" and num_calls >= 11 // budget


def test_a_resumed_response_that_has_ended_its_only_turn_is_not_asked_for(tmp_path: Path) -> None:
    engine, params = engine_with(tmp_path), SamplingParams(max_new_tokens=9, stop_token_ids=(7,))
    talk: dict[str, Any] = {"environment": lambda turn: [8], "conversation": Conversation(max_turns=3)}
    (begun,) = engine.generate([[5]], params, token_budget=2, **talk)
    if begun.token_ids[-1] == 8:  # the environment was faster than the end of the call
        tokens, logprobs, mask, versions = (part[:2] for part in (begun.token_ids, begun.logprobs, begun.model_mask,
                                                                  begun.versions))  # fmt: skip
        begun = replace(begun, token_ids=tokens, logprobs=logprobs, model_mask=mask, versions=versions)
    count = len(notes(tmp_path, "request"))
    (ended,) = engine.generate([], params, resume=[begun])
    assert (ended.token_ids, ended.finish_reason) == ((6, 7), "stop")
    assert len(notes(tmp_path, "request")) == count


@pytest.mark.parametrize(
    ("behaviour", "lengths_after", "left"), [("dies while it cuts", [2, 3, 2, 2, 2, 2], 5),
                                              ("dies when it has asked", [2, 2, 2, 2, 2, 0], 8)]
)  # fmt: skip
def test_a_process_that_ends_around_the_cut_loses_and_doubles_no_response(
    behaviour: str, lengths_after: list[int], left: int, tmp_path: Path
) -> None:
    engine, finished = engine_with(tmp_path, behaviour, max_slots=4), list[Completion]()
    made = engine.generate(
        [[30 + 10 * index] for index in range(6)], GREEDY, token_budget=10, token_limits=[2, *[20] * 5],
        on_finished=finished.append,
    )  # fmt: skip
    # The first process is asked about after 2 + 3 * 3 tokens, and ends with the first response received, or with that
    # of the first request that was cut, too. The second one makes two tokens for each of four, or 8 in all.
    assert [len(one.token_ids) for one in made] == lengths_after
    assert sorted(one.sample_id for one in finished) == list(range(6))
    for index, one in enumerate(made):
        assert one.token_ids == tuple(range(31 + 10 * index, 31 + 10 * index + len(one.token_ids)))
    assert [one.finish_reason for one in made] == ["length", *["unfinished"] * 5]
    assert [json.loads(note)["tokens"] for note in notes(tmp_path, "budget")] == [10, left]
    assert len(notes(tmp_path, "started")) == 2


def test_a_process_that_ends_after_the_budget_is_spent_is_not_started_again(tmp_path: Path) -> None:
    engine, finished = engine_with(tmp_path, "dies while it cuts"), list[int]()
    prompts = [[5], [20], [30]]
    settings: dict[str, Any] = {"token_budget": 2, "token_limits": [5, 20, 20]}
    made = engine.generate(
        prompts, GREEDY, **settings, on_finished=lambda one: finished.append(one.sample_id),
        may_stop=lambda: 0 in finished,
    )  # fmt: skip
    assert lengths(made) == [(5, "length"), (5, "unfinished"), (0, "unfinished")]
    assert len(notes(tmp_path, "started")) == 1
    rest = engine.generate([], replace(GREEDY, max_new_tokens=8), resume=made[1:])
    assert [one.token_ids for one in rest] == [tuple(range(21, 29)), tuple(range(31, 39))]


def test_a_call_without_some_responses_is_a_lost_vllm(tmp_path: Path) -> None:
    program = Path(stand_in(tmp_path))
    program.write_text(program.read_text().replace('enumerate(message["requests"])', "enumerate([])"))
    engine = VLLMEngine(tiny_model("llama"), options=VLLMOptions(python=str(program), restarts=0))
    with pytest.raises(EngineLost, match="2 of 2 requests without a response"):
        engine.generate([[5], [6]], GREEDY)


def test_seconds_in_which_vllm_starts_are_not_counted(tmp_path: Path) -> None:
    engine = engine_with(tmp_path)
    engine.generate([[5]], GREEDY, seconds_budget=100.0)
    (budget,) = map(json.loads, notes(tmp_path, "budget"))
    assert 0 < 100 - budget["seconds"] < engine.service.preparing_s / 2


def test_a_server_with_a_budget_is_refused_with_a_way_out() -> None:
    options = VLLMOptions(address="http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"rollout_budget cuts responses, and the server .* leave address out"):
        GenerationOptions(rollout_budget=RolloutBudget(tokens=9), vllm=options)
    with pytest.raises(GenerationError, match=r"a budget cuts responses, and the server .* leave address out"):
        VLLMEngine(tiny_model("llama"), options=options).generate([[5]], GREEDY, token_budget=9)
