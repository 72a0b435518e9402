"""Adapters in vLLM's workers, from the memory of `child`. Like `child`, this file imports nothing of this package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class AdaptersRefused(Exception):
    """Adapters of modules that vLLM cannot adapt, and would refuse again; the message names them, and the way out."""

    fails_again = True

    def __init__(self, modules: Sequence[str]) -> None:
        super().__init__(
            f"vLLM takes no adapters of {', '.join(modules)}; name other target_modules, or hand merged weights over "
            f"by VLLMOptions(merge_adapters=True), or use engine='native'"
        )


def prepare(worker: Any, settings: Mapping[str, Any]) -> set[str]:
    """Let a worker's next request for adapters load those that it keeps; return modules that vLLM cannot adapt."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.utils import parse_fine_tuned_lora_name

    lora, kept, helper = worker.model_runner.lora_manager, worker.taken_adapters, PEFTHelper.from_dict(dict(settings))
    manager, mapper = lora._adapter_manager, getattr(lora._adapter_manager.model, "hf_to_vllm_mapper", None)
    mapper = None if mapper is None else mapper.get_rename_mapper()
    packed = manager.packed_modules_mapping
    known = {part for module in manager.supported_lora_modules for part in packed.get(module, [module])}

    def load(request: Any) -> Any:
        helper.validate_legal(lora.lora_config)
        own = {name: weight.clone() for name, weight in kept.items()}  # vLLM scales them in place
        return LoRAModel.from_lora_tensors(
            request.lora_int_id, own, helper, device="cpu", dtype=lora.lora_config.lora_dtype, weights_mapper=mapper
        )

    lora._load_adapter = load
    modules = {parse_fine_tuned_lora_name(name, mapper)[0].rpartition(".")[2] for name in kept}
    return modules - known
