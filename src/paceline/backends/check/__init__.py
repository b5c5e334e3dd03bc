"""What a machine or several hosts have, and what would go wrong there."""
