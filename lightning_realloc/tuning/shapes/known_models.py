"""What do the common public models look like? Their shapes, so that planning needs no file and no network.

Figures are those of the models' published ``config.json``.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from lightning_realloc.errors import PlanError
from lightning_realloc.layout.model import ModelSpec, ParamSpec
from lightning_realloc.layout.sharding import TensorParallelCut
from lightning_realloc.tuning.shapes.experts import Experts
from lightning_realloc.tuning.shapes.model_shape import ModelShape
from lightning_realloc.tuning.shapes.role_memory import RoleMemory

_Part = tuple[str, tuple[int, ...], TensorParallelCut | None]
"""A parameter of a block: its name, its shape, its cut."""
_UNDIVIDED = "its experts are not divided over tensor-parallel ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A decoder of the Llama family: gated MLP or experts of that form, RMSNorm, rotary positions."""

    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    """Whether the head is the embedding."""
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: Experts | None = None
    """In the MLP's place in every block."""

    def __post_init__(self) -> None:
        if self.experts is not None and (self.experts.num_dense_blocks or self.experts.shared_features):
            raise PlanError(
                "a built-in shape has the same experts in all blocks and shares none; give a folder with a config.json"
            )

    def role(self, *, scores: bool = False) -> RoleMemory:
        """Return the model as a role's: with a head over the vocabulary, or one for ``scores``, one number a token."""
        return RoleMemory(model=self.spec(scores=scores), shape=self.shape(scores=scores))

    def shape(self, *, scores: bool = False) -> ModelShape:
        """Return the sizes that activations and times depend on."""
        return ModelShape(
            num_layers=self.num_layers, hidden=self.hidden, intermediate=self.intermediate, num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, num_outputs=1 if scores else self.vocabulary,
            qk_norm=self.qk_norm, experts=self.experts,
        )  # fmt: skip

    def spec(self, *, scores: bool = False) -> ModelSpec:
        """Return the parameters under the names and cuts that transformers gives them."""
        blocks = [param for block in range(self.num_layers) for param in self._block(block)]
        tied = self.tied and not scores
        by_token = TensorParallelCut(0) if self.experts is None else None
        embedding = ParamSpec("model.embed_tokens.weight", (self.vocabulary, self.hidden), by_token, "input")
        outputs = [ParamSpec("model.norm.weight", (self.hidden,), None, "output")]
        if scores:
            outputs.append(ParamSpec("score.weight", (1, self.hidden), None, "output"))
        elif not tied:
            outputs.append(ParamSpec("lm_head.weight", (self.vocabulary, self.hidden), by_token, "output"))
        aliases = (("lm_head.weight", embedding.name),) if tied else ()
        refusal = None if self.experts is None else _UNDIVIDED
        return ModelSpec((embedding, *blocks, *outputs), self.num_layers, aliases, refusal)

    def _block(self, block: int) -> list[ParamSpec]:
        params = [
            *self._attention(),
            *(self._mlp() if self.experts is None else self._mixture(self.experts)),
            ("input_layernorm.weight", (self.hidden,), None),
            ("post_attention_layernorm.weight", (self.hidden,), None),
        ]
        whole = self.experts is not None  # what runs without tensor parallelism alone has no cuts
        return [
            ParamSpec(f"model.layers.{block}.{name}", shape, None if whole else cut, "block", block)
            for name, shape, cut in params
        ]

    def _attention(self) -> list[_Part]:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        by_query = TensorParallelCut(0, num_units=self.num_heads)
        by_key = by_query
        if self.num_kv_heads < self.num_heads:
            by_key = TensorParallelCut(0, num_units=self.num_kv_heads, replicate_units=True)
        projections = (("q", queries, by_query), ("k", keys, by_key), ("v", keys, by_key))
        params: list[_Part] = [
            *((f"self_attn.{name}_proj.weight", (size, self.hidden), cut) for name, size, cut in projections),
            ("self_attn.o_proj.weight", (self.hidden, queries), TensorParallelCut(1, num_units=self.num_heads)),
        ]
        if self.qkv_bias:
            params += [(f"self_attn.{name}_proj.bias", (size,), cut) for name, size, cut in projections]
        if self.qk_norm:
            params += [(f"self_attn.{name}_norm.weight", (self.head_dim,), None) for name in "qk"]
        return params

    def _mlp(self) -> list[_Part]:
        return [
            ("mlp.gate_proj.weight", (self.intermediate, self.hidden), TensorParallelCut(0)),
            ("mlp.up_proj.weight", (self.intermediate, self.hidden), TensorParallelCut(0)),
            ("mlp.down_proj.weight", (self.hidden, self.intermediate), TensorParallelCut(1)),
        ]

    def _mixture(self, experts: Experts) -> list[_Part]:
        return [
            ("mlp.gate.weight", (experts.count, self.hidden), None),
            ("mlp.experts.gate_up_proj", (experts.count, 2 * experts.features, self.hidden), None),
            ("mlp.experts.down_proj", (experts.count, self.hidden, experts.features), None),
        ]


