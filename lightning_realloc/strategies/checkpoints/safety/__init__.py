"""Keep a whole checkpoint to resume from: errors of saves with the way out, the pointer ``last``, and verification."""
