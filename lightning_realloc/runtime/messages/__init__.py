"""Send samples, small objects and errors between ranks without a collective.

Start with `Mailbox`; `codec` turns samples into bytes, `bulk_messages` sends large ones.
"""
