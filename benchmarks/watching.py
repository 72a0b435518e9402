"""What watching a run and checking its values cost: their processor time as a share of an iteration's.

Two ranks train GRPO with a layout for every call. Rank 0 sums the processor time of the functions in `WATCHED` and
`CHECKS`, of the thread that trains as well as of the watchdog's threads. Reading the clock twice for each call counts
as well.

Run ``python -m benchmarks.watching``.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import reduce, wraps
from importlib import import_module
from typing import Any

from benchmarks.harness import BenchmarkReport, make_parser
from benchmarks.ranks import answer_of_first_rank

PACKAGE = "lightning_realloc"
WATCHED: Mapping[str, tuple[str, ...]] = {
    "watchdog": (
        "runtime.messages.watchdog:Watchdog._late_activity",
        "runtime.messages.watchdog:Watchdog._reach_store",
        "runtime.messages.watchdog:Watchdog._answer",
    ),
    "flight record": ("runtime.messages.flight_record:FlightRecord.during",),
    "signals": ("strategies.lightning.signals:StopRequest.agree_before_batch",),
}
"""Part -> functions, as module:name."""
CHECKS: Mapping[str, tuple[str, ...]] = {
    "batches": (
        "algorithms.rollout.policy_gradient:PolicyGradient.check_batch",
        "batch.samples:_check_column",
        "generation.loop.requests:Requests._check_prompt",
    ),
    "rewards": ("rewards.functions:refuse_infinite_sums",),
    "gradients": ("strategies.calls.train_call:TrainCalls._require_even_gradients",),
}
"""Part -> functions that check values in every iteration; checks at the start of a run are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Model of eight million weights, and short responses: short iterations, in which fixed costs count most."""

    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    vocabulary: int = 4096
    num_prompts: int = 4
    num_generations: int = 2
    prompt_tokens: int = 16
    new_tokens: int = 32
    iterations: int = 40


def owner_of(place: str) -> tuple[Any, str]:
    """Return the class or module of a function that is given as module:name, and the function's name there."""
    module, _, path = place.partition(":")
    *outer, name = path.split(".")
    return reduce(getattr, outer, import_module(f"{PACKAGE}.{module}")), name


@dataclass(slots=True)
class Clock:
    """Sums the processor time of functions, in all threads."""

    seconds: defaultdict[str, float]

    def watch(self, part: str, place: str) -> None:
        """Replace a function, given as module:name, by one that is timed."""
        owner, name = owner_of(place)
        timed = self._context if name == "during" else self._timed
        setattr(owner, name, timed(part, getattr(owner, name)))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                self.seconds[part] += time.thread_time() - began

        return run

    def _context(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Time only the entry and the exit of a context manager."""

        @wraps(function)
        @contextmanager
        def run(*args: Any, **options: Any) -> Iterator[None]:
            began = time.thread_time()
            inner = function(*args, **options)
            inner.__enter__()
            self.seconds[part] += time.thread_time() - began
            try:
                yield
            finally:
                began = time.thread_time()
                inner.__exit__(*sys.exc_info())
                self.seconds[part] += time.thread_time() - began

        return run


def measure(work: Workload) -> tuple[dict[str, float], float, float]:
    """Train on this rank; return the seconds of the parts, and processor and wall seconds of all iterations."""
    clock = Clock(defaultdict(float))
    for part, places in (WATCHED | CHECKS).items():
        for place in places:
            clock.watch(part, place)
    meter = watch_iterations(clock)
    train(work, [meter])
    return dict(clock.seconds), meter.cpu_s, meter.wall_s


def train(work: Workload, callbacks: list[Any]) -> None:
    """Train GRPO on this rank, with one iteration more than are measured."""
    from benchmarks.workload import byte_tokenizer, llama_config, make_trainer, random_prompts, share_of_vowels
    from lightning_realloc import GRPO, ReallocStrategy, SamplingParams

    sampling = SamplingParams(n=work.num_generations, max_new_tokens=work.new_tokens, ignore_eos=True)
    module = GRPO(
        llama_config(work), share_of_vowels, tokenizer=byte_tokenizer(), sampling=sampling, kl_coef=0.04,
        learning_rate=1e-5,
    )  # fmt: skip
    layouts = {"actor.generate": "dp2", "reference.infer": "dp2", "actor.train": "fsdp2"}
    trainer = make_trainer(
        strategy=ReallocStrategy({"calls": layouts}), callbacks=callbacks, max_steps=work.iterations + 1, max_epochs=-1
    )
    trainer.fit(module, random_prompts(8 * work.num_prompts, length=work.prompt_tokens, batch_size=work.num_prompts))


def watch_iterations(clock: Clock) -> Any:
    """Return a callback that measures all iterations but the first, and clears the clock after that one."""
    from lightning.pytorch.callbacks import Callback

    class Meter(Callback):
        """Measures processor and wall time."""

        cpu_s = wall_s = 0.0

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 1:
                clock.seconds.clear()
                self._began = time.process_time(), time.perf_counter()
            else:
                self.cpu_s = time.process_time() - self._began[0]
                self.wall_s = time.perf_counter() - self._began[1]

    return Meter()


def main(arguments: list[str] | None = None) -> int:
    """Measure, and report the shares."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--iterations", type=int, default=Workload().iterations, help="measured iterations")
    options = parser.parse_args(arguments)
    work = Workload(iterations=options.iterations)
    report = BenchmarkReport("watching", settings=asdict(work))
    seconds, cpu_s, wall_s = answer_of_first_rank(measure, work, world_size=2)
    for part in WATCHED | CHECKS:
        spent = seconds[part]  # every part must have run
        report.add_row(part=part, ms_per_iteration=1e3 * spent / work.iterations, share=spent / cpu_s)
    report.add_row(part="iteration", ms_per_iteration=1e3 * cpu_s / work.iterations, share=1.0)
    report.settings["wall_s_per_iteration"] = wall_s / work.iterations
    report.require_at_most("watching and checks, as a share of an iteration", sum(seconds.values()) / cpu_s, 0.005)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
