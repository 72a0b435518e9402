"""A reader's folder: tiny models and data under the names that the pages use.

``from_pretrained`` and ``load_dataset`` look for a folder before they ask the hub, so no function is replaced.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset

from tests.documentation.pages import examples
from tests.models import byte_tokenizer, tiny_model, tiny_scorer
from tests.vision_models import tiny_vision_model

ACTORS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "runs/demo/warm")
MIXTURES = {"Qwen/Qwen3-30B-A3B": "qwen3_moe", "zai-org/GLM-4.5-Air": "glm4_moe"}
IMAGE_MODELS = {"Qwen/Qwen2.5-VL-3B-Instruct": "qwen2_5_vl"}
REWARD_MODELS = ("Skywork/Skywork-Reward-V2-Qwen3-0.6B", "my/reward-model")
SIZES = {"vocab_size": 260, "max_position_embeddings": 4096}
MOST_TOKENS = range(2, 200)
"""End-of-sequence tokens of the models, so that most responses are short for any ``max_new_tokens``."""
CHAT_TEMPLATE = """\
{%- if tools %}{{ tools | tojson }}
{% endif %}
{%- for message in messages %}{{ message['role'] + ': ' + (message['content'] or '') }}
{%- for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}<eos>
{% endfor %}"""

SUMS = [(f"{number} + {number} =", str(2 * number)) for number in range(160)]
PROMPTS = [{"prompt": prompt, "answer": answer} for prompt, answer in SUMS]
CHATS = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in PROMPTS]
PAIRS = [{"prompt": prompt, "chosen": answer, "rejected": "no"} for prompt, answer in SUMS]
DEMONSTRATIONS = [{"prompt": prompt, "completion": answer} for prompt, answer in SUMS]
ROWS = {
    "train": CHATS, "pairs": PAIRS, "gsm8k_test": PROMPTS, "runs/demo/train": PROMPTS, "runs/demo/held_out": PROMPTS[:8]
}  # fmt: skip


def write_folder(folder: Path) -> None:
    """Write models, data and a plan."""
    for name in (*ACTORS, *MIXTURES):
        model = tiny_model(MIXTURES.get(name, "qwen3"), **SIZES)
        model.generation_config.eos_token_id = list(MOST_TOKENS)
        model.save_pretrained(folder / name)
    for name, family in IMAGE_MODELS.items():
        tiny_vision_model(family, **SIZES).save_pretrained(folder / name)
    for name in REWARD_MODELS:
        tiny_scorer("qwen3", **SIZES).save_pretrained(folder / name)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    for name in (*ACTORS, *MIXTURES, *IMAGE_MODELS, *REWARD_MODELS):
        tokenizer.save_pretrained(folder / name)
    for name, rows in ROWS.items():
        write_jsonl(folder / f"{name}.jsonl", rows)
    Dataset.from_list(DEMONSTRATIONS).to_parquet(folder / "chats.parquet")
    (folder / "plan.yaml").write_text(examples("docs/layouts-and-plans.md", "yaml")[0].text)
    write_hub_data(folder / "openai/gsm8k", "main", [{"question": prompt, "answer": answer} for prompt, answer in SUMS])


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_hub_data(folder: Path, configuration: str, rows: list[dict[str, str]]) -> None:
    """Write a data set with one configuration, as a repository of the hub holds it."""
    folder.mkdir(parents=True)
    write_jsonl(folder / "train.jsonl", rows)
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: {configuration}\n  data_files: train.jsonl\n---\n"
    )
