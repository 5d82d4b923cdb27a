"""Every name of SGLang that this package touches; a test compares it with the installed release.

SGLang logs and swallows the errors of plugins and of their hooks, so a server could start without
half of QSPEC: what is hooked is also checked at the start (`compat.check_hooks`).
"""

_ANTHROPIC = "sglang.srt.entrypoints.anthropic.serving.AnthropicServing"
_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
_COMPLETION = "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion"
_OLLAMA = "sglang.srt.entrypoints.ollama.serving.OllamaServing"
_RESPONSES = "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses"
_INTERNAL_STATE = (
    "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
)

HOOKED = (
    "sglang.srt.server_args.ServerArgs.add_cli_args",
    "sglang.srt.server_args.ServerArgs.from_cli_args",
    "sglang.srt.entrypoints.http_server.serve_generate_request",
    "sglang.srt.entrypoints.grpc_bridge.RuntimeHandle._run_generate",
    "sglang.srt.entrypoints.engine.Engine.generate",
    "sglang.srt.entrypoints.engine.Engine.async_generate",
    _COMPLETION + "._convert_to_internal_request",
    _CHAT + "._process_messages",
    _CHAT + "._convert_to_internal_request",
    _ANTHROPIC + "._convert_to_chat_completion_request",
    _RESPONSES + ".create_responses",
    "sglang.srt.entrypoints.openai.protocol.ResponsesRequest.to_sampling_params",
    _OLLAMA + ".handle_chat",
    _OLLAMA + ".handle_generate",
    _OLLAMA + "._convert_options_to_sampling_params",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.set_internal_state",
)
"""Wrapped in the process that serves HTTP or `sgl.Engine`."""

HOOKED_IN_SCHEDULER = (
    "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue",
    "sglang.srt.managers.scheduler.Scheduler.send_abort_output",
    "sglang.srt.managers.scheduler.Scheduler.get_output_streamer_class",
    "sglang.srt.speculative.external_corpus_manager.ExternalCorpusManager.check_pending_load",
    _INTERNAL_STATE + "._add_speculative",
    _INTERNAL_STATE + "._update_handlers",
    "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
    "sglang.srt.managers.schedule_batch.Req.update_finish_state",
)
"""Wrapped in the scheduler's process."""

