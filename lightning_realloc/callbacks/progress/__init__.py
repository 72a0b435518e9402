"""Text in the Trainer's progress bar about the call that runs. Start with `CallProgress`."""
