"""Measurements of trained models, as numbers; viewing shows them.

Text: corpora, windows. Its likelihood: perplexity, decoders. Benchmarks: harness (our model as the
lm-evaluation-harness calls it), tasks, execution. Generated text: quality.
"""
