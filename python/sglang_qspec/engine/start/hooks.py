"""Tables of the SGLang functions that QSPEC wraps: one for each kind of process.

`engine.boundary.guard` wraps each hook, so that an exception in the hook has only the consequence
that its row names. Each table imports its hooks only when its process asks, since the processes
need different parts of SGLang.
"""

from __future__ import annotations

from sglang_qspec.engine.boundary.hook import AFTER, AROUND, BEFORE, Hook, OnError

_ANTHROPIC = "sglang.srt.entrypoints.anthropic.serving.AnthropicServing"
_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
_COMPLETION = "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion"
_DETOKENIZER = "sglang.srt.managers.detokenizer_manager.DetokenizerManager"
_INTERNAL_STATE = (
    "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
)
_RESPONSES_REQUEST = "sglang.srt.entrypoints.openai.protocol.ResponsesRequest"
_ENGINE = "sglang.srt.entrypoints.engine.Engine"
_OLLAMA = "sglang.srt.entrypoints.ollama.serving.OllamaServing"
_MODEL_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_RESPONSES = "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
_TOOLS = "sglang.srt.function_call.function_call_parser.FunctionCallParser"
_TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"


def front() -> tuple[Hook, ...]:
    """Hooks of the process that parses arguments and serves HTTP or `sgl.Engine`.

    It also gets the hooks of the detokenizer's process, so that the start checks them.
    """
    from fastapi import HTTPException

    from sglang_qspec.engine.frontend import (
        chats,
        meta_info,
        prompts,
        samples,
        server_info,
        tool_calls,
    )
    from sglang_qspec.engine.scheduler import internal_state
    from sglang_qspec.engine.start import flags, lora
    from sglang_qspec.errors import RequestError

    refusal = (RequestError,)
    skip = OnError.SKIP
    return (
        Hook(_SERVER_ARGS + ".add_cli_args", flags.add_flags, AFTER, OnError.STOP_START),
        Hook(_SERVER_ARGS + ".from_cli_args", flags.read_flags, AROUND, OnError.STOP_START),
        Hook(
            "sglang.srt.arg_groups.lora_hook.check_lora_speculative_compatibility",
            lora.allow,
            AROUND,
            OnError.STOP_START,
        ),
        Hook(
            "sglang.srt.entrypoints.http_server.serve_generate_request",
            prompts.serve_generate,
            AROUND,
            skip,
        ),
        Hook(
            "sglang.srt.entrypoints.grpc_bridge.RuntimeHandle._run_generate",
            prompts.run_grpc,
            AROUND,
            skip,
        ),
        Hook(_ENGINE + ".generate", prompts.engine_generate, AROUND, skip, refusal),
        Hook(_ENGINE + ".async_generate", prompts.engine_async_generate, AROUND, skip, refusal),
        Hook(
            _COMPLETION + "._convert_to_internal_request",
            prompts.convert_completion,
            AROUND,
            skip,
            refusal,
        ),
        Hook(_CHAT + "._process_messages", chats.process_messages, BEFORE, skip, refusal),
        Hook(_CHAT + "._convert_to_internal_request", chats.convert_chat, AFTER, skip, refusal),
        Hook(
            _ANTHROPIC + "._convert_to_chat_completion_request",
            chats.convert_anthropic,
            AROUND,
            skip,
            refusal,
        ),
        Hook(_RESPONSES + ".create_responses", chats.create_responses, AROUND, skip),
        Hook(_RESPONSES_REQUEST + ".to_sampling_params", chats.responses_params, AFTER, skip),
        Hook(_OLLAMA + ".handle_chat", chats.ollama_chat, AROUND, skip),
        Hook(_OLLAMA + ".handle_generate", chats.ollama_generate, AROUND, skip),
        Hook(_OLLAMA + "._convert_options_to_sampling_params", chats.ollama_params, AFTER, skip),
        Hook(_TOOLS + ".parse_stream_chunk", tool_calls.parse_stream_chunk, AROUND, skip),
        Hook(
            "sglang.srt.function_call.json_array_parser.JsonArrayParser.parse_streaming_increment",
            tool_calls.parse_array,
            AROUND,
            skip,
        ),
        Hook(_TOKENIZER_MANAGER + ".generate_request", prompts.generate, BEFORE, skip, refusal),
        Hook(_TOKENIZER_MANAGER + "._send_one_request", samples.send_one, AROUND, skip),
        Hook(
            _TOKENIZER_MANAGER + "._validate_one_request",
            prompts.tokenized,
            BEFORE,
            skip,
            refusal,
        ),
        Hook(
            _TOKENIZER_MANAGER + ".update_request_meta_info",
            meta_info.complete_meta_info,
            AROUND,
            OnError.SKIP,
        ),
        Hook(
            _TOKENIZER_MANAGER + "._calculate_spec_decoding_metrics",
            meta_info.correct_rates,
            AFTER,
            OnError.SKIP,
        ),
        Hook(
            _TOKENIZER_MANAGER + ".set_internal_state",
            internal_state.check_update,
            BEFORE,
            OnError.SKIP,
            (HTTPException,),
        ),
        Hook(
            "sglang.srt.utils.common.build_server_info",
            server_info.hide_in_server,
            AFTER,
            OnError.SKIP,
        ),
        *detokenizer(),
    )


