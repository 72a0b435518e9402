"""Replacements for steps of a forward pass that packing and tensor parallelism change.

They cover attention over packed sequences, logits split over the vocabulary, and log-probabilities of tokens. Start
with `packed_attention` and `selected_logprobs`.
"""
