"""Pack sequences of different lengths into one row of tokens without padding.

Each sequence keeps its own positions, and ``packed_attention`` keeps sequences from attending to each other. Adjacent
sequences with the same prompt can share its tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_realloc.batch.balance_loss import BalanceLoss
from lightning_realloc.batch.model_input import joined_inputs
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import (
    EXPERTS,
    Samples,
    answer_inputs,
    extra_inputs,
    prompt_images,
    prompt_keys,
)
from lightning_realloc.errors import DataError

_TENSORS = (
    "input_ids",
    "position_ids",
    "cu_seqlens",
    "response_mask",
    "counted_places",
    "predicted_places",
    "sample_index",
    "predecessors",
)
"""Fields of a pack that are on its device."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """B sequences, each a prompt and its response, as one row of N tokens."""

    ids: Tensor
    """Sample ids in packing order, (B,) int64 on the host."""
    input_ids: Tensor
    """Token ids of the row, (1, N) int64."""
    position_ids: Tensor
    """Positions, (1, N) int64, restarting at 0 with every sequence."""
    cu_seqlens: Tensor
    """Bounds, (B + 1,) int32: sequence b is ``input_ids[0, cu_seqlens[b]:cu_seqlens[b + 1]]``."""
    lengths: tuple[int, ...]
    """Tokens of each sequence in the row: prompt and response, or only the response if its prompt is shared."""
    response_lengths: tuple[int, ...]
    """Response tokens of each sequence, at its end."""
    response_mask: Tensor
    """Tokens that count in the loss, (N,) bool: True for response tokens that the model chose and that have a
    predecessor. Tokens from an environment are False."""
    counted_places: Tensor
    """Places in the row of the tokens of ``response_mask``, (K,) int64. Found on the host: a device would have to be
    waited for."""
    predicted_places: Tensor
    """Places in the row of all tokens that have a predecessor, (P,) int64."""
    sample_index: Tensor
    """Index of the sequence that each token belongs to, (N,) int64."""
    predecessors: Tensor
    """Position in the row of the token before each token, (N,) int64; the first token of a sequence gives its own."""
    shared: tuple[int, ...]
    """Prompt tokens that each sequence shares with the nearest earlier sequence that holds its prompt; 0 if none."""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """Further inputs of the model by the keyword that its ``forward`` expects, each (rows, ...): those of the prompts
    and of environments' answers in the row, in its order."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Further columns: per token, (N, ...), zero outside responses, if ragged; else per sequence, (B, ...)."""
    data: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Columns of the data set, B Python objects each."""
    experts: Tensor | None = None
    """(N, layers * chosen) experts that the tokens' routers are given; None: they choose."""
    expert_counts: Tensor | None = None
    """(layers, experts) int64, to which forward passes add the tokens of `response_mask` by expert; None: nowhere."""
    expert_loads: Tensor | None = None
    """(layers, experts) int64, to which forward passes add all tokens by expert; None: nowhere."""
    balance_loss: BalanceLoss | None = None
    """Loss that the routers of forward passes add to; None: there is none."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.columns:
            raise DataError(
                f"no column {name!r} was packed; there are {sorted(self.columns)}, name it in pack(columns=)"
            )
        return self.columns[name]

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the row, N."""
        return int(self.input_ids.shape[1])

    @property
    def max_length(self) -> int:
        """Number of tokens in the longest sequence, shared prompt included."""
        return max(length + shared for length, shared in zip(self.lengths, self.shared, strict=True))

    @property
    def multiplicity(self) -> Tensor:
        """Number of sequences that each token of the row is in, (N,) int64: more than one for shared prompts."""
        counts = torch.ones(self.num_tokens, dtype=torch.int64)
        start = owner = 0
        for length, shared in zip(self.lengths, self.shared, strict=True):
            owner = owner if shared else start
            counts[owner : owner + shared] += 1
            start += length
        return counts.to(self.input_ids.device, non_blocking=True)

    def per_token(self, values: Tensor) -> Tensor:
        """Return per-sequence ``values`` (B, ...) repeated for every token, (N, ...)."""
        return values[self.sample_index]

    def responses(self, values: Tensor) -> Ragged:
        """Return the values of response tokens from per-token ``values`` (N, ...), aligned with ``response_ids``."""
        rows: list[Tensor] = []
        for sequence, response_length in zip(
            torch.split(values, list(self.lengths)), self.response_lengths, strict=True
        ):
            rows.append(sequence[sequence.shape[0] - response_length :])
        return Ragged(torch.cat(rows), torch.tensor(self.response_lengths, dtype=torch.int64))

    def to(self, device: torch.device | str) -> PackedBatch:
        """Return the same pack with its tensors on ``device``; ids stay on the host.

        Copies to an accelerator are queued: the host does not wait for the micro-batch before.
        """
        queued = torch.device(device).type != "cpu"
        moved = {name: getattr(self, name).to(device, non_blocking=queued) for name in _TENSORS}
        extras, columns = (
            {name: values.to(device, non_blocking=queued) for name, values in named.items()}
            for named in (self.extras, self.columns)
        )
        experts = None if self.experts is None else self.experts.to(device, non_blocking=queued)
        return dataclasses.replace(self, **moved, extras=extras, columns=columns, experts=experts)


