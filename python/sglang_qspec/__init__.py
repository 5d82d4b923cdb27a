"""Queue speculation and batch-parallel speculation for SGLang, as a plugin."""

__version__ = "0.1.0"
