"""Call reward functions in processes of their own, each within a deadline.

Start with `PooledReward`.
"""
