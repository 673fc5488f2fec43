"""A model behind HTTP (`dcdm serve`).

A request goes through `connections` (until its headers are there), `access` (who may ask), `app` (routes),
`schemas` (what is asked), `completions` or `denoise` (rows to compute), `scheduler` (batches), `writing` and
`streaming` (the answer). `served` is the model with its limits, `server` the process around the application.
"""
