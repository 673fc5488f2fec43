"""Measurements: every speed is a ratio to another path in the same run."""
