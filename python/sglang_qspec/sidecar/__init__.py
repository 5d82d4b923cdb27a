"""The sidecar: a process that runs the draft model for one or more servers.

`python -m sglang_qspec.sidecar` runs the sidecar; a server starts one with `SidecarProcess`.
"""
