"""vLLM in a process of its own on this machine: start it, exchange messages with it, and end it.

Nothing waits without a bound: a process that ends, or says nothing for too long, raises `EngineLost`, which begins with
the cause and names the log.
"""

from __future__ import annotations

import logging
import secrets
import select
import socket
import subprocess
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_realloc.batch.prompt_images import PromptImages
from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.vllm.child import receive, send
from lightning_realloc.generation.vllm.hand_over import CudaIPCHandOver, SharedMemoryHandOver, weights_of
from lightning_realloc.generation.vllm.hand_over_proof import HandOverProof
from lightning_realloc.generation.vllm.lone_adapters import adapter_names, adapter_settings, adapters_of, max_rank
from lightning_realloc.generation.vllm.messages import (
    CallBudget,
    EngineLost,
    OnResponse,
    StartFailed,
    TokenRequest,
    TokenResponse,
    bounds_message,
    check_version,
    reading,
    request_messages,
)
from lightning_realloc.generation.vllm.process_end import MARK, cause_of_end, end_processes
from lightning_realloc.generation.vllm.start.interpreter import PROGRAM, interpreter, not_started
from lightning_realloc.generation.vllm.start.process_log import (
    ProcessLog,
    may_start_later,
    plain,
    points_elsewhere,
    start_way_out,
)
from lightning_realloc.generation.vllm.start.process_settings import folder_with_settings, variables
from lightning_realloc.generation.vllm.tensor_ranks import TensorRanks
from lightning_realloc.generation.vllm.vllm_options import QUANTIZATIONS, VLLMOptions
from lightning_realloc.limits import VLLM_CPU_CACHE_BYTES
from lightning_realloc.runtime.dtypes import dtype_name
from lightning_realloc.runtime.model.image_inputs import placeholder_ids

_log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
"""Logger of `rank_zero_info`, for the first rank that generates, which may be another than rank 0."""


