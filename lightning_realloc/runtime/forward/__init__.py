"""Replacements for steps of a forward pass that packing and tensor parallelism change.

They cover logits split over the vocabulary, and log-probabilities of tokens; attention over packed sequences is in
`attention`. Start with `attention.packed_attention` and `selected_logprobs`.
"""
