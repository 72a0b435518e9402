"""Data modules and loaders: prompts, demonstrations, preferences and feedback as identical samples on every rank."""
