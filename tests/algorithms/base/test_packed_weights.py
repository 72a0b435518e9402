"""Published weights in MXFP4: refused, with a line that unpacks them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.errors import ConfigError
from tests.models import tiny_model


def test_mxfp4_weights_train_once_the_line_of_the_error_has_unpacked_them(tmp_path: Path) -> None:
    packed, unpacked = tmp_path / "packed", tmp_path / "unpacked"
    blocks = _write_packed(packed)
    with pytest.raises(ConfigError, match=r"actor is quantized \(mxfp4\)") as refused:
        Role(name="actor", source=str(packed), trained=True).describe()

    (line,) = re.findall(r"Unpack it once: (.*)", str(refused.value))
    exec(
        line,
        {
            "AutoModelForCausalLM": AutoModelForCausalLM,
            "Mxfp4Config": Mxfp4Config,
            "name": str(packed),
            "folder": str(unpacked),
        },
    )
    actor = Role(name="actor", source=str(unpacked), trained=True)
    read = dict(actor.build(seed=0).named_parameters())
    for name, (values, exponent) in blocks.items():
        # Two values of four bits a byte, the lower ones first: 2 is 1.0, and 12 (sign bit, 4) is -2.0.
        pairs = torch.tensor([1.0, -2.0]) * 2.0 ** (exponent - 127)
        assert read[name].shape == values and torch.equal(read[name][0, :2, 0].float(), pairs), name


def _write_packed(folder: Path) -> dict[str, tuple[torch.Size, int]]:
    """Write gpt-oss with experts of equal bytes; return the shape and the exponent of each stack of experts."""
    model = tiny_model("gpt_oss", hidden_size=32, intermediate_size=32)
    model.save_pretrained(folder)
    weights, stacks = load_file(folder / "model.safetensors"), {}
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        shape = weights.pop(name).shape  # (experts, inputs, outputs); packed along the inputs, 32 to a scale
        experts, inputs, outputs = shape
        stacks[name] = (shape, 127 - len(stacks))
        weights[f"{name}_blocks"] = torch.full((experts, outputs, inputs // 32, 16), 12 * 16 + 2, dtype=torch.uint8)
        weights[f"{name}_scales"] = torch.full((experts, outputs, inputs // 32), stacks[name][1], dtype=torch.uint8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(config))
    return stacks
