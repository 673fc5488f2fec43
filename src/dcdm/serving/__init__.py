"""A model behind HTTP (`dcdm serve`).

The way of a request: `server` (the process, its socket and connections) → `access` (who may ask) → `app` (routes)
→ `schemas` (what is asked) → `completions` or `denoise` (rows, checked against `served`, a model with the
limits of `settings`) → `scheduler` (queued, then computed together with others) → `writing` (text from tokens) →
`completions` or `denoise` again (the answer's JSON). `monitoring` is what an operator sees.
"""
