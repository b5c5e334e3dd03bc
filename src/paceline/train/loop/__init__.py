"""The training loop: steps, epochs, gradients and checkpoints between two batches."""
