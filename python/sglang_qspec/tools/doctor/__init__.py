"""`qspec doctor`: checks a machine and a pair of models before a server starts."""
