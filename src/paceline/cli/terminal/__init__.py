"""What is drawn on a terminal, or written to a pipe."""
