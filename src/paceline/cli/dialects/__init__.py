"""The lines of other launchers: one table per tool, and one engine that makes a line of paceline of them."""
