"""Commands ``lightning-realloc export`` and ``verify``: write models of checkpoints, and look for damage in them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jsonargparse import ArgumentParser

from lightning_realloc.remote_path import as_path
from lightning_realloc.strategies.checkpoints.export import export_checkpoint
from lightning_realloc.strategies.checkpoints.verification import verify_checkpoints

EXPORT_HELP = "Write one role of a checkpoint as a folder that Hugging Face's from_pretrained reads."
VERIFY_HELP = "Check every file of checkpoints, and print one line for each."


def export_parser() -> ArgumentParser:
    """Return the parser of ``lightning-realloc export``."""
    parser = ArgumentParser(prog="lightning-realloc export", description=EXPORT_HELP)
    parser.add_argument("checkpoint", type=str, help="Folder or address (s3://...) that a run saved to.")
    parser.add_argument("--output", type=str, required=True, help="New folder or address, or an earlier export.")
    parser.add_argument("--role", type=str, default="actor", help="Model of the checkpoint to export.")
    parser.add_argument("--dtype", type=str | None, default=None, help="float32, bfloat16, ...; default: as trained.")
    parser.add_argument("--merge", action="store_true", help="Merge adapters into their base; default: adapters alone.")
    parser.add_argument("--averaged", action="store_true", help="Write the averages of an EMA; default: the weights.")
    parser.add_argument("--base", type=str | None, default=None, help="Adapters' base model; default: as loaded.")
    trust = "Import a model class that is none of transformers, which runs its module; default: refuse."
    parser.add_argument("--trust-model-class", action="store_true", help=trust)
    return parser


def run_export(arguments: Sequence[str]) -> int:
    """Export a role, and return the exit code.

    Raises:
        ReallocError: for a folder that is no checkpoint, an unknown role or dtype, and an output folder in use.
    """
    chosen = export_parser().parse_args(list(arguments))
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
    sys.stdout.write(f"{chosen.role} of {chosen.checkpoint} written to {folder}\n")
    return 0


def verify_parser() -> ArgumentParser:
    """Return the parser of ``lightning-realloc verify``."""
    parser = ArgumentParser(prog="lightning-realloc verify", description=VERIFY_HELP)
    parser.add_argument("checkpoints", type=str, nargs="+", help="Checkpoints, or folders with some; addresses, too.")
    return parser


def run_verify(arguments: Sequence[str]) -> int:
    """Verify checkpoints, and return the exit code: 2 if one is damaged."""
    paths = [as_path(path) for path in verify_parser().parse_args(list(arguments)).checkpoints]
    return 0 if verify_checkpoints(paths, sys.stdout.write) else 2
