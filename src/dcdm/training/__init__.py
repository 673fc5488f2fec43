"""Training: settings (of a run), run (from settings to its folder, and the loop: steps, evaluations, checkpoints),
trainer (one step), optimizers, fsdp (many devices), metrics, and checkpoints: checkpoint (saving and resuming),
checkpoint_folder (what is on the disk, reading it, and which settings, tokenizer and data it belongs to).
"""
