"""The border to SGLang: hooks, their guards, errors, and every name that QSPEC uses."""
