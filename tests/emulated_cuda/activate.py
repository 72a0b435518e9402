"""Gives this process the emulated device."""

from __future__ import annotations


def activate() -> None:
    """Load the device and replace ``torch.cuda``; torch must not have been imported."""
    from tests.emulated_cuda import library

    library.load()
    from tests.emulated_cuda import kernels, nccl, torch_cuda

    torch_cuda.install()
    kernels.install()
    nccl.install()
