"""Complete a text, fill the blanks of another: python examples/generate.py [MODEL]"""

from train import given_or_trained

import dcdm

path = given_or_trained()

model, tokenizer = dcdm.load(path)
prompts = ["def main(", "def [[6]](self):\n    return [[9]]\n"]  # [[6]] is a blank of 6 tokens
result = dcdm.generate(model, prompts[:1], tokenizer=tokenizer, max_new_tokens=40, commit="chunk", seed=0)
filled = dcdm.generate(model, prompts[1:], tokenizer=tokenizer, commit="position", temperature=0.7, seed=0)
for name, done in (("completion", result), ("infilling", filled)):
    print(f"{name}, {int(done.forwards[0])} forwards:", repr(done.texts[0]))
