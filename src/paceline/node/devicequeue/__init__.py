"""Jobs take turns with the devices of a machine."""
