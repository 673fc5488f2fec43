"""A model behind HTTP (`dcdm serve`).

The way of a request: `server` (the process, its socket and connections) → `access` (who may ask) → `app` (routes)
→ `schemas` (what is asked) → `completions` or `denoise` (rows to compute, checked against `served`, a model with
its limits) → `scheduler` (queued, then computed together with others) → `writing` (text from tokens) → `streaming`
(the answer). `monitoring` is what an operator sees.
"""
