"""What the ranks of a rehearsal have recorded (`contract/rehearsal.py`), and what of it differs between them."""
