import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60, print_blob=True)
settings.load_profile("repeatable")
