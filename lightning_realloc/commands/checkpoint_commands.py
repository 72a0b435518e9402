"""Commands ``lightning-realloc export`` and ``verify``: write models of checkpoints, and look for damage in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_realloc.commands.command_parser import CommandParser
from lightning_realloc.remote_path import as_path
from lightning_realloc.strategies.checkpoints.export import export_checkpoint
from lightning_realloc.strategies.checkpoints.safety.verification import verify_checkpoints


def run_export(arguments: Sequence[str], write: Callable[[str], object]) -> int:
    """Export a role, and return the exit code.

    Raises:
        ReallocError: for a wrong flag, a folder that is no checkpoint, an unknown role or dtype, and an output folder
            in use.
    """
    parser = CommandParser("export")
    parser.add_argument("checkpoint", help="Folder or address (s3://...) that a run saved to.")
    parser.add_argument("--output", required=True, help="New folder or address, or an earlier export.")
    parser.add_argument("--role", default="actor", help="Model of the checkpoint to export.")
    parser.add_argument("--dtype", help="float32, bfloat16, ...; default: as trained.")
    parser.add_argument("--merge", action="store_true", help="Merge adapters into their base; default: adapters alone.")
    parser.add_argument("--averaged", action="store_true", help="Write the averages of an EMA; default: the weights.")
    parser.add_argument("--base", help="Adapters' base model; default: as loaded.")
    trust = "Import a model class that is none of transformers, which runs its module; default: refuse."
    parser.add_argument("--trust-model-class", action="store_true", help=trust)
    chosen = parser.parse(arguments)
    folder = export_checkpoint(
        chosen.checkpoint,
        chosen.output,
        role=chosen.role,
        dtype=chosen.dtype,
        merge=chosen.merge,
        averaged=chosen.averaged,
        base=chosen.base,
        trust_model_class=chosen.trust_model_class,
    )
    write(f"{chosen.role} of {chosen.checkpoint} written to {folder}\n")
    return 0


def run_verify(arguments: Sequence[str], write: Callable[[str], object]) -> int:
    """Verify checkpoints, and return the exit code: 2 if one is damaged."""
    parser = CommandParser("verify")
    parser.add_argument("checkpoints", nargs="+", help="Checkpoints, or folders with some; addresses, too.")
    paths = [as_path(path) for path in parser.parse(arguments).checkpoints]
    return 0 if verify_checkpoints(paths, write) else 2
