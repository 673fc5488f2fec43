"""Training: settings (of a run), start (what is found wrong before the first step), run (the loop: steps,
evaluations, checkpoints), trainer (one step), optimizers, fsdp (many devices), metrics, and checkpoints: checkpoint
(saving and resuming), checkpoint_folder (what is on the disk, and reading it), fingerprints (settings, tokenizer,
data that a checkpoint belongs to).
"""
