"""Keep a whole checkpoint to resume from: errors of saves that name the way out, and the pointer ``last``."""
