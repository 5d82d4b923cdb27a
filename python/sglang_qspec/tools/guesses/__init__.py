"""Guesses of clients: answers to earlier requests, which may be the answers to later ones."""
