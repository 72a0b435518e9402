"""How do sequences of different lengths share one forward pass? Laid end to end, without padding.

A pack is one row of N tokens; each sequence keeps its own positions, and ``packed_attention`` keeps them from
seeing each other. Which sequences go together is decided by token counts alone, so it can be planned anywhere.
Neighbours that answer the same prompt may hold it once: a group of responses then costs one prompt, not one each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_realloc.batch.samples import Ragged, Samples
from lightning_realloc.errors import DataError


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """B sequences, each a prompt and its response, as one row of N tokens."""

    ids: Tensor
    """(B,) int64 on the host: the samples, in the order they are packed."""
    input_ids: Tensor
    """(1, N) int64."""
    position_ids: Tensor
    """(1, N) int64, restarting at 0 with every sequence."""
    cu_seqlens: Tensor
    """(B + 1,) int32: sequence b is ``input_ids[0, cu_seqlens[b]:cu_seqlens[b + 1]]``."""
    lengths: tuple[int, ...]
    """Tokens of each sequence that lie in the row: prompt and response, or the response alone where it is shared."""
    response_lengths: tuple[int, ...]
    """Tokens of each sequence's response, which is its end."""
    response_mask: Tensor
    """(N,) bool: True where the model chose the token, and there is a token before it to be predicted from: in the
    responses, less what an environment said in them."""
    sample_index: Tensor
    """(N,) int64: which of the B sequences a token belongs to."""
    predecessors: Tensor
    """(N,) int64: where the token before a token lies; its own place for the first one of a sequence."""
    shared: tuple[int, ...]
    """Prompt tokens of each sequence that lie with the nearest sequence before it that shares none."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Per token (N, ...), zero outside the responses, where the column was ragged; else per sequence (B, ...)."""

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
        """N."""
        return int(self.input_ids.shape[1])

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return max(length + shared for length, shared in zip(self.lengths, self.shared, strict=True))

    def per_token(self, values: Tensor) -> Tensor:
        """Return per-sequence ``values`` (B, ...) repeated for every token, (N, ...)."""
        return values[self.sample_index]

    def responses(self, values: Tensor) -> Ragged:
        """Return the per-token ``values`` (N, ...) of the responses, aligned with ``response_ids``."""
        rows: list[Tensor] = []
        for sequence, response_length in zip(
            torch.split(values, list(self.lengths)), self.response_lengths, strict=True
        ):
            rows.append(sequence[sequence.shape[0] - response_length :])
        return Ragged(torch.cat(rows), torch.tensor(self.response_lengths, dtype=torch.int64))

    def to(self, device: torch.device | str) -> PackedBatch:
        """Return the same pack with its tensors on ``device``; ids stay on the host."""
        moved = {
            name: getattr(self, name).to(device)
            for name in ("input_ids", "position_ids", "cu_seqlens", "response_mask", "sample_index", "predecessors")
        }
        columns = {name: column.to(device) for name, column in self.columns.items()}
        return dataclasses.replace(self, **moved, columns=columns)


def pack(samples: Samples, *, columns: Sequence[str] = (), share_prompts: bool = False) -> PackedBatch:
    """Return all ``samples`` in one pack, with these of their columns beside the tokens.

    The samples need ``prompt_ids`` and ``response_ids``; either may be empty for a sample, but not both. A ragged
    column must be as long as the response, sample by sample, and lands on the response's tokens. Where there is a
    column ``model_mask``, response tokens that are False in it are read and do not count. With ``share_prompts``,
    samples next to each other with the same prompt hold it once: what a model says about the responses stays the same
    as long as it only looks back.

    Raises:
        DataError: when there is nothing to pack, or a column does not fit.
    """
    if len(samples) == 0:
        raise DataError("a pack needs at least one sequence; got no samples")
    prompts, responses = samples.ragged("prompt_ids"), samples.ragged("response_ids")
    device = responses.values.device
    totals = prompts.lengths + responses.lengths
    if int(totals.min()) == 0:
        empty = int(samples.ids[int(totals.argmin())])
        raise DataError(f"a packed sequence needs at least one token; prompt and response of sample {empty} are empty")
    shared = _shared_prompt_lengths(prompts, responses) if share_prompts else torch.zeros_like(totals)
    held = _without(prompts, shared > 0)
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
        sample_index=sample_index.to(device),
        predecessors=_predecessors(starts, shared, positions).to(device),
        shared=tuple(shared.tolist()),
        columns={name: _packed_column(samples, name, responses, in_response) for name in columns},
    )


def micro_batches(lengths: Sequence[int], max_tokens: int, *, what: str = "sequence") -> list[tuple[int, ...]]:
    """Return which positions go into one pack of at most ``max_tokens`` tokens: few packs, each ascending.

    The longest goes first, each into the first pack with room: at most 11/9 of the fewest possible packs, plus one.
    Packs come in the order of their first positions. Source: Johnson et al., SIAM J. Comput. 3 (1974).

    Args:
        what: The name of what has these lengths, for error messages.

    Raises:
        DataError: when one sequence alone is longer than ``max_tokens``.
    """
    longest = max(range(len(lengths)), key=lengths.__getitem__, default=None)
    if longest is not None and lengths[longest] > max_tokens:
        raise DataError(
            f"a {what} must fit one micro-batch; {what} {longest} has {lengths[longest]} tokens and "
            f"max_tokens={max_tokens}, raise it to at least {lengths[longest]} or shorten prompts and responses"
        )
    packs: list[list[int]] = []
    room: list[int] = []
    for position in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        place = next((k for k, free in enumerate(room) if free >= lengths[position]), None)
        if place is None:
            packs.append([position])
            room.append(max_tokens - lengths[position])
        else:
            packs[place].append(position)
            room[place] -= lengths[position]
    return sorted(tuple(sorted(members)) for members in packs)


def _shared_prompt_lengths(prompts: Ragged, responses: Ragged) -> Tensor:
    """Return (B,) how many prompt tokens a sequence need not hold, since the one before it has the same prompt.

    A sequence without a response keeps its prompt: it would have no token left.
    """
    rows = prompts.split()
    same = [False] + [torch.equal(before, row) for before, row in pairwise(rows)]
    return torch.where(torch.tensor(same) & (responses.lengths > 0), prompts.lengths, 0)


def _without(prompts: Ragged, dropped: Tensor) -> Ragged:
    """Return the prompts, empty where ``dropped`` (B,) is True."""
    kept = ~torch.repeat_interleave(dropped, prompts.lengths)
    return Ragged(prompts.values[kept.to(prompts.values.device)], prompts.lengths.masked_fill(dropped, 0))


def _predecessors(starts: Tensor, shared: Tensor, positions: Tensor) -> Tensor:
    """Return (N,) where the token before each token lies, from (B,) starts and shared lengths and (N,) positions."""
    before = torch.arange(positions.shape[0]) - (positions > 0).long()
    owners = torch.where(shared > 0, 0, torch.arange(starts.shape[0])).cummax(0).values
    sharing = shared > 0
    before[starts[sharing]] = (starts[owners] + shared - 1)[sharing]
    return before


def _interleaved(prompts: Ragged, responses: Ragged) -> Tensor:
    """Return (N,) indices into [all prompts, all responses] that put each response behind its prompt."""
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
