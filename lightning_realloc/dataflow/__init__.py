"""Dataflow of one iteration and its execution plan: pure values without tensors or process groups.

Start with `Dataflow` (calls and their dependencies) and `ExecutionPlan` (each call's layout, ranks and options).
"""
