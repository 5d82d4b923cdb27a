"""The drafting process: it runs the draft model for one or several servers.

`python -m sglang_qspec.sidecar` is the process; `SidecarProcess` starts it from a server.
"""
