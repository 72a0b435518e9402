"""An engine in place of vLLM's for `child_requests`: each step adds the next number to every running request.

It imports nothing, since the stand-in loads it by its path.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class CountingState:
    """A running request, with the members of vLLM's ``RequestState`` that the loop reads."""

    def __init__(self, request: Any, stops: list[int]) -> None:
        self.request_id = f"internal-{request['index']}"
        self.detokenizer = self
        self.request, self.stops = request, stops
        self.tokens: list[int] = []

    def num_output_tokens(self) -> int:
        """Return the number of tokens so far."""
        return len(self.tokens)

    @property
    def reason(self) -> str | None:
        """Why the response has ended; None: it has not."""
        if self.tokens[-1] in self.stops:
            return "stop"
        return "length" if len(self.tokens) >= self.request["max_tokens"] else None

    def make_request_output(self, new_token_ids: list[int], pooling: None, reason: Any, stop_reason: None) -> Any:
        """Return the output so far."""
        made = SimpleNamespace(token_ids=list(self.tokens), finish_reason=reason)
        return SimpleNamespace(finished=reason is not None, request_id=str(self.request["index"]), outputs=[made])


class CountingEngine:
    """Counts upwards from the last token of each request's prompt; a new request spends a step on reading."""

    def __init__(self, stops: list[int]) -> None:
        self.output_processor = self
        self.request_states: dict[str, CountingState] = {}
        self._new: set[str] = set()
        self._stops = stops
        self.aborted: list[str] = []

    def add_request(self, request: Any) -> None:
        """Begin a request."""
        state = CountingState(request, self._stops)
        self.request_states[state.request_id] = state
        self._new.add(state.request_id)

    def has_unfinished_requests(self) -> bool:
        """Return whether a request runs."""
        return bool(self.request_states)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of running requests."""
        return len(self.request_states)

    def step(self) -> list[Any]:
        """Give every request that was read its next token, and return the outputs of those that have finished."""
        outputs = []
        for state in list(self.request_states.values()):
            if state.request_id in self._new:
                self._new.remove(state.request_id)
                continue
            last = state.tokens[-1] if state.tokens else state.request["prompt"][-1]
            state.tokens.append((last + 1) % 128)
            if state.reason is not None:
                del self.request_states[state.request_id]
                outputs.append(state.make_request_output([], None, state.reason, None))
        return outputs

    def abort_request(self, request_ids: list[str], internal: bool = False) -> None:
        """Forget requests."""
        assert internal, "these are the engine's own names"
        for request_id in request_ids:
            del self.request_states[request_id]
        self.aborted += request_ids
