"""Choose execution plans: estimate calls, simulate iterations, search for the fastest plan that fits, tune a run.

Needs numpy, but no torch. Start with `search_plan`, then `Tuner`, which chooses plans during a run.
"""
