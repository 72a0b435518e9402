"""Run the parts of a forward pass that packing and tensor parallelism change.

Attention over packed sequences, logits split over the vocabulary, log-probabilities of tokens. Start with
`packed_attention` and `selected_logprobs`.
"""
