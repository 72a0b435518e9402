"""Environments of messages whose tools and server fail in the ways of a list, and counts of what they leave open.

The row names the fault. Iterations 1 and 8 have none; the first asks the server, which dies in the third.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch.optim import AdamW

from lightning_realloc.data.prompts import PromptDataModule
from lightning_realloc.environments import StepResult
from lightning_realloc.generation import Conversation, SamplingParams
from lightning_realloc.generation.loop.asking import call
from lightning_realloc.generation.loop.environment import EVENT_LOOP
from tests.environments.guessing import Asking, chat_model, chat_tokenizer, words_as_calls
from tests.strategies import runs

TOOL_DEADLINE_S = 0.3
DEADLINE_S = 2.0
STALL_TIMEOUT_S = 8.0
"""Stall of a run whose ranks wait for environments up to `DEADLINE_S`."""
BATCH = 6
FAULTS: tuple[tuple[str, ...], ...] = (
    ("server", "server"),
    ("hanging tool", "raising tool", "large answer of a tool", "late step"),
    ("dying server", "hanging coroutine", "large step"),
    ("hanging tool", "large answer of a tool", "raising step"),
    ("late step", "raising tool", "large step"),
    ("raising reset", "hanging coroutine"),
    ("hanging tool", "raising step"),
    (),
)
"""Faults of the rows of each iteration; further rows have none."""
FAILING = frozenset({"late step", "dying server", "large step", "raising step", "raising reset"})
"""Faults after which a response is left out; calls of tools that fail are answered."""
_RELEASED = threading.Event()
"""Ends hanging tools, whose threads nothing else can end."""


class Faulty(Asking):
    """A game with the fault that its row names.

    Args:
        address: Address of the server.
    """

    def __init__(self, address: str) -> None:
        super().__init__(tool_deadline_s=math.inf)  # a busy machine may hold up any call
        self.address = address

    def reset(self, row: Mapping[str, Any]) -> None:
        """Begin a game."""
        self.fault = row["fault"]
        if self.fault.startswith("hanging"):
            super().__init__(tool_deadline_s=TOOL_DEADLINE_S)
        super().reset(row)
        if self.fault == "raising reset":
            raise OSError("no room for a game")

    def is_above(self, number: int) -> Any:
        """Tell whether the secret number is above another one.

        Args:
            number: The other one.
        """
        match self.fault:
            case "hanging tool":
                _RELEASED.wait()
            case "hanging coroutine":
                return asyncio.sleep(3600)
            case "raising tool":
                raise LookupError(f"no card for {number}")
            case "large answer of a tool":
                return "1 " * 5_000_000
        return super().is_above(number)

    async def step(self, message: Mapping[str, Any]) -> StepResult:
        """Answer a turn."""
        match self.fault:
            case "late step":
                await call(time.sleep, 1.5 * DEADLINE_S)
            case "raising step":
                raise LookupError("the game is lost")
            case "large step":
                return StepResult([{"role": "user", "content": "1 " * 5_000_000}])
            case "server" | "dying server":
                path = "die" if self.fault == "dying server" else "hint"
                await call(_ask, f"{self.address}/{path}")
        return await super().step(message)


def _ask(address: str) -> None:
    with urlopen(address, timeout=DEADLINE_S) as answer:
        assert answer.read() == b"higher"


def algorithm(address: str, reward: Any) -> Any:
    """Return GRPO with these environments.

    When answers come decides which samples share a step, and so the last bits of the log-probabilities of the rollout:
    those that it learns with are the trained model's own.
    """
    return runs.RecordedGRPO(
        chat_model(), reward, reference=chat_model(1), tokenizer=chat_tokenizer(), parser=words_as_calls,
        sampling=SamplingParams(n=2, max_new_tokens=40), environment=partial(Faulty, address),
        conversation=Conversation(max_turns=3, max_turn_tokens=4, deadline_s=DEADLINE_S),
        optimizer=partial(AdamW, lr=1e-2, eps=1e-4), ratio_to="proximal",
    )  # fmt: skip


def games() -> PromptDataModule:
    """Return the rows of all iterations, in their order."""
    rows = [
        {"prompt": [{"role": "user", "content": "Guess"}], "secret": place, "fault": fault}
        for faults in FAULTS
        for place, fault in enumerate((*faults, *["none"] * (BATCH - len(faults))))
    ]
    return PromptDataModule(rows, batch_size=BATCH, shuffle=False)


# ---- the server
SERVER = """
import os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            os._exit(1)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"higher")

    def log_message(self, *arguments):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


def start_server() -> tuple[subprocess.Popen[str], str]:
    """Start a server, and return its process and address."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, f"http://127.0.0.1:{int(process.stdout.readline())}"


def end_server(process: subprocess.Popen[str]) -> None:
    """End a server, unless it has died."""
    process.kill()
    process.communicate()


# ---- what is left open
def open_things() -> dict[str, int]:
    """Return the numbers of threads, sockets, tasks of environments and child processes of this process."""
    own = Path("/proc/self")
    tasks = EVENT_LOOP.submit(_num_other_tasks()).result()
    children = [child for task in (own / "task").iterdir() for child in _children(task)]
    return {
        "threads": sum(thread.name != "tqdm_monitor" for thread in threading.enumerate()),  # of an export's bar
        "sockets": sum(_is_socket(link) for link in (own / "fd").iterdir()),
        "tasks": tasks,
        "children": len(children),
    }


async def _num_other_tasks() -> int:
    return len(asyncio.all_tasks()) - 1


def _children(task: Path) -> list[str]:
    try:
        return (task / "children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):  # the thread has ended
        return []


def _is_socket(link: Path) -> bool:
    try:
        return os.readlink(link).startswith("socket:")
    except FileNotFoundError:  # of the iteration itself
        return False


class LeftOpen(Callback):
    """Counts what is open after the first iteration and after the last one, when hanging tools have ended.

    Args:
        folder: Where to write what there is more of, a file per rank; None: nowhere.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.counts: list[dict[str, int]] = []

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Let tools hang again."""
        _RELEASED.clear()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Count after the first iteration of this process."""
        if not self.counts:
            gc.collect()
            self.counts.append(open_things())

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Count again; threads of late answers end within seconds."""
        _RELEASED.set()
        give_up_at = time.monotonic() + 3 * DEADLINE_S
        while self.leaks(now := open_things()) and time.monotonic() < give_up_at:
            gc.collect()
            time.sleep(0.05)
        self.counts.append(now)
        if self.folder is not None:
            (self.folder / f"left_open{trainer.global_rank}.json").write_text(json.dumps(self.leaks(now)))

    def leaks(self, now: Mapping[str, int]) -> dict[str, int]:
        """Return what there is more of than after the first iteration."""
        return {name: count - self.counts[0][name] for name, count in now.items() if count > self.counts[0][name]}
