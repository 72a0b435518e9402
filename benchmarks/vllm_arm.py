"""Arm of `benchmarks.generation` that runs vLLM in its own process, with other versions of torch and transformers.

The child measures its CPU time around vLLM's calls. Its log-probabilities are compared with a forward pass of the
model, so both arms have the same weights, also after a hand-over.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

_CHILD = Path(__file__).with_name("vllm_child.py")
_LARGEST_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.15}


class VllmUnavailableError(Exception):
    """vLLM cannot run here; the message has the reason."""


class VllmArm:
    """vLLM with a copy of a model; a context manager, which ends the process."""

    def __init__(self, python: Path, model: PreTrainedModel, *, max_sequences: int) -> None:
        """Start vLLM with its interpreter and wait until it is ready.

        Raises:
            VllmUnavailableError: if the interpreter does not exist or vLLM does not start.
        """
        self._model = model
        self._folder = TemporaryDirectory()
        model.save_pretrained(self._folder.name)
        self._log = Path(self._folder.name) / "log"
        try:
            with self._log.open("w") as log:
                self._child = subprocess.Popen(
                    [str(python), str(_CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
                )
        except OSError as error:
            raise VllmUnavailableError(f"{python} does not start: {error.strerror}") from error
        dtype = str(model.dtype).removeprefix("torch.")
        settings = {"model": self._folder.name, "dtype": dtype, "max_model_len": 512, "max_num_seqs": max_sequences}
        self.version = self._ask(**settings)["version"]

    def __enter__(self) -> VllmArm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def generate(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int], n: int = 1) -> float:
        """Return the CPU-seconds of ``n`` responses of exactly these lengths per prompt."""
        answer = self._ask(prompts=prompts, lengths=lengths, n=n)
        if answer["tokens"] != n * sum(lengths):
            raise RuntimeError(f"vLLM made {answer['tokens']} tokens, the workload wants {n * sum(lengths)}")
        self._check_weights(prompts[0], answer)
        return float(answer["cpu_s"])

    def hand_over(self) -> float:
        """Send the model's current weights to vLLM; return the CPU-seconds of loading them from memory."""
        path = Path(self._folder.name) / "update" / "weights.safetensors"
        path.parent.mkdir(exist_ok=True)
        save_file({name: parameter.detach() for name, parameter in self._model.named_parameters()}, path)
        return float(self._ask(weights=str(path))["cpu_s"])

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._child.stdin is not None and self._child.stdout is not None
        with suppress(BrokenPipeError):  # the child's last line, if any, has the reason
            print(json.dumps(request), file=self._child.stdin, flush=True)
        line = self._child.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._exit_reason()}
        if "error" in answer:
            self._close()
            raise VllmUnavailableError(f"vLLM does not run: {answer['error']}")
        return answer

    def _exit_reason(self) -> str:
        code, said = self._child.wait(), self._log.read_text().strip()
        return f"it ended with {code}; its last line of output is {said.splitlines()[-1] if said else 'nothing'!r}"

    def _close(self) -> None:
        self._child.communicate(timeout=60)
        self._folder.cleanup()

    @torch.no_grad()
    def _check_weights(self, prompt: Sequence[int], answer: dict[str, Any]) -> None:
        tokens, reported = answer["token_ids"], torch.tensor(answer["logprobs"])
        logits = self._model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.float().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        error = float((logprobs - reported).abs().max())
        if not error < _LARGEST_ERROR[self._model.dtype]:
            raise RuntimeError(f"vLLM's log-probabilities are {error:.3g} off the model's: it runs other weights")
