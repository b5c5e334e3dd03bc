"""Places jobs on a Slurm cluster: submits them, and starts an agent on each of their nodes."""
