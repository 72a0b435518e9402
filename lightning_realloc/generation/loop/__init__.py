"""Run one call of the engine: requests in, steps, completions out.

Start with `GenerationRun`.
"""
