"""Save and load checkpoints of several models, and export a role as a Hugging Face folder.

Start with `checkpoint.save` and `checkpoint.load`.
"""
