"""Parts that model families share."""
