"""What comes in: prompts, supervised pairs and rewards, as samples that are the same on every rank."""
