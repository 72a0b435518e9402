"""Search for the fastest execution plan that fits into memory.

Start with `search_plan`.
"""
