"""Decoding: one loop for every kind, and what varies in it: routing, prediction, commit, sampling."""
