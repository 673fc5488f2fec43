"""A model behind HTTP (`dcdm serve`).

A request goes through `connections` (until its headers are there), `access` (who may ask), `app` (routes),
`schemas` (what is asked), `models` (which one), `completions` or `denoise` (rows to compute; `workers` are threads
for what may take long), `scheduler` and `fairness` (who is computed when), `writing` and `streaming` (the answer).
`served` is a model with its limits, `server` the process around the application.
"""
