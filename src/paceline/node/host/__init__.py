"""What a client asks of this machine over a connection."""
