"""Subjects of tests: files of one room that show one behaviour from several sides are one row of docs/coverage.md.

A room → the behaviour → its files without `test_` and `.py`. A file that no subject names is a row by itself.
"""

from __future__ import annotations

SUBJECTS: dict[str, dict[str, str]] = {
    "The whole farm": {
        "A whole farm's streams survive kills, failovers, upgrades, rollouts and slow machines": (
            "chaos crashing_request engines failover rolling run slow survival survival_in_blocks survival_of_states "
            "upgrade"
        ),
        "A whole farm loads models, shares a host's memory, and needs no torch": (
            "memory_given_back models_at_run_time serve turns without_torch"
        ),
        "Official clients and frameworks work with a whole farm": "clients frameworks openai_client schema tools",
        "A whole farm serves published models with transformers' answers": "gguf_files images real_model scoring",
        "A whole farm runs from a wheel, and on ARM, in bare environments": "arm wheels",
        "Metrics of a whole farm count each request once": "metrics",
    },
    "control": {
        "Logs and exceptions have one shape and no secrets": "logged_exceptions logs",
        "The control plane's processes read settings, version and memory of their host": (
            "host_memory process settings structs version"
        ),
        "Back-off: pauses between tries double up to a longest": "backoff",
        "The control plane knows external engines' names and options": "engines",
        "API keys have limits, settlements and usage": "keys limits settlements usage",
    },
    "control/operations": {
        "An operator's names, keys and files become operations on models and farms": (
            "breaches key_rule local_farms spec"
        ),
    },
    "control/requests": {
        "Requests are queued within bounds and claimed in fair turns": (
            "claim counts enqueue expected_wait places turns"
        ),
        "Tokens of a request are emitted, logged and followed; every request ends": (
            "emit ending entries follow image_bytes kept many_choices request_ids rollback stranded token_log waiting "
            "weights"
        ),
        "Requests that crash a group are recorded in Redis and become dead letters": "dead suspects",
    },
    "control/replicas": {
        "A replica has one lock, commands, heartbeats and poison": "commands health lease",
        "A replica in Redis is judged: slow ranks, deaths for lack of memory": "memory_deaths slow state",
    },
    "control/placement": {
        "Replicas are placed within the memory of hosts and GPUs": "gpu_memory kv_cost memory placement uneven",
        "The planner moves replicas, follows demand, and has memory given back": "demand give_back rebalance rollout",
    },
    "control/records": {
        "Records of models, backends and stored responses are written once": "backend catalog responses",
    },
    "control/text": {
        "Tokens become text, cut at stop strings": "decoding_only detokenizer stop_strings",
        "JSON schemas of grammars, and tokenizers, are checked by their parts": "json_schema tokenizer_check",
    },
    "control/redis": {
        "Connections to Redis survive outages, failovers, losses and rotated passwords": (
            "address connection loss outage rotation shards topology transient"
        ),
    },
    "control/scripts": {
        "Lua scripts follow their rules, check arguments, and bound their work": (
            "full growth refused_arguments scripts"
        ),
    },
    "worker": {
        "Processes of the worker import only what they need, and log actions": "imports logged_actions",
    },
    "worker/leader": {
        "A leader continues answers over epochs, dead replicas and changed logs": (
            "backoff dead_replicas engine_leader leader pooled_recovery recurrent repair replay request"
        ),
        "A leader finds requests that crash their group by halves": (
            "crash_isolation crash_record failed_steps two_replicas"
        ),
        "A leader's loop schedules, executes, samples and emits a step beside Redis": (
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
        "An agent turns assignments into ranks that fit the host's memory": "agent on_demand planned_memory planner",
        "An agent detects stalls, deaths and missing files of its ranks": (
            "away downloads engine_stall failure_detector memory_kills"
        ),
        "An agent publishes its host's state": "facts host_view metrics",
    },
    "worker/rank": {
        "A rank's process answers each command once, in order": "rank rank_process rank_worker",
        "A rank's heartbeats report progress; silence is blamed with care": "heartbeat reachability",
        "Devices, addresses, counters and exit statuses of a rank's process": "address counters ending host",
    },
    "worker/sampling": {
        "Samplers give a row the same token in any batch": (
            "best_tokens both_samplers sampler step_sampler tensor_sampler"
        ),
        "A sampler's filters, penalties, masks and grammars limit tokens": (
            "allowed_tokens constraints dry filters grammars vocabularies"
        ),
    },
    "worker/external": {
        "External engines are offered, started and pass one suite": "engines host process",
    },
    "worker/engine": {
        "A forward of every model type computes as transformers does": (
            "experts falcon_h1 families gguf images llama4 mamba multimodal native nemotron_h other_forms parity "
            "pooled recurrent scoring"
        ),
        "A forward on several ranks computes what it does on one": "group uneven_shares",
        "Guesses, prefixes, graphs and refused steps change no token of a forward": (
            "engine fused graphs guesses prefixes step"
        ),
        "A forward takes the path of a GPU on fake tensors": "fake_gpu",
    },
    "worker/scheduling": {
        "The scheduler's plans hold under random arrivals and change no token": (
            "finish scheduler scored shares simulation with_a_model with_images"
        ),
        "The scheduler shares prefixes and makes guesses": "images kv_cache lookup prediction",
    },
    "worker/models": {
        "Products of a model's layers are near plain ones": (
            "block_products fusing grouped_products products rounding row_threads sparse_gates"
        ),
        "Models are built without weights, and loaded with checks": "backend encoder loading meta_model native_config",
        "The memory that a rank needs is known from headers": "need",
    },
    "worker/repository": {
        "Files of models that would give wrong tokens are refused": (
            "config_fields files image_part multimodal mxfp4 pooling quant_gate quantization validation"
        ),
        "GGUF files on disk are chosen and validated, their tokenizers cached": (
            "damaged gate gemma4 pre_tokenizers selection tokenizer_cache"
        ),
        "A model's files are found, downloaded and named": (
            "assets download_progress external fingerprint kinds local_models packaged source"
        ),
    },
    "worker/kv": {
        "Attention over slabs and pages equals the formula": "pages paged_kernels slabs stores",
        "Attention's Triton kernels compile and equal transformers' code": "compilation fused_kernels fusion",
        "KV memory in 16 and 8 bits is near 32": "kv_types",
    },
    "worker/weights": {
        "Tensors are read, dequantized and cut among ranks": "checkpoint dequantize header quantized_layouts sharding",
        "Quantized weights stay near the plain ones": (
            "block_quants quant quantize quantized_checkpoints quantized_experts"
        ),
        "Packed weights from the cache are whole and have the same bits": (
            "packed_structure packed_weights weight_cache"
        ),
    },
    "worker/collective": {
        "Collectives sum through shared memory and notice dead peers": (
            "agreement collectives dead_peer peer_failure rendezvous shared_memory waits"
        ),
    },
    "worker/native": {
        "The C++ library is chosen or compiled once; its memory is zeroed": "builds compiled memory",
    },
    "worker/selftest": {
        "Kernels are tried; wrong ones are switched off": "records selftest shapes trials",
    },
    "api": {
        "An API process as a whole survives outages, and stops": "given_up outages process server_stop waits",
        "An API process bounds its garbage and open files": "garbage open_files",
        "An API process as a whole answers captured requests of real clients": "captures",
    },
    "api/routes": {
        "Routes of OpenAI's API answer its client": (
            "embeddings images openai_client paths refusals response_socket responses sdk_types shared_reads"
        ),
        "Routes of Anthropic's API answer its client": "context_edits message_parts messages",
        "Agents send tools, reasoning and encrypted items to the routes": "agent_tools items sealed_items",
        "Routes of vLLM, llama.cpp and Ollama answer": "infill llama_cpp neighbours ollama ollama_models tokens",
        "Routes of stored chat completions read, list, relabel and delete them": "stored_chats",
        "Operators' routes do what `furrow` does": "backends farm_requests farm_routes",
        "The routes' OpenAPI document, and snippets that call them, are true": (
            "document document_bounds documentation openapi"
        ),
        "Routes answer or refuse unknown fields and hostile numbers": "numbers tolerance",
    },
    "api/console": {
        "The console shows and changes a farm in a browser": (
            "axe console console_files console_real facts keyboard outages request_pages"
        ),
        "The console's chat": "chat_kept chat_page chat_text",
    },
    "api/background": {
        "Background tasks finish requests and responses whose API process ended": (
            "api_death completion response_quota response_survival rounds"
        ),
        "Background tasks share reads, snapshots and samples of the farm": "farm_events plot_history shared_reads",
    },
    "api/generation": {
        "Streams are followed, resumed and brought back": (
            "batches bringing_back busy_leader direct_writing feed feeds follow long_answers recovery resuming_client "
            "streams unfollow"
        ),
        "Requests are admitted, wait, or are refused; a drain finishes them": (
            "admission archive backpressure draining full_redis queued sleeping unserved waiting_streams"
        ),
        "Entries of a request are rendered as the bytes of each dialect": (
            "echo interleaved ollama_rendering recorded_bytes rendering seals session_turns"
        ),
        "Prompts are truncated, and shared within a scope": "length prefix_scope truncation",
    },
    "api/models": {
        "Requests find their model; its files run confined": "checks confined fill_in_middle models served sleeping",
    },
    "api/chat": {
        "Conversations become prompts in the form of the model's template": (
            "conversation described_tools hostile_files functions history metered prediction prefill tokens"
        ),
        "Answers become reasoning, text and calls in forty forms": (
            "answer families forms forms_told linear_reading reading text_argument tools"
        ),
        "Demanded calls and formats are enforced or refused": "enforcement forms_enforced structured tool_refusals",
    },
    "api/images": {
        "Images are fetched and decoded within bounds": "containers decoding fetching hosts places",
    },
    "api/http": {
        "API keys, origins and limits open a request at the edge": "browsers gate keyring keys limits settlements",
        "Connections, heads and bodies are bounded": (
            "acceptor bodies connection heads large_bodies silence slow_readers structure uvicorn_hooks websocket"
        ),
        "Tenants take turns at the edge, before any work": "departures in_turn tasks turns",
        "Errors and paths have one form as HTTP answers": "errors paths",
    },
    "api/schemas": {
        "Fields of bodies are checked by number and bound": "bounds numbers prompts tolerance",
        "Bodies of every dialect become one request": "escaped_lark grammar_of items ollama_request response_tools",
    },
    "ops": {
        "Alerts and dashboards in ops/prometheus and ops/grafana; the Makefile's `chat`": "chat_target rules",
    },
    "ops/cli": {
        "`furrow doctor` finds faults of Redis, hosts and models": "doctor doctor_hosts doctor_models doctor_redis",
        "`furrow run`, `serve` and `api` start and end processes": (
            "asking_for_keys conversation own_farm process run serve service"
        ),
        "Commands list and change models, requests, keys and files": (
            "cache dead downloads json keys plan rebalance remote_plan show state"
        ),
        "Output of commands has remedies and progress, no passwords or control characters": (
            "cli passwords progress refusals tables wait"
        ),
    },
    "ops/chaos": {
        "Faults prove their effect, and every difference of streams is found": (
            "chaos_report checker large_log proxy redis_faults replays schedule"
        ),
    },
    "ops/compat": {
        "Official clients meet a scripted model; verdicts become a page": "compat scripted",
    },
    "ops/wheels": {
        "A wheel has the right contents": "package",
    },
    "ops/bench": {
        "Benchmarks that compare engines give each the same work": (
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
        "Groups of commands are imported when called; waits end with their condition": "groups waiting",
    },
    "The documents": {
        "Generated sections of documents are the code's": "coverage_page detectors pages rooms tolerance_page",
        "Documents' commands, snippets and links work, and the site is built": "documents redis_cli site",
    },
}
