"""Sample responses, reward them and choose which to learn from: what online algorithms share.

Start with `PolicyModule`, then `RewardedModule` and `PolicyGradient`.
"""
