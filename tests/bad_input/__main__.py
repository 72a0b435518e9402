"""Trial of bad input: mutate valid configurations, plans, data, models, rewards, agents and flags; see the answers.

    python -m tests.bad_input --cases 2000 --seed 0

Each case has one random mistake. It must be accepted (not every mutation is a mistake) or refused by one of the
package's errors, a usage error or an error of Lightning's own settings. Any other exception, and a case that takes
longer than its deadline, is a failure. Prints each failure, a table of counts by kind, and ``failures: N`` at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from lightning_realloc import GRPO, Dataflow, PreferenceDataModule, PromptDataModule, SFTDataModule
from lightning_realloc import cli as command_line
from lightning_realloc.batch.samples import Ragged, Samples
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.environments import MessageEnvironment, StepResult
from lightning_realloc.environments.environment_factory import EnvironmentFactory
from lightning_realloc.environments.episode_options import EpisodeOptions
from lightning_realloc.environments.episodes import Episodes
from lightning_realloc.environments.turns.turn_parser import TurnParser
from lightning_realloc.generation import Conversation, GenerationEngine, SamplingParams
from lightning_realloc.layout import ClusterSpec, Layout
from lightning_realloc.rewards import RewardFunctions
from lightning_realloc.strategies.lightning.failures import CALLER_ERRORS
from tests.bad_input.mutations import ODD_VALUES, damaged, misspelled, mutated
from tests.environments.guessing import END, chat_model, chat_tokenizer
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs
from tests.test_cli import CONFIG, REWARDS

DEADLINE_S = 60
"""Seconds of one case, at most."""
SHARES = {"layout": 25, "plan": 20, "rows": 25, "reward": 15, "flags": 10, "model": 5, "configuration": 15, "agent": 15}
"""Kind -> its share of all cases."""
LAYOUTS = ("dp2.tp2@0-3", "fsdp4", "fsdp2.tp2@0-3", "dp2.pp2.tp2@0-7", "tp2@0,2", "dp1@3-3")
PLAN = {
    "calls": {
        "actor.generate": "dp2.tp2@0-3",
        "reference.infer": {"layout": "tp2@0-1", "micro_batch_tokens": 512},
        "actor.train": {"layout": "fsdp4@0-3", "gradient_checkpointing": True},
    },
    "offload": ["reference"],
}
FLAGS = (
    "plan --algorithm grpo --actor model --cluster h100:1x4 --prompt-length 128 --response-length 256 --batch 8",
    "plan --algorithm ppo --actor model --cluster a100:1x2 --memory-per-device 40GiB --seconds 0.1",
    "plan --check plan.yaml --actor model --cluster h100:1x4 --headroom 0.2",
    "plan --actor model --cluster h100:1x4 --lora actor=16 --sweep 1,2",
    "export nowhere --output out --dtype float32",
)
ROWS: dict[type, list[dict[str, Any]]] = {
    PromptDataModule: [{"prompt": "2+2=", "answer": "4"}, {"prompt": "3+3=", "answer": "6"}],
    SFTDataModule: [{"prompt": "2+2=", "completion": "4"}, {"prompt": "3+3=", "completion": "6"}],
    PreferenceDataModule: [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2,
}


AGENT: dict[str, Any] = {
    "reset": [{"role": "user", "content": "Guess"}, {"role": "user", "content": [{"type": "text", "text": "1 2"}]}],
    "step": {"messages": [{"role": "user", "content": "lower"}], "reward": 0.5, "done": False, "metrics": {"a": 1.0}},
    "get_reward": 1.0,
    "tool": {"found": ["lower", 1]},
    "turn": {"content": "3", "tool_calls": [{"name": "tool", "arguments": {"number": 3}}]},
    "conversation": {"max_turns": 2, "max_turn_tokens": 2, "deadline_s": 5.0, "retries": 0},
}
"""What methods of an environment, a tool and a parser return, and the bounds of a conversation."""


class Late(BaseException):
    """A case that exceeds its deadline."""


# ---- one function per kind: makes a mistake, uses the input, and returns the mistake's description
def layout(rng: random.Random, folder: Path) -> Iterator[str]:
    """A layout's text, or a cluster's."""
    text = rng.choice(LAYOUTS)
    for _ in range(rng.randint(1, 3)):
        text = misspelled(text, rng)
    yield repr(text)
    Layout.parse(text)
    if rng.random() < 0.2:
        ClusterSpec.parse(misspelled("h100:2x8", rng))


def plan(rng: random.Random, folder: Path) -> Iterator[str]:
    """An execution plan, as a mapping or a file."""
    value, mistake = mutated(PLAN, rng)
    yield mistake
    if rng.random() < 0.5:
        file = folder / "plan.yaml"
        file.write_text(yaml.safe_dump(value), errors="replace")
        found = ExecutionPlan.load(file)
    else:
        found = ExecutionPlan.from_mapping(value)
    found.check(Dataflow(GRPO.calls_for(("actor", "reference"))), world_size=4)


def rows(rng: random.Random, folder: Path) -> Iterator[str]:
    """Rows of data, given or in a file whose bytes are damaged."""
    kind = rng.choice(list(ROWS))
    if rng.random() < 0.5:
        value, mistake = mutated(ROWS[kind], rng)
        yield f"{kind.__name__} {mistake}"
        data: Any = value
    else:
        file = folder / f"rows{rng.random()}.jsonl"  # an earlier case may have made a folder of it
        file.write_text("".join(json.dumps(row) + "\n" for row in ROWS[kind]))
        yield f"{kind.__name__} {damaged(file, rng)}"
        data = str(file)
    module = kind(data, batch_size=rng.choice((1, 2)), tokenizer=byte_tokenizer())
    module.setup("fit")
    next(iter(module.train_dataloader()))


def reward(rng: random.Random, folder: Path) -> Iterator[str]:
    """Results of a reward function."""
    results, mistake = mutated([0.0, 1.0, None], rng)
    yield mistake
    functions = RewardFunctions(lambda completions, **columns: results)
    functions(["a", "b", "c"], ["d", "e", "f"], [[1], [2], [3]], {})


def flags(rng: random.Random, folder: Path) -> Iterator[str]:
    """Flags of the commands that need no configuration."""
    words = rng.choice(FLAGS).split()
    at = rng.randrange(1, len(words))
    words[at] = rng.choice((misspelled(words[at], rng), *map(str, rng.sample(ODD_VALUES, 2))))
    if rng.random() < 0.2:
        del words[at]
    yield " ".join(words)[:160]
    _command(words)


def model(rng: random.Random, folder: Path) -> Iterator[str]:
    """Files of a model's folder."""
    copy = folder / "damaged"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder / "model", copy)
    file = rng.choice(sorted(path for path in copy.iterdir() if path.is_file()))
    yield damaged(file, rng)
    runs.trainer("realloc", 1, max_steps=0).fit(
        GRPO(str(copy), runs.low_tokens), PromptDataModule(str(folder / "prompts.jsonl"), batch_size=4)
    )


