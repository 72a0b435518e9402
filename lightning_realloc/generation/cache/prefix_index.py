"""Index of prefixes: pages get equal ids if they, and all pages before them in a sequence, hold equal tokens."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_realloc.generation.core.sample import Sample


class PrefixIndex:
    """Names for pages: equal names, equal contents."""

    def __init__(self, page_size: int) -> None:
        """Know of no page; ``page_size`` in tokens."""
        self.page_size = page_size
        self._names: dict[tuple[int, tuple[int, ...]], int] = {}

    def extend(self, names: list[int], tokens: Sequence[int]) -> None:
        """Append the names of the whole pages of ``tokens``, which follow the pages named so far."""
        size = self.page_size
        for begin in range(0, len(tokens) - size + 1, size):
            # Numbered, not hashed: a chain of hashes could give two contents one name, however seldom.
            key = (names[-1] if names else -1, tuple(tokens[begin : begin + size]))
            names.append(self._names.setdefault(key, len(self._names)))


class SampleLengths:
    """What the paged scheduler asks of samples, by their places in the call: lengths, and names of pages."""

    def __init__(self, samples: Sequence[Sample], page_size: int) -> None:
        """Look at ``samples``, which grow; ``page_size`` in tokens."""
        self._samples = samples
        self._names = PrefixIndex(page_size)
        self._named: dict[int, list[int]] = {}

    def position(self, index: int) -> int:
        """Return where the token stands that the sample reads next."""
        return self._samples[index].position

    def num_read(self, index: int) -> int:
        """Return from how many positions on its slot holds nothing."""
        return self._samples[index].num_read

    def longest(self, index: int) -> int:
        """Return the most positions that it may come to."""
        return longest_of(self._samples[index])

    def num_common(self, index: int) -> int:
        """Return how many first positions are read alike by all samples of its prompt."""
        return len(self._samples[index].prompt) - 1

    def names(self, index: int, length: int) -> Sequence[int]:
        """Return the names of the whole pages among its first ``length`` positions."""
        size, named = self._names.page_size, self._named.setdefault(index, [])
        if length // size > len(named):
            self._names.extend(named, self._samples[index].tokens(len(named) * size, length))
        return named[: length // size]


def longest_of(sample: Sample) -> int:
    """Return the most positions that a sample may come to."""
    return len(sample.prompt) + sample.max_new_tokens
