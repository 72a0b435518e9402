"""Scripts and configurations to start from: ``python -m examples.demo``, and the same in a few lines or in YAML."""
