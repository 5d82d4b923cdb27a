"""The start of a server: registration, flags, checks of settings, and the tables of hooks."""
