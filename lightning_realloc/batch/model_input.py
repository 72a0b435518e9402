"""A prompt as a model reads it: token ids, further inputs of the model's ``forward``, and a key that identifies both.

No tensor operations at import: the generation loop passes inputs on without reading them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


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

    def positions_between(self, begin: int, end: int) -> Tensor | None:
        """Return the positions (3, end - begin) of the tokens at these places of a sequence; None: their places."""
        if self.positions is None:
            return None
        import torch

        after = torch.arange(max(begin, len(self.token_ids)), max(end, len(self.token_ids))) + self.shift
        return torch.cat([self.positions[:, begin:end], after.expand(3, -1)], 1)


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
    """Return the further inputs of several prompts, concatenated along dim 0.

    Where other dims differ, such as heights of images or numbers of their parts, zeros follow the smaller ones. Models
    read no further than the sizes say, which are among the inputs.
    """
    from torch import cat
    from torch.nn.functional import pad

    rows: dict[str, list[Tensor]] = {}
    for part in parts:
        for name, values in part.items():
            rows.setdefault(name, []).append(values)
    joined: dict[str, Tensor] = {}
    for name, several in rows.items():
        if len({values.shape[1:] for values in several}) > 1:
            sizes = [max(lengths) for lengths in zip(*(values.shape[1:] for values in several), strict=True)]
            several = [
                pad(v, [n for most, own in zip(sizes[::-1], v.shape[:0:-1], strict=True) for n in (0, most - own)])
                for v in several
            ]
        joined[name] = cat(several)
    return joined
