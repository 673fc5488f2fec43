"""Lanes and drafts: many left-to-right writers at once, predicted from the left. The core does not import this."""
