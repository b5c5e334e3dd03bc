"""What a job uses on a node over time: measured, kept, and read again."""
