"""`dcdm serve`: a model behind HTTP."""
