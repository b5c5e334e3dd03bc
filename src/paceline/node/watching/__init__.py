"""Where the ranks are, and whether they can go on."""
