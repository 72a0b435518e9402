"""Shapes of common public models, so that planning needs no checkpoint and no network.

`find_known_model` looks one up by its Hugging Face name; `parse_shape` reads a shape that the user writes out.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType

import yaml

from lightning_realloc.errors import PlanError
from lightning_realloc.layout.model import ModelSpec, ParamSpec
from lightning_realloc.layout.sharding import TensorParallelCut
from lightning_realloc.tuning.shapes.experts import Experts
from lightning_realloc.tuning.shapes.model_shape import ModelShape
from lightning_realloc.tuning.shapes.role_memory import RoleMemory

_BlockParam = tuple[str, tuple[int, ...], TensorParallelCut | None]
"""Name, shape and tensor-parallel cut of a parameter of a block."""
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
    """Experts that replace the MLP of every block; None for a dense model."""

    def __post_init__(self) -> None:
        if self.experts is not None and (self.experts.num_dense_blocks or self.experts.shared_features):
            raise PlanError(
                "a built-in shape has the same experts in all blocks and shares none; give a folder with a config.json"
            )

    def role(self, *, scores: bool = False) -> RoleMemory:
        """Return the model as a role, with a language-model head or, for ``scores``, a head with one output a token."""
        return RoleMemory(model=self.spec(scores=scores), shape=self.shape(scores=scores))

    def shape(self, *, scores: bool = False) -> ModelShape:
        """Return the sizes that activation memory and run times depend on."""
        return ModelShape(
            num_layers=self.num_layers,
            hidden=self.hidden,
            intermediate=self.intermediate,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            num_outputs=1 if scores else self.vocabulary,
            qk_norm=self.qk_norm,
            experts=self.experts,
        )

    def spec(self, *, scores: bool = False) -> ModelSpec:
        """Return the parameters, with the names and tensor-parallel cuts that transformers gives them."""
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
        whole = self.experts is not None  # a mixture of experts runs without tensor parallelism only
        return [
            ParamSpec(f"model.layers.{block}.{name}", shape, None if whole else cut, "block", block)
            for name, shape, cut in params
        ]

    def _attention(self) -> list[_BlockParam]:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        by_query, to_output = (TensorParallelCut(dim, self.num_heads, num_groups=self.num_kv_heads) for dim in (0, 1))
        by_key = by_query
        if self.num_kv_heads < self.num_heads:
            by_key = TensorParallelCut(0, num_units=self.num_kv_heads, replicate_units=True)
        projections = (("q", queries, by_query), ("k", keys, by_key), ("v", keys, by_key))
        params: list[_BlockParam] = [
            *((f"self_attn.{name}_proj.weight", (size, self.hidden), cut) for name, size, cut in projections),
            ("self_attn.o_proj.weight", (self.hidden, queries), to_output),
        ]
        if self.qkv_bias:
            params += [(f"self_attn.{name}_proj.bias", (size,), cut) for name, size, cut in projections]
        if self.qk_norm:
            params += [(f"self_attn.{name}_norm.weight", (self.head_dim,), None) for name in "qk"]
        return params

    def _mlp(self) -> list[_BlockParam]:
        return [
            ("mlp.gate_proj.weight", (self.intermediate, self.hidden), TensorParallelCut(0)),
            ("mlp.up_proj.weight", (self.intermediate, self.hidden), TensorParallelCut(0)),
            ("mlp.down_proj.weight", (self.hidden, self.intermediate), TensorParallelCut(1)),
        ]

    def _mixture(self, experts: Experts) -> list[_BlockParam]:
        return [
            ("mlp.gate.weight", (experts.count, self.hidden), None),
            ("mlp.experts.gate_up_proj", (experts.count, 2 * experts.features, self.hidden), None),
            ("mlp.experts.down_proj", (experts.count, self.hidden, experts.features), None),
        ]


@lru_cache(maxsize=1)
def known_models() -> Mapping[str, KnownModel]:
    """Return the built-in models by Hugging Face name, read from ``known_models.yaml`` on the first call."""
    models = {}
    for name, entry in yaml.safe_load(files(__package__).joinpath("known_models.yaml").read_text("utf-8")).items():
        experts = entry.pop("experts", None)
        models[name] = KnownModel(**entry, experts=experts and Experts(**experts))
    return MappingProxyType(models)


def find_known_model(name: str) -> KnownModel:
    """Return a model by its Hugging Face name, case-insensitive, with or without the owner.

    Raises:
        PlanError: for an unknown name; the message lists the nearest ones.
    """
    models = known_models()
    names = {key.lower(): key for key in models} | {key.split("/")[1].lower(): key for key in models}
    wanted = name.strip().lower()
    if wanted in names:
        return models[names[wanted]]
    near = dict.fromkeys(names[match] for match in difflib.get_close_matches(wanted, names, n=4, cutoff=0.5))
    offer = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(models)}"
    raise PlanError(f"model {name!r} is not built in ({offer}); or give a folder with its config.json")


_NEEDED_KEYS = ("layers", "hidden", "intermediate", "heads", "vocabulary")
_SHAPE_KEYS = (*_NEEDED_KEYS, "kv_heads", "head_dim", "experts", "experts_per_token")
_SHAPE_FLAGS = ("tied", "qkv_bias", "qk_norm")
_SHAPE_EXAMPLE = "layers=32,hidden=4096,intermediate=14336,heads=32,kv_heads=8,vocabulary=128256,tied"


def is_shape(text: str) -> bool:
    """Whether a text is a written-out shape rather than the name of a model."""
    return "=" in text


def parse_shape(text: str) -> KnownModel:
    """Read a shape such as ``"layers=32,hidden=4096,intermediate=14336,heads=32,kv_heads=8,vocabulary=128256,tied"``.

    ``kv_heads`` defaults to ``heads``, and ``head_dim`` to ``hidden / heads``. The flags ``tied``, ``qkv_bias`` and
    ``qk_norm`` take no value. With ``experts`` and ``experts_per_token``, ``intermediate`` is the size of one expert.

    Raises:
        PlanError: for an unknown, repeated or missing key, and for sizes that contradict each other.
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
        per_token = sizes["experts_per_token"]
        experts = Experts(count=sizes["experts"], per_token=per_token, features=sizes["intermediate"])
    return KnownModel(
        num_layers=sizes["layers"],
        hidden=sizes["hidden"],
        intermediate=sizes["intermediate"],
        num_heads=sizes["heads"],
        num_kv_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        vocabulary=sizes["vocabulary"],
        experts=experts,
        **dict.fromkeys(flags, True),
    )
