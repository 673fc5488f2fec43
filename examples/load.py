"""Load a model and look at its chunks: python examples/load.py [MODEL]"""

import torch
from train import given_or_trained

import dcdm

path = given_or_trained()  # a run folder, a checkpoint in it, or an exported folder

model, tokenizer = dcdm.load(path)
tokens = torch.tensor([[tokenizer.bos_id, *tokenizer.encode("def area(self):")]])
masked = torch.zeros_like(tokens, dtype=torch.bool)
masked[0, -5:] = True
out = model(tokens, masked)
print(out.chunk_ids[0].tolist(), tuple(out.logits.shape))
