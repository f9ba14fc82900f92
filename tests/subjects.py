"""Subjects of tests: files of one room that show one behaviour from several sides are one row of docs/coverage.md.

A room → the behaviour → its files without `test_` and `.py`. A file that no subject names is a row by itself.
"""

from __future__ import annotations

SUBJECTS: dict[str, dict[str, str]] = {
    "The whole farm": {
        "Streams survive kills, failovers, upgrades, rollouts and slow machines": (
            "chaos crashing_request engines failover rolling run slow survival survival_in_blocks survival_of_states "
            "upgrade"
        ),
        "Models are loaded, share a host's memory, and need no torch": (
            "memory_given_back models_at_run_time serve turns without_torch"
        ),
        "Official clients and frameworks work; answers fit the OpenAPI document": (
            "clients frameworks openai_client schema tools"
        ),
        "Answers of published models are those of transformers": "gguf_files images real_model scoring",
        "Wheels install and ARM kernels compute in bare environments": "arm wheels",
    },
    "control": {
        "Requests are queued within bounds and claimed in fair turns": (
            "claim counts enqueue expected_wait places turns"
        ),
        "The lock's holder emits tokens that clients follow; every request ends": (
            "emit ending follow kept many_choices stranded waiting weights"
        ),
        "Requests that crash a group are recorded, buried, and tried again": "dead suspects",
        "Locks, commands, heartbeats and poison decide who works": "commands health lease memory_deaths rounds",
        "API keys have limits, settlements and usage": "keys limits settlements usage",
        "Specifications, images and stored responses take bounded room": "catalog image_bytes responses",
        "Outages, failovers, losses and rotated passwords of Redis are survived": (
            "connection full loss rollback rotation topology"
        ),
        "Scripts write nothing when they fail; their work is bounded": "growth refused_arguments",
        "Logs and exceptions have one shape and no secrets": "logged_exceptions logs",
        "Processes read settings, version and memory of their host": "host_memory process settings structs version",
    },
    "control/operations": {
        "Models, farms, keys and breaches are found for operators": "breaches key_rule local_farms spec",
    },
    "control/requests": {
        "Ids are unique; logs are small and shown as text": "entries request_ids token_log",
    },
    "control/replicas": {
        "Replicas, slow ranks and deaths are judged": "memory_deaths slow state",
    },
    "control/placement": {
        "Replicas are placed within the memory of hosts and GPUs": "gpu_memory kv_cost memory placement uneven",
        "Replicas follow demand, are rolled out, moved, and give memory back": "demand give_back rebalance rollout",
    },
    "control/text": {
        "Tokens become text, cut at stop strings": "decoding_only detokenizer stop_strings",
        "Schemas and tokenizers are judged by their parts": "json_schema tokenizer_check",
    },
    "control/redis": {
        "URLs, outages, refusals and nodes of Redis are handled": "address outage shards transient",
    },
    "worker/leader": {
        "Answers go on over epochs, dead replicas and changed logs": (
            "backoff dead_replicas engine_leader leader pooled_recovery recurrent repair replay request"
        ),
        "Requests that crash their group are found by halves": (
            "crash_isolation crash_record failed_steps two_replicas"
        ),
        "A step is scheduled, executed, sampled and emitted beside Redis": (
            "background_call exchange group scripted_leader serving"
        ),
        "Tenants share a leader; slow steps harm nobody": "chunk_size kv_share shares slow",
        "A leader's guesses, prefixes, grammars and scores change no answer": "lookup prefix_reuse scoring structured",
        "A leader publishes its backend and counts each request once": "backends request_counters",
    },
    "worker/agent": {
        "Agent, supervisor and standby replace each other's processes": (
            "adoption forks replica standby supervision two_hosts"
        ),
        "Assignments become ranks that fit the host's memory": "agent on_demand planned_memory planner",
        "Stalls, deaths and missing files are detected": "away downloads engine_stall failure_detector memory_kills",
        "A host's state is published": "facts host_view metrics",
    },
    "worker/rank": {
        "A rank process answers each command once, in order": "rank rank_process rank_worker",
        "Heartbeats report progress; silence is blamed with care": "heartbeat reachability",
        "Devices, addresses, counters and exit statuses of a rank": "address counters ending host",
    },
    "worker/sampling": {
        "Samplers give a row the same token in any batch": (
            "best_tokens both_samplers sampler step_sampler tensor_sampler"
        ),
        "Filters, penalties, masks and grammars limit tokens": (
            "allowed_tokens constraints dry filters grammars vocabularies"
        ),
    },
    "worker/external": {
        "External engines are offered, started and pass one suite": "engines host process",
    },
    "worker/engine": {
        "Every family computes as transformers does": (
            "experts falcon_h1 families gguf images llama4 mamba multimodal native nemotron_h other_forms parity "
            "pooled recurrent scoring"
        ),
        "Quantized weights stay near the plain ones": (
            "block_quants kv_types quant quantized_checkpoints quantized_experts"
        ),
        "Weights are loaded, packed, cached, and their need is known": (
            "backend imports loading need packed_structure packed_weights weight_cache"
        ),
        "Ranks of a group compute what one computes": "collectives group uneven_shares",
        "Guesses, prefixes, pages, graphs and refused steps change no token": (
            "engine fused graphs guesses pages prefixes step"
        ),
    },
    "worker/scheduling": {
        "The scheduler's plans hold under random arrivals and change no token": (
            "finish scheduler scored shares simulation with_a_model with_images"
        ),
        "Prefixes are shared and predictions guessed": "images kv_cache lookup prediction",
    },
    "worker/models": {
        "Packed and fused products are near plain ones": (
            "block_products fusing grouped_products products rounding row_threads"
        ),
        "Models are built without weights": "encoder meta_model native_config",
    },
    "worker/repository": {
        "Model folders that would give wrong tokens are refused": (
            "config_fields files image_part multimodal mxfp4 pooling quant_gate quantization validation"
        ),
        "GGUF files and their tokenizers are chosen, checked and cached": (
            "damaged gate gemma4 pre_tokenizers selection tokenizer_cache"
        ),
        "A model's files are found, downloaded and named": (
            "assets download_progress external fingerprint kinds local_models packaged source"
        ),
    },
    "worker/kv": {
        "Attention over slabs and pages equals the formula": "pages paged_kernels slabs stores",
        "Attention's Triton kernels compile and equal transformers' code": "compilation fused_kernels",
    },
    "worker/weights": {
        "Tensors are read, dequantized and cut among ranks": "checkpoint dequantize header quantized_layouts sharding",
    },
    "worker/collective": {
        "Ranks sum through shared memory and notice dead peers": (
            "agreement dead_peer peer_failure rendezvous shared_memory waits"
        ),
    },
    "worker/native": {
        "C++ libraries are chosen or compiled once": "builds compiled",
    },
    "worker/selftest": {
        "Kernels are tried; wrong ones are switched off": "records selftest trials",
    },
    "api": {
        "An API process survives outages, ends what is given up, and stops": (
            "given_up outages process server_stop waits"
        ),
        "Connections and garbage of a process are bounded": "garbage open_files",
    },
    "api/routes": {
        "Routes of OpenAI's API answer its client": (
            "embeddings images openai_client paths refusals response_socket responses sdk_types shared_reads"
        ),
        "Routes of Anthropic's API answer its client": "context_edits message_parts messages",
        "Agents send tools, reasoning and encrypted items to the routes": "agent_tools items sealed_items",
        "Routes and fields of vLLM, llama.cpp and Ollama": ("infill llama_cpp neighbours ollama ollama_models tokens"),
        "Operators' routes do what `furrow` does": "backends farm_requests farm_routes",
        "The OpenAPI document and the snippets of the pages are true": (
            "document document_bounds documentation openapi"
        ),
        "Unknown fields and hostile numbers are answered or refused": "numbers tolerance",
    },
    "api/console": {
        "The console shows and changes a farm in a browser": (
            "axe console console_files console_real facts keyboard outages request_pages"
        ),
        "The console's chat": "chat_kept chat_page chat_text",
    },
    "api/background": {
        "Background tasks finish requests and responses whose API process ended": (
            "api_death completion response_quota response_survival"
        ),
        "Pages share reads, snapshots and samples of the farm": "farm_events plot_history shared_reads",
    },
    "api/generation": {
        "Streams are followed, resumed and brought back": (
            "batches bringing_back busy_leader feed feeds follow long_answers recovery resuming_client streams unfollow"
        ),
        "Requests are admitted, wait, or are refused in clear words": (
            "admission archive backpressure full_redis queued sleeping unserved waiting_streams"
        ),
        "Entries become the bytes of each dialect": (
            "echo interleaved ollama_rendering recorded_bytes rendering seals session_turns"
        ),
        "Prompts are cut and shared within a scope": "length prefix_scope truncation",
    },
    "api/models": {
        "Requests find their model; its files run confined": "checks confined fill_in_middle models served sleeping",
    },
    "api/chat": {
        "Conversations become prompts in the model's form": (
            "conversation described_tools hostile_files functions history metered prediction prefill tokens"
        ),
        "Answers become reasoning, text and calls in forty forms": (
            "answer families forms forms_told linear_reading reading text_argument tools"
        ),
        "Demanded calls and formats are enforced or refused": ("enforcement forms_enforced structured tool_refusals"),
    },
    "api/images": {
        "Images are fetched and decoded within bounds": "containers decoding fetching hosts places",
    },
    "api/http": {
        "API keys, origins and limits open a request": "browsers gate keyring keys limits settlements",
        "Connections, heads and bodies are bounded": (
            "acceptor bodies connection heads large_bodies silence slow_readers structure uvicorn_hooks websocket"
        ),
        "Tenants take turns before any work": "departures in_turn turns",
        "Errors and paths have one form": "errors paths",
    },
    "api/schemas": {
        "Bodies are checked by field, number and bound": "bounds numbers prompts tolerance",
        "Dialects become one request": "escaped_lark grammar_of items ollama_request response_tools",
    },
    "ops/cli": {
        "`furrow doctor` finds faults of Redis, hosts and models": "doctor doctor_hosts doctor_models doctor_redis",
        "`furrow run`, `serve` and `api` start and end processes": (
            "asking_for_keys conversation own_farm process run serve service"
        ),
        "Commands list and change models, requests, keys and files": (
            "cache dead downloads json keys plan rebalance remote_plan show state"
        ),
        "Output has remedies and progress, no passwords or control characters": (
            "cli passwords progress refusals tables wait"
        ),
    },
    "ops/chaos": {
        "Faults prove their effect, and every difference of streams is found": (
            "chaos_report checker large_log proxy redis_faults replays schedule"
        ),
    },
    "ops/compat": {
        "Clients meet a scripted model; verdicts become a page": "compat scripted",
    },
    "ops/bench": {
        "Comparisons give every engine the same work": (
            "alphabet compare decode_benchmark engines gguf memory overhead report runner"
        ),
        "Benchmarks measure the real loop and whole answers": (
            "ask control_benchmark fanout hostile_benchmark hostile_rows load memory_benchmark random_farms "
            "ranks_benchmark scale_benchmark scenarios"
        ),
        "Benchmarks print figures beside their limits and the machine": (
            "figures house machine phases program segments startup summary"
        ),
    },
    "ops/local": {
        "The private Redis server is a bounded process": "embedded server_memory",
    },
    "ops/demo": {
        "The demonstration model and its text are right": "demo_model demo_tasks",
    },
    "ops/client": {
        "The resuming transport gives the same bytes wherever cut": "events resuming_client resuming_transport",
    },
    "ops/docker": {
        "Containers, images and compose.yaml are sound": "compose containers images",
    },
    "ops/common": {
        "Commands are imported when called; tools wait for conditions": "groups waiting",
    },
    "The documents": {
        "Generated sections are the code's": "coverage_page detectors pages rooms tolerance_page",
        "Commands and links exist, and the site is built": "documents site",
    },
}
