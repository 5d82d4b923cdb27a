"""`qspec top`: shows what a running server does, in a terminal, and refreshes the view."""
