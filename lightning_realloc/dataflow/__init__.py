"""Describe one iteration: its model function calls, what they pass on, and where an execution plan runs each of them.

Pure values, without tensors and process groups. Start with `Dataflow` and `ExecutionPlan`.
"""
