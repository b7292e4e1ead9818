"""Decides which of vLLM's settings are part of a block's name: all except those listed here.

A setting that changes the bytes of a block, or their meaning, must distinguish engines. A complete
list of these is impossible, least of all for releases to come. So the other settings are listed,
each with its reason. An unlisted setting distinguishes engines by its value: a setting that is new
in vLLM costs a cold start at most, and can't mix blocks.

``FACT`` marks settings that were reviewed and belong in the name; they are written plainly. An
unlisted setting is written as a digest, because it may be a secret. A test walks vLLM's
configurations and variables, and fails at one that is not listed.

Kernels that compute the same thing differ by rounding, and are not distinguished. Kernels that
quantize values that others don't are distinguished.
"""

from __future__ import annotations

import os
from dataclasses import MISSING, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm import envs

from kvtier.vllm.identity.plain_values import digest, plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FACT: Final = "part of the name, by its value"
BY_ITSELF: Final = "a fact by itself: namespace.py, page_facts.py"
IN_SPECS: Final = "in the KV-cache specs, which are a fact"
IN_HASH: Final = "in the hash of a block's tokens"
WALKED: Final = "settings of its own, below"

_ROUNDING: Final = "the same values but for rounding: a kernel, or who computes what"
_SIZES: Final = "how much is kept or computed at once"
_PLACES: Final = "files, caches and processes on this host"
_NETWORK: Final = "addresses, ports and time limits"
_OUTPUT: Final = "sampling, and what becomes of outputs"
_SHOWN: Final = "logs, metrics, profiles, debugging"
_FRONT: Final = "how requests get in: the hash has what came of it"
_TAKEN_IN: Final = "what vLLM itself derives from settings that are listed here"

