"""Tests that share one running server: a package, so that it lives as long as they run."""
