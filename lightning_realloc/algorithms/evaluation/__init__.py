"""Named sets of prompts on which a model is evaluated during training and after it, next to validation data.

Start with `Evaluation`, the callback. `EvaluationSet` holds the rows of one set, and the rule for right responses.
"""

from __future__ import annotations
