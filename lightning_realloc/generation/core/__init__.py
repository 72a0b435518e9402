"""Choose the next token: sampling, filters, keyed noise, stop rules, and the sample they work on.

Start with `Sample` and `sample_tokens`.
"""
