"""The diffusion itself: noise (what is masked) and objectives (what is minimised). Knows no decoder."""
