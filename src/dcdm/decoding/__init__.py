"""Decoding: one loop for every kind.

config (the settings), routes (which chunk comes next), predictors (what a forward pass computes), commits (which
positions it fills), sampling (which tokens), loop (a canvas from MASKs to text, pass by pass), text (one text and
its windows), session (texts that share forward passes), prompts and engine (`dcdm.generate`). constraints and
revision are apart; what lanes and drafts need is in `dcdm.lanes`, which these do not import.
"""