def pack(samples: Samples, *, columns: Sequence[str] = (), share_prompts: bool = False) -> PackedBatch:
    """Pack all ``samples`` into one row, together with the named columns.

    The samples need ``prompt_ids`` and ``response_ids``; a sample may have one of them empty, but not both. A ragged
    column must have one value per response token, and keeps its place there. If there is a column ``model_mask``,
    response tokens that are False in it are model input only and do not count in the loss. Columns ``input/...`` are
    further inputs of the model. With ``share_prompts``, adjacent samples whose prompts have the same key store the
    prompt and its further inputs once, if its tokens have the same experts. A causal model gives the same outputs for
    the responses. With a column ``experts``, the model's routers are given them.

    Raises:
        DataError: if there are no samples, or a column does not fit.
    """
    if len(samples) == 0:
        raise DataError("a pack needs at least one sequence; got no samples")
    prompts, responses = samples.ragged("prompt_ids"), samples.ragged("response_ids")
    device = responses.values.device
    totals = prompts.lengths + responses.lengths
    if int(totals.min()) == 0:
        empty = int(samples.ids[int(totals.argmin())])
        raise DataError(f"a packed sequence needs at least one token; prompt and response of sample {empty} are empty")
    shared = _shared_prompt_lengths(samples) if share_prompts else torch.zeros_like(totals)
    held, holders = _without(prompts, shared > 0), (shared == 0).nonzero().flatten()
    lengths = totals - shared
    sample_index = torch.repeat_interleave(torch.arange(len(samples)), lengths)
    starts = lengths.cumsum(0) - lengths
    positions = torch.arange(int(lengths.sum())) - starts[sample_index] + shared[sample_index]
    in_response = positions >= prompts.lengths[sample_index]
    counted = in_response & (positions > 0)
    if "model_mask" in samples:
        counted &= _packed_column(samples, "model_mask", responses, in_response).to(counted.device)
    order = _interleaved(held, responses)
    input_ids = torch.cat([held.values.to(device), responses.values])[order.to(device)]
    return PackedBatch(
        ids=samples.ids,
        input_ids=input_ids.unsqueeze(0),
        position_ids=positions.unsqueeze(0).to(device),
        cu_seqlens=pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32),
        lengths=tuple(lengths.tolist()),
        response_lengths=tuple(responses.lengths.tolist()),
        response_mask=counted.to(device),
        counted_places=counted.nonzero().squeeze(1).to(device),
        predicted_places=positions.nonzero().squeeze(1).to(device),
        sample_index=sample_index.to(device),
        predecessors=_predecessors(starts, shared, positions).to(device),
        shared=tuple(shared.tolist()),
        extras={name: values.to(device) for name, values in _packed_inputs(samples, holders).items()},
        columns={name: _packed_column(samples, name, responses, in_response) for name in columns},
        data=samples.data,
        experts=_packed_experts(samples.ragged(EXPERTS), sample_index, positions) if EXPERTS in samples else None,
    )