def _llama(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocabulary: int) -> KnownModel:
    return KnownModel(
        num_layers=layers, hidden=hidden, intermediate=intermediate, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=hidden // heads, vocabulary=vocabulary,
    )  # fmt: skip


def _qwen2(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocabulary: int, tied: bool
) -> KnownModel:
    return KnownModel(
        num_layers=layers, hidden=hidden, intermediate=intermediate, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=hidden // heads, vocabulary=vocabulary, tied=tied, qkv_bias=True,
    )  # fmt: skip


def _qwen3(layers: int, hidden: int, intermediate: int, heads: int, tied: bool) -> KnownModel:
    return KnownModel(
        num_layers=layers, hidden=hidden, intermediate=intermediate, num_heads=heads, num_kv_heads=8,
        head_dim=128, vocabulary=151936, tied=tied, qk_norm=True,
    )  # fmt: skip


def _mixtral(layers: int, hidden: int, intermediate: int, heads: int) -> KnownModel:
    return KnownModel(
        num_layers=layers, hidden=hidden, intermediate=intermediate, num_heads=heads, num_kv_heads=8, head_dim=128,
        vocabulary=32000, experts=Experts(count=8, per_token=2, features=intermediate),
    )  # fmt: skip


def _qwen3_moe(layers: int, hidden: int, intermediate: int, features: int, heads: int) -> KnownModel:
    return KnownModel(
        num_layers=layers, hidden=hidden, intermediate=intermediate, num_heads=heads, num_kv_heads=4, head_dim=128,
        vocabulary=151936, qk_norm=True, experts=Experts(count=128, per_token=8, features=features),
    )  # fmt: skip


KNOWN_MODELS: dict[str, KnownModel] = {
    "meta-llama/Llama-2-7b-hf": _llama(32, 4096, 11008, 32, 32, 32000),
    "meta-llama/Llama-2-13b-hf": _llama(40, 5120, 13824, 40, 40, 32000),
    "meta-llama/Llama-2-70b-hf": _llama(80, 8192, 28672, 64, 8, 32000),
    "codellama/CodeLlama-34b-hf": _llama(48, 8192, 22016, 64, 8, 32000),
    "meta-llama/Llama-3.1-8B": _llama(32, 4096, 14336, 32, 8, 128256),
    "meta-llama/Llama-3.1-70B": _llama(80, 8192, 28672, 64, 8, 128256),
    "meta-llama/Llama-3.3-70B-Instruct": _llama(80, 8192, 28672, 64, 8, 128256),
    "mistralai/Mistral-7B-v0.1": _llama(32, 4096, 14336, 32, 8, 32000),
    "mistralai/Mixtral-8x7B-v0.1": _mixtral(32, 4096, 14336, 32),
    "mistralai/Mixtral-8x22B-v0.1": _mixtral(56, 6144, 16384, 48),
    "Qwen/Qwen2.5-0.5B": _qwen2(24, 896, 4864, 14, 2, 151936, True),
    "Qwen/Qwen2.5-1.5B": _qwen2(28, 1536, 8960, 12, 2, 151936, True),
    "Qwen/Qwen2.5-3B": _qwen2(36, 2048, 11008, 16, 2, 151936, True),
    "Qwen/Qwen2.5-7B": _qwen2(28, 3584, 18944, 28, 4, 152064, False),
    "Qwen/Qwen2.5-14B": _qwen2(48, 5120, 13824, 40, 8, 152064, False),
    "Qwen/Qwen2.5-32B": _qwen2(64, 5120, 27648, 40, 8, 152064, False),
    "Qwen/Qwen2.5-72B": _qwen2(80, 8192, 29568, 64, 8, 152064, False),
    "Qwen/Qwen3-0.6B": _qwen3(28, 1024, 3072, 16, True),
    "Qwen/Qwen3-1.7B": _qwen3(28, 2048, 6144, 16, True),
    "Qwen/Qwen3-4B": _qwen3(36, 2560, 9728, 32, True),
    "Qwen/Qwen3-8B": _qwen3(36, 4096, 12288, 32, False),
    "Qwen/Qwen3-14B": _qwen3(40, 5120, 17408, 40, False),
    "Qwen/Qwen3-32B": _qwen3(64, 5120, 25600, 64, False),
    "Qwen/Qwen3-30B-A3B": _qwen3_moe(48, 2048, 6144, 768, 32),
}
"""By Hugging Face name. The larger ones of a family differ from their instruct forms in nothing that is in here."""


