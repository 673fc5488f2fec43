"""likelihood."""
