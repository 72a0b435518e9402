"""vLLM in a process of its own on this machine: start it, exchange messages with it, and end it.

Nothing waits without a bound: a process that ends, or says nothing for too long, raises `EngineLost` with the end of
its log.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_realloc.batch.prompt_images import PromptImages
from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.vllm.child import receive, send
from lightning_realloc.generation.vllm.hand_over import CudaIPCHandOver, SharedMemoryHandOver
from lightning_realloc.generation.vllm.messages import (
    EngineLost,
    OnResponse,
    StartFailed,
    TokenRequest,
    TokenResponse,
    check_version,
    reading,
)
from lightning_realloc.generation.vllm.owned_folder import OwnedFolder
from lightning_realloc.generation.vllm.vllm_options import VLLMOptions
from lightning_realloc.runtime.dtypes import dtype_name
from lightning_realloc.runtime.model.image_inputs import placeholder_ids

_PROGRAM = Path(__file__).with_name("child.py")
_OF_RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of torchrun, by which vLLM would take itself for one of the run's ranks."""
_MARK = "LIGHTNING_REALLOC_VLLM"
"""Variable by which the processes of one vLLM are found."""
_ERROR = re.compile(r"\b[A-Za-z_.]*(?:Error|Exception): .*")
_DEFAULTS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: no further one can be left behind
    "VLLM_NO_USAGE_STATS": "1",
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
    ) -> None:
        """Start vLLM for a model's configuration, and wait until it is ready. Its weights come later.

        ``images``: some of the prompts', whose processor vLLM gets; None: it reads text alone, and loads no tower.

        Raises:
            GenerationError: for an interpreter without vLLM, or with a version that was not tested, and for a model
                whose images this vLLM does not read.
            StartFailed: if vLLM does not start.
        """
        self._timeout_s = options.timeout_s
        device: torch.device = next(model.parameters()).device
        self._hand_over = CudaIPCHandOver() if device.type == "cuda" else SharedMemoryHandOver()
        self._is_asleep = False
        self._folder = OwnedFolder()
        folder = self._folder.path
        config = copy.deepcopy(model.config)
        config.architectures = config.architectures or [type(model).__name__]  # which vLLM would guess otherwise
        config.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if images is not None:
            images.save_processor(folder)  # with its tokenizer
        self._log = folder / "vllm.log"
        python = options.python or _interpreter()
        self._mark = secrets.token_hex(8)
        self._process, self._socket = self._start(python, device)
        self._end = weakref.finalize(self, _end, self._process, self._socket, self._folder, self._mark)
        arguments = self._arguments(model, options, max_slots, max_cache_bytes)
        arguments["skip_tokenizer_init"] = tokenizer is None and images is None
        placeholders = sorted(placeholder_ids(model))
        read = None if images is None else {"placeholders": placeholders, "backend": images.backend}
        if images is not None:
            arguments.setdefault("limit_mm_per_prompt", {"video": 0})  # no memory is set aside for them
        elif placeholders:
            arguments["language_model_only"] = True
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
                    env=_environment(device) | {_MARK: self._mark},
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise GenerationError(
                    f"vLLM's interpreter {python} does not start: {error.strerror}; name that of an environment with "
                    f"vLLM by VLLMOptions(python=...) or the variable VLLM_PYTHON"
                ) from error
        return process, ours

    def _arguments(
        self, model: Any, options: VLLMOptions, max_slots: int, max_cache_bytes: int | None
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
        on_cpu = self._hand_over.backend == "shared_memory"
        if on_cpu:
            arguments["enforce_eager"] = True  # compiling takes minutes
        cache_bytes = max_cache_bytes or (1 << 30 if on_cpu else None)  # a share of the host's memory is too much
        if cache_bytes is not None:
            arguments["kv_cache_memory_bytes"] = int(cache_bytes)
        if options.max_length is not None:
            arguments["max_model_len"] = options.max_length
        return arguments | dict(options.arguments)

    @property
    def process_id(self) -> int:
        """Process of vLLM."""
        return self._process.pid

    def update_weights(self, model: nn.Module, label: str) -> None:
        """Replace vLLM's weights; see `Connection`."""
        if self._is_asleep:
            self._call("wake")
            self._is_asleep = False
        self._call("begin_update")
        for chunk in self._hand_over.chunks(model):
            self._call("update", **chunk)
        self._call("finish_update", version=label)

    def generate(self, requests: Sequence[TokenRequest], sampling: Mapping[str, Any], on_response: OnResponse) -> int:
        """Complete all requests; see `Connection`."""
        with TemporaryDirectory(dir=self._folder.path) as folder:
            asked = _messages(requests, Path(folder))
            self._send({"do": "generate", "requests": asked, "sampling": dict(sampling)})
            while "done" not in (message := self._receive()):
                if "response" in message:
                    on_response(_read_response(message["response"]))
        with reading("vLLM's process"):
            return int(message["done"]["num_steps"])

    def sleep(self) -> None:
        """Free the device's memory; see `Connection`."""
        if not self._is_asleep:
            self._call("sleep")
            self._is_asleep = True

    def close(self) -> None:
        """End the process."""
        self._end()

    def _call(self, method: str, **arguments: Any) -> None:
        self._send({"do": method, **arguments})
        self._receive()

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
            end, has_failed = f"ended {_described(code)}", code > 0
        except subprocess.TimeoutExpired:
            end, has_failed = "closed its connection, and was ended", True
        lines = self._log_lines()
        cause = _last_error(lines) if has_failed else ""  # a signal comes from elsewhere than an error that was logged
        self.close()
        raise EngineLost(f"vLLM's process {end}; {cause}{_end_of_log(lines)}")

    def _raise_silent(self) -> NoReturn:
        log_text = _end_of_log(self._log_lines())
        self.close()
        raise EngineLost(
            f"vLLM's process gave no sign of life for {self._timeout_s:g} s and was ended; raise "
            f"VLLMOptions(timeout_s=...) if it only was slow; {log_text}"
        )

    def _log_lines(self) -> list[str]:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return [line.strip() for line in text.splitlines() if line.strip()]


def _messages(requests: Sequence[TokenRequest], folder: Path) -> list[dict[str, Any]]:
    """Return requests for JSON, with images that are in no files in ``folder``."""
    try:
        return [request.message(folder) for request in requests]
    except OSError as error:
        raise GenerationError(
            f"the images of prompts cannot be handed to vLLM through {folder.parent}: {error}; free space there, or "
            f"set TMPDIR to a folder with more"
        ) from error


def _last_error(lines: list[str]) -> str:
    """Return the last error that a log names; empty if it names none. vLLM also logs errors that it goes on after."""
    errors = [found[0] for line in lines if (found := _ERROR.search(line))]
    causes = [error for error in errors if "root cause above" not in error.lower()]
    return f"its log names {causes[-1][:400]}; " if causes else ""


def _end_of_log(lines: list[str]) -> str:
    return f"the end of its log: {' | '.join(lines[-4:])[-600:] or 'nothing'}"


def _interpreter() -> str:
    """Return the interpreter to start when the options name none."""
    given = os.environ.get("VLLM_PYTHON")
    if given:
        return given
    if importlib.util.find_spec("vllm") is None:
        check_version(None, f"this interpreter, {sys.executable},")
    return sys.executable


def _environment(device: torch.device) -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    variables = {**_DEFAULTS, **variables}
    if device.type == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        index = device.index if device.index is not None else torch.cuda.current_device()
        variables["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index] if visible else str(index)
        variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # handles of CUDA IPC are pickled
    return variables


def _end(process: subprocess.Popen[bytes], connection: socket.socket, folder: OwnedFolder, mark: str) -> None:
    connection.close()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # vLLM has nothing to save, and takes seconds to end by itself
    process.wait()
    for left in _marked_processes(mark):  # those that left the process's group
        with suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)
    folder.cleanup()


def _marked_processes(mark: str) -> Iterator[int]:
    """Yield the processes that inherited the mark of a vLLM."""
    wanted = f"{_MARK}={mark}".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # another user's, or ended meanwhile
            if wanted in environment.read_bytes():
                yield int(environment.parent.name)


def _read_response(made: Any) -> TokenResponse:
    with reading("vLLM's process"):
        return TokenResponse(
            made["index"], tuple(made["token_ids"]), tuple(made["logprobs"]), made["reason"], tuple(made["versions"])
        )


def _described(code: int) -> str:
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
