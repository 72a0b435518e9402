"""Newer weights for a generation that is under way, and the log by which its batch can be made again.

A rank writes a line for every training batch: the version that it began with, and after how many of its steps it took
each newer one. A run that is given the log takes the same versions after the same steps, and waits for them. Since all
else depends on seeds, it makes the same batches.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_realloc.errors import ConfigError
from lightning_realloc.output_files import append_text
from lightning_realloc.remote_path import expand_home
from lightning_realloc.runtime.messages.flight_record import FlightRecord
from lightning_realloc.strategies.pool.weight_streams import ReplicaStream, WeightStreams

_log = logging.getLogger(__name__)

_SAME_RUN = "give the log of a run with the same plan, data and settings, or leave replay_versions out"
STEPS_PER_AGREEMENT = 8
"""Steps after which tensor-parallel ranks ask each other whether all have newer weights."""


@dataclass(slots=True)
class BatchVersions:
    """The versions that one rank generated one batch with."""

    iteration: int
    """Iteration that generated the batch."""
    call: str
    """The generating call."""
    begin: int
    """Version of the first step: iterations of training."""
    updates: list[tuple[int, int]] = field(default_factory=list)
    """(steps, version): after so many steps came a newer version."""

    def line(self) -> str:
        """Return the values as a line of JSON."""
        return json.dumps(asdict(self)) + "\n"


class VersionLog:
    """Reads and writes the versions of one rank.

    Args:
        replayed: Folder of an earlier run, whose versions are taken again; None: versions are taken as they arrive.

    Raises:
        ConfigError: for a file that is no such log.
    """

    def __init__(self, rank: int, replayed: str | Path | None) -> None:
        self._name = f"rank_{rank}.jsonl"
        self._file: Path | None = None
        self._has_written = False
        self._replayed = None if replayed is None else _read(expand_home(Path(replayed)) / self._name)

    @property
    def is_replayed(self) -> bool:
        """Whether versions of an earlier run are taken again."""
        return self._replayed is not None

    def write_to(self, folder: Path) -> None:
        """Write batches to a file in this folder from now on."""
        self._file, self._has_written = folder / self._name, False

    def write(self, versions: BatchVersions) -> None:
        """Append a batch; the first one of a run from the beginning replaces the log of an earlier run.

        A log that cannot be written ends with a warning, and no run.
        """
        if self._file is not None:
            begins = versions.iteration == 0 and not self._has_written
            self._has_written = True
            try:
                append_text(self._file, versions.line(), replaces=begins)
            except OSError as error:
                _log.warning("%s cannot be written (%s); the log of versions ends here", self._file, error.strerror)
                self._file = None

    def replayed(self, iteration: int, call: str) -> BatchVersions | None:
        """Return the versions to take again; None if no log is followed. Raises ConfigError if it lacks them."""
        if self._replayed is None:
            return None
        if (iteration, call) not in self._replayed:
            raise ConfigError(f"replay_versions: the log has no line for {call} in iteration {iteration}; {_SAME_RUN}")
        return self._replayed[iteration, call]


class WeightUpdates:
    """Gives one generating call of this rank newer weights between two steps.

    Args:
        group: Ranks that generate the same tokens together; None: this rank decides alone.
        device: A device that the group can communicate from.
    """

    def __init__(
        self,
        streams: WeightStreams,
        call: str,
        group: dist.ProcessGroup | None,
        device: torch.device,
        log: VersionLog,
        record: FlightRecord,
    ) -> None:
        self._streams, self._call, self._group, self._device = streams, call, group, device
        self._log, self._record = log, record
        self._num_steps = 0
        self._taken: BatchVersions | None = None
        self._wanted: BatchVersions | None = None

    @property
    def num_taken(self) -> int:
        """Versions that came during the last generation."""
        return 0 if self._taken is None else len(self._taken.updates)

    def begin(self, iteration: int | None) -> int | None:
        """Start a generation; return the version of its weights, None if they are not filled in the background.

        ``iteration`` is None for a generation that is not trained on.
        """
        self._taken = self._wanted = None
        self._num_steps = 0
        stream = self._streams.of(self._call)
        if stream is None or iteration is None:
            return None if stream is None else stream.version
        self._wanted = self._log.replayed(iteration, self._call)
        if self._wanted is None:
            while self._all_have_news(stream):
                stream.take()
        else:
            self._take_until(stream, self._wanted.begin)
        self._taken = BatchVersions(iteration, self._call, stream.version)
        return stream.version

    def poll(self, prepare: Callable[[int], None] | None = None) -> int | None:
        """Fill the model with a newer version if there is one, and return it; else None. Called before every step.

        ``prepare`` is called with that version before the weights change.
        """
        stream, taken = self._streams.of(self._call), self._taken
        if stream is None or taken is None:
            return None
        if self._wanted is not None:
            due = [version for steps, version in self._wanted.updates if steps == self._num_steps]
        elif self._group is not None and self._num_steps % STEPS_PER_AGREEMENT:
            due = []
        else:
            due = [stream.version + 1] if self._all_have_news(stream) else []
        if due and prepare is not None:
            prepare(due[-1])
        for version in due:
            self._take_until(stream, version)
            taken.updates.append((self._num_steps, stream.version))
        self._num_steps += 1
        return stream.version if due else None

    def follow(self, version: int) -> None:
        """Take the versions that the last stage of a pipeline has taken; its own log lists them."""
        if (stream := self._streams.of(self._call)) is not None:
            self._take_until(stream, version)

    def end(self) -> None:
        """Finish a generation: write its versions. Raises ConfigError if the log that is followed lists more."""
        if self._taken is None:
            return
        if self._wanted is not None and self._taken.updates != self._wanted.updates:
            raise ConfigError(
                f"replay_versions: {self._call} ended after {self._num_steps} steps in iteration "
                f"{self._taken.iteration}, and the log lists the updates {self._wanted.updates} (steps, version); "
                f"{_SAME_RUN}"
            )
        self._log.write(self._taken)

    def _all_have_news(self, stream: ReplicaStream) -> bool:
        has_news = stream.has_news()
        if self._group is None:
            return has_news
        votes = torch.tensor([has_news], dtype=torch.int32, device=self._device)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=self._group)
        return bool(votes.item())

    def _take_until(self, stream: ReplicaStream, version: int) -> None:
        """Take versions until the replica holds ``version``; waits for it."""
        if stream.version > version:
            raise ConfigError(
                f"replay_versions: the weights of {self._call} are of version {stream.version} already, and the log "
                f"lists {version}; {_SAME_RUN}"
            )
        with self._record.during(f"waiting for weights of {self._call}", waits_for=stream.senders):
            while stream.version < version:
                stream.take()


def _read(file: Path) -> dict[tuple[int, str], BatchVersions]:
    """Return (iteration, call) -> its versions; the last line of a batch counts, which a resumed run made anew."""
    if not file.parent.is_dir():
        raise ConfigError(f"replay_versions: there is no folder {file.parent}; give the one that a run wrote")
    if not file.exists():
        return {}  # of a rank that does not generate
    found: dict[tuple[int, str], BatchVersions] = {}
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        try:
            values = json.loads(line)
            updates = [(int(steps), int(version)) for steps, version in values["updates"]]
            versions = BatchVersions(int(values["iteration"]), str(values["call"]), int(values["begin"]), updates)
            if max([versions.begin, *(version for _, version in updates)]) > versions.iteration:
                raise ValueError("a version that is trained only after its batch")
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"replay_versions: line {number} of {file} does not list versions ({error}); give the folder that a "
                f"run with max_staleness of 2 or more wrote"
            ) from error
        found[versions.iteration, versions.call] = versions
    return found
