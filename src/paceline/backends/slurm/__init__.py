"""Jobs on a Slurm cluster."""
