"""Load a model and look at its chunks: python examples/load.py [MODEL]"""

import torch
from train import given_or_trained

import dcdm

# the folder of a run, a checkpoint or an export, or a name that `dcdm models` lists
path = given_or_trained()

model, tokenizer = dcdm.load(path)
tokens = torch.tensor([[tokenizer.bos_id, *tokenizer.encode("def area(self):")]])
masked = torch.zeros_like(tokens, dtype=torch.bool)
masked[0, -5:] = True
out = model(tokens, None if model.config.predicts_from_left else masked)  # lanes predict every free token
print(out.chunk_ids[0].tolist(), tuple(out.logits.shape))
