"""Checkpoints: saved in the background, committed by all ranks or by none."""
