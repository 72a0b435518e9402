"""A running vLLM server, reached by its own HTTP routes for tokens and for reinforcement learning.

Weights are handed over in a folder that both see, which the server loads in place of its own. Every request has a
bound on its time, so that a server that hangs raises `EngineLost`.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn
from transformers import AutoConfig

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.vllm.hand_over import write_weights
from lightning_realloc.generation.vllm.messages import (
    EngineLost,
    OnResponse,
    TokenRequest,
    TokenResponse,
    check_version,
)
from lightning_realloc.generation.vllm.vllm_options import VLLMOptions

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
        self.version = check_version(self._ask("version")["version"], f"the server {self._address}")
        config = self._ask("server_info?config_format=json")["vllm_config"]
        (served,) = self._ask("v1/models")["data"]
        self._name, self.max_length = served["id"], int(served["max_model_len"])
        self._mode = config["model_config"]["logprobs_mode"]
        self._check_model(model, config)
        parent = options.weights_folder or _SHARED_MEMORY_FOLDER
        self._folder = TemporaryDirectory(prefix="lightning-realloc-vllm-", dir=parent)

    def _check_model(self, model: Any, config: Mapping[str, Any]) -> None:
        """Raise GenerationError for another model than this one, and for one whose weights cannot be replaced."""
        theirs, ours = self._served_config(config["model_config"]["model"]), model.config.get_text_config().to_dict()
        for name in _ALIKE:
            if name in theirs and theirs[name] != ours.get(name):
                raise GenerationError(
                    f"the server {self._address} serves {self._name} with {name}={theirs[name]}, and the actor has "
                    f"{ours.get(name)}; start it with the actor's model"
                )
        if ours.get("tie_word_embeddings") and config["device_config"]["device"] == "cpu":
            raise GenerationError(
                f"the server {self._address} runs on CPU, where vLLM keeps the old output layer of a model with tied "
                f"embeddings when it reloads weights; leave address out, or use a server with a GPU"
            )

    def _served_config(self, source: str) -> dict[str, Any]:
        """Return the configuration of the served model, by its name or folder; the server itself does not show it."""
        try:
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

    def update_weights(self, model: nn.Module, label: str) -> None:
        """Let the server load the weights from a folder; see `Connection`."""
        if self._is_asleep:
            self._ask("wake_up", {})
            self._is_asleep = False
        folder = Path(self._folder.name)
        write_weights(model, folder)
        self._ask("collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        if not self._ask("reset_prefix_cache", {})["success"]:
            raise GenerationError(
                f"the server {self._address} keeps keys and values of old weights, since other requests run; let no "
                f"other program use it"
            )
        self._ask("update_weight_version", {"new_version": label})

    def generate(self, requests: Sequence[TokenRequest], sampling: Mapping[str, Any], on_response: OnResponse) -> int:
        """Complete all requests, ``max_slots`` at a time; see `Connection`."""
        self._check_logprobs(sampling)
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

    def _check_logprobs(self, sampling: Mapping[str, Any]) -> None:
        """Refuse sampling for which the server reports other log-probabilities than ``softmax(logits / temperature)``.

        Raises:
            GenerationError: with the way out.
        """
        filters = sampling["top_k"] or sampling["top_p"] < 1 or sampling["min_p"] or sampling["min_tokens"]
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
        params = {**sampling, "max_tokens": request.max_tokens, "seed": request.seed, "logprobs": 0}
        body = {"model": self._name, "token_ids": list(request.prompt), "sampling_params": params}
        (made,) = self._ask("inference/v1/generate", body)["choices"]
        return TokenResponse(
            request.index,
            tuple(made["token_ids"]),
            tuple(entry["logprob"] for entry in made["logprobs"]["content"]),
            made["finish_reason"],
            tuple(sorted({span["version"] for span in made["weight_versions"] or ()})),
        )

    def _ask(self, route: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the server's answer to a GET, or to a POST of ``body``.

        Raises:
            GenerationError: for a request that the server refuses.
            EngineLost: if it does not answer.
        """
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(
            f"{self._address}/{route}", data=data, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(asked, timeout=self._timeout_s) as answer:
                content = answer.read()
        except urllib.error.HTTPError as error:
            raise self._refusal(route, error) from error
        except OSError as error:
            raise EngineLost(
                f"the vLLM server {self._address} does not answer {route.partition('?')[0]}: {error}; start it, or "
                f"leave address out for a process of the run's own"
            ) from error
        return json.loads(content) if content else None

    def _refusal(self, route: str, error: urllib.error.HTTPError) -> GenerationError:
        said = " ".join(error.read().decode(errors="replace").split())[:300]
        if error.code == 404:
            return GenerationError(
                f"{self._address} has no {route.partition('?')[0]}; start `vllm serve` with VLLM_SERVER_DEV_MODE=1, "
                f"which adds the routes for new weights"
            )
        kind = EngineLost if error.code >= 500 else GenerationError
        return kind(f"the vLLM server {self._address} refuses {route.partition('?')[0]} with {error.code}: {said}")
