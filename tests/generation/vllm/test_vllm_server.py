"""VLLMServer against a small HTTP server with vLLM's routes: checks, responses, hand-over, refusals."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation import SamplingParams, VLLMEngine, VLLMOptions
from lightning_realloc.generation.vllm.bounded_http import fetch
from lightning_realloc.generation.vllm.messages import EngineLost
from tests.models import tiny_model

GREEDY = SamplingParams(max_new_tokens=3, temperature=0)


class StandIn(ThreadingHTTPServer):
    """A server with a configuration, which counts tokens upwards and loads folders of weights."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = str(folder)
        self.serve_model()
        self.version, self.logprobs_mode, self.device = "0.32.0", "raw_logprobs", "cpu"
        self.dev_mode, self.keeps_label = True, False
        self.label = "default"
        self.loaded: list[dict[str, torch.Tensor]] = []

    def serve_model(self, family: str = "llama", **settings: Any) -> None:
        """Serve a model of this family."""
        tiny_model(family, **settings).config.save_pretrained(self.folder)

    @property
    def address(self) -> str:
        """Address for `VLLMOptions`."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, route: str, body: Any) -> Any:
        """Return the answer to a request; None: there is no such route."""
        if route == "/version":
            return {"version": self.version}
        if route == "/v1/models":
            return {"data": [{"id": "actor", "max_model_len": 64}]}
        if route == "/inference/v1/generate":
            return {"choices": [self._choice(body)]}
        if not self.dev_mode:
            return None
        if route == "/server_info":
            model = {"logprobs_mode": self.logprobs_mode, "model": self.folder}
            return {"vllm_config": {"model_config": model, "device_config": {"device": self.device}}}
        if route == "/collective_rpc":
            self.loaded.append(load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors"))
        if route == "/update_weight_version" and not self.keeps_label:
            self.label = body["new_version"]
        return {"success": True}

    def _choice(self, body: dict[str, Any]) -> dict[str, Any]:
        count = body["sampling_params"]["max_tokens"]
        tokens = [body["token_ids"][-1] + 1 + index for index in range(count)]
        span = {"version": self.label, "start": 0, "end": count}
        return {
            "token_ids": tokens, "finish_reason": "length", "weight_versions": [span],
            "logprobs": {"content": [{"token_id": token, "logprob": -2.0} for token in tokens]},
        }  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    """Passes requests to the `StandIn`."""

    server: StandIn

    def do_GET(self) -> None:
        """Answer a GET."""
        self._reply(None)

    def do_POST(self) -> None:
        """Answer a POST."""
        self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _reply(self, body: Any) -> None:
        answer = self.server.answer(self.path.partition("?")[0], body)
        if isinstance(answer, tuple):
            self._drip(answer)
            return
        content = json.dumps(answer).encode()
        self.send_response(404 if answer is None else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _drip(self, parts: tuple[bytes, ...]) -> None:
        for number, part in enumerate(parts):
            time.sleep(0.3 if number else 0.0)
            try:
                self.wfile.write(part)
            except OSError:
                return
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    """A server that runs for one test."""
    with StandIn(tmp_path_factory.mktemp("served")) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def engine_of(server: StandIn, **options: Any) -> VLLMEngine:
    """Return an engine that uses a server."""
    return VLLMEngine(tiny_model("llama"), options=VLLMOptions(address=server.address, **options))


def test_a_server_gets_the_weights_and_completes_every_prompt(server: StandIn, tmp_path: Path) -> None:
    engine = engine_of(server, weights_folder=str(tmp_path))
    made = engine.generate([[5], [9], [40]], GREEDY)
    assert [c.token_ids for c in made] == [(6, 7, 8), (10, 11, 12), (41, 42, 43)]
    assert made[0].logprobs == (-2.0,) * 3
    engine.weights_updated()
    engine.generate([[5]], GREEDY)
    expected = dict(tiny_model("llama").named_parameters())
    assert len(server.loaded) == 2
    assert all(torch.equal(server.loaded[1][name], weight) for name, weight in expected.items())
    engine.service.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "0.9.1"}, r"the server http://127.0.0.1:\d+ has vLLM 0.9.1, and weights are handed over"),
        ({"folder": "/nowhere/served"}, "serves /nowhere/served, whose configuration cannot be read here"),
        ({"dev_mode": False}, "has no server_info; start `vllm serve` with VLLM_SERVER_DEV_MODE=1"),
        ({"keeps_label": True}, "answered with the weights default in place of"),
        ({"logprobs_mode": "raw_logits"}, "reports raw_logits, which with logits in place of log-probabilities"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_in_one_line(
    change: dict[str, Any], message: str, server: StandIn
) -> None:
    for name, value in change.items():
        setattr(server, name, value)
    with pytest.raises(GenerationError, match=message) as caught:
        engine_of(server).generate([[5]], GREEDY)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("mode", "params", "refused"),
    [
        ("raw_logprobs", {"temperature": 0.7}, "temperature=0.7"),
        ("raw_logprobs", {"temperature": 1.0, "top_p": 0.9}, None),
        ("processed_logprobs", {"temperature": 0.7}, None),
        ("processed_logprobs", {"temperature": 1.0, "top_p": 0.9}, "filters or a penalty"),
        ("processed_logprobs", {"repetition_penalty": 1.1}, "filters or a penalty"),
    ],
)
def test_sampling_whose_log_probabilities_the_server_cannot_report_is_refused(
    mode: str, params: dict[str, Any], refused: str | None, server: StandIn
) -> None:
    server.logprobs_mode = mode
    engine, sampling = engine_of(server), SamplingParams(max_new_tokens=2, **params)
    if refused is None:
        assert len(engine.generate([[5]], sampling)) == 1
        return
    with pytest.raises(GenerationError, match=f"{refused} are not those that training recomputes"):
        engine.generate([[5]], sampling)


def test_a_server_of_another_model_or_vocabulary_is_refused_before_it_gets_weights(server: StandIn) -> None:
    for family, settings, message in (
        ("llama", {"vocab_size": 99}, "serves actor with vocab_size=99, and the actor has 128; start it with"),
        ("mistral", {}, "serves actor with model_type=mistral, and the actor has llama"),
        ("llama", {"num_hidden_layers": 3}, "serves actor with num_hidden_layers=3, and the actor has 2"),
    ):
        server.serve_model(family, **settings)
        with pytest.raises(GenerationError, match=message):
            engine_of(server).generate([[5]], GREEDY)
    assert server.loaded == []


def test_tied_embeddings_are_refused_on_a_server_on_cpu(server: StandIn) -> None:
    model = tiny_model("qwen2")
    server.serve_model("qwen2")
    with pytest.raises(GenerationError, match="keeps the old output layer of a model with tied embeddings"):
        VLLMEngine(model, options=VLLMOptions(address=server.address)).generate([[5]], GREEDY)
    server.device = "cuda"
    VLLMEngine(model, options=VLLMOptions(address=server.address)).generate([[5]], GREEDY)


class Raw(StandIn):
    """A server that answers requests for responses with given bytes, a third of a second apart."""

    raw: tuple[bytes, ...] = ()

    def answer(self, route: str, body: Any) -> Any:
        """Return the bytes in place of a response."""
        return self.raw if route == "/inference/v1/generate" else super().answer(route, body)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ((b"HTTP/1.1 200 OK\r\n", *[b"x"] * 9), "does not answer inference/v1/generate: no whole answer within 1 s"),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", *[b"["] * 9), "no whole answer within 1 s"),
        ((b"HTTP/1.1 200 OK\r\n\r\nno json",), "sent something else than vLLM's answer .JSONDecodeError"),
        ((b'HTTP/1.1 200 OK\r\n\r\n{"choices": [{"token_ids": 3}]}',), "something else than vLLM's answer .TypeError"),
        ((b'HTTP/1.1 200 OK\r\n\r\n{"choices": []}',), "something else than vLLM's answer .ValueError"),
        ((b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n",), "refuses inference/v1/generate with 302"),
        ((b"SSH-2.0\r\n\r\n",), "something else than vLLM's answer .ValueError: no HTTP"),
    ],
)
def test_answers_that_are_not_vllms_are_a_lost_engine(raw: tuple[bytes, ...], message: str, tmp_path: Path) -> None:
    with Raw(tmp_path) as server:
        server.raw = raw
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        with pytest.raises(EngineLost, match=message):
            engine_of(server, timeout_s=1.0).generate([[5]], GREEDY)
        server.shutdown()
        thread.join()


def test_an_answer_is_read_up_to_a_size(server: StandIn) -> None:
    with pytest.raises(ValueError, match="more than 0 MiB"):
        fetch(server.address, "v1/models", None, timeout_s=10.0, most_bytes=20)


def test_the_time_to_connect_counts(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.create_connection

    def connect_late(*args: Any, **options: Any) -> socket.socket:
        time.sleep(0.4)
        return connect(*args, **options)

    monkeypatch.setattr(socket, "create_connection", connect_late)
    with pytest.raises(TimeoutError, match="no whole answer within"):
        fetch(server.address, "v1/models", None, timeout_s=0.2)


def test_an_address_where_nothing_answers_is_named(tmp_path: Path) -> None:
    with StandIn(tmp_path) as closed:
        address = closed.address
    with pytest.raises(EngineLost, match=r"does not answer version: .*Connection refused.*start it, or leave address"):
        VLLMEngine(tiny_model("llama"), options=VLLMOptions(address=address)).generate([[5]], GREEDY)
