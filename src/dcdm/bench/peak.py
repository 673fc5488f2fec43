"""Peak memory of one path in a process of its own: `python -m dcdm.bench.peak SUBJECT CASE PATH THREADS`."""

from __future__ import annotations

import sys

import torch

from dcdm.bench.harness import forget_peak, peak_megabytes
from dcdm.bench.subjects import find_case


def main(subject: str, case: str, path: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    run = find_case(subject, case).paths[path]()
    before = forget_peak()
    run()
    print(peak_megabytes() - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
