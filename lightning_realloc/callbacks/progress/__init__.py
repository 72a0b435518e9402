"""What runs inside an iteration, in the Trainer's progress bar. Start with `CallProgress`."""
