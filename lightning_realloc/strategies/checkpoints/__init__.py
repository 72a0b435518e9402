"""Save and load checkpoints of several models, and export a role as a Hugging Face folder.

Start with `checkpoint_writer.write_checkpoint` and `checkpoint.read_checkpoint`.
"""
