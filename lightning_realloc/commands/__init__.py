"""Commands of ``lightning-realloc`` besides LightningCLI's: one-line training, checkpoints, ``doctor`` and ``chat``.

`short_run` translates short flags into the arguments of ``fit``; start there. Each command parses its own flags.
"""
