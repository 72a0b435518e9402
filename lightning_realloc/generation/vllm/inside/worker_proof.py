"""Compare weights with a rank's checksums as they arrive in a vLLM worker, and with the parameters they end up in.

`child` loads this file in every worker. Like `child`, it imports nothing of this package: `checksums`, which needs
torch alone, is loaded by its path.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

_CHECKSUMS = Path(__file__).parents[3] / "runtime/transfer/checksums.py"
_ROWS, _COLUMNS = 256, 4
"""Most elements that are compared of a weight that vLLM computes with, and columns of one in a kernel's own format."""
_SLOTS = ("lora_a_stacked", "lora_b_stacked")
_COPYING = frozenset({"NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
"""Methods of vLLM's layers that keep the elements of loaded parameters, or pack them into ``cpu_linear``."""


def _load_checksums() -> Any:
    name = "lightning_realloc_checksums"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, _CHECKSUMS)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


Fault = tuple[str, str]
"""Name of a weight that a worker does not have, as in a checkpoint, and the rest of a sentence that begins with it.
Workers send it to a process that does not know this file."""


class Arrivals:
    """Weights that arrived in one update, next to those that ranks announced.

    Args:
        opening: An announcement by `HandOverProof.opening`.
    """

    def __init__(self, opening: Mapping[str, Any]) -> None:
        self._checksums, self._seed = _load_checksums(), opening["seed"]
        self._is_sampled, self._num_ranks = opening["is_sampled"], len(opening["ranks"])
        self._label, self._ranks = opening["label"], opening["ranks"]
        self.announced = {name: family for family in opening["families"] for name in family["names"]}
        """Name -> dtype, shape and boxes of a weight."""
        self.counts = Counter[str]()
        """Times that each name arrived."""
        self.sums: dict[str, list[int]] = {}
        """Name -> checksums of the pieces of a weight that arrived as announced."""
        self._faults: list[Fault] = []

    def record(self, weights: Mapping[str, Tensor], names: Iterable[str]) -> None:
        """Take checksums of tensors that arrived. ``names`` are theirs, each as often as it arrived."""
        self.counts.update(names)
        families: dict[int, list[str]] = {}
        for name, weight in weights.items():
            family = self.announced.get(name)
            dtype, shape = str(weight.dtype).removeprefix("torch."), list(weight.shape)
            if family is None:
                self._faults.append((name, "arrived, and was not handed over"))
            elif (dtype, shape) != (family["dtype"], family["shape"]):
                wanted = f"{family['dtype']} {family['shape']}"
                self._faults.append((name, f"arrived as {dtype} {shape} in place of {wanted}"))
            else:
                families.setdefault(id(family), []).append(name)
        names = [name for group in families.values() for name in group]
        groups = [self._family(group) for group in families.values()]
        found = self._checksums.Checksums(groups, weights, dtype=None, is_sampled=self._is_sampled)
        numbers = iter(found.compute(self._seed).tolist())
        widths = [group.num_columns for group in groups for _ in group.names]
        for name, width in zip(names, widths, strict=True):
            self.sums[name] = [next(numbers) for _ in range(width)] + [0] * (self._num_ranks - width)

    def _family(self, names: Sequence[str]) -> Any:
        family = self.announced[names[0]]
        shape, count = tuple(family["shape"]), self._checksums.samples_per_box(len(family["boxes"]))
        boxes = [
            self._checksums.HeldBox(tuple(size), tuple(start), shape, tuple(start), shape, count, column)
            for size, start, column in family["boxes"]
        ]
        return self._checksums.BoxFamily(tuple(names), tuple(boxes))

    def faults(self, label: str, expected: Mapping[str, Sequence[int]]) -> list[Fault]:
        """Compare with the ranks' checksums, name -> one of each rank's pieces, and the label of their weights."""
        faults = list(self._faults)
        named = {name for name, _ in faults}
        if label != self._label:
            faults.append((next(iter(expected)), f"arrived for {self._label} in place of {label}"))
        for name in self.announced.keys() | expected.keys():
            if (count := self.counts[name]) != 1:
                faults.append((name, f"arrived {count} times"))
            elif name not in named and self.sums.get(name) != list(expected.get(name, ())):
                pairs = zip(self._ranks, self.sums[name], expected.get(name, ()), strict=False)
                rank = next((rank for rank, held, sent in pairs if held != sent), self._ranks[0])
                faults.append((name, f"arrived with other elements than those of rank {rank}"))
        return sorted(faults)


class _Place(NamedTuple):
    """Elements of a parameter of vLLM's that come from one weight."""

    layer: Any
    parameter: str
    shape: torch.Size
    at: Tensor
    """(N,) flat indices in the parameter."""
    source: Tensor
    """(N,) flat indices in the weight."""


class WorkerProof:
    """The proof of a worker's weights, update by update.

    Args:
        model: vLLM's model.
        learn: Returns weight -> its places in the model's parameters; none of other weights are compared there.
    """

    def __init__(
        self, model: Any, learn: Callable[[Any, Mapping[str, Any]], dict[str, list[_Place]]] | None = None
    ) -> None:
        self._model, self._learn = model, learn or learn_places
        self._places: dict[str, list[_Place]] | None = None
        self._arrivals: Arrivals | None = None
        self._samples: dict[str, list[Tensor]] = {}
        self._seconds = 0.0

    def begin(self, opening: Mapping[str, Any]) -> None:
        """Record weights from now on, after vLLM got ready for them and before the first one."""
        self._arrivals = Arrivals(opening)
        self._samples.clear()
        self._seconds = 0.0
        if self._places is None:
            self._places = self._learn(self._model, self._arrivals.announced)
        vars(self._model).pop("load_weights", None)
        load = self._model.load_weights

        def recorded(weights: Iterable[tuple[str, Tensor]]) -> Any:
            return load(self._record(list(weights)))

        self._model.load_weights = recorded

    def _record(self, given: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Return the weights that vLLM may load: none of another name, dtype or shape."""
        begin = time.perf_counter()
        assert self._arrivals is not None and self._places is not None
        self._arrivals.record(dict(given), (name for name, _ in given))
        given = [(name, weight) for name, weight in given if name in self._arrivals.sums]
        for name, weight in given:
            places = self._places.get(name, ())
            self._samples[name] = [torch.take(weight, place.source.to(weight.device)) for place in places]
        self._seconds += time.perf_counter() - begin
        return given

    def arrived(self, label: str, expected: Mapping[str, Sequence[int]]) -> list[Fault]:
        """Return the faults of weights as they arrived, before vLLM uses them."""
        vars(self._model).pop("load_weights", None)
        assert self._arrivals is not None, "no update began"
        return self._arrivals.faults(label, expected)

    @torch.no_grad()
    def in_use(self) -> dict[str, Any]:
        """Compare vLLM's parameters with the weights that arrived.

        Returns ``faults``, names of weights that were not compared here (``uncompared``), and ``seconds`` of the proof.
        """
        begin = time.perf_counter()
        assert self._arrivals is not None and self._places is not None
        heads = [layer for name, layer in self._model.named_modules() if _has_own_copy(name, layer)]
        probes: dict[int, Tensor] = {}
        faults, uncompared = [], []
        for name in self._arrivals.announced:
            places = self._places.get(name, ())
            are_equal = [
                is_equal
                for place, sample in zip(places, self._samples.get(name, ()), strict=True)
                for is_equal in _compare(place, sample, heads, probes)
            ]
            if not all(are_equal):
                faults.append((name, "arrived, and vLLM computes with other elements"))
            if not are_equal:
                uncompared.append(name)
        seconds = self._seconds + time.perf_counter() - begin
        self._samples.clear()
        return {"faults": faults, "uncompared": uncompared, "seconds": seconds}


def prove(worker: Any, step: str, *arguments: Any) -> Any:
    """Call a method of a worker's `WorkerProof`."""
    proof = vars(worker).get("weight_proof")
    if proof is None:
        proof = vars(worker)["weight_proof"] = WorkerProof(worker.get_model())
    return getattr(proof, step)(*arguments)


def _has_own_copy(name: str, layer: Any) -> bool:
    """Return whether a layer is an output layer whose kernel on CPU has a copy of the weight, in its own format."""
    return name.endswith("lm_head") and hasattr(layer, "cpu_linear")


def _compare(place: _Place, sample: Tensor, heads: Sequence[Any], probes: dict[int, Tensor]) -> list[bool]:
    """Compare a parameter with a sample of its weight: where it is readable, and where a kernel has a copy of it."""
    live = getattr(place.layer, place.parameter)
    found = []
    if live.shape == place.shape:
        held = torch.take(live.data, place.at.to(live.device))
        found.append(_equal(held, sample.to(live.device, live.dtype)))
    packed = [place.layer] if live.shape != place.shape and hasattr(place.layer, "cpu_linear") else []
    packed += [head for head in heads if head.weight is live]
    for layer in packed if place.parameter == "weight" and len(place.shape) == 2 else ():
        columns = _spread(place.shape[1], _COLUMNS)
        if id(layer) not in probes:  # multiplied with unit vectors, it gives its columns: a sum with zeros is exact
            units = torch.zeros(len(columns), place.shape[1], dtype=live.dtype)
            units[torch.arange(len(columns)), columns] = 1
            probes[id(layer)] = layer.cpu_linear(units, layer.weight, None)
        rows, column = place.at // place.shape[1], torch.searchsorted(columns, place.at % place.shape[1])
        found.append(_equal(probes[id(layer)][column, rows], sample.to(live.dtype)))
    return found


def _equal(held: Tensor, sample: Tensor) -> bool:
    """Return whether elements are equal, as are all NaNs, both zeros, and numbers so small that kernels drop them."""
    if not sample.is_floating_point():
        return torch.equal(held, sample)
    return torch.allclose(held.float(), sample.float(), rtol=0.0, atol=torch.finfo(torch.float32).tiny, equal_nan=True)


def _spread(size: int, most: int) -> Tensor:
    """Return the first and last of ``size`` indices, and others at equal distances; all if they are few."""
    count = min(size, most)
    return torch.arange(count) * (size - 1) // max(1, count - 1)


def learn_places(model: Any, announced: Mapping[str, Any]) -> dict[str, list[_Place]]:
    """Return weight -> places where vLLM's loaders put its elements, by loading indices in place of elements.

    This runs between vLLM's start of an update and the first weight. A loader that computes with elements moves other
    indices when they are counted backwards; its weights have no places.
    """
    places = {}
    with _Recorders(model) as recorders:
        for name, family in announced.items():
            size = torch.Size(family["shape"]).numel()
            indices = torch.arange(size).view(family["shape"])
            try:
                moved, others = (recorders.load(name, each) for each in (indices, size - 1 - indices))
            except Exception:
                continue
            places[name] = [
                _place(layer, parameter, ids)
                for (layer, parameter, ids), (_, _, backwards) in zip(moved, others, strict=True)
                if torch.equal(torch.where(ids < 0, ids, size - 1 - ids), backwards)
                and bool((ids >= 0).any())
                and type(getattr(layer, "quant_method", None)).__name__ in _COPYING
            ]
    return places


def _place(layer: Any, parameter: str, ids: Tensor) -> _Place:
    if ids.ndim == 2 and hasattr(layer, "cpu_linear"):  # whole columns, which a kernel can be asked for
        columns = _spread(ids.shape[1], _COLUMNS)
        rows = (ids[:, 0] >= 0).nonzero().flatten()
        at = (rows[_spread(len(rows), _ROWS)][:, None] * ids.shape[1] + columns).flatten()
    else:
        at = (ids.flatten() >= 0).nonzero().flatten()
        at = at[_spread(len(at), _ROWS)]
    return _Place(layer, parameter, ids.shape, at, ids.flatten()[at])


class _Recorders:
    """Loaders that put indices into tensors of their own, in place of vLLM's for as long as the context lasts."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._scratches: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self._replaced: list[tuple[Any, Any]] = []

    def __enter__(self) -> _Recorders:
        from vllm.model_executor.model_loader.reload import layerwise

        for layer in self._model.modules():
            for parameter, tensor in layerwise.get_layer_tensors(layer).items():
                if hasattr(tensor, "weight_loader"):
                    self._replaced.append((tensor, tensor.weight_loader))
                    original = layerwise._get_original_loader(tensor)
                    tensor.weight_loader = self._recorder(layer, parameter, tensor, original)
        return self

    def __exit__(self, *_: object) -> None:
        for tensor, loader in reversed(self._replaced):
            tensor.weight_loader = loader

    def load(self, name: str, indices: Tensor) -> list[tuple[Any, str, Tensor]]:
        """Return layer, name and content of each parameter that a weight of these indices goes into; -1 elsewhere."""
        self._scratches.clear()
        self._model.load_weights([(name, indices)])
        found = self._scratches.values()
        return [(layer, parameter, scratch.data.as_subclass(Tensor)) for layer, parameter, scratch in found]

    def _recorder(self, layer: Any, parameter: str, tensor: Any, original: Any) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def load(*arguments: Any, **options: Any) -> Any:
            given = signature.bind(*arguments, **options)
            if (id(layer), parameter) not in self._scratches:
                scratch = torch.full(tensor.shape, -1)
                scratch.__class__, scratch.__dict__ = tensor.__class__, tensor.__dict__.copy()
                self._scratches[id(layer), parameter] = layer, parameter, scratch
            given.arguments["param"] = self._scratches[id(layer), parameter][2]
            return original(*given.args, **given.kwargs)

        return load


@torch.no_grad()
def check_adapters(
    worker: Any, opening: Mapping[str, Any], label: str, expected: Mapping[str, Any], number: int
) -> dict[str, Any]:
    """Compare adapters of a worker with those that were announced, and vLLM's slot of them with what arrived.

    ``number`` is the id under which vLLM has them. Returns the same as `WorkerProof.in_use`.
    """
    begin = time.perf_counter()
    arrivals, names = Arrivals(opening), vars(worker).pop("taken_names", [])
    kept = {name.removeprefix("base_model.model."): weight for name, weight in worker.taken_adapters.items()}
    arrivals.record({name: kept[name] for name in names}, names)
    faults, uncompared = arrivals.faults(label, expected), list[str]()
    if not faults:
        faults, uncompared = _slot_faults(worker.model_runner.lora_manager, number)
    return {"faults": faults, "uncompared": uncompared, "seconds": time.perf_counter() - begin}


def _slot_faults(lora: Any, number: int) -> tuple[list[Fault], list[str]]:
    """Compare vLLM's slot of adapters with one that is filled anew from those that arrived.

    Also return layers whose slots have another form.
    """
    manager, faults, uncompared = lora._adapter_manager, list[Fault](), list[str]()
    if number not in manager.lora_index_to_id:
        return [(next(iter(manager.modules)), "has no slot for the adapters that arrived")], []
    index = manager.lora_index_to_id.index(number)
    fresh = lora._load_adapter(SimpleNamespace(lora_int_id=number))
    manager._create_merged_loras_inplace(fresh)
    for name, module in manager.modules.items():
        slots = {key: vars(module)[key] for key in _SLOTS if isinstance(vars(module).get(key), tuple)}
        weights = manager._get_lora_layer_weights(fresh, name)
        if not slots:
            uncompared += [name] if weights else []
            continue
        filled = {key: tuple(torch.zeros_like(slot) for slot in value) for key, value in slots.items()}
        vars(module).update(filled)
        try:
            if weights:
                module.set_lora(index, weights.lora_a, weights.lora_b)
        finally:
            vars(module).update(slots)
        pairs = [pair for key in slots for pair in zip(slots[key], filled[key], strict=True)]
        if not all(_equal(held[index], wanted[index]) for held, wanted in pairs):
            faults.append((name, "has adapters that arrived, and vLLM computes with other elements"))
    return faults, uncompared
