"""Sandbox for generated programs: limits of time, memory, processes and output.

Start with `run_limited`.
"""
