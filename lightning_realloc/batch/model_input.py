"""A prompt as a model reads it: token ids, further inputs of the model's ``forward``, and a key that identifies both.

No tensor operations at import: the generation loop passes inputs on without reading them.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from lightning_realloc.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_realloc.batch.prompt_images import PromptImages

_SIZES = frozenset({"image_sizes", "pixel_attention_mask"})
"""Further inputs that say which of an image's values are no padding."""


@dataclass(frozen=True, slots=True)
class ModelInput:
    """What a model reads before it responds.

    Example:
        >>> ModelInput((5, 6)) == ModelInput((5, 6))
        True
    """

    token_ids: tuple[int, ...]
    """Token ids of the prompt."""
    extras: Mapping[str, Tensor] = field(default_factory=dict, compare=False)
    """Further inputs by the keyword that the model's ``forward`` expects, each (rows, ...), for tokens of the prompt
    before its last. Inputs of several samples are concatenated along dim 0."""
    prompt_key: int = -1
    """Key of equal prompts, 0 to 2^63 - 1: a digest of token ids and further inputs; -1: worked out here."""
    positions: Tensor | None = field(default=None, compare=False)
    """(3, P) positions of the tokens in time, height and width, on the host; None: their places."""
    shift: int = field(default=0, compare=False)
    """What the position of a token after the prompt is more than its place."""

    def __post_init__(self) -> None:
        if self.prompt_key < 0:
            object.__setattr__(self, "prompt_key", prompt_digest(self.token_ids, self.extras))

    @property
    def images(self) -> PromptImages | None:
        """Images that ``extras`` are made of; None if there are none."""
        return getattr(self.extras, "images", None)


@dataclass(frozen=True, slots=True)
class AnswerInput:
    """An environment's answer that shows images, in a response."""

    begin: int
    """Index into the response of the answer's first token."""
    input: ModelInput
    """Its tokens, and further inputs of the model for them. Positions are counted from its first token."""


def positions_between(parts: Iterable[tuple[int, ModelInput]], begin: int, end: int) -> Tensor | None:
    """Return the positions (3, end - begin) of the tokens at these places of a sequence; None: their places.

    Args:
        parts: Inputs in the sequence, in order, with the place of each one's first token.
    """
    placed = [(start, part.positions, part.shift) for start, part in parts if part.positions is not None]
    if not placed:
        return None
    import torch

    positions = torch.arange(end).repeat(3, 1)
    for start, of_part, shift in placed:
        known = of_part[:, : max(end - start, 0)]
        positions[:, start : start + known.shape[1]] += known - torch.arange(known.shape[1])
        positions[:, start + of_part.shape[1] :] += shift
    return positions[:, begin:]


def prompt_digest(token_ids: Sequence[int], extras: Mapping[str, Tensor], *, of_inputs: int | None = None) -> int:
    """Return 63 bits of a hash of token ids and of names, shapes, dtypes and values of further inputs.

    Args:
        of_inputs: 64 bits that tell further inputs apart, in place of their values.
    """
    digest = blake2b(array("q", token_ids).tobytes(), digest_size=8)
    if of_inputs is not None:
        digest.update(f"inputs {of_inputs}".encode())
    for name in sorted(extras):
        values = extras[name].detach().cpu()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)} ".encode())
        short = values.is_floating_point() and values.dtype.itemsize < 4  # numpy has no bfloat16
        digest.update((values.float() if short else values).numpy().tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1


def joined_inputs(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the further inputs of several prompts, one after another along dim 0.

    Images of different sizes are padded with zeros behind their values, where their prompts say how large each is.

    Raises:
        DataError: for inputs of different shapes otherwise.
    """
    rows: dict[str, list[Tensor]] = {}
    for part in parts:
        for name, values in part.items():
            rows.setdefault(name, []).append(values)
    return {name: _joined(name, several, rows.keys() & _SIZES) for name, several in rows.items()}


def _joined(name: str, parts: Sequence[Tensor], sizes: Collection[str]) -> Tensor:
    from torch import cat
    from torch.nn.functional import pad

    parts = [values for values in parts if len(values)] or parts[:1]
    shapes = {tuple(values.shape[1:]) for values in parts}
    if len(shapes) == 1:
        return cat(list(parts))
    if not sizes or len({len(shape) for shape in shapes}) > 1:
        raise DataError(
            f"the input {name!r} has rows of the shapes {sorted(shapes)} in different prompts, and they share a batch; "
            f"give rows of one shape, or give {' or '.join(sorted(_SIZES))} too, which say how large each image is"
        )
    largest = [max(lengths) for lengths in zip(*shapes, strict=True)]

    def padded(values: Tensor) -> Tensor:
        missing = [most - own for most, own in zip(largest, values.shape[1:], strict=True)]
        return pad(values, [number for each in reversed(missing) for number in (0, each)])

    return cat([padded(values) for values in parts])
