"""What a training logs, and where its time goes."""
