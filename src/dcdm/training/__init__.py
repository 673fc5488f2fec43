"""The optimizer loop."""
