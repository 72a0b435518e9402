"""A running vLLM server, reached by its own HTTP routes for tokens and for reinforcement learning.

Weights are handed over in a folder that both see, which the server loads in place of its own. Every request has a
bound on its time, so that a server that hangs raises `EngineLost`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.vllm.bounded_http import fetch
from lightning_realloc.generation.vllm.hand_over import write_weights
from lightning_realloc.generation.vllm.messages import (
    CallBudget,
    EngineLost,
    OnResponse,
    TokenRequest,
    TokenResponse,
    check_version,
    reading,
)
from lightning_realloc.generation.vllm.owned_folder import OwnedFolder
from lightning_realloc.generation.vllm.vllm_options import VLLMOptions
from lightning_realloc.remote_path import require_files

_SHARED_MEMORY_FOLDER = Path("/dev/shm")
_ALIKE = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings")
"""Fields of a model's configuration by which another model is recognised."""


class VLLMServer:
    """A connection to a vLLM server that this run did not start, and that no other run uses."""

    def __init__(self, model: Any, options: VLLMOptions, *, max_slots: int) -> None:
        """Check the server.

        Raises:
            GenerationError: for a server with another model or vocabulary, or with a version that was not tested.
            EngineLost: if nothing answers at the address.
        """
        assert options.address is not None
        self._address, self._timeout_s = options.address.rstrip("/"), options.timeout_s
        self._max_slots, self._is_asleep = max_slots, False
        self.version = server_version(self._address, timeout_s=self._timeout_s)
        with self._reading():
            config = self._ask("server_info?config_format=json")["vllm_config"]
            (served,) = self._ask("v1/models")["data"]
            self._name, self.max_length = str(served["id"]), int(served["max_model_len"])
            source, self._mode = str(config["model_config"]["model"]), config["model_config"]["logprobs_mode"]
            device = config["device_config"]["device"]
        self._check_model(model, source, device)
        self._folder = OwnedFolder(options.weights_folder or _SHARED_MEMORY_FOLDER)

    def _reading(self) -> AbstractContextManager[None]:
        return reading(f"the server {self._address}")

    def _check_model(self, model: Any, source: str, device: str) -> None:
        """Raise GenerationError for another model than this one, and for one whose weights cannot be replaced."""
        theirs, ours = self._served_config(source), model.config.get_text_config().to_dict()
        for name in _ALIKE:
            if name in theirs and theirs[name] != ours.get(name):
                raise GenerationError(
                    f"the server {self._address} serves {self._name} with {name}={theirs[name]}, and the actor has "
                    f"{ours.get(name)}; start it with the actor's model"
                )
        if ours.get("tie_word_embeddings") and device == "cpu":
            raise GenerationError(
                f"the server {self._address} runs on CPU, where vLLM keeps the old output layer of a model with tied "
                f"embeddings when it reloads weights; leave address out, or use a server with a GPU"
            )

    def _served_config(self, source: str) -> dict[str, Any]:
        """Return the configuration of the served model, by its name or folder; the server itself does not show it."""
        try:
            require_files(source)
            config: dict[str, Any] = AutoConfig.from_pretrained(source).get_text_config().to_dict()
        except (OSError, ValueError) as error:
            raise GenerationError(
                f"the server {self._address} serves {source}, whose configuration cannot be read here to compare it "
                f"with the actor's: {' '.join(str(error).split())[:200]}; serve a model by its name on the hub, or by "
                f"the full path of a folder that both machines see"
            ) from error
        return config

    @property
    def process_id(self) -> None:
        """None: the server is not of this run."""
        return None

    def update_weights(self, model: nn.Module, label: str) -> int:
        """Let the server load the weights from a folder; see `Connection`."""
        if self._is_asleep:
            self._ask("wake_up", {})
            self._is_asleep = False
        folder = self._folder.path
        num_bytes = write_weights(model, folder)
        self._ask("collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        with self._reading():
            is_reset = bool(self._ask("reset_prefix_cache", {})["success"])
        if not is_reset:
            raise GenerationError(
                f"the server {self._address} keeps keys and values of old weights, since other requests run; let no "
                f"other program use it"
            )
        self._ask("update_weight_version", {"new_version": label})
        return num_bytes

    def generate(
        self,
        requests: Sequence[TokenRequest],
        sampling: Mapping[str, Any],
        on_response: OnResponse,
        budget: CallBudget | None = None,
    ) -> int:
        """Complete all requests, ``max_slots`` at a time; see `Connection`. A budget is refused before."""
        assert budget is None, "a server returns whole responses"
        self._check_logprobs(sampling, forbids=any(request.min_tokens for request in requests))
        with ThreadPoolExecutor(max_workers=min(self._max_slots, len(requests))) as threads:
            futures = [threads.submit(self._complete, request, sampling) for request in requests]
            try:
                for future in as_completed(futures):
                    on_response(future.result())
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        return 0

    def sleep(self) -> None:
        """Free the device's memory; see `Connection`."""
        if not self._is_asleep:
            self._ask("sleep?level=2", {})
            self._is_asleep = True

    def close(self) -> None:
        """Remove the folder of weights; the server goes on."""
        self._folder.cleanup()

    def _check_logprobs(self, sampling: Mapping[str, Any], *, forbids: bool) -> None:
        """Refuse sampling for which the server reports other log-probabilities than ``softmax(logits / temperature)``.

        ``forbids``: tokens are forbidden at the beginning.

        Raises:
            GenerationError: with the way out.
        """
        forbids = forbids or bool(sampling["logit_bias"])
        filters = sampling["top_k"] or sampling["top_p"] < 1 or sampling["min_p"] or forbids
        changed = {
            "raw_logprobs": sampling["temperature"] not in (0.0, 1.0) and f"temperature={sampling['temperature']}",
            "processed_logprobs": (filters or sampling["repetition_penalty"] != 1) and "filters or a penalty",
        }
        reason = changed.get(self._mode, "logits in place of log-probabilities")
        if reason:
            raise GenerationError(
                f"the server {self._address} reports {self._mode}, which with {reason} are not those that training "
                f"recomputes; start it with another --logprobs-mode, or leave address out"
            )

    def _complete(self, request: TokenRequest, sampling: Mapping[str, Any]) -> TokenResponse:
        own = {"max_tokens": request.max_tokens, "min_tokens": request.min_tokens, "seed": request.seed}
        params = {**sampling, **own, "logprobs": 0}
        body = {"model": self._name, "token_ids": list(request.prompt), "sampling_params": params}
        with self._reading():
            (made,) = self._ask("inference/v1/generate", body)["choices"]
            return TokenResponse(
                request.index,
                tuple(made["token_ids"]),
                tuple(entry["logprob"] for entry in made["logprobs"]["content"]),
                made["finish_reason"],
                tuple(sorted({span["version"] for span in made["weight_versions"] or ()})),
            )

    def _ask(self, route: str, body: Mapping[str, Any] | None = None) -> Any:
        return _ask(self._address, route, body, timeout_s=self._timeout_s)


def server_version(address: str, *, timeout_s: float) -> str:
    """Return the version of vLLM that a server runs.

    Raises:
        GenerationError: for one that was not tested, and for another server than vLLM's.
        EngineLost: if nothing answers at the address.
    """
    address = address.rstrip("/")
    with reading(f"the server {address}"):
        return check_version(_ask(address, "version", None, timeout_s=timeout_s)["version"], f"the server {address}")


def _ask(address: str, route: str, body: Mapping[str, Any] | None, *, timeout_s: float) -> Any:
    """Return the server's answer to a GET, or to a POST of ``body``.

    Raises:
        GenerationError: for a request that the server refuses.
        EngineLost: if it does not answer, or with anything else than vLLM does.
    """
    data, name = None if body is None else json.dumps(body).encode(), route.partition("?")[0]
    with reading(f"the server {address}"):
        try:
            status, content = fetch(address, route, data, timeout_s=timeout_s)
        except OSError as error:
            raise EngineLost(
                f"the vLLM server {address} does not answer {name}: {error}; start it, or leave address out for a "
                f"process of the run's own"
            ) from error
        if not 200 <= status < 300:
            raise _refusal(address, name, status, content)
        return json.loads(content) if content else None


def _refusal(address: str, route: str, status: int, content: bytes) -> GenerationError:
    if status == 404:
        return GenerationError(
            f"{address} has no {route}; start `vllm serve` with VLLM_SERVER_DEV_MODE=1, which adds the routes for new "
            f"weights"
        )
    kind = GenerationError if 400 <= status < 500 else EngineLost
    said = " ".join(content.decode(errors="replace").split())[:300]
    return kind(f"the vLLM server {address} refuses {route} with {status}: {said}")
