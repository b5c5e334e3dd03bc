"""What happens between two batches."""
