"""Measurements of trained models, as numbers; viewing shows them.

Text as windows: corpora. Its likelihood: perplexity. Benchmarks: harness (our model as the
lm-evaluation-harness calls it), tasks, execution.
"""
