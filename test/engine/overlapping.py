"""Keeps SGLang's overlap scheduler on for a QSPEC server on a CPU, through a second plugin.

On a CPU nothing runs in parallel, but the order of events is the same as on a GPU: SGLang launches
a pass before it processes the result of the previous pass.
"""

OVERLAP = """
    from sglang_qspec.engine.start import arguments

    arguments.OVERLAPS.add("cpu")
"""
"""Lines for the end of a plugin's function `load`."""
