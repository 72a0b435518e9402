"""Read what a Hugging Face model is made of: blocks, tied weights, adapters, what its file left out.

No ranks: everything here works on one process. Start with `find_blocks`.
"""
