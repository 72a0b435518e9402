"""Hold the data of an iteration: samples with ragged columns, packed batches, and the options of a training call.

Tensors, but no models and no ranks. Start with `Samples`, then `PackedBatch` and `TrainOptions`.
"""
