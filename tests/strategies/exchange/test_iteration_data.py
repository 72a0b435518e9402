"""Exchange of samples between ranks: each rank receives its inputs once, for any ranks and layouts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.training import TrainOptions
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import PlanError
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.runtime.messages.codec import decode_message, encode_message
from lightning_realloc.runtime.messages.mailbox import FrameKind, Mailbox
from lightning_realloc.strategies.exchange.iteration_data import IterationData
from lightning_realloc.strategies.exchange.routing import CallPlacement, Routes, table_owner

DEADLINE_S = 20.0

GENERATE = ModelFunctionCall("actor.generate", "generate", "actor", "roll_out", ("batch",), ("rollout",))
INFER = ModelFunctionCall("critic.infer", "infer", "critic", "value", ("rollout",), ("values",))
REWARD = ModelFunctionCall("reward.infer", "infer", "reward", "score", ("rollout",), ("scores",))
JUDGE = ModelFunctionCall("judge", "compute", None, "judge", ("rollout",), ("rewards", "shaped"))
ESTIMATE = ModelFunctionCall(
    "estimate",
    "compute",
    None,
    "estimate",
    ("rollout", "values", "scores", "rewards"),
    ("advantages",),
    whole_batch=True,
)
ACTOR = ModelFunctionCall("actor.train", "train", "actor", "actor_loss", ("rollout", "advantages"))
CRITIC = ModelFunctionCall("critic.train", "train", "critic", "critic_loss", ("rollout", "values", "rewards"))
CALLS = (GENERATE, INFER, JUDGE, REWARD, ESTIMATE, ACTOR, CRITIC)


class Post:
    """State shared by the mailboxes of all ranks."""

    def __init__(self) -> None:
        self.frames: dict[tuple[int, ...], Tensor] = {}
        self.parts: dict[tuple[int, ...], dict[int, Tensor]] = {}
        """(kind, run, call) -> part of each rank that gives one."""
        self.contributors: dict[tuple[int, ...], set[int]] = {}
        self.unread: dict[tuple[int, ...], int] = {}
        """(kind, run, call) -> number of ranks that have not received the whole."""
        self.arrival = threading.Condition()
        self.rows: Counter[tuple[int, int, int]] = Counter()
        """(receiver, call, sample id) -> number of times it was sent."""


class ThreadMailbox:
    """A mailbox between threads."""

    def __init__(self, rank: int, world_size: int, post: Post) -> None:
        self._rank, self._post = rank, post
        self.others = tuple(other for other in range(world_size) if other != rank)

    def send(self, to: Iterable[int], kind: FrameKind, run: int, call: int, content: Tensor, *, part: int = 0) -> None:
        """As `Mailbox.send`."""
        with self._post.arrival:
            for rank in to:
                self._post.frames[rank, kind, run, call, self._rank, part] = content
                if kind in (FrameKind.ROWS, FrameKind.CHUNK):
                    sent = decode_message(content)
                    rows = sent if kind == FrameKind.ROWS else sent.rows
                    ids = [] if rows is None else rows.ids.tolist()
                    self._post.rows.update((rank, call, sample_id) for sample_id in ids)
            self._post.arrival.notify_all()

    def receive(self, kind: FrameKind, run: int, call: int, source: int, *, part: int = 0) -> Tensor:
        """As `Mailbox.receive`."""
        name = (self._rank, kind, run, call, source, part)
        with self._post.arrival:
            assert self._post.arrival.wait_for(lambda: name in self._post.frames, DEADLINE_S), f"{name} never came"
            return self._post.frames.pop(name)

    def share(self, kind: FrameKind, run: int, call: int, part: Any, contributors: Collection[int]) -> None:
        """As `Mailbox.share`."""
        name = (kind, run, call)
        with self._post.arrival:
            parts = self._post.parts.setdefault(name, {})
            assert self._rank in contributors and self._rank not in parts
            assert self._post.contributors.setdefault(name, set(contributors)) == set(contributors)
            parts[self._rank] = encode_message(part)
            self._post.unread[name] = 1 + len(self.others)
            self._post.arrival.notify_all()

    def receive_whole(self, kind: FrameKind, run: int, call: int) -> Any:
        """As `Mailbox.receive_whole`."""
        post, name = self._post, (kind, run, call)
        with post.arrival:
            is_whole = post.arrival.wait_for(
                lambda: name in post.parts and post.parts[name].keys() == post.contributors[name], DEADLINE_S
            )
            assert is_whole, f"{name} never came"
            post.unread[name] -= 1
            parts = [decode_message(part) for _, part in sorted(post.parts[name].items())]
        return type(parts[0]).merge(parts)


def _batch(num_prompts: int) -> Samples:
    prompts = [list(range(3, 4 + prompt % 5)) for prompt in range(num_prompts)]
    names = tuple(f"prompt {prompt}" for prompt in range(num_prompts))
    return Samples(torch.arange(num_prompts) * 10, {"prompt_ids": Ragged.from_list(prompts), "prompt": names})


def _roll_out(prompts: Samples) -> Samples:
    samples = prompts.with_columns(prompt_id=prompts.ids).repeat(2)
    lengths = [(7 * sample_id) % 11 for sample_id in samples.ids.tolist()]
    return Samples(
        samples.ids,
        {
            "prompt_id": samples.tensor("prompt_id"),
            "prompt_ids": samples.ragged("prompt_ids"),
            "response_ids": Ragged.from_list(
                [[n] * length for n, length in zip(samples.ids.tolist(), lengths, strict=True)], dtype=torch.int64
            ),
        },
    )


def _value(samples: Samples) -> Samples:
    rows = [
        torch.full((int(n),), float(i))
        for i, n in zip(samples.ids, samples.ragged("response_ids").lengths, strict=True)
    ]
    return Samples(samples.ids, {"values": Ragged.from_list(rows, dtype=torch.float32)})


def _score(samples: Samples) -> Samples:
    return Samples(samples.ids, {"scores": samples.ids.float() * 5})


def _judge(samples: Samples) -> Samples:
    counts = Counter(samples.tensor("prompt_id").tolist())
    assert set(counts.values()) <= {2}, "the samples of a prompt are judged together"
    rewards = samples.ids.float() / 3
    return Samples(samples.ids, {"rewards": rewards, "shaped": -rewards, "extra": rewards * 2})


def _estimate(samples: Samples) -> Samples:
    centred = samples.tensor("rewards") - samples.tensor("rewards").mean()
    values = samples.ragged("values")
    return Samples(
        samples.ids, {"advantages": Ragged(values.values - centred.repeat_interleave(values.lengths), values.lengths)}
    )


def _send_chunks(data: IterationData, made: Samples) -> None:
    """Send samples in chunks as an engine would, the even ones first; some chunks stay empty."""
    chunked = data.chunked(GENERATE)
    if chunked is None:
        return
    num_chunks = chunked.num_chunks
    order = sorted(range(len(made)), key=lambda row: (int(made.ids[row]) % 4, row))
    for chunk in range(num_chunks - 1):
        rows = order[chunk * len(order) // num_chunks : (chunk + 1) * len(order) // num_chunks]
        if rows:
            chunked.send(made.select(rows))


def _infer(data: IterationData, call: ModelFunctionCall, layout: Layout, rank: int) -> None:
    """Infer chunk by chunk if samples come in chunks, else all at once."""
    method, index = {INFER: _value, REWARD: _score}[call], layout.data_parallel_index(rank)
    if call.name in data.routes.fusion.sources:
        parts = []
        chunked = data.chunked(GENERATE)
        assert chunked is not None
        for chunk in chunked.chunks(data.table(GENERATE).known):
            share = data.routes.fusion.chunk_shares(call, chunk.lengths)[index]
            parts += [chunk.rows.select(micro.positions) for micro in share if micro.counts]
        data.record(call, method(Samples.concatenate(parts)) if parts else None)
        return
    place = data.routes.micro_batches(call, data.table(call))[index]
    counted = sorted({position for micro in place if micro.counts for position in micro.positions})
    data.record(call, method(data.rows(call).select(counted)) if counted else None)


def _walk(
    rank: int, world_size: int, layouts: dict[str, Layout], num_prompts: int, post: Post, num_chunks: int = 1
) -> dict[str, Any]:
    """Run a rank's part of an iteration; return the samples that it got in every call."""
    options = TrainOptions(num_epochs=2, num_minibatches=2)
    places = {
        name: CallPlacement(layout=layout, micro_batch_tokens=40, train_options=options, order_seeds=(1, 2))
        for name, layout in layouts.items()
    }
    mailbox = cast(Mailbox, ThreadMailbox(rank, world_size, post))
    data = IterationData(_batch(num_prompts), Routes(CALLS, places, world_size, num_chunks), mailbox, rank=rank, run=1)
    seen: dict[str, Any] = {}
    for call in data.routes.calls:
        is_fused = call.name in data.routes.fusion.sources
        if (call.kind == "compute" or rank in layouts[call.name]) and not is_fused:
            seen[call.name] = data.inputs(call)
        rows = seen.get(call.name)
        if call is GENERATE:
            made = (
                None
                if rank not in layouts[call.name]
                else _roll_out(data.table(call).known.select([]) if rows is None else rows)
            )
            if made is not None and layouts[call.name].coordinate(rank).tp == 0:
                _send_chunks(data, made)
            data.record(call, made)
        elif call.kind == "infer":
            if rank in layouts[call.name] and (is_fused or rows is not None):
                _infer(data, call, layouts[call.name], rank)
        elif call.kind == "compute" and rows is not None:
            data.record(call, _judge(rows) if call is JUDGE else _estimate(rows))
        if call is ESTIMATE:
            data.report.maxima |= {"seconds": float(rank)}
            data.send_report()
    seen["metrics"] = data.receive_report().metrics
    seen["known"] = data.known()
    return seen


