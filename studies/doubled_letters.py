"""A text whose entropy is known: letters drawn evenly out of 16, each written twice. Usage: FOLDER."""

import random
import sys
from pathlib import Path

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
for name, seed, letters in (("train", 0, 500_000), ("valid", 1, 20_000)):
    drawn = random.Random(seed).choices("abcdefghijklmnop", k=letters)
    (folder / f"doubled-{name}.txt").write_text("".join(letter * 2 for letter in drawn))
