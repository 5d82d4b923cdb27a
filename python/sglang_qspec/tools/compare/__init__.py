"""`qspec models compare`: what each draft model would be worth for a target on this machine.

A server with the target writes answers and measures its passes. Then one process for each candidate
reads the same answers with the sidecar's draft model, and measures its steps. The formulas of
`sglang_qspec.policy` predict the throughput from both.
"""
