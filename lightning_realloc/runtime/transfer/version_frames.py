"""Lay out the pieces of a message in one block of memory, with the version and a checksum of each piece after them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_realloc.realloc.delivery import Message, plan_delivery
from lightning_realloc.realloc.plan import ReallocationPlan
from lightning_realloc.runtime.transfer.agreement import WeightVerification
from lightning_realloc.runtime.transfer.checksums import BoxFamily, Checksums, HeldBox, samples_per_box
from lightning_realloc.runtime.transfer.shared_memory import align_up

_WORD_BYTES = 8
"""Bytes of the version and of each checksum."""


class MessageFrame(NamedTuple):
    """Views of the memory of one message."""

    content: Tensor
    """(bytes,) uint8 tensor: all of it."""
    pieces: tuple[Tensor, ...]
    """The pieces in their shapes."""
    proof: Tensor
    """(1 + number of checksums,) int64 tensor: the version, then a checksum of each piece, or none."""


class FrameLayout:
    """The places of a message's pieces and checksums, which all ranks that send or read it work out alike.

    Args:
        dtype: Dtype of the pieces on their way.
        verify_weights: Elements of each piece that its checksum covers.
    """

    def __init__(self, message: Message, dtype: torch.dtype, verify_weights: WeightVerification) -> None:
        self._transfers, self._dtype, self._verify_weights = message.transfers, dtype, verify_weights
        self._sizes = [transfer.numel for transfer in message.transfers]
        num_words = 1 + (0 if verify_weights == "off" else len(message.transfers))
        self._proof_begin = -(-sum(self._sizes) * dtype.itemsize // _WORD_BYTES) * _WORD_BYTES
        self.num_bytes = self._proof_begin + num_words * _WORD_BYTES
        """Bytes of the message."""

    def view(self, memory: Tensor) -> MessageFrame:
        """Return the views of a (bytes,) uint8 tensor of at least `num_bytes`, aligned to 8 bytes."""
        pieces = torch.split(memory[: sum(self._sizes) * self._dtype.itemsize].view(self._dtype), self._sizes)
        shaped = tuple(piece.view(each.shape) for piece, each in zip(pieces, self._transfers, strict=True))
        proof = memory[self._proof_begin : self.num_bytes].view(torch.int64)
        return MessageFrame(memory[: self.num_bytes], shaped, proof)

    def checksums(self, held: Mapping[str, Tensor], offsets: Mapping[int, tuple[int, ...]]) -> PieceChecksums:
        """Return the checksums of some pieces where a rank holds them.

        Args:
            held: Parameter name -> local tensor.
            offsets: Index of a piece -> first index of its box in the local tensor.
        """
        counts = Counter(transfer.param for transfer in self._transfers)
        groups: dict[HeldBox, list[int]] = {}
        for index, offset in offsets.items() if self._verify_weights != "off" else ():
            param, shape = self._transfers[index].param, self._transfers[index].shape
            whole, num_samples = tuple(held[param].shape), samples_per_box(counts[param])
            box = HeldBox(shape, offset, whole, (0,) * len(shape), shape, num_samples, 0)
            groups.setdefault(box, []).append(index)
        order = [index for members in groups.values() for index in members]
        families = [
            BoxFamily(tuple(self._transfers[index].param for index in members), (box,))
            for box, members in groups.items()
        ]
        sums = Checksums(families, held, dtype=self._dtype, is_sampled=self._verify_weights == "sampled")
        names = tuple(self._transfers[index].param for index in order)
        return PieceChecksums(sums, torch.tensor([1 + index for index in order], dtype=torch.int64), names)


class PieceChecksums(NamedTuple):
    """Checksums of pieces as a rank holds them, and their places in a frame."""

    sums: Checksums
    places: Tensor
    """(number of checksums,) int64 tensor: indices in the frame's proof."""
    names: tuple[str, ...]
    """Parameter of each checksum."""

    def write(self, version: int, proof: Tensor) -> None:
        """Write the version and the checksums into a frame's proof."""
        proof[0] = version
        proof[self.places] = self.sums.compute(version).cpu()

    def differing(self, version: int, proof: Tensor) -> list[str]:
        """Return the parameters whose pieces differ from the sender's."""
        differs = (proof[self.places] != self.sums.compute(version).cpu()).tolist()
        return [name for name, is_wrong in zip(self.names, differs, strict=True) if is_wrong]


class LandedMessage(NamedTuple):
    """A message that lands on a host, as one of its ranks reads it."""

    message: Message
    layout: FrameLayout
    begin: int
    """First byte in the memory of one version."""
    reads: Mapping[int, tuple[int, ...]]
    """Index of a piece -> first index of its box in the rank's tensor; {} if the rank reads nothing of it."""


class HostFrames:
    """The messages that land on a rank's host, in the memory of one version.

    Args:
        plan: Its target has this rank.
        dtype: Dtype of the pieces on their way.
        verify_weights: Elements of each piece that its checksum covers.
    """

    def __init__(
        self, plan: ReallocationPlan, rank: int, dtype: torch.dtype, verify_weights: WeightVerification
    ) -> None:
        delivery = plan_delivery(plan, rank)
        self.rank = rank
        """The rank that reads."""
        self.readers = delivery.readers
        """Ranks that read in the same memory, ascending."""
        self.landed: list[LandedMessage] = []
        """The messages."""
        self.num_bytes = 0
        """Size of the memory of one version."""
        self.num_slots = 1 if len(self.readers) == 1 else 2
        """Versions in memory at once. With two, a rank waits for slower ones of its host no longer than if each
        received weights of its own."""
        for message, reads in zip(delivery.messages, delivery.reads, strict=True):
            layout = FrameLayout(message, dtype, verify_weights)
            self.landed.append(LandedMessage(message, layout, self.num_bytes, reads))
            self.num_bytes += align_up(layout.num_bytes)

    @property
    def required_bytes(self) -> int:
        """Size of the memory of all versions."""
        return self.num_slots * self.num_bytes
