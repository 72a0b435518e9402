"""Run a Hugging Face model on a packed row of samples and their cache.

Start with `ModelRunner`. `attention`, `cuda_graphs` and `packed_linear` make it fast.
"""
