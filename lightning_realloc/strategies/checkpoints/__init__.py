"""Save and load checkpoints of several models, and export a role as a Hugging Face folder.

Start with `checkpoint.write_checkpoint` and `checkpoint.read_checkpoint`.
"""
