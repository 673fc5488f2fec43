"""Training: settings (of a run), run (all put together), loop (one step after the other), fsdp (many devices),
validation, metrics, and checkpoints: checkpoint (saving and resuming), checkpoint_state (what one holds),
checkpoint_folder (what stands on the disk).
"""
