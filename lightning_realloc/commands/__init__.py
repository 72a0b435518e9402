"""Commands of ``lightning-realloc`` next to those of LightningCLI: one-line training, checkpoints and ``doctor``.

`short_run` translates short flags into the arguments of ``fit``; start there. Each command parses its own flags.
"""