def _layouts(world_size: int, kinds: tuple[str, ...]) -> st.SearchStrategy[Layout]:
    def place(dims: ParallelDims) -> st.SearchStrategy[Layout]:
        ranks = st.permutations(range(world_size)).map(lambda order: tuple(order[: dims.size]))
        return ranks.map(lambda chosen: Layout(dims, chosen))

    degrees = [
        ParallelDims(**{kind: a, "tp": b})
        for kind in kinds for a in (1, 2, 3) for b in (1, 2) if a * b <= world_size
    ]  # fmt: skip
    return st.sampled_from(degrees).flatmap(place)


@st.composite
def _cases(draw: st.DrawFn) -> tuple[int, dict[str, Layout], int, int]:
    world_size = draw(st.integers(1, 5))
    layouts = {call.name: draw(_layouts(world_size, ("dp", "fsdp"))) for call in CALLS if call.role is not None}
    return world_size, layouts, draw(st.integers(2, 6)), draw(st.sampled_from((1, 2, 4)))


@settings(max_examples=40, deadline=None)
@given(_cases())
def test_every_rank_receives_its_inputs_exactly_once(case: tuple[int, dict[str, Layout], int, int]) -> None:
    world_size, layouts, num_prompts, num_chunks = case
    post = Post()
    with ThreadPoolExecutor(world_size) as ranks:
        walks = [
            ranks.submit(_walk, rank, world_size, layouts, num_prompts, post, num_chunks) for rank in range(world_size)
        ]
        everyone = [walk.result() for walk in walks]

    rollout = _roll_out(_batch(num_prompts)).sorted_by_id()
    judged, values = _judge(rollout), _value(rollout)
    advantages = _estimate(Samples(rollout.ids, {**judged.columns, **values.columns}))
    names = {sample_id: f"prompt {sample_id // 20}" for sample_id in rollout.ids.tolist()}
    products = {
        "rollout": rollout,
        "values": values,
        "scores": _score(rollout),
        "rewards": judged,
        "advantages": advantages,
    }
    for seen in everyone:
        for call in (INFER, REWARD, JUDGE, ESTIMATE, ACTOR, CRITIC):
            rows = seen.get(call.name)
            if rows is None:
                continue
            for need in call.needs:
                expected = products[need].by_ids(rows.ids)
                columns = expected.columns if need != "rewards" else {"rewards": expected["rewards"]}
                for name, column in columns.items():
                    ours = rows[name]
                    same = ours.equals(column) if isinstance(ours, Ragged) else torch.equal(ours, column)
                    assert same, (call.name, name)
            assert rows.objects("prompt") == tuple(names[sample_id] for sample_id in rows.ids.tolist())
            assert "shaped" not in rows
        known = seen["known"]
        assert torch.equal(known.tensor("extra"), judged.tensor("extra"))
        assert torch.equal(known.ragged("advantages").lengths, values.ragged("values").lengths)
        assert seen["metrics"] == {"seconds": float(world_size - 1)}
    assert max(post.rows.values(), default=1) == 1, "a datum was sent twice"
    assert not post.frames, f"sent and never received: {list(post.frames)}"
    assert not any(post.unread.values()), f"not received by all: {post.unread}"


