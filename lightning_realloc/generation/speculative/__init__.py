"""Draft tokens and verify them: speculative decoding, built only when `Speculation` asks for it.

Start with `Speculation` (settings) and `Speculator` (the loop).
"""
