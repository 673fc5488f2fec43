"""Models from folders and to folders.

load (runs, checkpoints, exported folders), importing (weights of `transformers`), export (what Hugging Face tools
load), verify (checks of what a folder holds).
"""
