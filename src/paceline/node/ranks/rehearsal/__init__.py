"""Inside a rank of a rehearsal: record what ranks must do alike, see `contract/rehearsal.py`."""