def test_rewards_cover_all_samples_and_whole_batches_stay_on_one_rank() -> None:
    layouts = {
        "actor.generate": Layout(ParallelDims(dp=2, tp=2), (0, 1, 2, 3)),
        "critic.infer": Layout(ParallelDims(dp=2), (2, 3)), "reward.infer": Layout(ParallelDims(), (2,)),
        "actor.train": Layout(ParallelDims(fsdp=2), (0, 1)), "critic.train": Layout(ParallelDims(), (3,)),
    }  # fmt: skip
    post = Post()
    with ThreadPoolExecutor(4) as ranks:
        everyone = list(ranks.map(lambda rank: _walk(rank, 4, layouts, 4, post), range(4)))
    judged = sorted(i for seen in everyone if seen["judge"] is not None for i in seen["judge"].ids.tolist())
    assert judged == _roll_out(_batch(4)).ids.tolist()
    assert [seen["estimate"] is not None for seen in everyone] == [True, False, False, False]  # where the actor trains
    assert sum(seen["judge"] is not None for seen in everyone) == 4, (
        "ranks of a tensor-parallel group share the judging"
    )


def test_pipeline_stages_before_the_last_receive_only_tokens() -> None:
    layouts = {
        "actor.generate": Layout(ParallelDims(), (0,)),
        "critic.infer": Layout(ParallelDims(), (0,)),
        "reward.infer": Layout(ParallelDims(), (0,)),
        "actor.train": Layout(ParallelDims(pp=3), (1, 2, 3)),
        "critic.train": Layout(ParallelDims(), (0,)),
    }
    post = Post()
    with ThreadPoolExecutor(4) as ranks:
        everyone = list(ranks.map(lambda rank: _walk(rank, 4, layouts, 4, post), range(4)))
    columns = [{*seen["actor.train"].columns, *seen["actor.train"].data} for seen in everyone[1:]]
    assert columns[0] == columns[1] == {"prompt_ids", "response_ids", "prompt_id", "prompt"}
    assert columns[2] == columns[0] | {"advantages"}


def test_a_call_of_two_sets_of_samples_is_refused() -> None:
    again = ModelFunctionCall("other.generate", "generate", "other", "m", ("batch",), ("second",))
    both = ModelFunctionCall("both", "compute", None, "m", ("rollout", "second"), ("x",))
    with pytest.raises(PlanError, match=r"two sets of samples, by actor\.generate and other\.generate"):
        table_owner(both, (GENERATE, again, both))
