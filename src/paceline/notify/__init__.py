"""Notices of jobs that end, fail, hang or are slow, by webhooks and by mail: `paceline notify`."""
