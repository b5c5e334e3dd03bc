"""The API server: where it is, requests, watches, refusals in words, and what this user may do."""
