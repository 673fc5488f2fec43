"""Likelihoods of sequences: exact values, valid bounds, and the paper's surrogate (estimators), from few passes
(subsets). Above decoding, since the likelihood of a decoder walks the decoder's own loop.
"""
