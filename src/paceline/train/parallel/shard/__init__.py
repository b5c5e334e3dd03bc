"""Models that are sharded over ranks."""
