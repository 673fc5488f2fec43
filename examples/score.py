"""Likelihoods of a text, each labelled with what it is: python examples/score.py [MODEL]"""

import torch
from train import given_or_trained

import dcdm

path = given_or_trained()

model, tokenizer = dcdm.load(path)
text = "for name in sorted(names):\n    print(name)\n"
tokens = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(text)]])
print(dcdm.score(model, tokens, samples=16))  # an estimator that is valid for this kind of model
exact = dcdm.score(model, tokens, estimator="trajectory", commit="chunk")
print(exact, "with", int(exact.forwards[0]), "forwards")
