"""Texts of the trained models of studies/claims.yaml, scored by a model that none of them is.

python studies/outside_scorer.py WORK SCORER TEXT OUT: runs of the study, a folder with a causal model of
transformers, a text that people wrote, and the file of results.
"""

import json
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path

from sample_quality import TextScorer, measure_quality

import dcdm
from dcdm.files import write_whole

SEEDS, TEXTS, LENGTH = (0, 1, 2), 24, 127
WAYS: dict[str, list[dict[str, object]]] = {
    "ar": [{}],
    "lanes": [{"lanes": 1}, {"lanes": 4}, {"lanes": 8}, {"lanes": 16}],
    "strided-left": [{}],
    "causal-left": [{}],
    "bdlm": [{"commit": "chunk"}, {"commit": "dilated:2"}, {"commit": "dilated:8"}],
    "paper": [{"commit": "chunk"}, {"commit": "dilated:2"}],
    "mdlm": [{"commit": "dilated:8"}, {"commit": "dilated:16"}, {"commit": "dilated:64"}],
}


def main(work: Path, scorer: Path, text: Path, out: Path) -> None:
    judge = TextScorer.load(scorer)
    rows = json.loads(out.read_text()) if out.exists() else []
    done = {(row["variant"], row["seed"], json.dumps(row["decoding"])) for row in rows}
    for variant, seed in product(WAYS, SEEDS):
        model, tokenizer = dcdm.load(work / f"{variant}-s{seed}")
        if not any(row["variant"] == "text" for row in rows):
            ids = tokenizer.encode(text.read_text(encoding="utf-8")[:400_000])
            starts = range(0, LENGTH * 3 * TEXTS, LENGTH)
            real = [tokenizer.decode(ids[at : at + LENGTH]) for at in starts]
            rows.append({"variant": "text", "seed": None, "decoding": {}, **asdict(measure_quality(real, judge))})
        for decoding in WAYS[variant]:
            if (variant, seed, json.dumps(decoding)) in done:
                continue
            made = dcdm.generate(
                model, [[tokenizer.bos_id]] * TEXTS, max_new_tokens=LENGTH, temperature=1.0, seed=seed, eos_id=-1,
                batch_size=8, **decoding,
            )  # fmt: skip
            texts = [tokenizer.decode(completion) for completion in made.completions]
            figures = asdict(measure_quality(texts, judge))
            forwards = float(made.forwards.double().mean())
            rows.append({"variant": variant, "seed": seed, "decoding": decoding, "forwards": forwards, **figures})
            write_whole(out, (json.dumps(rows, indent=1) + "\n").encode())
            print(variant, seed, decoding, round(forwards, 1), round(figures["bits_per_byte"], 3), flush=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
