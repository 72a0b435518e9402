"""Run one call of the engine: requests in, one step after the other, completions out.

Start with `GenerationRun`.
"""