def _packed_inputs(samples: Samples, holders: Tensor) -> dict[str, Tensor]:
    """Return the further inputs of a row, those of images read now.

    Prompts are those of the samples at the positions ``holders``; answers are those of all samples.
    """
    columns = {name: column.split() for name, column in extra_inputs(samples).items()}
    held, parts = set(holders.tolist()), list[Mapping[str, Tensor]]()
    for row, (images, answers) in enumerate(zip(prompt_images(samples), answer_inputs(samples), strict=True)):
        if row in held:
            parts.append({name: rows[row] for name, rows in columns.items()})
            parts += [] if images is None else [images.inputs]
        parts += [answer.input.extras for answer in answers]
    return joined_inputs(parts)


def _packed_experts(experts: Ragged, sample_index: Tensor, positions: Tensor) -> Tensor:
    """Return the (N, ...) experts of tokens at (N,) positions of their samples."""
    starts = experts.lengths.cumsum(0) - experts.lengths
    return experts.values[(starts[sample_index] + positions).to(experts.values.device)]


def _shared_prompt_lengths(samples: Samples) -> Tensor:
    """Return the number of prompt tokens, (B,), that each sequence shares with the sequence before it.

    A sequence without a response keeps its prompt, because it would have no token left.

    Raises:
        DataError: for equal keys of adjacent prompts that differ.
    """
    keys, prompts = prompt_keys(samples).cpu(), samples.ragged("prompt_ids")
    same = pad(keys[1:] == keys[:-1], (1, 0))
    rows = prompts.split()
    experts = samples.ragged(EXPERTS).split() if EXPERTS in samples else None
    for row in same.nonzero().flatten().tolist():
        if not torch.equal(rows[row - 1], rows[row]):
            raise DataError(
                f"samples with the same prompt_key have the same prompt; those of samples {int(samples.ids[row - 1])} "
                f"and {int(samples.ids[row])} differ: where prompts change, drop the keys of before by "
                f"samples.without_columns('prompt_key')"
            )
        if experts is not None:  # they may differ where prompts were read again, or next to others
            size = len(rows[row])
            same[row] = torch.equal(experts[row - 1][:size], experts[row][:size])
    return torch.where(same & (samples.ragged("response_ids").lengths > 0), prompts.lengths, 0)


def _without(prompts: Ragged, dropped: Tensor) -> Ragged:
    """Return the prompts, empty where ``dropped`` (B,) is True."""
    kept = ~torch.repeat_interleave(dropped, prompts.lengths)
    return Ragged(prompts.values[kept.to(prompts.values.device)], prompts.lengths.masked_fill(dropped, 0))


def _predecessors(starts: Tensor, shared: Tensor, positions: Tensor) -> Tensor:
    """Return the position of each token's predecessor, (N,), from (B,) starts and shared lengths and (N,) positions."""
    before = torch.arange(positions.shape[0]) - (positions > 0).long()
    owners = torch.where(shared > 0, 0, torch.arange(starts.shape[0])).cummax(0).values
    sharing = shared > 0
    before[starts[sharing]] = (starts[owners] + shared - 1)[sharing]
    return before


def _interleaved(prompts: Ragged, responses: Ragged) -> Tensor:
    """Return (N,) indices into [all prompts, all responses] that put each response after its prompt."""
    num_sequences = len(prompts)
    owner = torch.cat(
        [
            torch.repeat_interleave(2 * torch.arange(num_sequences), prompts.lengths),
            torch.repeat_interleave(2 * torch.arange(num_sequences) + 1, responses.lengths),
        ]
    )
    return owner.argsort(stable=True)


def _packed_column(samples: Samples, name: str, responses: Ragged, in_response: Tensor) -> Tensor:
    column = samples[name]
    if isinstance(column, tuple):
        raise DataError(f"column {name!r} holds python objects and cannot be packed; pack tensors and sequences only")
    if isinstance(column, Tensor):
        return column.to(responses.values.device)
    if not torch.equal(column.lengths, responses.lengths):
        row = int((column.lengths != responses.lengths).nonzero()[0])
        raise DataError(
            f"column {name!r} needs one value per response token; sample {int(samples.ids[row])} has "
            f"{int(column.lengths[row])} values for {int(responses.lengths[row])} tokens"
        )
    values = column.values.to(responses.values.device)
    packed = values.new_zeros((in_response.shape[0], *values.shape[1:]))
    packed[in_response.to(values.device)] = values
    return packed
