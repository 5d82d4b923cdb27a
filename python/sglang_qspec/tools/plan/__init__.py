"""`qspec plan` and `qspec measure`: what a deployment costs, predicted from measured times.

An event simulation serves an arrival trace with the server's own policies (`sglang_qspec.policy`)
in simulated time. docs/plan.md describes the model and what it leaves out. Times are seconds.
"""
