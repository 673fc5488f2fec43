"""Noise, objectives, policies and likelihoods."""
