"""The documentation: what of it is made by code, and the site."""