def configuration(rng: random.Random, folder: Path) -> Iterator[str]:
    """A configuration of the command line."""
    value, mistake = mutated(CONFIG, rng)
    yield mistake
    (folder / "fit.yaml").write_text(yaml.safe_dump(value), errors="replace")
    _command(["fit", "--config", "fit.yaml", "--trainer.max_steps", "0", "--trainer.max_epochs", "1"])


def agent(rng: random.Random, folder: Path) -> Iterator[str]:
    """Results of an environment, of a tool and of a parser, and settings of a conversation."""
    value, mistake = mutated(AGENT, rng)
    yield mistake
    given = value if isinstance(value, dict) else {}

    def tool(number: int) -> Any:
        """Look it up.

        Args:
            number: A number.
        """
        return given.get("tool")

    class Answers(MessageEnvironment):
        def reset(self, row: Any) -> Any:
            return given.get("reset")

        def step(self, message: Any) -> Any:
            result = given.get("step")
            return StepResult(**result) if isinstance(result, dict) else result

        def get_reward(self) -> Any:
            return given.get("get_reward")

    tokenizer = chat_tokenizer()
    settings = given.get("conversation")
    bounds = Conversation(**settings) if isinstance(settings, dict) else Conversation()
    parser = TurnParser(tokenizer, lambda text: given.get("turn"))
    factory = EnvironmentFactory(Answers, [tool])
    episodes = Episodes(EpisodeOptions(factory, tokenizer, frozenset({END}), {}, parser, bounds))
    prompts = Samples(torch.arange(2), {"prompt_ids": Ragged.from_list([[4, 1]] * 2)}, {"prompt": ("Guess", "Guess")})
    engine = GenerationEngine(chat_model(), tokenizer=tokenizer)
    begun = episodes.begin(prompts, max_prompt_tokens=engine.max_prompt_tokens)
    made = engine.generate(begun, SamplingParams(max_new_tokens=12), environment=episodes, conversation=bounds)
    made, _ = episodes.finish(made)
    for error in filter(None, (completion.error for completion in made)):  # a mistake of ours would be one of theirs
        assert " raised " not in error or "StepResult.__init__" in error, error


