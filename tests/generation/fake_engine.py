"""An engine without a forward pass, for tests in which the tokens are not the point."""

from __future__ import annotations

from lightning_realloc.generation.base_engine import Engine, EngineCall
from lightning_realloc.generation.loop.run import GenerationStats


class CountingEngine(Engine):
    """Responds with 1, 2, 3 …, each with the log-probability -0.5, up to the sample's limit or a stop token."""

    name = "counting"
    capabilities = frozenset({"stream"})

    def _complete(self, call: EngineCall) -> GenerationStats:
        num_steps = 0
        running = call.longest_first()
        while running:
            num_steps += 1
            for sample in running:
                call.stop.take(sample, [len(sample.token_ids) + 1], [-0.5])
            ended = [sample for sample in running if sample.finish_reason is not None]
            call.notifier.report(ended)
            running = [sample for sample in running if sample.finish_reason is None]
        return GenerationStats(num_steps=num_steps, generated_tokens=sum(len(s.token_ids) for s in call.samples))

    def release(self) -> None:
        """Do nothing: no storage is kept between calls."""