def detokenizer() -> tuple[Hook, ...]:
    """Hooks of the process that turns tokens into text."""
    from sglang_qspec.engine.frontend import detokenizer

    return (
        Hook(_DETOKENIZER + ".init_tokenizer", detokenizer.repair_detokenizer, AFTER, OnError.SKIP),
        Hook(
            _DETOKENIZER + "._decode_batch_token_id_output",
            detokenizer.decode_step,
            AROUND,
            OnError.SKIP,
        ),
    )


def scheduler() -> tuple[Hook, ...]:
    """Hooks of the scheduler's process."""
    from sglang_qspec.engine.cuda import capture
    from sglang_qspec.engine.passes.launch import prefill_hooks
    from sglang_qspec.engine.scheduler import (
        early,
        internal_state,
        kv_ahead,
        kv_reserve,
        last_output,
        lifecycle,
        lora_slots,
        publishing,
        results,
        stop_strings,
    )
    from sglang_qspec.engine.sidecar import scheduler_fork

    check_pending_load = (
        "sglang.srt.speculative.external_corpus_manager.ExternalCorpusManager.check_pending_load"
    )
    return (
        Hook(
            _SCHEDULER + "._add_request_to_queue",
            lifecycle.enqueued,
            AFTER,
            OnError.END_SPECULATION,
        ),
        Hook(
            "sglang.srt.runtime_context.spawn_world_rank",
            scheduler_fork.fork_scheduler,
            BEFORE,
            OnError.SKIP,
        ),
        Hook(_SCHEDULER + ".init_tokenizer", stop_strings.repair_scheduler, AFTER, OnError.SKIP),
        # If the sidecar cannot start, speculation ends, since the link would wait forever.
        Hook(
            _SCHEDULER + ".init_model_worker",
            lifecycle.started,
            AFTER,
            OnError.END_SPECULATION,
        ),
        Hook(_SCHEDULER + ".run_batch", early.decide, BEFORE, OnError.END_SPECULATION),
        Hook(_SCHEDULER + "._forward_isolation", early.isolate, AROUND, OnError.SKIP),
        Hook(_SCHEDULER + ".process_batch_result", results.settle, BEFORE, OnError.END_SPECULATION),
        Hook(_SCHEDULER + ".send_abort_output", lifecycle.aborted, AFTER, OnError.END_SPECULATION),
        # QSPEC's output streamer ends requests; without it the speculator would keep them all.
        Hook(
            _SCHEDULER + ".get_output_streamer_class",
            last_output.output_streamer_class,
            AFTER,
            OnError.END_SPECULATION,
        ),
        Hook(_SCHEDULER + ".get_output_streamer_class", publishing.start, AFTER, OnError.SKIP),
        Hook(check_pending_load, lifecycle.polled, AFTER, OnError.END_SPECULATION),
        Hook(check_pending_load, publishing.publish, AFTER, OnError.SKIP),
        Hook(_INTERNAL_STATE + "._add_speculative", internal_state.describe, AFTER, OnError.SKIP),
        Hook(
            _INTERNAL_STATE + "._update_handlers", internal_state.add_handlers, AFTER, OnError.SKIP
        ),
        Hook(
            "sglang.srt.managers.schedule_batch.ScheduleBatch.new_tokens_required_next_decode",
            kv_ahead.tokens_required,
            AROUND,
            OnError.SKIP,
        ),
        Hook(
            "sglang.srt.speculative.eagle_utils.eagle_prepare_for_decode",
            kv_ahead.prepare,
            AROUND,
            OnError.SKIP,
        ),
        # Without wider rows a request could write to the KV slots of another request.
        Hook(
            "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
            kv_reserve.reserve_columns,
            AFTER,
            OnError.STOP_START,
        ),
        # Without this an adapter could keep a part of the adapter that had its slot before.
        Hook(
            "sglang.srt.lora.mem_pool.LoRAMemoryPool.load_lora_weight_to_buffer",
            lora_slots.clear,
            BEFORE,
            OnError.STOP_START,
        ),
        # Without these classes the graphs of ragged passes would be wrong.
        Hook(
            _MODEL_RUNNER + "._decode_cuda_graph_runner_cls",
            capture.runner_class,
            AROUND,
            OnError.STOP_START,
        ),
        Hook(
            _MODEL_RUNNER + ".max_decode_logits_rows",
            capture.logits_rows,
            AROUND,
            OnError.STOP_START,
        ),
        # Without these slots a prefill verifies no drafts.
        Hook(
            "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend",
            prefill_hooks.reserve,
            AFTER,
            OnError.END_SPECULATION,
        ),
        # Without these logits the worker repeats the prefill without drafts.
        Hook(
            "sglang.srt.layers.logits_processor.LogitsProcessor._get_pruned_states",
            prefill_hooks.prune_states,
            AROUND,
            OnError.END_SPECULATION,
        ),
    )
