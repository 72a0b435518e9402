"""Cut a model over ranks: tensor parallelism, pipeline stages, FSDP, and the device meshes they use.

Start with `parallelize`, which applies a `Layout` to a model, and `describe_model`, which plans how.
"""
