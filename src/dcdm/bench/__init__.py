"""Measurements: every speed is a ratio to another path in the same run.

Read `paths.py` (how paths are timed; attention and the training step against their literal versions), then
`generation.py` (decoders of trained models, and `transformers` beside them). What only
developers of this project run, such as load on the server, is in the folder `benchmarks/`.
"""
