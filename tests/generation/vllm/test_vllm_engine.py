"""VLLMEngine's side of the exchange: requests, responses, weights, and all that may go wrong with the process."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_realloc.errors import ConfigError, GenerationError
from lightning_realloc.generation import Completion, Conversation, SamplingParams, Turn, VLLMEngine, VLLMOptions
from lightning_realloc.generation.vllm.messages import EngineLost
from tests.generation.vllm.stand_in import notes, stand_in
from tests.models import byte_tokenizer, tiny_model

GREEDY = SamplingParams(max_new_tokens=5, temperature=0)


def engine_with(folder: Path, behaviour: str = "", **options: Any) -> VLLMEngine:
    """Return an engine on a program that behaves so, which is not started again unless ``options`` say so."""
    options = {"restarts": 0, **options}
    return VLLMEngine(tiny_model("llama"), options=VLLMOptions(python=stand_in(folder, behaviour), **options))


def is_running(process: int) -> bool:
    """Return whether a process exists and is no zombie."""
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_completions_are_in_the_order_of_the_prompts_with_tokens_lengths_and_versions(tmp_path: Path) -> None:
    engine, finished = engine_with(tmp_path), list[Completion]()
    engine.weights_updated(3)
    params = SamplingParams(max_new_tokens=4, n=2, stop_token_ids=(12,))
    made = engine.generate(
        [[5, 6], [9]], params, sample_ids=[7, 8, 20, 21], token_limits=[2, 9], length_hints=[1, 9],
        on_finished=finished.append,
    )  # fmt: skip
    # The stand-in counts upwards from the prompt's last token: 7, 8 within the limit of 2, and 10, 11, 12 to the stop.
    assert [c.token_ids for c in made] == [(7, 8), (7, 8), (10, 11, 12), (10, 11, 12)]
    assert [c.finish_reason for c in made] == ["length", "length", "stop", "stop"]
    assert [(c.sample_id, c.prompt_index) for c in made] == [(7, 0), (8, 0), (20, 1), (21, 1)]
    assert made[0].logprobs == (-1.0, -1.0) and made[0].versions == (3, 3) and made[0].model_mask == (True, True)
    assert [c.sample_id for c in finished] == [20, 21, 7, 8], "long ones first, each once"
    assert (engine.stats.num_steps, engine.stats.generated_tokens, engine.stats.prefill_tokens) == (7, 10, 6)


def test_each_turn_of_a_conversation_is_a_request_with_the_whole_sequence(tmp_path: Path) -> None:
    engine, asked = engine_with(tmp_path), list[Turn]()
    params = SamplingParams(max_new_tokens=12, min_new_tokens=5, stop_token_ids=(12, 32))

    def environment(turn: Turn) -> list[int] | None:
        asked.append(turn)
        return [28, 29] if turn.number == 1 else None

    (made,) = engine.generate([[5, 8]], params, environment=environment)
    # The stand-in counts upwards from the last token: 9 to the stop at 12, and after the answer 30 to the stop at 32.
    assert made.token_ids == (9, 10, 11, 12, 28, 29, 30, 31, 32)
    assert made.model_mask == (True,) * 4 + (False,) * 2 + (True,) * 3
    assert made.logprobs == (-1.0,) * 4 + (0.0,) * 2 + (-1.0,) * 3 and made.finish_reason == "environment"
    assert [(turn.number, turn.token_ids) for turn in asked] == [(1, made.token_ids[:4]), (2, made.token_ids)]
    first, second = map(json.loads, notes(tmp_path, "request"))
    assert first["prompt"] == [5, 8] and second["prompt"] == [5, 8, 9, 10, 11, 12, 28, 29]
    assert (first["max_tokens"], second["max_tokens"]) == (12, 6)
    assert (first["min_tokens"], second["min_tokens"]) == (5, 0)
    assert first["seed"] != second["seed"], "the second turn would be drawn by the numbers of the first"
    stats = engine.stats
    assert (stats.num_steps, stats.generated_tokens, stats.prefill_tokens) == (14, 7, 10)


def test_a_conversation_ends_by_its_length_its_turns_or_a_failure(tmp_path: Path) -> None:
    def environment(turn: Turn) -> list[int]:
        if turn.prompt == (90,):
            raise ValueError("no such tool")
        return [turn.token_ids[-1]] * turn.prompt[0]

    engine, params = engine_with(tmp_path), SamplingParams(max_new_tokens=7, stop_token_ids=tuple(range(128)))
    made = engine.generate(
        [[1], [5], [6], [90]], params, environment=environment, conversation=Conversation(max_turns=2)
    )
    # One token, the answer, and one more token where there is room for it.
    assert [len(one.token_ids) for one in made] == [3, 7, 1, 1]
    assert [one.finish_reason for one in made] == ["max_turns", "max_turns", "length", "failure"]
    assert "raised ValueError(no such tool) after turn 1" in str(made[3].error)


def test_limits_below_min_new_tokens_lower_it(tmp_path: Path) -> None:
    params = SamplingParams(max_new_tokens=9, min_new_tokens=4)
    engine_with(tmp_path).generate([[5], [6]], params, token_limits=[2, 9])
    assert [json.loads(note)["min_tokens"] for note in notes(tmp_path, "request")] == [2, 4]


def test_weights_are_handed_over_once_for_each_update(tmp_path: Path) -> None:
    engine = engine_with(tmp_path)
    for updates in (0, 0, 1, 2):
        for _ in range(updates):
            engine.weights_updated()
        engine.generate([[5]], GREEDY)
    assert len(notes(tmp_path, "started")) == 1
    assert len(set(notes(tmp_path, "weights"))) == len(notes(tmp_path, "weights")) == 3


def test_versions_may_skip_numbers_and_return_to_earlier_ones(tmp_path: Path) -> None:
    engine = engine_with(tmp_path)
    for version in (3, 7, 5, 5):
        engine.weights_updated(version)
        (made,) = engine.generate([[5]], GREEDY)
        assert set(made.versions) == {version}
    assert len(set(notes(tmp_path, "weights"))) == 4, "also weights of the same number may have changed"


def test_no_prompts_start_no_process(tmp_path: Path) -> None:
    assert engine_with(tmp_path).generate([], GREEDY) == []
    assert not (tmp_path / "notes").exists()


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("absent", r"the interpreter .*python has no vLLM; make an environment with vllm==0\.32\.\*"),
        ("old", r"has vLLM 0\.11\.2, and .* tested with 0\.32\.\* alone; install vllm==0\.32\.\*"),
        (
            "does not start",
            r"^vLLM's process ended with exit code 3, the end of its log: out of memory \(vLLM for the model on rank 0",
        ),
        ("dies", "^vLLM's process ended by signal SIGKILL, the end of its log: WARNING.* segmentation fault"),
        ("error", r"^ValueError: no such kernel \(vLLM for the model on rank 0 failed; its log is /"),
        ("keeps old weights", r"answered with the weights default in place of \w+-1, which it was given last"),
    ],
)
def test_a_process_that_cannot_serve_ends_the_call_with_one_line(behaviour: str, message: str, tmp_path: Path) -> None:
    engine = engine_with(tmp_path, behaviour)
    with pytest.raises(GenerationError, match=message) as caught:
        engine.generate([[5], [6]], GREEDY)
    assert "\n" not in str(caught.value)
    (process,) = map(int, notes(tmp_path, "started"))
    assert not is_running(process)


@pytest.mark.parametrize("temperature", [2.01, 0.009])
def test_temperatures_that_vllm_refuses_or_replaces_are_named_before_it_starts(
    temperature: float, tmp_path: Path
) -> None:
    engine, params = engine_with(tmp_path), SamplingParams(temperature=temperature)
    with pytest.raises(GenerationError, match=rf"temperature={temperature} is not among .* 0 and 0\.01 to 2; set one"):
        engine.generate([[5]], params)
    assert not (tmp_path / "notes").exists()


def test_a_process_that_says_nothing_is_ended_after_the_timeout(tmp_path: Path) -> None:
    engine, begin = engine_with(tmp_path, "silent", timeout_s=1.0), time.monotonic()
    with pytest.raises(EngineLost, match=r"no sign of life for 1 s and was ended, .*; raise VLLMOptions\(timeout_s"):
        engine.generate([[5], [6]], GREEDY)
    assert time.monotonic() - begin < 30, "the program sleeps for a minute"


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("closes its connection", "vLLM's process closed its connection, and was ended"),
        ("drips", "vLLM's process gave no sign of life for 1 s and was ended"),
        ("empty", "sent something else than vLLM's answer .ValueError: a message of 0 bytes"),
        ("huge", "sent something else than vLLM's answer .ValueError: a message of 629145600 bytes"),
        ("text", "sent something else than vLLM's answer .JSONDecodeError"),
        ("array", "sent something else than vLLM's answer .TypeError: a list"),
        ("kinds", "sent something else than vLLM's answer .TypeError"),
        ("unknown", "answered request 9, which is not open"),
        ("done", "sent something else than vLLM's answer .TypeError"),
        ("leaves a process", "gave no sign of life for 1 s and was ended"),  # its child holds the connection
    ],
)
def test_broken_messages_and_connections_are_a_lost_engine_within_the_timeout(
    behaviour: str, message: str, tmp_path: Path
) -> None:
    engine, begin = engine_with(tmp_path, behaviour, timeout_s=1.0), time.monotonic()
    with pytest.raises(EngineLost, match=message) as caught:
        engine.generate([[5], [6]], GREEDY)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - begin < 30, "the program sleeps for a minute"
    processes = [int(process) for kind in ("started", "left") for process in notes(tmp_path, kind)]
    while any(map(is_running, processes)):  # killed, and not ended at once on a busy machine
        assert time.monotonic() - begin < 30, "the program sleeps for a minute"
        time.sleep(0.05)


def test_a_restart_repeats_open_requests_alone_with_weights_handed_over_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, finished = engine_with(tmp_path, "dies once", restarts=None), list[Completion]()
    made = engine.generate([[5], [6], [7]], GREEDY, on_finished=finished.append)
    assert [c.token_ids[0] for c in made] == [6, 7, 8]
    assert sorted(c.sample_id for c in finished) == [0, 1, 2]
    assert len(notes(tmp_path, "started")) == len(notes(tmp_path, "weights")) == 2
    assert "ended by signal SIGKILL" in caplog.text and "2 requests are repeated" in caplog.text


def test_restarts_are_bounded(tmp_path: Path) -> None:
    engine = engine_with(tmp_path, "dies", restarts=1)
    with pytest.raises(EngineLost):
        # Each process dies at its second request, so three take three processes.
        engine.generate([[5], [6], [7]], GREEDY)
    assert len(notes(tmp_path, "started")) == 2


def test_the_process_ends_with_its_engine_and_after_a_listener_that_raises(tmp_path: Path) -> None:
    engine = engine_with(tmp_path)
    engine.generate([[5]], GREEDY)

    def fail(completion: Completion) -> None:
        raise KeyError("listener")

    with pytest.raises(KeyError, match="listener"):
        engine.generate([[5], [6]], GREEDY, on_finished=fail)
    engine.generate([[5]], GREEDY)
    first, second = map(int, notes(tmp_path, "started"))
    assert not is_running(first) and is_running(second)
    engine.service.close()
    assert not is_running(second)
    engine.generate([[5]], GREEDY)
    del engine
    assert not is_running(int(notes(tmp_path, "started")[-1]))


def test_a_listener_for_tokens_needs_another_engine() -> None:
    with pytest.raises(GenerationError, match=r"on_tokens needs an engine .* engine='vllm' does not"):
        VLLMEngine(tiny_model("llama")).generate([[5]], GREEDY, on_tokens=print)


@pytest.mark.parametrize("name", ["drafter", "peers", "lockstep"])
def test_settings_of_the_native_engine_are_answered_with_its_name(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"VLLMEngine has no setting {name}; here it is GenerationEngine\({name}=...\)"
    ):
        VLLMEngine(tiny_model("llama"), **{name: object()})


def test_stop_strings_need_a_tokenizer_that_vllm_can_load(tmp_path: Path) -> None:
    class Decoder:
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            return "".join(map(chr, token_ids))

    options = VLLMOptions(python=stand_in(tmp_path))
    params = SamplingParams(max_new_tokens=9, stop_strings=("C",))
    with pytest.raises(GenerationError, match="this one is a Decoder; use stop_token_ids"):
        VLLMEngine(tiny_model("llama"), tokenizer=Decoder(), options=options).generate([[5]], params)
    engine = VLLMEngine(tiny_model("llama", vocab_size=259), tokenizer=byte_tokenizer(), options=options)
    engine.generate([[5]], GREEDY)
    engine.generate([[5]], params)  # the process is started anew, with the tokenizer
    assert len(notes(tmp_path, "started")) == 2


def test_logits_that_are_not_finite_are_an_error(tmp_path: Path) -> None:
    program = Path(stand_in(tmp_path))
    program.write_text(program.read_text().replace("[-1.0] * len(tokens)", "[float('nan')] * len(tokens)"))
    with pytest.raises(GenerationError, match=r"not finite for sample ids \[0\]"):
        VLLMEngine(tiny_model("llama"), options=VLLMOptions(python=str(program))).generate([[5]], GREEDY)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"restarts": -1}, "restarts=-1 must be at least 0"),
        ({"restarts": 1.5}, "restarts=1.5 must be a whole number or None"),
        ({"timeout_s": 0.5}, "timeout_s=0.5 must be at least 1"),
        ({"memory_share": 1.5}, r"memory_share=1.5 must lie in \(0, 1\]"),
        ({"max_length": 0}, "max_length=0 must be at least 1"),
        ({"python": 3}, "python=3 must be text or None"),
        ({"address": "localhost:8000"}, "address='localhost:8000' must begin with http"),
        ({"address": "http://x", "restarts": 1}, "restarts=1 start a process again"),
        ({"address": "http://x", "python": "python"}, "python='python' is for a process that the run starts"),
        ({"quantization": "fp4"}, "quantization='fp4' must be None or one of fp8, int8"),
        ({"address": "http://x", "quantization": "fp8"}, "quantization='fp8' is for a process that the run starts"),
        ({"arguments": {"load_format": "pt"}}, "holds load_format, which follows from the model, the plan and other"),
        ({"arguments": {"tensor_parallel_size": 2}}, "holds tensor_parallel_size; here it is tp in the layout of the"),
    ],
)
def test_invalid_options_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        VLLMOptions(**settings)


def test_sleep_needs_a_gpu() -> None:
    with pytest.raises(GenerationError, match="sleep=True frees memory of a GPU, and the model is on the CPU"):
        VLLMEngine(tiny_model("llama"), options=VLLMOptions(sleep=True))


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("fp8", torch.float32, "rounds weights of 16 bits, and generation has float32; set precision='bf16"),
        ("int8", torch.bfloat16, "rounds weights of experts, and LlamaForCausalLM has none; use 'fp8'"),
    ],
)
def test_weights_that_vllm_would_not_round_are_refused(name: Any, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        VLLMEngine(tiny_model("llama").to(dtype), options=VLLMOptions(quantization=name))


def test_the_quantization_reaches_vllm_by_its_own_name(tmp_path: Path) -> None:
    for name, family in (("fp8", "llama"), ("int8", "qwen3_moe")):
        options = VLLMOptions(python=stand_in(tmp_path), quantization=name)  # type: ignore[arg-type]
        VLLMEngine(tiny_model(family).to(torch.bfloat16), options=options).generate([[5]], GREEDY)
    names = [json.loads(line)["llm"]["quantization"] for line in notes(tmp_path, "settings")]
    assert names == ["fp8_per_channel", "int8_per_channel_weight_only"]


def test_variables_of_torchrun_do_not_reach_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    program = Path(stand_in(tmp_path))
    line = 'note("ranks " + repr([name for name in os.environ if "RANK" in name]))\n'
    program.write_text(program.read_text().replace("label = ", line + "label = ", 1))
    VLLMEngine(tiny_model("llama"), options=VLLMOptions(python=str(program))).generate([[5]], GREEDY)
    assert notes(tmp_path, "ranks") == ["[]"] and os.environ["RANK"] == "3"
