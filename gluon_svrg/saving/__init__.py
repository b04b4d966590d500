"""Files: states as plain data, written whole or not at all, read whole or not at all."""
