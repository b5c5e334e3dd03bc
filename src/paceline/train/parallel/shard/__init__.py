"""Models of which each rank keeps a part."""
