"""Studies: variants of a model trained with several seeds, measured on the same text, compared with intervals.

In order: study (the YAML file and its checks), measuring (the figures of one run), results (intervals, comparisons,
verdicts), runner (training and measuring what is missing), plots. The paper's experiments are one such file,
`studies/claims.yaml`, which also says what they take at the paper's scale.
"""