_IMPORTED = {
    "sglang.kernels.ops.speculative.spec_tree": ("verify_tree_greedy_func",),
    "sglang.srt.arg_groups.choices": (
        "add_attention_backend_choices",
        "add_quantization_method_choices",
    ),
    "sglang.srt.arg_groups.model_override_base": ("model_config_of",),
    "sglang.srt.arg_groups.overrides": (
        "attn_dp_enabled_of",
        "declare_resolution",
        "resolving_view",
    ),
    "sglang.srt.arg_groups.resolution_hooks": ("register_resolution_hook",),
    "sglang.srt.configs.hybrid_arch": ("mambaish_config",),
    "sglang.srt.configs.model_config": ("ModelConfig",),
    "sglang.srt.distributed": ("bootstrap",),
    "sglang.srt.distributed.parallel_state": (
        "destroy_distributed_environment",
        "destroy_model_parallel",
    ),
    "sglang.srt.entrypoints.grpc_bridge": ("RuntimeHandle._send_native_error",),
    "sglang.srt.entrypoints.http_server": ("_global_state",),
    "sglang.srt.entrypoints.openai.serving_responses": (
        "OpenAIServingResponses.create_error_response",
    ),
    "sglang.srt.environ": ("envs.SGLANG_RUST_SERVER",),
    "sglang.srt.layers.activation": ("SiluAndMul",),
    "sglang.srt.layers.attention.attention_registry": ("register_attention_backend",),
    "sglang.srt.layers.attention.torch_native_backend": ("TorchNativeAttnBackend",),
    "sglang.srt.layers.layernorm": ("RMSNorm",),
    "sglang.srt.layers.linear": ("LinearBase",),
    "sglang.srt.layers.logits_processor": (
        "LogitsProcessor._compute_lm_head",
        "LogitsProcessorOutput",
    ),
    "sglang.srt.layers.logprob_processor": ("compute_spec_logprobs",),
    "sglang.srt.layers.moe": ("initialize_moe_config",),
    "sglang.srt.layers.moe.fused_moe_triton": ("FusedMoE",),
    "sglang.srt.layers.quantization": ("QUANTIZATION_METHODS",),
    "sglang.srt.layers.quantization.auto_round": ("AutoRoundConfig",),
    "sglang.srt.layers.quantization.awq": ("AWQCPUConfig",),
    "sglang.srt.layers.quantization.awq.schemes": ("AWQLinearScheme",),
    "sglang.srt.layers.quantization.base_config": (
        "LinearMethodBase",
        "QuantizationConfig",
        "QuantizeMethodBase",
    ),
    "sglang.srt.layers.quantization.fp4_utils": ("initialize_fp4_gemm_config",),
    "sglang.srt.layers.quantization.fp8_utils": ("initialize_fp8_gemm_config",),
    "sglang.srt.layers.quantization.gptq": ("CPUGPTQConfig", "GPTQLinearMethod"),
    "sglang.srt.layers.quantization.gptq.schemes": ("GPTQLinearScheme",),
    "sglang.srt.layers.quantization.unquant": (
        "UnquantizedEmbeddingMethod",
        "UnquantizedLinearMethod.apply",
        "UnquantizedLinearMethod.process_weights_after_loading",
        "initialize_bf16_gemm_config",
    ),
    "sglang.srt.layers.quantization.utils": ("get_linear_quant_method",),
    "sglang.srt.layers.radix_attention": ("AttentionType", "RadixAttention"),
    "sglang.srt.layers.rotary_embedding.base": ("RotaryEmbedding",),
    "sglang.srt.layers.vocab_parallel_embedding": ("ParallelLMHead", "VocabParallelEmbedding"),
    "sglang.srt.layers.sampler": (
        "Sampler._sample_from_probs",
        "apply_custom_logit_processor",
    ),
    "sglang.srt.managers.overlap_utils": ("FutureMap",),
    "sglang.srt.managers.schedule_batch": ("ScheduleBatch",),
    "sglang.srt.managers.schedule_policy": ("CacheAgnosticPolicy.LOF",),
    "sglang.srt.managers.scheduler": ("GenerationBatchResult",),
    "sglang.srt.managers.scheduler_components.output_streamer": (
        "SchedulerOutputStreamer.build_additional_customized_info",
    ),
    "sglang.srt.managers.scheduler_components.internal_state": ("_UpdateHandler",),
    "sglang.srt.managers.tp_worker": ("TpModelWorker",),
    "sglang.srt.managers.utils": ("is_health_check_generate_req",),
    "sglang.srt.mem_cache.allocation_sizing": ("get_alloc_reserve_per_decode",),
    "sglang.srt.mem_cache.memory_pool": ("KVWriteLoc", "MHATokenToKVPool"),
    "sglang.srt.model_executor.forward_batch_info": (
        "CaptureHiddenMode",
        "ForwardBatch",
        "ForwardMode",
    ),
    "sglang.srt.model_executor.forward_context": ("get_attn_backend",),
    "sglang.srt.model_executor.model_runner": ("ModelRunner",),
    "sglang.srt.model_loader.loader": ("DefaultModelLoader.postprocess_weights",),
    "sglang.srt.models.llama": (
        "LlamaAttention",
        "LlamaDecoderLayer",
        "LlamaMLP",
        "LlamaModel.forward",
    ),
    "sglang.srt.plugins": ("load_plugins",),
    "sglang.srt.plugins.hook_registry": (
        "HookRegistry._hooks",
        "HookRegistry._patched",
        "HookRegistry.register",
        "HookType",
    ),
    "sglang.srt.runtime_context": (
        "SpawnRanks",
        "get_device",
        "get_model",
        "get_parallel",
        "get_serving",
        "get_spec",
        "publish",
        "spawn_world_rank",
    ),
    "sglang.srt.sampling.sampling_batch_info": ("SamplingBatchInfo",),
    "sglang.srt.sampling.sampling_params": ("TOP_K_ALL",),
    "sglang.srt.server_args": ("PortArgs", "ServerArgs"),
    "sglang.srt.speculative.base_spec_worker": ("BaseSpecWorker",),
    "sglang.srt.speculative.eagle_utils": ("eagle_sample",),
    "sglang.srt.speculative.ngram_info": ("NgramVerifyInput",),
    "sglang.srt.speculative.spec_info": ("SpeculativeAlgorithm.register",),
    "sglang.srt.speculative.spec_registry": ("CustomSpecAlgo",),
    "sglang.srt.speculative.spec_utils": (
        "GrammarMask",
        "GrammarTree.from_host",
        "build_grammar_vocab_mask",
        "move_accept_tokens_to_target_kvcache",
    ),
    "sglang.srt.utils.async_probe": ("sanitize_nan_logits",),
    "sglang.srt.utils.hf_transformers_utils": ("get_config", "get_tokenizer"),
}
CALLED = tuple(f"{module}.{name}" for module, names in _IMPORTED.items() for name in names)
"""Called, subclassed, or patched on a CPU; also by the sidecar's `draft_model`."""
