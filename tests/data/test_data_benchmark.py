"""`benchmarks/preparing.py`: a small run of the whole."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "preparing.py"


@pytest.mark.slow
def test_the_benchmark_measures_each_size_and_a_start_on_ten_billion_tokens():
    command = [sys.executable, str(FILE), "--gigabytes", "0.001", "0.004", "--tokenizer", "bytes"]
    said = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    small, large = said["sizes"]
    assert large["documents"] > 3 * small["documents"] > 300
    assert large["peak_mib"] < 2 * small["peak_mib"]
    assert said["openwebtext_hours"] > 0
    assert said["start_seconds"]["first_batch"] > said["start_seconds"]["opened"] > 0
