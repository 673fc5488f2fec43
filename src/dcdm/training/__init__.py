"""Training: settings (of a run), run (all put together), loop (one step after the other), fsdp (many devices),
validation, metrics, and checkpoints: checkpoint (saving and resuming), checkpoint_folder (what is on the disk, and
reading it), fingerprints (the settings, tokenizer and data that a checkpoint belongs to).
"""
