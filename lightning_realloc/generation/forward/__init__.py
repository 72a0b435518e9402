"""Run a Hugging Face model on a packed row of samples and their cache.

Start with `ModelRunner`; `attention` and `cuda_graphs` are how it is fast.
"""
