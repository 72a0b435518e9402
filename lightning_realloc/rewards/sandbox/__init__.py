"""Run untrusted programs under limits of time, memory and processes.

Start with `run_limited`.
"""