_TABLE: Final[dict[str, dict[str, str]]] = {
    "vllm_config": {
        WALKED: "model_config cache_config parallel_config load_config attention_config "
        "kernel_config lora_config speculative_config engram_config diffusion_config",
        FACT: "additional_config",
        BY_ITSELF: "quant_config mamba_config device_config",
        _SIZES: "scheduler_config offload_config",
        _ROUNDING: "compilation_config optimization_level performance_mode",
        _OUTPUT: "structured_outputs_config reasoning_config watermark_config aux_output_config",
        _SHOWN: "observability_config logging_config profiler_config kv_events_config "
        "watchdog_config shutdown_timeout",
        "connectors: what they change is seen where it takes effect": "kv_transfer_config",
        "an encoder's outputs have names of their own": "ec_transfer_config ec_manager_config",
        "another number each time": "instance_id",
        "a change of weights begins a generation": "weight_transfer_config",
    },
    "model_config": {
        FACT: "runner convert model_class_overrides trust_remote_code",
        WALKED: "multimodal_config",
        BY_ITSELF: "model model_weights hf_config hf_text_config hf_overrides hf_config_path "
        "config_format revision code_revision dtype quantization quantization_config model_impl "
        "disable_sliding_window seed",
        "in the rope's facts, where it matters": "max_model_len spec_target_max_model_len",
        IN_HASH: "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init "
        "enable_prompt_embeds",
        _TAKEN_IN: "is_submodel_config word_embeddings_untied_by_checkpoint",
        _FRONT: "allowed_local_media_path allowed_media_domains served_model_name hf_token "
        "io_processor_plugin renderer_num_workers allow_deprecated_quantization",
        _ROUNDING: "enforce_eager disable_cascade_attn",
        _OUTPUT: "return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel "
        "generation_config override_generation_config logits_processors pooler_config",
        _SHOWN: "enable_trace_replay",
        _PLACES: "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend "
        "sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator",
    },
    "multimodal_config": {
        FACT: "mm_processor_kwargs mm_device_do_normalize mm_encoder_attn_dtype "
        "mm_encoder_fp8_scale_path video_pruning_rate video_pruning_method media_io_kwargs "
        "allow_missing_mm_embeddings language_model_only mm_encoder_only",
        IN_HASH: "mm_hasher_algorithm enable_mm_embeds interleave_mm_strings",
        _ROUNDING: "mm_encoder_tp_mode mm_encoder_attn_backend",
        _SIZES: "limit_per_prompt mm_processor_cache_gb mm_processor_cache_type skip_mm_profiling "
        "mm_shm_cache_max_object_size_mb mm_tensor_ipc mm_ipc_gpu_memory_gb",
        _PLACES: "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin",
    },
    "cache_config": {
        FACT: "mamba_cache_dtype mamba_ssm_cache_dtype mamba_cache_mode use_replayssm "
        "use_kda_recoverssm enable_mamba_shared_prefix_checkpoint kv_sharing_fast_prefill",
        BY_ITSELF: "cache_dtype kv_cache_dtype_skip_layers kv_cache_layout "
        "prefix_caching_hash_algo prefix_match_unit hash_block_size",
        IN_SPECS: "block_size sliding_window is_attention_free mamba_page_size_padded "
        "skip_page_size_padded mamba_block_size replayssm_buffer_len swa_bounded_replay",
        _TAKEN_IN: "user_specified_block_size _block_size_resolved effective_attention_block_size "
        "cache_hit_alignment_tokens",
        _SIZES: "gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks "
        "simple_cpu_offload_num_blocks kv_cache_size_tokens kv_cache_max_concurrency "
        "kv_cache_memory_bytes kv_offloading_size kv_offloading_backend "
        "enable_prefix_caching prefix_cache_retention_interval",
    },
    "parallel_config": {
        FACT: "worker_cls",
        BY_ITSELF: "tensor_parallel_size pipeline_parallel_size prefill_context_parallel_size "
        "decode_context_parallel_size world_size dcp_kv_cache_interleave_size "
        "cp_kv_cache_interleave_size",
        _TAKEN_IN: "is_moe_model rank data_parallel_index _allow_auto_resolve_cp_interleave_size",
        _ROUNDING: "enable_hc_sp enable_expert_parallel enable_batch_sharded_sampling "
        "enable_ep_weight_filter enable_eplb eplb_config expert_placement_strategy all2all_backend "
        "disable_custom_all_reduce enable_dbo ubatch_size dbo_decode_token_threshold "
        "dbo_prefill_token_threshold dcp_comm_backend dcp_q_replicate",
        "each replica has what it would have alone": "data_parallel_size data_parallel_size_local "
        "data_parallel_rank data_parallel_rank_local data_parallel_backend "
        "data_parallel_external_lb data_parallel_hybrid_lb dp_sync_interval "
        "disable_nccl_for_dp_synchronization enable_elastic_ep elastic_ep_max_dp_size",
        _NETWORK: "data_parallel_master_ip data_parallel_rpc_port data_parallel_master_port "
        "master_addr master_port _data_parallel_master_port_list _coord_store_port node_rank "
        "nnodes distributed_timeout_seconds cpu_distributed_timeout_seconds enable_fault_tolerance "
        "fault_tolerance_config",
        _PLACES: "max_parallel_loading_workers enable_shm_tensor_arena ray_workers_use_nsight "
        "ray_runtime_env placement_group distributed_executor_backend worker_extension_cls "
        "numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids _api_process_count "
        "_api_process_rank",
    },
    "load_config": {
        FACT: "ignore_patterns",
        BY_ITSELF: "load_format model_loader_extra_config",
        _PLACES: "download_dir safetensors_load_strategy safetensors_prefetch_num_threads "
        "safetensors_prefetch_block_size device use_tqdm_on_load pt_load_map_location",
    },
    "attention_config": {
        FACT: "disable_flashinfer_q_quantization use_prefill_query_quantization indexer_kv_dtype "
        "indexer_sparse_logits use_non_causal hisparse_config",
        BY_ITSELF: "backend backend_per_kind",
        _ROUNDING: "minimax_m3_msa_decode_backend flash_attn_version "
        "flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv "
        "tq_max_kv_splits_for_cuda_graph use_trtllm_attention mla_prefill_backend "
        "trtllm_ragged_backend indexer_tp_shard_min_rows minimax_m3_indexer_cp "
        "sparse_mla_force_mqa sparse_mla_prefill_workspace_factor flex_attn_block_m "
        "flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size",
    },
    "kernel_config": {
        FACT: "moe_backend linear_backend linear_backend_per_quant",
        _ROUNDING: "ir_op_priority enable_flashinfer_autotune enable_rocm_segmented_attn_autotune "
        "enable_cutedsl_warmup enable_jit_warmup monokernel sparse_indexer_topk_backend",
    },
    "mamba_config": {
        FACT: "backend enable_stochastic_rounding stochastic_rounding_philox_rounds ssu_algorithm",
    },
    "lora_config": {
        FACT: "enable_mixed_moe_lora_format enable_moe_shared_loras",
        BY_ITSELF: "lora_dtype target_modules enable_tower_connector_lora",
        IN_HASH: "default_mm_loras",
        _SIZES: "max_lora_rank max_loras max_cpu_loras",
        _ROUNDING: "fully_sharded_loras specialize_active_lora",
        _OUTPUT: "max_lora_cls_labels",
    },
    "speculative_config": {
        FACT: "index_share_for_mtp_iteration parallel_drafting disable_eagle_block_drop "
        "disable_lookahead_block_hashes moe_backend",
        BY_ITSELF: "model method revision code_revision quantization kv_cache_dtype "
        "attention_backend draft_model_config draft_load_config",
        # The specs have the heads per rank, and the number of drafts if they have states.
        IN_SPECS: "num_speculative_tokens num_speculative_tokens_per_batch_size "
        "draft_tensor_parallel_size tensor_parallel_size",
        "in the rope's facts, where it matters": "max_model_len",
        _TAKEN_IN: "target_model_config target_parallel_config draft_parallel_config",
        _ROUNDING: "enforce_eager disable_padded_drafter_batch",
        "which tokens are proposed, and which of them are taken": "draft_lm_head_quantization "
        "use_local_argmax_reduction use_heterogeneous_vocab prompt_lookup_max prompt_lookup_min "
        "suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests "
        "suffix_decoding_max_spec_factor suffix_decoding_min_token_prob rejection_sample_method "
        "synthetic_acceptance_rates synthetic_acceptance_length enable_adaptive_verification "
        "draft_sample_method dspark_draft_topk xpress_topc fly_window_size fly_entropy_threshold "
        "fly_entropy_top_k",
    },
    "engram_config": {_SIZES: "cpu_offload embedding_across_dp dp_shared_memory use_thp"},
    "diffusion_config": {FACT: "canvas_length max_denoising_steps"},
}

