"""Execute a `ReallocationPlan`: copy weights between layouts, through shared memory or process groups.

Start with `Reallocation`, which runs one plan repeatedly.
"""
