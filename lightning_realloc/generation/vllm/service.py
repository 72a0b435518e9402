"""Keep one vLLM running for a role on this rank: start it when it is needed, give it new weights, restart it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from lightning_realloc.batch.prompt_images import PromptImages
from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.base_engine import GivenWeights
from lightning_realloc.generation.vllm.hand_over_proof import HandOverProof
from lightning_realloc.generation.vllm.messages import (
    CallBudget,
    Connection,
    EngineLost,
    OnResponse,
    StartFailed,
    TokenRequest,
    TokenResponse,
)

_log = logging.getLogger(__name__)


class VLLMService:
    """A vLLM that outlives the plan, and is replaced when it is lost.

    Args:
        connect: Starts vLLM for a model or connects to it. Its flag: whether vLLM needs a tokenizer, for stop strings.
            Its images: some that prompts show; None: they show none.
        restarts: Times that it is connected to again after a loss.
        proof: Compares the weights that vLLM gets; it lives as long.
    """

    def __init__(
        self,
        connect: Callable[[nn.Module, bool, PromptImages | None], Connection],
        *,
        restarts: int,
        proof: HandOverProof,
    ) -> None:
        self.proof = proof
        self._connect, self._restarts_left = connect, restarts
        self._connection: Connection | None = None
        self._has_tokenizer = False
        self._images: PromptImages | None = None
        """Images for whose processor vLLM was started; None: it reads text alone."""
        self._num_updates = 0
        self._label = ""
        self._is_current = False
        """Whether vLLM has the model's current weights."""
        self.given = GivenWeights()
        """Weights that vLLM was given so far."""
        self.preparing_s = 0.0
        """Seconds of calls in which vLLM started and got weights."""

    def weights_changed(self) -> None:
        """Hand weights over before the next response."""
        self._is_current = False

    @property
    def max_length(self) -> int | None:
        """Most tokens of prompt and response together; None before vLLM has started."""
        return None if self._connection is None else self._connection.max_length

    def generate(
        self,
        model: nn.Module,
        requests: Sequence[TokenRequest],
        sampling: Mapping[str, Any],
        on_response: OnResponse,
        budget: CallBudget | None = None,
    ) -> int:
        """Complete every request once on the model's current weights; return the number of forward passes.

        With a ``budget``, requests may be left as `Connection` describes; those of a lost vLLM are not repeated once
        it is spent.

        Raises:
            EngineLost: if vLLM was lost more often than it may be restarted.
            GenerationError: for a response of other weights, and for weights that vLLM does not take.
        """
        waiting = {request.index: request for request in requests}
        images = next((request.images for request in requests if request.images is not None), None)

        def accept(response: TokenResponse) -> None:
            if response.index not in waiting:
                raise EngineLost(f"vLLM answered request {response.index}, which is not open")
            self._check(response)
            del waiting[response.index]
            on_response(response)

        while True:
            try:
                begin = time.monotonic()
                try:
                    connection = self.prepare(model, needs_tokenizer=bool(sampling.get("stop")), images=images)
                finally:
                    self.preparing_s += time.monotonic() - begin
                return connection.generate(list(waiting.values()), sampling, accept, budget)
            except EngineLost as lost:
                self.close()
                if self._restarts_left < 1 or isinstance(lost, StartFailed):
                    raise
                self._restarts_left -= 1
                if budget is not None and budget.is_spent():
                    _log.warning("%s; its last %d requests stay as they were before the iteration", lost, len(waiting))
                    return 0
                _log.warning("%s; it is started again, and %d requests are repeated", lost, len(waiting))
            except BaseException:  # requests may still be open, whose responses nobody expects
                self.close()
                raise

    @property
    def process_id(self) -> int | None:
        """Process of vLLM on this machine; None before it has started, and for a server."""
        return None if self._connection is None else self._connection.process_id

    def prepare(
        self, model: nn.Module, *, needs_tokenizer: bool = False, images: PromptImages | None = None
    ) -> Connection:
        """Start vLLM if it does not run, and give it the model's weights if they have changed.

        One that was started without a tokenizer, or for text alone, is replaced when that is needed; not the reverse.
        """
        if (needs_tokenizer and not self._has_tokenizer) or (images is not None and self._images is None):
            self.close()
        if self._connection is None:
            needs_tokenizer, images = self._has_tokenizer or needs_tokenizer, self._images or images
            self._connection = self._connect(model, needs_tokenizer, images)
            self._has_tokenizer, self._images = needs_tokenizer, images
        if not self._is_current:
            self._num_updates += 1
            self._label = f"{id(self):x}-{self._num_updates}"
            begin = time.monotonic()
            num_bytes = self._connection.update_weights(model, self._label)
            seconds = self.given.seconds + time.monotonic() - begin
            self.given = GivenWeights(self.given.num_bytes + num_bytes, seconds, self.proof.seconds)
            self._is_current = True
        return self._connection

    def sleep(self) -> None:
        """Free the device's memory; the next call hands weights over again."""
        if self._connection is not None:
            self._connection.sleep()
            self._is_current = False

    def close(self) -> None:
        """End vLLM, or the connection to it; the next call starts it again."""
        if self._connection is not None:
            self._connection.close()
        self._connection, self._is_current = None, False

    def _check(self, response: TokenResponse) -> None:
        if response.versions != (self._label,):
            given = ", ".join(response.versions) or "none"
            raise GenerationError(
                f"vLLM answered with the weights {given} in place of {self._label}, which it was given last; let no "
                f"other run use the same server"
            )
        if response.reason not in ("stop", "length", "unfinished"):
            raise GenerationError(
                f"vLLM ended a response with the reason {response.reason!r}; its log tells why, and "
                f"VLLMOptions(arguments={{...}}) sets what it asks for"
            )
