"""A CUDA device emulated in the memory of the host, for the paths of a GPU on a machine without one.

``python -m tests.emulated_cuda ARGUMENTS`` is ``python ARGUMENTS`` with ``torch.cuda`` as on a machine with one GPU, in
child processes too::

    python -m tests.emulated_cuda -m pytest -m gpu
    python -m tests.emulated_cuda -m benchmarks.one_gpu

Tensors of the device are tensors of another device: mixing them with those of the host fails, a replay of a CUDA graph
reads the addresses it was captured with, and an operator that waits for the device warns or fails where the program
asks for it. Their operators are those of the CPU (``device.cpp``). So it shows mistakes of devices, addresses, captures
and memory, but neither speed nor the rounding of a GPU's kernels, and streams run in order. NCCL, Triton and compiled
kernels are missing. It needs a C++ compiler.
"""

EMULATED = "Emulated GPU"
"""Name of the device."""
