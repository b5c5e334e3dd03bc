"""What a browser shows: the page of `paceline web`, and reports."""
