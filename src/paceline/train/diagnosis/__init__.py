"""Which rank is in which collective."""
