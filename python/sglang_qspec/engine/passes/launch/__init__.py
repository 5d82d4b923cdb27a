"""The inputs of passes, and what passes leave on the device."""
