"""Tests on one running server. A package, so that they share the server."""
