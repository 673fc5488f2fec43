"""Measurements: every speed is a ratio to another path in the same run.

Read `harness.py` (how), then `subjects.py` (what); `estimator.py`, `generation.py` and `serving.py` measure errors
of likelihoods, decoders of trained models and the server.
"""
