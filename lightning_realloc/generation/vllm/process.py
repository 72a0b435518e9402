"""vLLM in a process of its own on this machine: start it, exchange messages with it, and end it.

Nothing waits without a bound: a process that ends, or says nothing for too long, raises `EngineLost` with the end of
its log.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import secrets
import socket
import subprocess
import sys
import uuid
import weakref
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import torch
from lightning.pytorch.utilities import rank_zero_info
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
from lightning_realloc.generation.vllm.owned_folder import OwnedFolder
from lightning_realloc.generation.vllm.process_end import MARK, describe_end, end_of_log, end_processes, last_error
from lightning_realloc.generation.vllm.tensor_ranks import TensorRanks, visible_device
from lightning_realloc.generation.vllm.vllm_options import QUANTIZATIONS, VLLMOptions
from lightning_realloc.limits import VLLM_CPU_CACHE_BYTES
from lightning_realloc.runtime.dtypes import dtype_name
from lightning_realloc.runtime.model.image_inputs import placeholder_ids

_PROGRAM = Path(__file__).with_name("child.py")
_OF_RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of torchrun, by which vLLM would take itself for one of the run's ranks."""
_DEFAULTS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no process but this one and workers of tensor parallelism
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked worker would hold the connection open
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # ranks next to each other would all be bound to the first cores
    "VLLM_LOGGING_LEVEL": "WARNING",
}


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
        self._timeout_s = options.timeout_s
        device: torch.device = next(model.parameters()).device
        self._ranks, shared = ranks, SharedMemoryHandOver(ranks=ranks)
        self._hand_over = CudaIPCHandOver() if device.type == "cuda" and ranks is None else shared
        self._adapter_hand_over, self._proof = shared, proof
        goes_alone = bool(adapter_names(model)) and not options.merge_adapters
        self._adapters = adapter_settings(model) if goes_alone else None
        """Settings of adapters that vLLM adds to the base weights itself; None: it gets whole weights alone."""
        self._has_base = self._is_asleep = False
        self._folder = OwnedFolder()
        _save_settings(self._folder.path, model, tokenizer, images)
        self._log = self._folder.path / "vllm.log"
        python = options.python or _interpreter()
        self._mark = secrets.token_hex(8)
        self._process, self._socket = self._start(python, device)
        self._end = weakref.finalize(self, end_processes, self._process, self._socket, self._folder, self._mark)
        arguments = self._arguments(model, options, max_slots, max_cache_bytes, device)
        arguments = _input_arguments(model, tokenizer, images) | arguments
        read = None if images is None else {"placeholders": sorted(placeholder_ids(model)), "backend": images.backend}
        rank_zero_info(f"starting vLLM (log: {self._log})")
        try:
            with reading("vLLM's process"):
                self.version: str = check_version(self._receive()["vllm"], f"the interpreter {python}")
                self._send({"llm": arguments, "images": read})
                self.max_length: int = int(self._receive()["max_model_len"])
        except EngineLost as lost:
            self.close()
            raise StartFailed(f"vLLM does not start: {lost}") from lost
        except BaseException:
            self.close()
            raise

    def _start(self, python: str, device: torch.device) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        ours.settimeout(self._timeout_s)
        with theirs, self._log.open("wb") as log:
            try:
                process = subprocess.Popen(
                    [python, str(_PROGRAM), str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    env=_environment(device, self._ranks) | {MARK: self._mark} | self._folders(),
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise GenerationError(
                    f"vLLM's interpreter {python} does not start: {error.strerror}; name that of an environment with "
                    f"vLLM by VLLMOptions(python=...) or the variable VLLM_PYTHON"
                ) from error
        return process, ours

    def _folders(self) -> dict[str, str]:
        """Return variables by which vLLM's own files go with the folder, unless sockets there have too long a name."""
        folder = str(self._folder.path)
        most = 107 - len(f"/{uuid.UUID(int=0)}")  # characters; a socket's path ends with an id
        return {"VLLM_RPC_BASE_PATH": folder, "TMPDIR": folder} if len(folder) <= most else {}

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
        open_requests, is_stopped = {request.index for request in requests}, False
        with TemporaryDirectory(dir=self._folder.path) as folder:
            asked = request_messages(requests, Path(folder))
            bounds = {} if budget is None else {"budget": bounds_message(budget)}
            self._send({"do": "generate", "requests": asked, "sampling": dict(sampling), **bounds})
            while "done" not in (message := self._receive()):
                if "response" in message:
                    with reading("vLLM's process"):
                        response = TokenResponse.from_message(message["response"])
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
            self._raise_ended()
        if "refused" in message:
            self.close()
            raise GenerationError(" ".join(str(message["refused"]).split()))
        if "error" in message:
            self.close()
            raise EngineLost(f"vLLM failed: {' '.join(str(message['error']).split())[:600]}")
        return message

    def _raise_ended(self) -> NoReturn:
        try:
            code = self._process.wait(timeout=min(10.0, self._timeout_s))
            end, has_failed = f"ended {describe_end(code)}", code > 0
        except subprocess.TimeoutExpired:
            end, has_failed = "closed its connection, and was ended", True
        lines = self._log_lines()
        cause = last_error(lines) if has_failed else ""  # a signal comes from elsewhere than an error that was logged
        self.close()
        raise EngineLost(f"vLLM's process {end}; {cause}{end_of_log(lines)}")

    def _raise_silent(self) -> NoReturn:
        log_text = end_of_log(self._log_lines())
        self.close()
        raise EngineLost(
            f"vLLM's process gave no sign of life for {self._timeout_s:g} s and was ended; raise "
            f"VLLMOptions(timeout_s=...) if it only was slow; {log_text}"
        )

    def _log_lines(self) -> list[str]:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return [line.strip() for line in text.splitlines() if line.strip()]


def _save_settings(folder: Path, model: Any, tokenizer: Any, images: PromptImages | None) -> None:
    """Write the configuration that vLLM starts with, and its tokenizer or processor."""
    config = copy.deepcopy(model.config)
    config.architectures = config.architectures or [type(model).__name__]  # which vLLM would guess otherwise
    config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if images is not None:
        images.save_processor(folder)  # with its tokenizer


def _input_arguments(model: Any, tokenizer: Any, images: PromptImages | None) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` about what it reads."""
    arguments: dict[str, Any] = {"skip_tokenizer_init": tokenizer is None and images is None}
    if images is not None:
        arguments["limit_mm_per_prompt"] = {"video": 0}  # no memory is set aside for them
    elif placeholder_ids(model):
        arguments["language_model_only"] = True
    return arguments


def _interpreter() -> str:
    """Return the interpreter to start when the options name none."""
    given = os.environ.get("VLLM_PYTHON")
    if given:
        return given
    if importlib.util.find_spec("vllm") is None:
        check_version(None, f"this interpreter, {sys.executable},")
    return sys.executable


def _environment(device: torch.device, ranks: TensorRanks | None) -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    variables = {**_DEFAULTS, **variables}
    if device.type == "cuda":
        devices = (visible_device(device),) if ranks is None else ranks.devices
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # handles of CUDA IPC are pickled
    return variables
