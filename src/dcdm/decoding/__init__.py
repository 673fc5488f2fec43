"""Decoding: one loop for every kind.

config (the settings), routes (which chunk comes next), commits (which positions a forward pass fills, and with
which tokens), loop (a canvas from MASKs to text, pass by pass), text (one text and its windows), batch (texts
that share forward passes), engine (`dcdm.generate`). caching is apart; what lanes and drafts need is in
`dcdm.lanes`, which these do not import: it registers its own router, predictor and batch for its models, and
overrides some of their methods.

A text's way: `engine.generate` → `batch.write`, which calls `ContinuousBatch.step` → `DecodingState.step`: a router
says which chunk is active, a predictor runs the network, a commit policy says which positions are filled, and
`Sampling` draws their tokens. Likelihoods call `loop.fill_canvas` instead, with the true tokens.
"""
