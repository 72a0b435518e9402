"""Send samples, small objects and errors between ranks.

Start with `Mailbox`. `codec` converts samples to bytes, and `bulk_messages` sends large messages.
"""
