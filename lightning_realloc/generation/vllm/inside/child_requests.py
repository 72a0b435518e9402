"""Complete requests in vLLM's process: report each response as it finishes, and stop when a budget is spent.

`child` loads this file by its path in vLLM's interpreter, so it imports nothing of this package.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any


class RequestLoop:
    """Gives vLLM as many requests as it runs at a time: it would hold the pixels of those that wait.

    Args:
        engine: vLLM's ``LLMEngine``.
        most_running: Most requests that it runs at a time.
        add: Adds a request to the engine.
        response_of: Returns the message for an output of the engine.
        say: Sends the rank a message.
        receive: Waits for the rank's next message; None: it has closed the connection.
    """

    longest_silence_s = 1.0
    """Seconds of work after which a sign of life is sent."""

    def __init__(
        self,
        engine: Any,
        *,
        most_running: int,
        add: Callable[[Mapping[str, Any]], None],
        response_of: Callable[[Any], dict[str, Any]],
        say: Callable[[Mapping[str, Any]], None],
        receive: Callable[[], Mapping[str, Any] | None],
    ) -> None:
        self._engine, self._most_running = engine, most_running
        self._add, self._response_of, self._say, self._receive = add, response_of, say, receive

    def run(self, requests: Iterable[Mapping[str, Any]], budget: Mapping[str, float | None] | None) -> dict[str, int]:
        """Complete all requests, or leave them when the budget is spent; return the number of forward passes.

        ``budget`` has the ``tokens`` and ``seconds`` that are left; None: no bound. The rank is asked between two
        steps, once all finished responses are sent, and asked again only after a further one: what it waits for are
        finished responses. So no response can finish while the others are cut.
        """
        engine, begin = self._engine, time.monotonic()
        waiting, said, num_steps, num_tokens, asks = deque(requests), begin, 0, 0, True
        while waiting or engine.has_unfinished_requests():
            if waiting and engine.get_num_unfinished_requests() < self._most_running:
                self._add(waiting.popleft())
                finished, is_step = [], False
            else:
                num_steps += 1
                finished, is_step = [output for output in engine.step() if output.finished], True
            for output in finished:
                num_tokens += len(output.outputs[0].token_ids)
                self._say({"response": self._response_of(output)})
            if finished or time.monotonic() - said > self.longest_silence_s:
                said = time.monotonic()
                self._say({"alive": num_steps})
            if budget is None or not is_step:
                continue
            asks |= bool(finished)
            is_open = waiting or engine.has_unfinished_requests()
            if asks and is_open and self._is_spent(budget, num_tokens, time.monotonic() - begin):
                asks = False
                if self._may_stop(num_steps):
                    self._cut()
                    break
        return {"num_steps": num_steps}

    def _may_stop(self, num_steps: int) -> bool:
        """Ask the rank whether it leaves open requests unfinished."""
        self._say({"spent": num_steps})
        answer = self._receive()
        if answer is None:
            raise ConnectionError("the rank has closed the connection")
        return bool(answer["stop"])

    def _is_spent(self, budget: Mapping[str, float | None], num_tokens: int, seconds: float) -> bool:
        """Return whether finished responses with ``num_tokens`` and open ones, or the seconds, use the budget up."""
        if budget["tokens"] is not None:
            states = self._engine.output_processor.request_states.values()
            if num_tokens + sum(state.detokenizer.num_output_tokens() for state in states) >= budget["tokens"]:
                return True
        return budget["seconds"] is not None and seconds >= budget["seconds"]

    def _cut(self) -> None:
        """Report the tokens of running requests, and abort these.

        vLLM's own abort returns nothing of a request whose final output alone was asked for. Its state has all
        tokens, so none had to be reported in earlier steps.
        """
        states = list(self._engine.output_processor.request_states.values())
        for state in states:
            if state.detokenizer.num_output_tokens():
                output = state.make_request_output([], None, "abort", None)  # any reason: vLLM reads that there is one
                self._say({"response": {**self._response_of(output), "reason": "unfinished"}})
        self._engine.abort_request([state.request_id for state in states], internal=True)
