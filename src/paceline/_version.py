"""The version, apart from the public names, so that every room can read it without importing them."""

__version__ = "0.1.0"
