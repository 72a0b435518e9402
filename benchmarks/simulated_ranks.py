"""What one rank of many does between the calls of an iteration: CPU seconds, messages and bytes.

One process runs the real code of one rank on GRPO's calls: which rank works on which samples, micro-batches,
deliveries, encoding and decoding. First that is rank 0, the root of the tree of hosts, which also merges what others
send, then a rank at the tree's end, as most are. The other ranks exist as their messages alone, which are made outside
of the measured time.
Models, and the transport of messages, are left out. Sizes run from 8 ranks, which are all real elsewhere, to 4,096.

Run ``python -m benchmarks.simulated_ranks``.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from benchmarks.harness import BenchmarkReport, be_quiet, make_parser
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.training import TrainOptions
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.layout import Layout
from lightning_realloc.runtime.messages.codec import encode_message
from lightning_realloc.runtime.messages.frame_port import FramePort, Header
from lightning_realloc.runtime.messages.host_tree import TreeNode
from lightning_realloc.runtime.messages.mailbox import WHOLE, Frame, FrameKind, Mailbox
from lightning_realloc.strategies.exchange.generated_samples import Directory
from lightning_realloc.strategies.exchange.iteration_data import IterationData
from lightning_realloc.strategies.exchange.iteration_report import IterationReport
from lightning_realloc.strategies.exchange.routing import CallPlacement, Routes
from lightning_realloc.strategies.exchange.sample_table import SampleTable, outline, product_columns

SIZES = (8, 64, 512, 4096)
NUM_SAMPLES, GROUP = 102_400, 8
"""Responses of an iteration, and those to one prompt."""
HOST = 8
"""Ranks of a host."""
MAX_CPU_S = 0.3
"""CPU seconds of a rank in an iteration of 512 ranks."""
GENERATE = ModelFunctionCall("actor.generate", "generate", "actor", "rollout", ("batch",), ("rollout",))
JUDGE = ModelFunctionCall("judge", "compute", None, "judge", ("rollout",), ("rewards",))
INFER = ModelFunctionCall("reference.infer", "infer", "reference", "log_probs", ("rollout",), ("ref_logprobs",))
ESTIMATE = ModelFunctionCall("advantages", "compute", None, "estimate", ("rollout", "rewards"), ("advantages",))
TRAIN = ModelFunctionCall(
    "actor.train", "train", "actor", "loss", ("rollout", "advantages", "ref_logprobs"), (),
)  # fmt: skip
CALLS = (GENERATE, JUDGE, INFER, ESTIMATE, TRAIN)


class Lengths:
    """Tokens of all prompts and responses, from a seed."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.prompts = torch.from_numpy(rng.integers(64, 512, NUM_SAMPLES // GROUP))
        self.responses = torch.from_numpy(rng.geometric(1 / 512, NUM_SAMPLES).clip(16, 4096))

    def batch(self) -> Samples:
        """Return all prompts, with lengths alone: no token plays a part."""
        ids = torch.arange(len(self.prompts))
        return Samples(ids, {"prompt_ids": _sequences(self.prompts)}).lengths_only()

    def rollout(self, prompts: torch.Tensor) -> Samples:
        """Return the responses to some prompts."""
        ids = (prompts[:, None] * GROUP + torch.arange(GROUP)).flatten()
        owners, responses = ids // GROUP, _sequences(self.responses[ids])
        columns: dict[str, Any] = {"prompt_id": owners, "num_model_tokens": self.responses[ids]}
        return Samples(ids, columns | {"prompt_ids": _sequences(self.prompts[owners]), "response_ids": responses})

    def made(self, call: ModelFunctionCall, ids: torch.Tensor) -> Samples:
        """Return what a later call makes of samples: numbers, or numbers of every response token."""
        (name,) = call.produces
        if call is INFER:
            return Samples(ids, {name: _sequences(self.responses[ids], torch.float32)})
        return Samples(ids, {name: ids.float()})


def _sequences(lengths: torch.Tensor, dtype: torch.dtype = torch.int64) -> Ragged:
    return Ragged(torch.zeros(int(lengths.sum()), dtype=dtype), lengths)


