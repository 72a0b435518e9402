"""Ten thousand rows with large images take no memory for them: headers are read, pixels of few samples are kept."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lightning_realloc import PromptDataModule
from lightning_realloc.batch.samples import model_inputs
from lightning_realloc.data.images.sample_images import CACHED_BYTES
from tests.vision_processors import tiny_processor

NUM_ROWS = 10_000
MIB = 1 << 20


def resident_bytes() -> int:
    """Return the resident set of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the resident set from /proc")
def test_memory_stays_flat_with_ten_thousand_large_images(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    for number in range(4):  # 1 to 4 MB; rows have files of their own, which share their content on the disk
        pixels = noise.integers(0, 256, (600 * (number + 1), 700, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        assert (number + 1) * MIB < (tmp_path / f"{number}.png").stat().st_size < (number + 2) * MIB
    rows = []
    for number in range(NUM_ROWS):
        os.link(tmp_path / f"{number % 4}.png", tmp_path / f"row{number}.png")
        rows.append({"prompt": "what?", "image": str(tmp_path / f"row{number}.png")})
    module = PromptDataModule(rows, batch_size=8, tokenizer=tiny_processor("qwen2_5_vl"))
    before = resident_bytes()

    module.setup()
    after_setup = resident_bytes()
    inputs = model_inputs(module.tables["train"])
    sizes = [given.extras["pixel_values"].nbytes for given in inputs[:200]]

    assert after_setup - before < 100 * MIB  # 2.5 MB a row would be 25 GB
    assert resident_bytes() - after_setup < 100 * MIB + min(sum(sizes), CACHED_BYTES)
