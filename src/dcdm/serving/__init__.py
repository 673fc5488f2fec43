"""A model behind HTTP (`dcdm serve`).

The way of a request: `server` (the process, its connections, and who may ask) → `app` (routes) → `schemas` (what is
asked) → `answers` (completions, checked against `served`, a model with the limits of `settings`) → `scheduler`
(queued, then rows of the batch that `dcdm.decoding.batch` writes) → `reading` (text from tokens) → `answers` again
(the answer's JSON). `monitoring` is what an operator sees.
"""
