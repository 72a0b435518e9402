"""How many bytes does a rank need, beyond what it holds, while models move from one plan's layouts to another's?"""

from __future__ import annotations

from collections.abc import Mapping

from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.layout.dims import Layout
from lightning_realloc.tuning.memory.parts import MemorySettings
from lightning_realloc.tuning.shapes.role_elements import RoleElements
from lightning_realloc.tuning.shapes.role_memory import RoleMemory


def transition_bytes(
    dataflow: Dataflow,
    before: ExecutionPlan,
    after: ExecutionPlan,
    roles: Mapping[str, RoleMemory],
    settings: MemorySettings,
    *,
    rank: int,
) -> int:
    """Return the most that a rank holds at once beyond what it held before the change.

    Roles move one after the other. Each is made whole and divided on the ranks of its new layout, then takes over
    weights and optimizer state, and only then the old replica goes. Copies are not moved; they are filled again later.

    Raises:
        LayoutError: for a layout that does not fit its model.
    """
    most = held = 0
    for name in dataflow.roles:
        if roles[name].shares is not None:
            continue
        call = dataflow.home_call(name).name
        old, new = before.call(call), after.call(call)
        if (old.layout, old.gradient_checkpointing) == (new.layout, new.gradient_checkpointing):
            continue
        role, trains = roles[name], name in dataflow.trained_roles
        elements, count = RoleElements(role), role.model.num_elements
        gone = _bytes_of(elements, old.layout, rank, settings, is_trained=trains)
        weights, state = _bytes_of(elements, new.layout, rank, settings, is_trained=trains)
        whole = settings.weights_bytes(role, count, count - role.num_frozen, is_trained=trains)
        whole = whole if rank in new.layout else 0
        most = max(most, held + whole + weights, held + weights + state)
        held += weights + state - sum(gone)
    return most


def _bytes_of(
    elements: RoleElements, layout: Layout, rank: int, settings: MemorySettings, *, is_trained: bool
) -> tuple[int, int]:
    """Return a home replica's weights and optimizer state on a rank."""
    if rank not in layout:
        return 0, 0
    sizes = elements.on(layout, rank)
    num, num_trained = sizes.num_sharded, sizes.num_trained_sharded
    weights = settings.weights_bytes(elements.role, num, num_trained, is_trained=is_trained)
    return weights, num_trained * settings.optimizer_bytes if is_trained else 0
