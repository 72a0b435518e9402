"""Requests to vLLM, its responses, and the interface of the two ways to reach it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from lightning_realloc.batch.prompt_images import PromptImages
from lightning_realloc.errors import GenerationError

TESTED_VERSIONS = ("0.32.",)
"""Beginnings of the versions of vLLM whose interfaces the engine was tested with."""


class EngineLost(GenerationError):
    """vLLM ended, or gave no sign of life for too long; its open requests are lost.

    ``is_reported``: vLLM raised an error, and did not just end.
    """

    def __init__(self, message: str, *, is_reported: bool = False) -> None:
        super().__init__(message)
        self.is_reported = is_reported


class StartFailed(EngineLost):
    """vLLM did not start, or failed at its first request; another try would fail alike."""


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raise EngineLost for an answer of another form than vLLM's; ``what`` names who sent it."""
    try:
        yield
    except GenerationError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise EngineLost(f"{what} sent something else than vLLM's answer ({reason})") from error


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A sequence to complete once."""

    index: int
    """Number of the request, distinct within a call."""
    prompt: tuple[int, ...]
    """Tokens of the sequence: a prompt, or a prompt and the response so far."""
    max_tokens: int
    """Most tokens of the response."""
    min_tokens: int
    """Number of first tokens among which no stop token is drawn and stop strings are ignored."""
    seed: int
    """Seed of the response's random numbers, from 0 to 2**63 - 1."""
    images: PromptImages | None = None
    """Images that the sequence shows; None: it is text alone."""

    def message(self, folder: Path) -> dict[str, Any]:
        """Return the request for JSON, with a file of each image; images without one get it in ``folder``."""
        paths = () if self.images is None else self.images.paths(folder)
        return {**asdict(replace(self, images=None)), "images": list(map(str, paths))}


def request_messages(requests: Sequence[TokenRequest], folder: Path) -> list[dict[str, Any]]:
    """Return requests for JSON, with images that are in no files in ``folder``."""
    try:
        return [request.message(folder) for request in requests]
    except OSError as error:
        raise GenerationError(
            f"the images of prompts cannot be handed to vLLM through {folder.parent}: {error}; free space there, or "
            f"set TMPDIR to a folder with more"
        ) from error


@dataclass(frozen=True, slots=True)
class TokenResponse:
    """A response as vLLM returns it."""

    index: int
    """Number of its request."""
    token_ids: tuple[int, ...]
    """Tokens, including a stop token."""
    logprobs: tuple[float, ...]
    """One per token."""
    reason: str
    """vLLM's reason of the end, "stop" or "length", or "unfinished" where a budget cut it; others are failures."""
    versions: tuple[str, ...]
    """Labels of all weights that generated its tokens."""

    def __post_init__(self) -> None:
        numbers, texts = (self.index, *self.token_ids), (self.reason, *self.versions)
        if not all(isinstance(number, int) for number in numbers) or not all(isinstance(text, str) for text in texts):
            raise TypeError("a response with fields of other kinds")
        if not all(isinstance(logprob, int | float) for logprob in self.logprobs):
            raise TypeError("a response with logprobs that are no numbers")
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.token_ids)} tokens and {len(self.logprobs)} logprobs")

    @classmethod
    def from_message(cls, made: Any) -> TokenResponse:
        """Return the response that vLLM's process sent as JSON."""
        return cls(
            made["index"], tuple(made["token_ids"]), tuple(made["logprobs"]), made["reason"], tuple(made["versions"])
        )


OnResponse = Callable[[TokenResponse], None]
"""Receives each response once, as soon as it has finished."""


class CallBudget(Protocol):
    """Budget of a call; `Budget` documents the members. Responses are counted as soon as they are received."""

    def left(self) -> tuple[float, float]: ...

    def may_stop(self) -> bool: ...

    def is_spent(self) -> bool: ...


def bounds_message(budget: CallBudget) -> dict[str, float | None]:
    """Return the tokens and seconds that are left, for JSON; None: no bound."""
    tokens, seconds = (None if left == math.inf else left for left in budget.left())
    return {"tokens": tokens, "seconds": seconds}


class Connection(Protocol):
    """A vLLM that is ready to generate."""

    max_length: int
    """Most tokens of prompt and response together."""
    version: str
    """vLLM's version."""

    @property
    def process_id(self) -> int | None:
        """Process of vLLM on this machine; None for a server."""

    def update_weights(self, model: nn.Module, label: str) -> int:
        """Replace vLLM's weights by the model's, label them, and drop keys and values of the old ones.

        Returns the bytes that vLLM was given.
        """

    def generate(
        self,
        requests: Sequence[TokenRequest],
        sampling: Mapping[str, Any],
        on_response: OnResponse,
        budget: CallBudget | None = None,
    ) -> int:
        """Complete all requests; return the number of forward passes, 0 if unknown.

        ``sampling`` holds further fields of vLLM's ``SamplingParams``. Once the ``budget`` is spent and may stop, the
        responses of running requests are "unfinished", and requests that did not begin have none.
        """

    def sleep(self) -> None:
        """Free the device's memory until the next update of weights."""

    def close(self) -> None:
        """End the connection, and a process that belongs to it."""


def check_version(version: str | None, where: str) -> str:
    """Return a version of vLLM that was tested; ``where`` names the environment or server.

    Raises:
        GenerationError: for another one, or None: no vLLM.
    """
    tested = " or ".join(f"{prefix}*" for prefix in TESTED_VERSIONS)
    if version is None:
        raise GenerationError(
            f"{where} has no vLLM; make an environment with vllm=={tested} (`make vllm-env`), and name its interpreter "
            f"by VLLMOptions(python=...) or the variable VLLM_PYTHON"
        )
    if not version.startswith(TESTED_VERSIONS):
        raise GenerationError(
            f"{where} has vLLM {version}, and weights are handed over by interfaces that were tested with {tested} "
            f"alone; install vllm=={tested}"
        )
    return version