_VARIABLES: Final[dict[str, str]] = {
    FACT: "VLLM_B12X_MOE_FP4_FORCE_A16 VLLM_BATCH_INVARIANT VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER "
    "VLLM_CPU_INT4_W4A8 VLLM_DEEPEPLL_NVFP4_DISPATCH VLLM_DISABLED_KERNELS "
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE VLLM_FLOAT32_MATMUL_PRECISION "
    "VLLM_HUMMING_INPUT_QUANT_CONFIG VLLM_HUMMING_ONLINE_QUANT_CONFIG VLLM_MARLIN_INPUT_DTYPE "
    "VLLM_MEDIA_CONNECTOR VLLM_MODEL_REDIRECT_PATH VLLM_MOE_ROUTING_SIMULATION_STRATEGY "
    "VLLM_MOE_USE_DEEP_GEMM VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD "
    "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD VLLM_PLUGINS VLLM_PP_LAYER_PARTITION "
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE "
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION VLLM_ROCM_USE_AITER_FP4BMM VLLM_ROCM_USE_AITER_FP8BMM "
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4 VLLM_ROCM_USE_AITER_MOE_SITUV2 "
    "VLLM_TEST_FORCE_LOAD_FORMAT VLLM_USE_DEEP_GEMM VLLM_USE_DEEP_GEMM_E8M0 "
    "VLLM_USE_FLASHINFER_MOE_INT4 VLLM_USE_MODELSCOPE VLLM_VIDEO_LOADER_BACKEND "
    "VLLM_XPU_INC_WNA16_BACKEND",
    BY_ITSELF: "VLLM_KV_CACHE_LAYOUT VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT VLLM_ROCM_USE_AITER "
    "VLLM_SSM_CONV_STATE_LAYOUT VLLM_TARGET_DEVICE VLLM_USE_V2_MODEL_RUNNER",
    IN_SPECS: "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE VLLM_MLA_DISABLE",
    _ROUNDING: "VLLM_ALLREDUCE_USE_FLASHINFER VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC "
    "VLLM_ALLREDUCE_USE_SYMM_MEM VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD "
    "VLLM_CPU_ATTN_SPLIT_KV VLLM_DBO_COMM_SMS VLLM_DCP_Q_REPLICATE VLLM_DEEPEP_BUFFER_SIZE_MB "
    "VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL "
    "VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION "
    "VLLM_DEEPEP_V2_PREFER_OVERLAP VLLM_DEEP_GEMM_WARMUP "
    "VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION VLLM_DISABLE_SHARED_EXPERTS_STREAM "
    "VLLM_ENABLE_CUDAGRAPH_GC VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE VLLM_ENABLE_GEMM_RS "
    "VLLM_ENABLE_HPC_OPS VLLM_ENABLE_INDUCTOR_* VLLM_ENABLE_PREGRAD_PASSES "
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR "
    "VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE "
    "VLLM_FORCE_AOT_LOAD VLLM_GDN_DECODE_KERNEL VLLM_HAS_FLASHINFER_CUBIN "
    "VLLM_HUMMING_MOE_GEMM_TYPE VLLM_HUMMING_USE_F16_ACCUM VLLM_KIMI_K3_AUX_ATTN_RES_STREAM "
    "VLLM_KIMI_K3_GEMM_AR VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT VLLM_LORA_DISABLE_PDL "
    "VLLM_LORA_ENABLE_DUAL_STREAM VLLM_MARLIN_USE_ATOMIC_ADD VLLM_MOE_SKIP_PADDING "
    "VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD VLLM_REPLICATE_EMBED "
    "VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS VLLM_ROCM_AITER_MLA_ASM_PADDING "
    "VLLM_ROCM_AITER_MLA_DCP_VERIFY VLLM_ROCM_AITER_MOE_DISPATCH_POLICY "
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN VLLM_ROCM_FP8_PADDING VLLM_ROCM_MOE_PADDING "
    "VLLM_ROCM_MONO_DECODE VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16 "
    "VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB "
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE "
    "VLLM_ROCM_USE_AITER_CUSTOM_AR VLLM_ROCM_USE_AITER_FP4_ASM_GEMM "
    "VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS VLLM_ROCM_USE_AITER_LINEAR "
    "VLLM_ROCM_USE_AITER_LINEAR_HIPBMM VLLM_ROCM_USE_AITER_MHA VLLM_ROCM_USE_AITER_MLA "
    "VLLM_ROCM_USE_AITER_MOE VLLM_ROCM_USE_AITER_RMSNORM VLLM_ROCM_USE_AITER_TRITON_GEMM "
    "VLLM_ROCM_USE_AITER_TRITON_ROPE VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA "
    "VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION VLLM_ROCM_USE_SKINNY_GEMM "
    "VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD VLLM_SPARSE_INDEXER_MAX_LOGITS_MB "
    "VLLM_STEP5_SHARD_SP_SHARED_EXPERT VLLM_TPU_USING_PATHWAYS VLLM_TRITON_FORCE_FIRST_CONFIG "
    "VLLM_TRITON_JIT_WARMUP_NUM_THREADS VLLM_TRITON_USE_TD VLLM_TUNED_CONFIG_FOLDER "
    "VLLM_USE_AOT_COMPILE VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_USE_BYTECODE_HOOK "
    "VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES VLLM_USE_DIRECT_DCP_A2A "
    "VLLM_USE_DIRECT_DCP_KV_GATHER VLLM_USE_DIRECT_DCP_Q_GATHER VLLM_USE_FUSED_MOE_GROUPED_TOPK "
    "VLLM_USE_HW_AGNOSTIC VLLM_USE_LAYERNAME VLLM_USE_MEGA_AOT_ARTIFACT VLLM_USE_NCCL_SYMM_MEM "
    "VLLM_USE_OINK_OPS VLLM_USE_STANDALONE_COMPILE VLLM_USE_TRITON_AWQ "
    "VLLM_XPU_FORCE_N_CONTIG_WEIGHT VLLM_XPU_PP_MICROBATCH VLLM_ZENTORCH_WEIGHT_PREPACK",
    _SIZES: "VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN VLLM_ALLOW_LONG_MAX_MODEL_LEN "
    "VLLM_CPU_CI_ENV VLLM_CPU_KVCACHE_SPACE VLLM_CPU_NUM_OF_RESERVED_CPU "
    "VLLM_CPU_OMP_THREADS_BIND VLLM_FASTSAFETENSORS_QUEUE_SIZE "
    "VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS VLLM_MAX_* VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS "
    "VLLM_MQ_MAX_CHUNK_BYTES_MB VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_V1_OUTPUT_PROC_CHUNK_SIZE "
    "VLLM_XGRAMMAR_CACHE_MB",
    _PLACES: "CUDA_HOME CUDA_VISIBLE_DEVICES LD_LIBRARY_PATH LOCAL_RANK VLLM_ASSETS_CACHE "
    "VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_CACHE_ROOT VLLM_COMPILE_CACHE_SAVE_FORMAT "
    "VLLM_CONFIG_ROOT VLLM_CUDART_SO_PATH VLLM_CUDA_COMPATIBILITY_PATH "
    "VLLM_DISABLE_COMPILE_CACHE VLLM_DISABLE_PYNCCL VLLM_DISTRIBUTED_USE_SPLIT_GROUP VLLM_DP_* "
    "VLLM_ELASTIC_EP_* VLLM_ENABLE_CUDA_COMPATIBILITY VLLM_ENABLE_STARTUP_PLAN "
    "VLLM_ENABLE_V1_MULTIPROCESSING VLLM_GPU_NIC_PCIE_MAPPING VLLM_LORA_RESOLVER_* "
    "VLLM_MEDIA_CACHE VLLM_MEDIA_CACHE_* VLLM_NCCL_* VLLM_NIC_SELECTION_VARS "
    "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_PROCESS_NAME_PREFIX "
    "VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_RAY_* VLLM_RPC_BASE_PATH VLLM_RUST_FRONTEND_PATH "
    "VLLM_SKIP_P2P_CHECK VLLM_USE_RAY_* VLLM_USE_SIMPLE_KV_OFFLOAD VLLM_USE_SPINLOOP_EXT "
    "VLLM_WEIGHT_OFFLOADING_* VLLM_WORKER_MULTIPROC_METHOD VLLM_WSL2_ENABLE_PIN_MEMORY "
    "VLLM_XLA_*",
    _NETWORK: "MOONCAKE_* S3_* VLLM_EC_* VLLM_ENGINE_READY_TIMEOUT_S "
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_HOST_IP VLLM_HTTP_* VLLM_KEEP_ALIVE_ON_ENGINE_DEATH "
    "VLLM_LOOPBACK_IP VLLM_MOONCAKE_* VLLM_NIXL_* VLLM_P2P_* VLLM_PORT "
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS",
    _OUTPUT: "VLLM_BEAM_* VLLM_COMPUTE_NANS_IN_LOGITS VLLM_ENABLE_COHERE_API "
    "VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_RAISE_ON_LOGIT_NANS "
    "VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_TOOL_* VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT "
    "VLLM_USE_FLASHINFER_SAMPLER VLLM_V1_USE_OUTLINES_CACHE VLLM_XPU_USE_SAMPLER_KERNEL",
    _FRONT: "VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_API_KEY "
    "VLLM_AUDIO_FETCH_TIMEOUT VLLM_CHAT_* VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_GPT_OSS_* "
    "VLLM_IMAGE_FETCH_TIMEOUT VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_MEDIA_FETCH_MAX_RETRIES "
    "VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_REQUEST_BODY_LOG_LEVEL "
    "VLLM_SERVER_DEV_MODE VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_SYSTEM_START_DATE "
    "VLLM_USE_FASTOKENS VLLM_USE_RUST_* VLLM_VIDEO_FETCH_TIMEOUT",
    _SHOWN: "FORCE_COLOR NO_COLOR VERBOSE VLLM_CONFIGURE_LOGGING VLLM_CUSTOM_SCOPES_FOR_PROFILING "
    "VLLM_DEBUG_* VLLM_DISABLE_LOG_LOGO VLLM_DO_NOT_TRACK VLLM_GC_DEBUG VLLM_GPU_SYNC_CHECK "
    "VLLM_LOGGING_* VLLM_LOG_* VLLM_NO_USAGE_STATS VLLM_NVTX_SCOPES_FOR_PROFILING "
    "VLLM_PATTERN_MATCH_DEBUG VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_TRACE_FUNCTION VLLM_USAGE_*",
    "of builds of vLLM: its release is a fact": "CMAKE_BUILD_TYPE MAX_JOBS NVCC_THREADS "
    "VLLM_BUILD_* VLLM_DOCKER_BUILD_CONTEXT VLLM_IMAGE_TAG VLLM_MAIN_CUDA_VERSION "
    "VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_SKIP_VERSION_SUFFIX "
    "VLLM_USE_PRECOMPILED VLLM_USE_PRECOMPILED_RUST",
}


