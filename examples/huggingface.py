"""The same model through transformers: python examples/huggingface.py [MODEL]"""

import tempfile
from pathlib import Path

import torch
from train import given_or_trained
from transformers import AutoModelForMaskedLM, AutoTokenizer

import dcdm.hub  # makes the Auto classes know its models
from dcdm.io.export import export

path = given_or_trained()

with tempfile.TemporaryDirectory() as scratch:
    folder = path
    if not (path / "config.json").exists():  # not exported yet
        folder = Path(scratch) / "exported"
        export(path, folder)

    model = AutoModelForMaskedLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    blank = tokenizer.mask_token * 6
    ids = tokenizer(tokenizer.bos_token + f"def {blank}(self):", return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        logits = model(input_ids=ids["input_ids"]).logits  # defined for the chunk that comes next
    masked = ids["input_ids"][0] == tokenizer.mask_token_id
    print(dcdm.__version__, tuple(logits.shape), repr(tokenizer.decode(logits[0, masked].argmax(dim=-1))))
