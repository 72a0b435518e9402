"""Sample responses, reward them and choose which to learn from: what online algorithms share.

Start with `PolicyModule`, then `RewardedModule` and `PolicyGradient`.
"""

from lightning_realloc.moved_modules import moved_names

__getattr__ = moved_names(__name__)
