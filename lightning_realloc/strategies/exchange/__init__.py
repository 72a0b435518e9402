"""Route samples of an iteration from the rank that made them to the ranks that need them.

Start with `IterationData`; `Routes` and `Fusion` are pure.
"""
