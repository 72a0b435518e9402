"""Distribute a model over ranks: tensor parallelism, pipeline stages, FSDP, and their device meshes.

Start with `parallelize`, which applies a `Layout` to a model, and `describe_model`, which makes its `ModelSpec`.
"""
