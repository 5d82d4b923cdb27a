"""Measures target and draft model: the only code that times passes and draft steps.

- `pass_timer` times the passes of a running server, and `server_tables` makes the file of tables of
  `qspec measure` from them.
- `loaded_model` times passes of a model in a process of its own, and reads answers with it; for the
  draft models of `qspec models compare`, and with `pair` for `qspec doctor --measure`.
- `agreement` judges what was read.
- `tables` has the figures from which `tools.theory` and `tools.plan` predict.
"""
