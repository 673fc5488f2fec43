"""A model behind HTTP (`dcdm serve`).

The way of a request: `server` (the process, its connections, and who may ask) → `app` (routes; `workers` do what
takes long) → `schemas` (what is asked) → `answers` (rows, checked against `served`, a model with the limits of
`settings`) → `scheduler` (queued, then written together with others by `dcdm.decoding.session`) → `reading` (text
from tokens) → `answers` again (the answer's JSON). `monitoring` is what an operator sees.
"""
