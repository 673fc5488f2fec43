"""Measurements of trained models, as numbers; viewing draws them.

Text: corpora, windows. Its likelihood: perplexity, decoders. Balance of chunks: studies. Benchmarks: harness (our
model as the lm-evaluation-harness calls it), tasks, execution. Generated text: quality.
"""