class OtherRanks(FramePort):
    """Port of one rank: the frames of all others, made when the rank waits for them.

    Args:
        rank: The rank.
        world_size: Number of ranks, eight on each host.
        routes: A plan of its own, so that the rank does not profit from what was worked out here.
        lengths: Lengths of all samples.
    """

    def __init__(self, rank: int, world_size: int, routes: Routes, lengths: Lengths) -> None:
        super().__init__(None, probe=FrameKind.PROBE)
        self.hosts = [range(first, first + HOST) for first in range(0, world_size, HOST)]
        """Ranks of each host."""
        self.num_sent = 0
        """Frames that the rank sends."""
        self.num_received = 0
        """Frames that it reads."""
        self.num_bytes = 0
        """Bytes of both."""
        self.paused_s = 0.0
        """CPU seconds of this class."""
        self._rank, self._routes, self._lengths = rank, routes, lengths
        self._prompts = SampleTable(lengths.batch())
        self._table: SampleTable | None = None
        self._queue: deque[tuple[int, Header, torch.Tensor]] = deque()

    @contextmanager
    def _paused(self) -> Iterator[None]:
        begin = time.process_time()
        yield
        self.paused_s += time.process_time() - begin

    def send(self, to: int, header: Header, content: torch.Tensor) -> list[Any]:
        """Count a frame."""
        self.num_sent += 1
        self.num_bytes += content.numel()
        return []

    def next_header(self) -> tuple[int, Header] | None:
        """Return the next frame's source and header."""
        return self._queue[0][:2] if self._queue else None

    def content(self, source: int, size: int, timeout: Any = None) -> torch.Tensor:
        """Return the next frame's content."""
        _, _, content = self._queue.popleft()
        self.num_received += 1
        self.num_bytes += size
        return content

    def begin(self, table: SampleTable) -> None:
        """Continue with the samples that all ranks generated."""
        with self._paused():
            self._table = SampleTable(table.known, table.holders, chunks=table.chunks)

    def expect(self, frame: Frame) -> None:
        """Make the frames that the rank needs for this one.

        Those of a whole are the merged parts of its children in the tree, or the whole itself from its parent.
        """
        with self._paused():
            if frame.source != WHOLE:
                self._put(frame.source, frame, FrameKind.ROWS, frame.part, self._rows(frame))
                return
            gives = np.ones(HOST * len(self.hosts), dtype=bool)
            if frame.kind == FrameKind.DIRECTORY:
                gives[:] = np.isin(np.arange(len(gives)), self._routes.placements[GENERATE.name].senders)
            node = TreeNode.find(self._rank, self.hosts)
            if node.parent is not None:
                self._put(node.parent, frame, frame.kind, 0, self._merged(frame.kind, range(len(gives)), gives))
                return
            for child, ranks in node.children.items():
                if gives[list(ranks)].any():
                    content = (gives, self._merged(frame.kind, ranks, gives))
                    self._put(child, frame, FrameKind.PART, frame.kind, content)

    def _merged(self, kind: FrameKind, ranks: Sequence[int], gives: np.ndarray) -> Any:
        parts = [self._part(kind, rank) for rank in ranks if gives[rank]]
        return type(parts[0]).merge(parts)

    def _put(self, source: int, frame: Frame, kind: FrameKind, part: int, content: object) -> None:
        encoded = encode_message(content)
        self._queue.append((source, Header(kind, frame.run, frame.call, part, encoded.numel()), encoded))

    def _part(self, kind: FrameKind, rank: int) -> Any:
        if kind == FrameKind.DIRECTORY:
            prompts = self._routes.positions(GENERATE, rank, self._prompts)
            return Directory.of(rank, [self._lengths.rollout(torch.from_numpy(prompts))])
        assert self._table is not None
        report = IterationReport(maxima={f"seconds/{each.name}": 1.0 for each in CALLS})
        for each in (JUDGE, INFER, ESTIMATE):
            rows = np.flatnonzero(self._routes.holders(each, self._table).senders == rank)
            if len(rows):
                report.values[each.name] = outline(self._lengths.made(each, self._table.ids(rows)))
        return report

    def _rows(self, frame: Frame) -> Samples:
        assert self._table is not None
        call = self._routes.calls[frame.call]
        ids = self._table.ids(self._routes.outgoing(call, frame.source, self._table)[self._rank])
        made = self._lengths.made(call, ids) if call is not GENERATE else self._rollout_of(ids)
        return product_columns(made, call, self._routes.products(call, self._rank, self._table))

    def _rollout_of(self, ids: torch.Tensor) -> Samples:
        return self._lengths.rollout(torch.unique(ids // GROUP)).by_ids(ids)


class LoneMailbox(Mailbox):
    """Mailbox of one rank, with frames that are made when it waits for them."""

    def __init__(self, rank: int, others: OtherRanks) -> None:
        super().__init__(rank, HOST * len(others.hosts), None, hosts=others.hosts)
        self._port = self._others = others

    def _receive(self, frame: Frame, what: str, sources: tuple[int, ...]) -> torch.Tensor:
        self._others.expect(frame)
        return super()._receive(frame, what, sources)


def measure(world_size: int, rank: int, seed: int) -> dict[str, Any]:
    """Return the figures of one rank, which generates."""
    half = f"dp{world_size // 2}.tp2"
    layouts = {GENERATE: half, INFER: half, TRAIN: f"dp{world_size // 8}.fsdp8"}
    places = {
        call.name: CallPlacement(
            layout=Layout.parse(text), micro_batch_tokens=16_384, train_options=TrainOptions(num_minibatches=4),
            order_seeds=(seed,),
        )
        for call, text in layouts.items()
    }  # fmt: skip
    lengths = Lengths(seed)
    others = OtherRanks(rank, world_size, Routes(CALLS, places, world_size), lengths)
    batch, seconds = lengths.batch(), defaultdict[str, float](float)

    def timed(name: str, function: Callable[[], Any]) -> Any:
        begin, paused = time.process_time(), others.paused_s
        found = function()
        seconds[name] += time.process_time() - begin - (others.paused_s - paused)
        return found

    routes = timed("generate", lambda: Routes(CALLS, places, world_size))
    data = timed("generate", lambda: IterationData(batch, routes, LoneMailbox(rank, others), rank=rank, run=1))
    prompts = timed("generate", lambda: data.inputs(GENERATE))
    made = lengths.rollout(prompts.ids)
    timed("generate", lambda: data.record(GENERATE, made))
    table = timed("generate", lambda: data.table(JUDGE))
    others.begin(table)
    for call in (JUDGE, INFER, ESTIMATE):
        timed(call.name, lambda call=call: data.rows(call))
        ids = table.ids(routes.positions(call, rank, table))
        timed(call.name, lambda call=call, ids=ids: data.record(call, lengths.made(call, ids)))
    timed("actor.train", lambda: data.rows(TRAIN))
    steps = timed("actor.train", lambda: routes.train_steps(TRAIN, table))
    timed("actor.train", lambda: [table.totals(step.positions, group_size=1, sums_of=()) for step in steps])
    timed("report", data.send_report)
    timed("report", data.receive_report)
    return {
        "ranks": world_size,
        "CPU s": sum(seconds.values()),
        **{f"{name}, s": value for name, value in seconds.items()},
        "messages sent": others.num_sent,
        "messages read": others.num_received,
        "MB": others.num_bytes / 1e6,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all sizes."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="numbers of ranks, multiples of 8")
    options = parser.parse_args(arguments)
    be_quiet()
    settings = {"sizes": options.sizes, "samples": NUM_SAMPLES}
    report = BenchmarkReport("simulated_ranks", settings=settings)
    for world_size in options.sizes:
        for place, rank in (("root", 0), ("end", world_size - 2)):
            row = measure(world_size, rank, seed=0)
            report.add_row(place=place, **row)
            if world_size == 512:
                report.require_at_most(f"512 ranks: CPU s of the {place}", row["CPU s"], MAX_CPU_S)
            report.write(options.json)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