KINDS: dict[str, Callable[[random.Random, Path], Iterator[str]]] = {
    function.__name__: function for function in (layout, plan, rows, reward, flags, model, configuration, agent)
}


def _command(words: list[str]) -> None:
    """Run a command line; raise AssertionError if it ends with a traceback or without a message."""
    sys.argv = ["lightning-realloc", *words]
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = command_line.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    if code:
        assert "Traceback" not in errors.getvalue(), errors.getvalue()
        assert code != 2 or errors.getvalue().strip(), "it ends without a message"
        raise SystemExit(code)


# ---- the trial
def outcome(kind: str, seed: str, folder: Path) -> tuple[str, str]:
    """Run one case, and return its outcome and its description."""
    case = KINDS[kind](random.Random(seed), folder)
    mistake = next(case)
    signal.alarm(DEADLINE_S)
    try:
        next(case, None)
        return "accepted", mistake
    except (*CALLER_ERRORS, SystemExit) as error:
        is_said = isinstance(error, SystemExit) or len(str(error)) > 10
        return ("refused" if is_said else "failed"), mistake
    except Late:
        return "late", mistake
    except BaseException:
        return "failed", f"{mistake}\n{traceback.format_exc(limit=-4)}"
    finally:
        signal.alarm(0)


def _raise_late(*_: object) -> None:
    raise Late


def _prepare(folder: Path) -> None:
    """Write a model, prompts, rewards and a plan."""
    tiny_model("qwen2", vocab_size=320).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    lines = [json.dumps({"prompt": f"{number}+{number}=", "answer": str(2 * number)}) for number in range(8)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "plan.yaml").write_text(yaml.safe_dump(PLAN))
    os.chdir(folder)
    sys.path.insert(0, str(folder))


def main() -> int:
    """Run the trial, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000, help="number of cases of all kinds together")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mistakes")
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS), help="kinds to try")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _raise_late)
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in options.only}
    with tempfile.TemporaryDirectory(prefix="bad-input-") as name:
        folder = Path(name)
        _prepare(folder)
        for kind in options.only:
            for number in range(options.cases * SHARES[kind] // sum(SHARES.values()) + 1):
                seed = f"{options.seed} {kind} {number}"
                result, mistake = outcome(kind, seed, folder)
                counts[kind][result] += 1
                if result in ("failed", "late"):
                    print(f"{result}: {kind} {number}: {mistake}", flush=True)
        os.chdir("/")
    for kind, count in counts.items():
        print(f"{kind:14s} {', '.join(f'{name} {number}' for name, number in sorted(count.items()))}")
    failures = sum(count["failed"] + count["late"] for count in counts.values())
    print(f"cases: {sum(map(Counter.total, counts.values()))}, failures: {failures}")
    return failures > 0


if __name__ == "__main__":
    sys.exit(main())
