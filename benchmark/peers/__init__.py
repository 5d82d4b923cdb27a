"""The parts of `bench_peers`.

loads (pipelines) ─► harness.session (servers, openvino_server) ─► summary (pipelines)
"""
