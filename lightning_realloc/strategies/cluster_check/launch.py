"""Read this process's place among the ranks of a launcher: torchrun, Slurm's srun, or mpirun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from lightning_realloc.errors import ConfigError

DEFAULT_PORT = 29500
"""Port at which ranks meet if ``MASTER_PORT`` is not set, as under torch."""
_MPI_NAMES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""Variables of Open MPI, and of MPICH and Intel MPI: rank, number of ranks, and the same on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Place of a process among the ranks of its launcher."""

    launcher: str
    rank: int
    local_rank: int
    """Number of the rank on its host, which chooses its GPU."""
    world_size: int
    address: str
    """Address at which ranks meet."""
    port: int
    has_agent: bool = False
    """Whether an agent of torchrun listens there already."""

    @classmethod
    def from_environment(cls, variables: Mapping[str, str]) -> Launch:
        """Return the place by the variables of a launcher.

        Raises:
            ConfigError: without a launcher, and where ranks of several hosts have no address to meet at.
        """
        if "RANK" in variables and "WORLD_SIZE" in variables:
            return cls(
                launcher="torchrun" if "TORCHELASTIC_RUN_ID" in variables else "environment",
                rank=int(variables["RANK"]),
                local_rank=int(variables.get("LOCAL_RANK", "0")),
                world_size=int(variables["WORLD_SIZE"]),
                address=_address(variables, "RANK and WORLD_SIZE"),
                port=_port(variables),
                has_agent=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            )
        if "SLURM_PROCID" in variables and "SLURM_STEP_ID" in variables:
            nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "127.0.0.1")
            return cls(
                launcher="srun",
                rank=int(variables["SLURM_PROCID"]),
                local_rank=int(variables["SLURM_LOCALID"]),
                world_size=int(variables["SLURM_NTASKS"]),
                address=variables.get("MASTER_ADDR") or SLURMEnvironment.resolve_root_node_address(nodes),
                port=_port(variables, 15000 + int(variables.get("SLURM_JOB_ID", "0")) % 1000),  # as Lightning does
            )
        for rank, size, local_rank, local_size in _MPI_NAMES:
            if rank in variables and size in variables:
                is_one_host = variables.get(local_size) == variables[size]
                return cls(
                    launcher="mpirun",
                    rank=int(variables[rank]),
                    local_rank=int(variables.get(local_rank, "0")),
                    world_size=int(variables[size]),
                    address="127.0.0.1" if is_one_host else _address(variables, rank),
                    port=_port(variables),
                )
        raise ConfigError(
            "doctor --cluster runs on every rank of a launcher, and there is none; start it by 'torchrun --nnodes 2 "
            "--nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m lightning_realloc doctor --cluster', "
            "'srun lightning-realloc doctor --cluster' or 'mpirun -x MASTER_ADDR lightning-realloc doctor --cluster'"
        )


def _address(variables: Mapping[str, str], given: str) -> str:
    if address := variables.get("MASTER_ADDR"):
        return address
    raise ConfigError(
        f"{given} are set, but ranks have no address to meet at; export MASTER_ADDR with the name of rank 0's host on "
        f"every host (mpirun -x MASTER_ADDR)"
    )


def _port(variables: Mapping[str, str], otherwise: int = DEFAULT_PORT) -> int:
    return int(variables.get("MASTER_PORT") or otherwise)
