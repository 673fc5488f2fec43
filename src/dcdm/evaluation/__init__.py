"""Measurements of trained models, as numbers; viewing draws them.

Text: corpora, windows. Its likelihood: perplexity, decoders, and studies of one model. Benchmarks: harness (our
model as the lm-evaluation-harness calls it), tasks, execution. Generated text: quality. To repeat it: provenance.
"""
