"""Imports what a draft model needs of SGLang, in the order of `sglang_qspec.sidecar.loading`."""

from sglang.srt.plugins import load_plugins

load_plugins()

import sglang.srt.model_executor.model_runner  # noqa: E402, F401

import sglang_qspec.sidecar.draft_model  # noqa: E402, F401
