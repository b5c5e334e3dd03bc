"""Ends Slurm jobs: on request, or when the agents have ended, and decides then whether a job goes on."""
