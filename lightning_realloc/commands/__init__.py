"""Commands of ``lightning-realloc`` next to those of LightningCLI: one-line training and checkpoints.

`short_run` translates short flags into the arguments of ``fit``; start there. Each command parses its own flags.
"""
