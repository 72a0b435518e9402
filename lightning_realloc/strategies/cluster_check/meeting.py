"""Store through which the ranks of a launcher meet, with deadlines, and the names of ranks that do not come."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from lightning_realloc.runtime.messages.plain_data import decode_value, encode_value
from lightning_realloc.strategies.cluster_check.launch import Launch

CONNECT_S = 5.0
"""Seconds after which a connection between two hosts counts as impossible."""
_LEAST_WAIT_S = 0.01
_NUM_THREADS = 16
"""Connections that a host tries at the same time."""


class Meeting:
    """Values that ranks give each other before they have a process group.

    Args:
        deadline: Moment of `time.monotonic` until which ranks wait for rank 0's store.

    Raises:
        RuntimeError: if this rank does not reach the store.
    """

    def __init__(self, launch: Launch, *, deadline: float) -> None:
        self.launch = launch
        self._attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._server = _store(launch, deadline - time.monotonic(), listens=launch.rank == 0 and not launch.has_agent)
        self.store = PrefixStore(f"doctor/{self._attempt}", self._server)

    def give(self, name: str, value: object) -> None:
        """Give a value to the ranks that wait for it."""
        self.store.set(name, encode_value(value).hex())  # a store takes texts

    def wait_for(self, name: str, deadline: float) -> Any:
        """Return a value once a rank has given it.

        Raises:
            TimeoutError: if none does until the deadline.
        """
        try:
            self.store.wait([name], timedelta(seconds=max(_LEAST_WAIT_S, deadline - time.monotonic())))
        except RuntimeError as error:  # torch's DistStoreError, and a lost connection
            raise TimeoutError(f"no rank gave {name!r} in time") from error
        return decode_value(bytes.fromhex(self.store.get(name).decode()))

    def wait_for_all(self, name: str, ranks: Iterable[int], deadline: float) -> dict[int, Any]:
        """Return rank -> its value, without the ranks that gave none until the deadline."""
        found: dict[int, Any] = {}
        for rank in ranks:
            with suppress(TimeoutError):
                found[rank] = self.wait_for(f"{name}/{rank}", deadline)
        return found

    def enter(self, stage: str) -> None:
        """Write down where this rank is, for `ranks_by_stage`."""
        self.store.set(f"stage/{self.launch.rank}", stage)

    def ranks_by_stage(self) -> dict[str, list[int]]:
        """Return stage -> the ranks in it, over a connection of its own: the others may be waiting on theirs."""
        store = PrefixStore(f"doctor/{self._attempt}", _store(self.launch, CONNECT_S, listens=False))
        found: dict[str, list[int]] = {}
        for rank in range(self.launch.world_size):
            key = f"stage/{rank}"
            found.setdefault(store.get(key).decode() if store.check([key]) else "start", []).append(rank)
        return found

    def leave(self) -> None:
        """Leave the meeting; the rank that has the store waits a moment for the others."""
        if self.launch.rank:
            with suppress(RuntimeError):  # the store has ended
                self.store.add("left", 1)
            return
        until = time.monotonic() + CONNECT_S
        while self.store.add("left", 0) < self.launch.world_size - 1 and time.monotonic() < until:
            time.sleep(0.02)


def _store(launch: Launch, timeout_s: float, *, listens: bool) -> TCPStore:
    return TCPStore(
        launch.address,
        launch.port,
        is_master=listens,
        timeout=timedelta(seconds=max(1.0, timeout_s)),
        wait_for_workers=False,
    )


class Doorway:
    """Listening port of a host, to which the other hosts try to connect.

    Args:
        address: Address that ranks of this host listen at; None listens nowhere.
    """

    def __init__(self, address: str | None) -> None:
        self._socket: socket.socket | None = None
        if address is not None:
            with suppress(OSError):  # of another host, which a fault names
                self._socket = socket.create_server((address, 0))
                threading.Thread(target=self._accept, name="doctor's port", daemon=True).start()

    @property
    def place(self) -> tuple[str, int] | None:
        """Address and port; None without one."""
        return None if self._socket is None else self._socket.getsockname()

    def _accept(self) -> None:
        assert self._socket is not None, "opened before the thread"
        with suppress(OSError):  # it was closed
            while True:
                self._socket.accept()[0].close()

    def close(self) -> None:
        """Stop listening."""
        if self._socket is not None:
            self._socket.close()


def failed_connections(
    places: Mapping[str, tuple[str, int]], connect: Callable[..., socket.socket] = socket.create_connection
) -> dict[str, str]:
    """Try to connect to other hosts, and return host -> the reason for those where it fails.

    Args:
        places: Host -> address and port.
    """

    def reason(place: tuple[str, int]) -> str | None:
        try:
            connect(place, timeout=CONNECT_S).close()
        except OSError as error:
            return f"{place[0]}:{place[1]}: {error.strerror or error}"
        return None

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        reasons = dict(zip(places, pool.map(reason, places.values()), strict=True))
    return {host: why for host, why in reasons.items() if why is not None}
