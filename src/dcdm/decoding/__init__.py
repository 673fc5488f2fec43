"""Decoding: one loop for every kind.

config (the choices), routes (which chunk comes next), predictors (what a forward computes), commits (which
positions it fills), sampling (which tokens), loop (all of it on one canvas), prompts and engine (`dcdm.generate`).
"""
