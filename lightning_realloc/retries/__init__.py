"""Try again what another attempt may do: errors that may pass (`causes`), attempts and waits (`attempts`)."""
