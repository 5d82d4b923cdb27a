"""The client of `qspec batch` against a server that costs nothing."""