def setting_facts(vllm_config: Any) -> dict[str, Any]:  # noqa: ANN401 - vLLM has no stubs
    """Return the settings that distinguish engines, by configuration and name."""
    return {**settings_of("vllm_config", vllm_config), **_variables(os.environ)}


def settings_of(name: str, config: Any) -> dict[str, Any]:  # noqa: ANN401 - vLLM has no stubs
    """Return the settings of one vLLM configuration that distinguish engines; none if it is None.

    Settings at vLLM's default are left out: the release is a fact.
    """
    found: dict[str, Any] = {}
    for field, value in _set_in(config):
        reason = reason_for(name, field)
        if reason == WALKED:
            found |= settings_of(field, value)
        elif reason in (FACT, None):
            found[f"{name}.{field}"] = _shown(value, is_known=reason is not None)
    return found


def reason_for(name: str, field: str) -> str | None:
    """Return why a configuration's field is in the name, or is not; None: it is not listed."""
    for reason, fields_of_it in _TABLE.get(name, {}).items():
        if field in fields_of_it.split():
            return reason
    return None


def reason_for_variable(variable: str) -> str | None:
    """Return why a variable is in the name of blocks, or is not; None: it is not listed.

    A variable listed by its whole name takes precedence over one listed by its prefix.
    """
    for ending in ("", "*"):
        for reason, names in _VARIABLES.items():
            for name in names.split():
                if name.endswith("*") == bool(ending) and (
                    variable == name or (ending and variable.startswith(name[:-1]))
                ):
                    return reason
    return None


def _variables(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the set variables that vLLM reads and that distinguish engines."""
    found = {}
    for name in sorted(environment.keys() & envs.environment_variables):
        reason = reason_for_variable(name)
        if reason in (FACT, None):
            found[name] = _shown(environment[name], is_known=reason is not None)
    return found


def _set_in(config: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - vLLM has no stubs
    """Yield the fields of a configuration that are not at their default, and their values."""
    if not is_dataclass(config):
        yield from vars(config).items() if config is not None else ()
        return
    for field in fields(config):
        value = getattr(config, field.name)
        made = field.default_factory
        default = field.default if made is MISSING else made()
        if type(value) is not type(default) or value != default:
            yield field.name, value


def _shown(value: Any, *, is_known: bool) -> Any:  # noqa: ANN401 - any value
    """Return a value as written in the facts: plainly if it is short and not a secret."""
    as_json = plain(value)
    return as_json if is_known and not isinstance(as_json, dict | list) else digest(as_json)
