"""Noise, objectives and likelihoods."""
