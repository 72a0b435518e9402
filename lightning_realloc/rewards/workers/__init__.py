"""Worker processes for reward functions, with a deadline for each request.

Start with `PooledReward`.
"""