def find_known_model(name: str) -> KnownModel:
    """Return a model by its Hugging Face name, in any case, with or without its owner.

    Raises:
        PlanError: for a name that is not known, with the nearest ones.
    """
    names = {key.lower(): key for key in KNOWN_MODELS} | {key.split("/")[1].lower(): key for key in KNOWN_MODELS}
    wanted = name.strip().lower()
    if wanted in names:
        return KNOWN_MODELS[names[wanted]]
    near = dict.fromkeys(names[match] for match in difflib.get_close_matches(wanted, names, n=4, cutoff=0.5))
    offer = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(KNOWN_MODELS)}"
    raise PlanError(f"model {name!r} is not built in ({offer}); or give a folder with its config.json")


_NEEDED_KEYS = ("layers", "hidden", "intermediate", "heads", "vocabulary")
_SHAPE_KEYS = (*_NEEDED_KEYS, "kv_heads", "head_dim", "experts", "experts_per_token")
_SHAPE_FLAGS = ("tied", "qkv_bias", "qk_norm")
_SHAPE_EXAMPLE = "layers=32,hidden=4096,intermediate=14336,heads=32,kv_heads=8,vocabulary=128256,tied"


def is_shape(text: str) -> bool:
    """Whether a text is a shape that is written out, rather than the name of a model."""
    return "=" in text


def parse_shape(text: str) -> KnownModel:
    """Read ``"layers=32,hidden=4096,intermediate=14336,heads=32,kv_heads=8,vocabulary=128256,tied"``.

    ``kv_heads`` is by default ``heads``, ``head_dim`` ``hidden / heads``; ``tied``, ``qkv_bias`` and ``qk_norm`` are
    said by their names alone. With ``experts`` and ``experts_per_token``, ``intermediate`` is that of one expert.

    Raises:
        PlanError: for anything else.
    """
    sizes, flags = {}, set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, separator, value = (piece.strip() for piece in part.partition("="))
        if not separator and key in _SHAPE_FLAGS and key not in flags:
            flags.add(key)
        elif key in _SHAPE_KEYS and key not in sizes and value.isdecimal() and int(value):
            sizes[key] = int(value)
        else:
            known = ", ".join((*(f"{key}=NUMBER" for key in _SHAPE_KEYS), *_SHAPE_FLAGS))
            raise PlanError(f"{part!r} of the shape {text!r} is none of {known}, each once; as in {_SHAPE_EXAMPLE}")
    pair = ("experts", "experts_per_token")
    needed = (*_NEEDED_KEYS, *(pair if any(key in sizes for key in pair) else ()))
    missing = [key for key in needed if key not in sizes]
    if missing:
        raise PlanError(f"the shape {text!r} lacks {', '.join(missing)}; as in {_SHAPE_EXAMPLE}")
    sizes.setdefault("kv_heads", sizes["heads"])
    sizes.setdefault("head_dim", sizes["hidden"] // sizes["heads"])
    if sizes["heads"] % sizes["kv_heads"] or not sizes["head_dim"]:
        raise PlanError(
            f"heads={sizes['heads']} of the shape {text!r} must be a multiple of kv_heads={sizes['kv_heads']} and at "
            f"most hidden={sizes['hidden']}; see the model's config.json"
        )
    experts = None
    if "experts" in sizes:
        experts = Experts(
            count=sizes["experts"], per_token=sizes["experts_per_token"], features=sizes["intermediate"]
        )  # fmt: skip
    return KnownModel(
        num_layers=sizes["layers"], hidden=sizes["hidden"], intermediate=sizes["intermediate"],
        num_heads=sizes["heads"], num_kv_heads=sizes["kv_heads"], head_dim=sizes["head_dim"],
        vocabulary=sizes["vocabulary"], experts=experts, **dict.fromkeys(flags, True),
    )  # fmt: skip
