"""Hooks on requests and answers in the process that serves clients."""
