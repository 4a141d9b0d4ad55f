"""Plain and speculative decoding, measured side by side."""
