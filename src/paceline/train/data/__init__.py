"""Every sample of an epoch once, over any number of ranks."""
