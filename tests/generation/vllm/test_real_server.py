"""A running vLLM server: log-probabilities after updates, and refusals of other models, vocabularies and weights."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation import SamplingParams, VLLMEngine, VLLMOptions
from tests.generation.test_engine import draw_prompts
from tests.generation.vllm.test_real_vllm import change_weights, recomputed
from tests.models import tiny_model
from tests.vllm_environment import vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

STARTS_WITHIN_S = 600
ENDS_WITHIN_S = 30


def actor(vocab_size: int = 128, family: str = "llama") -> PreTrainedModel:
    """Return a model with heads of a size that vLLM has; its output layer is not tied."""
    return tiny_model(family, vocab_size=vocab_size, hidden_size=128)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the actor on a free port of this machine, for all tests."""
    folder = tmp_path_factory.mktemp("served")
    actor().save_pretrained(folder / "model")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {
        "model": str(folder / "model"), "host": "127.0.0.1", "port": str(port), "dtype": "float32",
        "logprobs-mode": "processed_logprobs", "kv-cache-memory-bytes": str(1 << 26), "max-num-seqs": "8",
    }  # fmt: skip
    flags = ["--enable-scale-out", "--enforce-eager", "--skip-tokenizer-init"]
    arguments = [text for name, value in options.items() for text in (f"--{name}", value)]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [str(vllm_python()), "-m", "vllm.entrypoints.openai.api_server", *arguments, *flags],
            env=os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        wait_for(f"http://127.0.0.1:{port}", server, folder / "log")
        yield f"http://127.0.0.1:{port}"
    finally:
        end(server)


def end(server: subprocess.Popen[bytes]) -> None:
    """Ask the server to end, so that it removes its 400 MB of shared memory, and kill what is left of its group."""
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(ENDS_WITHIN_S)
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Return when the server answers."""
    deadline = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-2000:]
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise AssertionError(f"the server is not up after {STARTS_WITHIN_S} s: {log.read_text()[-2000:]}")


def engine_on(address: str, model: PreTrainedModel) -> VLLMEngine:
    """Return an engine that uses the server."""
    return VLLMEngine(model, max_slots=8, options=VLLMOptions(address=address))


def test_log_probabilities_of_a_server_are_those_of_a_forward_after_every_update(address: str) -> None:
    model, params = actor(), SamplingParams(max_new_tokens=10, n=2, temperature=0.7)
    engine = engine_on(address, model)
    for seed in range(3):
        change_weights(model, engine, seed=seed)
        for completion in engine.generate(draw_prompts(4), params):
            expected = recomputed(model, completion, params)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
    engine.service.close()


@pytest.mark.parametrize(
    ("vocab_size", "family", "message"),
    [
        (200, "llama", "with vocab_size=128, and the actor has 200; start it with the actor's model"),
        (128, "mistral", "with model_type=llama, and the actor has mistral; start it with the actor's model"),
    ],
)
def test_a_server_of_another_model_or_vocabulary_is_refused_in_one_line(
    vocab_size: int, family: str, message: str, address: str
) -> None:
    with pytest.raises(GenerationError, match=message) as caught:
        engine_on(address, actor(vocab_size, family)).generate([[5]])
    assert "\n" not in str(caught.value)


def test_responses_of_weights_that_another_program_gave_are_refused_in_one_line(address: str) -> None:
    engine, params = engine_on(address, actor()), SamplingParams(max_new_tokens=3)
    engine.generate([[5]], params)
    request = urllib.request.Request(
        f"{address}/update_weight_version",
        data=json.dumps({"new_version": "another"}).encode(),
        headers={"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=60).close()
    with pytest.raises(GenerationError, match="answered with the weights another in place of") as caught:
        engine.generate([[5]], params)
    assert "\n" not in str(caught.value)
    engine.weights_updated()
    assert len(engine.generate([[5]], params)) == 1, "the next update repairs it"
    engine.service.close()
