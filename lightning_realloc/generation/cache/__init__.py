"""Keep keys and values of running samples, in one slot each or in pages with a bound on their bytes.

Start with `KVCache`.
"""
