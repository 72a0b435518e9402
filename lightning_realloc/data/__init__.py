"""What comes in: prompts and supervised pairs, as samples that are the same on every rank."""
