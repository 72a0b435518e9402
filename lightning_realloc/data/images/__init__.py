"""Images of rows: found in columns and messages, checked by their headers, and decoded where a rank needs them."""