class VLLMProcess:
    """A process with vLLM, which ends with this object or this process."""

    def __init__(
        self,
        model: Any,
        options: VLLMOptions,
        *,
        tokenizer: Any,
        images: PromptImages | None,
        max_slots: int,
        max_cache_bytes: int | None,
        proof: HandOverProof,
        ranks: TensorRanks | None = None,
    ) -> None:
        """Start vLLM for a model's configuration, and wait until it is ready. Its weights come later.

        ``images``: some of the prompts', whose processor vLLM gets; None: it reads text alone, and loads no tower.
        ``ranks``: those that hold shards of the model, of which this is the first; None: the model is whole here.

        Raises:
            GenerationError: for an interpreter without vLLM, or with a version that was not tested, and for a model
                whose images this vLLM does not read.
            StartFailed: if vLLM does not start.
        """
        self._timeout_s, self._model = options.timeout_s, proof.model
        device: torch.device = next(model.parameters()).device
        self._ranks, shared = ranks, SharedMemoryHandOver(ranks=ranks)
        self._hand_over = CudaIPCHandOver() if device.type == "cuda" and ranks is None else shared
        self._adapter_hand_over, self._proof = shared, proof
        goes_alone = bool(adapter_names(model)) and not options.merge_adapters
        self._adapters = adapter_settings(model) if goes_alone else None
        """Settings of adapters that vLLM adds to the base weights itself; None: it gets whole weights alone."""
        self._has_base = self._is_asleep = self._has_responded = False
        self._folder = folder_with_settings(model, tokenizer, images)
        self._log = ProcessLog(self._folder.path)
        self._python = interpreter(options.python)
        self._mark = secrets.token_hex(8)
        self._process, self._socket = self._start(device)
        files = self._folder, self._log
        self._end = weakref.finalize(self, end_processes, self._process, self._socket, files, self._mark)
        arguments = self._arguments(model, options, max_slots, max_cache_bytes, device)
        arguments = _input_arguments(model, tokenizer, images) | arguments
        read = None if images is None else {"placeholders": sorted(placeholder_ids(model)), "backend": images.backend}
        try:
            with self._naming_losses("does not start"):
                self._prepare({"llm": arguments, "images": read})
        except BaseException:
            self.close()
            raise

    def _prepare(self, settings: Mapping[str, Any], *, reminder_s: float = 30.0) -> None:
        """Announce the start, and wait until vLLM is ready, with a line whenever ``reminder_s`` have passed."""
        begin = time.monotonic()
        with reading("vLLM's process"):
            self.version: str = check_version(self._receive()["vllm"], f"the interpreter {self._python}")
            self._say(f"vLLM {self.version} of {self._python} starts for {self._model.role} (log: {self._log.path})")
            self._send(settings)
            while not select.select([self._socket], [], [], min(reminder_s, self._timeout_s))[0]:
                seconds = time.monotonic() - begin
                if seconds > self._timeout_s:
                    break
                self._say(f"vLLM still starts, for {seconds:.0f} s; {self._log.end(1)}")
                if self._ranks is not None:
                    self._ranks.keep_waiting()
            self.max_length: int = int(self._receive()["max_model_len"])
        self._say(f"vLLM is ready after {time.monotonic() - begin:.0f} s")

    def _say(self, text: str) -> None:
        """Log a line on the first rank that generates with the model."""
        if self._model.is_first:
            _log.info(text)

    @contextmanager
    def _naming_losses(self, what: str) -> Iterator[None]:
        """Let a loss begin with its cause, name the log, which is kept, and be a `StartFailed` if it would repeat."""
        try:
            yield
        except EngineLost as lost:
            cause, self._log.is_kept = str(lost), True
            self.close()
            repeats = what == "does not start" or (lost.is_reported and not self._has_responded)
            kind = StartFailed if repeats and not may_start_later(cause) else EngineLost
            where = f"vLLM for {self._model.role} on rank {self._model.rank} {what}; its log is {self._log.path}"
            raise kind(f"{cause} ({where}){start_way_out(cause, self._python)}") from lost

    def _start(self, device: torch.device) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        ours.settimeout(self._timeout_s)
        with theirs, self._log.path.open("wb") as log:
            try:
                process = subprocess.Popen(
                    [self._python, str(PROGRAM), str(theirs.fileno()), str(self._folder.path), str(self._log.path)],
                    pass_fds=[theirs.fileno()],
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    env=variables(device, self._ranks, self._folder.path) | {MARK: self._mark},
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                self._log.remove_unless_kept()
                self._folder.cleanup()
                raise not_started(self._python, error) from error
        return process, ours

    def _arguments(
        self, model: Any, options: VLLMOptions, max_slots: int, max_cache_bytes: int | None, device: torch.device
    ) -> dict[str, Any]:
        """Return the arguments of `vllm.LLM`."""
        arguments: dict[str, Any] = {
            "model": str(self._folder.path),
            "dtype": dtype_name(next(model.parameters()).dtype),
            "load_format": "dummy",
            "generation_config": "vllm",
            "seed": 0,
            "max_num_seqs": max_slots,
            "weight_transfer_config": {"backend": self._hand_over.backend},
            "enable_sleep_mode": options.sleep,
            "gpu_memory_utilization": options.memory_share,
        }
        if self._ranks is not None:
            arguments |= {"tensor_parallel_size": self._ranks.count, "distributed_executor_backend": "mp"}
        if self._adapters is not None:
            room = {"max_lora_rank": max_rank(self._adapters), "max_loras": 1, "max_cpu_loras": 1}
            arguments |= {"enable_lora": True, **room}
        on_cpu = device.type == "cpu"
        if on_cpu:
            arguments["enforce_eager"] = True  # compiling takes minutes
        cache_bytes = max_cache_bytes or (VLLM_CPU_CACHE_BYTES if on_cpu else None)
        if cache_bytes is not None:
            arguments["kv_cache_memory_bytes"] = int(cache_bytes)
        if options.quantization is not None:
            arguments["quantization"] = QUANTIZATIONS[options.quantization]
        if options.max_length is not None:
            arguments["max_model_len"] = options.max_length
        return arguments | dict(options.arguments)

    @property
    def process_id(self) -> int:
        """Process of vLLM."""
        return self._process.pid

    def update_weights(self, model: nn.Module, label: str) -> int:
        """Replace vLLM's weights; see `Connection`. Base weights under adapters that go alone are given once."""
        with self._naming_losses("failed"):
            return self._update_weights(model, label)

    def _update_weights(self, model: nn.Module, label: str) -> int:
        if self._is_asleep:
            self._call("wake")
            self._is_asleep = False
        num_bytes = 0
        if self._adapters is None or not self._has_base:
            weights = weights_of(model)
            self._call("begin_update", proof=self._proof.opening(weights, label))
            num_bytes += self._give(self._hand_over, weights, "weights", "update")
            expected = self._proof.expected(weights, "weights")
            self._proof.judge(self._call("finish_update", version=label, expected=expected))
            self._has_base = True
        if self._adapters is not None:
            adapters = adapters_of(model)
            num_bytes += self._give(self._adapter_hand_over, adapters, "adapters", "take_adapters")
            opening, expected = self._proof.opening(adapters, label), self._proof.expected(adapters, "adapters")
            given = {"settings": self._adapters, "version": label, "proof": opening, "expected": expected}
            self._proof.judge(self._call("use_adapters", **given))
        return num_bytes

    def _give(
        self, hand_over: SharedMemoryHandOver | CudaIPCHandOver, weights: Mapping[str, Tensor], kind: str, method: str
    ) -> int:
        """Give weights to a method of vLLM's process, and return their bytes."""
        with closing(hand_over.chunks(weights, kind)) as chunks:
            for chunk in chunks:
                self._call(method, **chunk)
        return hand_over.num_bytes(weights)

    def generate(
        self,
        requests: Sequence[TokenRequest],
        sampling: Mapping[str, Any],
        on_response: OnResponse,
        budget: CallBudget | None = None,
    ) -> int:
        """Complete all requests; see `Connection`."""
        with self._naming_losses("failed"):
            return self._generate(requests, sampling, on_response, budget)

    def _generate(
        self,
        requests: Sequence[TokenRequest],
        sampling: Mapping[str, Any],
        on_response: OnResponse,
        budget: CallBudget | None,
    ) -> int:
        open_requests, is_stopped = {request.index for request in requests}, False
        with TemporaryDirectory(dir=self._folder.path) as folder:
            asked = request_messages(requests, Path(folder))
            bounds = {} if budget is None else {"budget": bounds_message(budget)}
            self._send({"do": "generate", "requests": asked, "sampling": dict(sampling), **bounds})
            while "done" not in (message := self._receive()):
                if "response" in message:
                    with reading("vLLM's process"):
                        response = TokenResponse.from_message(message["response"])
                    self._has_responded = True
                    on_response(response)
                    open_requests.discard(response.index)
                elif "spent" in message:
                    is_stopped = budget is not None and budget.may_stop()
                    self._send({"stop": is_stopped})
                elif self._ranks is not None:
                    self._ranks.keep_waiting()
        with reading("vLLM's process"):
            num_steps = int(message["done"]["num_steps"])
            if open_requests and not is_stopped:
                raise ValueError(f"{len(open_requests)} of {len(requests)} requests without a response")
        return num_steps

    def sleep(self) -> None:
        """Free the device's memory; see `Connection`."""
        if not self._is_asleep:
            self._call("sleep")
            self._is_asleep, self._has_base = True, False

    def close(self) -> None:
        """End the process."""
        self._end()

    def _call(self, method: str, **arguments: Any) -> Any:
        self._send({"do": method, **arguments})
        return self._receive().get("done")

    def _send(self, message: Mapping[str, Any]) -> None:
        self._socket.settimeout(self._timeout_s)
        try:
            send(self._socket, message)
        except TimeoutError:
            self._raise_silent()
        except OSError:
            pass  # the process has ended; what it said last is received next

    def _receive(self) -> dict[str, Any]:
        """Return the next message.

        Raises:
            EngineLost: if there is none, if it is none of vLLM's, or if it reports an error.
            GenerationError: if the process refuses a request or the model, as it would again.
        """
        try:
            with reading("vLLM's process"):
                message = receive(self._socket, timeout_s=self._timeout_s)
                if not isinstance(message, dict | None):
                    raise TypeError(f"a {type(message).__name__}")
        except TimeoutError:
            self._raise_silent()
        except OSError:
            message = None
        if message is None:
            raise EngineLost(cause_of_end(self._process, self._log, timeout_s=min(10.0, self._timeout_s)))
        if "refused" in message:
            self.close()
            raise GenerationError(" ".join(str(message["refused"]).split()))
        if "error" in message:
            error = plain(str(message["error"]))
            cause = self._log.root_cause() if points_elsewhere(error) else None
            raise EngineLost(cause or error, is_reported=True)
        return message

    def _raise_silent(self) -> NoReturn:
        raise EngineLost(
            f"vLLM's process gave no sign of life for {self._timeout_s:g} s and was ended, {self._log.end()}"
        )


def _input_arguments(model: Any, tokenizer: Any, images: PromptImages | None) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` about what it reads."""
    arguments: dict[str, Any] = {"skip_tokenizer_init": tokenizer is None and images is None}
    if images is not None:
        arguments["limit_mm_per_prompt"] = {"video": 0}  # no memory is set aside for them
    elif placeholder_ids(model):
        arguments["language_model_only"] = True
    return arguments
