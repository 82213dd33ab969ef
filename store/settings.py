"""What an operator can set; `load_settings.py` reads it.

Unknown keys are refused: a misspelt limit that silently keeps its default is worse than a server that does not start.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)

from store.cgroups import cores
from store.environment import SettingsError as SettingsError, Unreachable as Unreachable
from store.people.oidc_settings import OidcSettings

#: Databases and workers take no larger number than 64 bits hold.
_MOST = 2**63 - 1
#: The largest value of settings that are not whole numbers, mostly seconds.
MOST = 1e9
Positive = Annotated[int, Field(gt=0, le=_MOST)]
Natural = Annotated[int, Field(ge=0, le=_MOST)]

#: The device of a worker's model: auto is a GPU if there is one. Both workers may use the same.
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]

#: The dtype of the frozen weights: auto is bfloat16 on a GPU and float32 on a CPU. Adapters are always trained in
#: float32.
Dtype = Literal["auto", "float32", "bfloat16"]


def _half_the_cores() -> int:
    """Trainer and generator work at the same time, so each takes half of the cores this process may use."""
    return max(1, cores() // 2)


def _network(value: str) -> str:
    """An address or a network; ValueError otherwise."""
    ipaddress.ip_network(value, strict=False)
    return value


def _redis(value: str) -> str:
    """A URL for redis-py, or "". Raises ValueError, without the URL's contents, for others."""
    parts = urlsplit(value)
    if value and (parts.scheme not in ("redis", "rediss", "unix") or not (parts.hostname or parts.path)):
        raise ValueError("a Redis is redis://HOST:PORT/NUMBER, rediss://.. or unix://PATH")
    _ = parts.port  # raises ValueError if it is no number
    return value


def _database(value: str) -> str:
    """A URL for SQLAlchemy, or "". Raises ValueError, without the URL's contents, for others."""
    if value and not value.startswith(("postgresql://", "postgresql+psycopg://", "sqlite:///")):
        raise ValueError("a PostgreSQL is postgresql+psycopg://USER:PASSWORD@HOST/NAME")
    return value


def _bucket(value: str) -> str:
    if not re.fullmatch(r"(s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._-]+)*/?)?", value):
        raise ValueError("an object store is s3://BUCKET/PREFIX, of A-Z a-z 0-9 . _ -, and the bucket in lower case")
    return value


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*")
    @classmethod
    def _usable(cls, value: Any) -> Any:
        """Raise unless the system's clocks, and files, take the value."""
        if isinstance(value, float) and not abs(value) <= MOST:
            raise ValueError(f"must be a number of at most {MOST:,.0f}, got {value}")
        texts = value.values() if isinstance(value, dict) else [value]
        if any(isinstance(text, str | Path) and "\0" in str(text) for text in texts):
            raise ValueError("has a NUL, which no path and no name may have")
        return value


class TrainerSettings(_Section):
    #: How many trainers there are, each with the base models in its memory; every run lives on one of them.
    replicas: Positive = 1
    #: How many processes make up one trainer and share the base: one for each GPU (docs/production.md).
    ranks: Positive = 1
    #: How many machines with that many ranks each make up the trainer; they meet at HOST:PORT of one of them. A worker
    #: is started on each.
    nodes: Positive = 1
    rendezvous: str = ""
    #: The base is kept in parts over all ranks, or whole on each node; or each rank has its share of the experts and
    #: all of the rest.
    shard: Literal["all", "node", "experts"] = "all"
    #: Threads of each rank.
    threads: Positive = Field(default_factory=_half_the_cores)
    device: Device = "auto"
    dtype: Dtype = "auto"
    #: How many tokens one pass takes at most, over all its runs. If it is not set: at least as many as all ranks
    #: compute at once, or twice as many as a single rank does.
    pass_tokens: Positive = 4096
    #: A larger operation is cut between its data into slices of about this many tokens.
    slice_tokens: Positive = 1024
    #: How many tokens are computed at once: memory grows with it, and beyond some 2k tokens a CPU gets slower. If it is
    #: not set: on a GPU up to 8,192, as memory allows (`weftd plan`).
    microbatch_tokens: Positive = 2048
    #: A run's whole state is written after this many tokens of training, which bounds what a lost trainer replays.
    snapshot_every_tokens: Positive = 65_536
    #: Memory for the states of runs (weights, moments, gradient), on the device if the trainer has one; the others are
    #: paged out. 0: what is left of the memory (`weftd plan`), on a CPU half of it; trainers of one server share it.
    resident_bytes: Natural = 0
    #: With a device: memory of the host for runs that are paged out of it; beyond, they are in files. 0: half.
    host_bytes: Natural = 0
    #: Seconds that a pass of `pass_tokens` may take. A trainer that needs longer is ended, and its work done again.
    pass_limit_s: Annotated[float, Field(gt=0)] = 900.0
    #: Seconds that an uploaded loss may take for each 1,024 of its cost: then the trainer is ended, and its operation
    #: fails. What is measured is some 0.05.
    loss_limit_s: Annotated[float, Field(gt=0)] = 10.0

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.ranks > 1 and ":" in self.device:
            raise ValueError(f"device is {self.device}, but each of {self.ranks} ranks has a GPU of its own: use cuda")
        if self.nodes > 1 and not self.rendezvous:
            raise ValueError(f"{self.nodes} nodes need a rendezvous, HOST:PORT of one of them")
        return self


EngineKind = Literal["torch", "vllm"]


class VllmSettings(_Section):
    """Generators that are vLLM (docs/vllm.md)."""

    #: The `vllm` command of an environment built by `make vllm`. Empty: that one.
    program: Path = Path()
    #: vLLM servers that are there already, http://HOST:PORT or unix:PATH: one for each vLLM generator, instead.
    urls: list[str] = []
    #: How many adapters one batch may have, and their highest rank.
    max_adapters: Positive = 16
    max_rank: Literal[8, 16, 32, 64, 128, 256, 320, 512] = 64
    #: Memory for keys and values, on a CPU.
    kv_bytes: Positive = 1 << 30
    #: Further options of vLLM, by its own names: those in docs/vllm.md, and no others.
    options: dict[str, Any] = {}
    #: Serve adapters even if options round weights, or keys and values, so that sampled log-probabilities differ from
    #: those in training.
    lossy_adapters: bool = False


class GeneratorSettings(_Section):
    engine: EngineKind = "torch"
    #: How many generators of `engine` there are; or the kind of each.
    replicas: Positive | Annotated[list[EngineKind], Field(min_length=1)] = 1
    vllm: VllmSettings = Field(default_factory=VllmSettings)
    threads: Positive = Field(default_factory=_half_the_cores)
    device: Device = "auto"
    dtype: Dtype = "auto"
    #: How many sequences are decoded at the same time; 0: as memory allows, at most 32 on a CPU and 64 on a GPU.
    slots: Natural = 0
    #: The longest sequence, prompt and completion; a model's own context holds as well.
    context_tokens: Positive = 8192
    #: Keys and values kept for all running sequences together, in tokens; 0: enough for full slots, or half of the
    #: remaining memory. With less, young sequences are set aside when all grow long.
    kv_tokens: Natural = 0
    #: Prompt tokens computed between two decode steps; longer prompts are computed in pieces.
    prefill_tokens: Positive = 2048
    #: Prompt lookup: a step tries up to this many tokens more of a sequence whose last ones have stood in it before, in
    #: slots that are free. Tokens and logprobs are the same; text that repeats itself takes fewer steps. 0: off.
    lookup: Annotated[int, Field(ge=0, le=16)] = 0
    #: On a CPU, a second copy of the weights in the order of multiplication, which is faster. auto: if it takes less
    #: than half of the remaining memory.
    packed: bool | Literal["auto"] = "auto"
    #: Memory, for each base model, for adapters that are sampled from, in use or kept; 0: as memory allows. Requests
    #: wait until others release what they need; a larger adapter comes in alone.
    adapter_cache_bytes: Natural = 0
    #: Memory, of each base model, for prompts that later ones may begin with; 0 keeps none.
    prefix_cache_bytes: Natural = 512 << 20

    @property
    def kinds(self) -> list[EngineKind]:
        """The engine of each generator."""
        return list(self.replicas) if isinstance(self.replicas, list) else [self.engine] * self.replicas


class Limits(_Section):
    """The most that one request, and one organisation at a time, may ask for. Beyond it requests get a 4xx that names
    limit and value."""

    max_body_bytes: Positive = 64 * 1024 * 1024
    max_data: Positive = 4096  # per forward / forward_backward
    max_tokens_per_op: Positive = 4_000_000
    #: Tokens of one sequence; the model's context length holds as well.
    max_seq_len: Positive = 131_072
    max_num_samples: Positive = 1024
    max_rank: Positive = 128
    max_stop_sequences: Positive = 64
    max_queued_ops_per_org: Positive = 4096
    #: Bodies of all queued operations together.
    max_queued_bytes_per_org: Positive = 1 << 30
    #: A larger result is first announced by its size alone, to clients that allow it.
    inline_result_bytes: Positive = 1024 * 1024
    #: Quotas of an organisation, unless the operator has set another one for it (`weftd org quota`): what is stored by
    #: checkpoints and samplers, runs that are live, sessions that are active, uploaded losses, archives for downloads.
    stored_bytes_per_org: Positive = 1 << 40
    runs_per_org: Positive = 4096
    sessions_per_org: Positive = 16_384
    custom_losses_per_org: Positive = 16_384
    archive_bytes_per_org: Positive = 64 << 30
    #: Results kept of one organisation, all together; beyond it, fetched ones are deleted first, then the oldest.
    result_bytes_per_org: Positive = 1 << 30
    #: Turns of sessions that clients name themselves (`X-Session-ID`), unpacked; they go after a day.
    turn_bytes_per_org: Positive = 1 << 30
    #: Telemetry that is kept of one organisation in one day, and for how many days; what is beyond is dropped.
    telemetry_bytes_per_day: Positive = 16 * 1024 * 1024
    telemetry_days: Positive = 14
    #: How long the journal keeps ended samples.
    sample_days: Positive = 90


class FrontSettings(_Section):
    """Limits of connections, and the proxies that connections come through."""

    #: Addresses and networks (CIDR) of proxies whose X-Forwarded-For and X-Forwarded-Proto are believed; nobody else's
    #: are.
    trusted_proxies: list[Annotated[str, AfterValidator(_network)]] = ["127.0.0.1", "::1"]
    max_connections: Positive = 8192
    #: With IPv6 an address means a network of 64 bits, which belongs to one customer. Proxies are not limited.
    max_connections_per_address: Positive = 2048
    #: From the start of a connection, or the first byte of a request, to the end of its headers.
    header_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    #: How long a body may take before it counts as slow, and how long an answer may wait to be read.
    body_timeout_s: Annotated[float, Field(gt=0)] = 60.0


class LogSettings(_Section):
    """How the server, its workers and its jobs log (`store.logs`)."""

    #: text: lines for people. json: an object on each line.
    format: Literal["text", "json"] = "text"
    #: debug has a line for each request and each operation, where it was accepted, computed and settled.
    level: Literal["debug", "info", "warning", "error"] = "info"


class BillingSettings(_Section):
    """How new organisations pay; `weftd billing mode` changes an existing one."""

    #: unlimited: everything is counted and nothing refused. prepaid: only what was paid for, plus `overdraft_usd`.
    #: postpaid: up to `overdraft_usd` of credit.
    mode: Literal["unlimited", "prepaid", "postpaid"] = "unlimited"
    overdraft_usd: Annotated[int, Field(ge=0, le=10**9)] = 0


class JobsSettings(_Section):
    #: embedded: a thread of the server. celery: `weftd jobs worker` and `weftd jobs beat`, on Redis.
    driver: Literal["embedded", "celery"] = "embedded"
    #: Empty: the server's own (`redis_url`).
    redis_url: Annotated[str, AfterValidator(_redis)] = ""


class PaymentsSettings(_Section):
    """Stripe. Keys may come from the environment instead, or from files that it names (docs/payments.md)."""

    enabled: bool = False
    #: A restricted key (rk_...), or a test key.
    secret_key: SecretStr | None = None
    #: Signing secrets of the webhook endpoint: two while they are rotated.
    webhook_secrets: Annotated[list[SecretStr], Field(max_length=2)] = []
    #: The address at which browsers find this server: Stripe's Checkout sends them back to the console there.
    public_url: str = "http://127.0.0.1:8000"
    #: Metered prices, one for each meter, that postpaid organisations are subscribed to (`weftd payments setup`).
    price_ids: list[str] = []
    min_topup_usd: Positive = 5
    max_topup_usd: Positive = 10_000
    #: Empty: Stripe's own.
    api_base: str = ""


class OwnershipSettings(_Section):
    """The cost of the machines, for `weftd tco` (docs/tco.md). The defaults are published figures for H100 servers."""

    #: How many GPUs are paid for, and how many trainers and generators run on them.
    gpus: Positive = 1
    machines: Positive = 2
    server_usd: Annotated[float, Field(gt=0)] = 361_255.0
    gpus_per_server: Positive = 8
    interest_per_year: Annotated[float, Field(ge=0, lt=1)] = 0.1025
    months: Positive = 72
    draw_kw: Annotated[float, Field(ge=0)] = 10.926
    usd_per_kwh: Annotated[float, Field(ge=0)] = 0.087
    load: Annotated[float, Field(ge=0, le=1)] = 0.80
    #: Power usage effectiveness: total power, with cooling and losses, over the power of the computers.
    pue: Annotated[float, Field(ge=1)] = 1.35
    space_usd_per_kw_month: Annotated[float, Field(ge=0)] = 150.0
    other_usd_per_month: Annotated[float, Field(ge=0)] = 170.0


class Settings(_Section):
    data_dir: Path
    host: str = "127.0.0.1"
    #: 0 takes a free port.
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    #: Name as clients know it -> local Hugging Face folder. Empty: the built-in tiny model.
    models: dict[str, Path] = {}
    #: Empty: SQLite in the data folder. `postgresql+psycopg://...` in production.
    database_url: Annotated[str, AfterValidator(_database)] = ""
    #: Several API replicas and workers on this Redis, `redis://...`, with one PostgreSQL and one place for
    #: blobs (docs/production.md). Empty: the embedded service.
    redis_url: Annotated[str, AfterValidator(_redis)] = ""
    #: Bodies, results and weights in an S3-compatible store, s3://BUCKET/PREFIX, whose endpoint, region and credentials
    #: are in the usual environment (docs/production.md). Empty: in the data folder.
    blob_url: Annotated[str, AfterValidator(_bucket)] = ""
    #: How many bytes a process keeps in its data folder of what it has read there.
    blob_cache_bytes: Positive = 16 << 30
    #: Downloads go directly to the store, by links valid for minutes: clients must be able to reach it.
    blob_links: bool = False
    #: The secret that signs tokens and links, at least 32 characters: replicas without a common folder need the same
    #: one. Empty: each data folder has its own.
    server_secret: Annotated[SecretStr, Field(min_length=32)] | None = None
    #: Flush every commit and every blob to the disk: safe against power loss, not only against kill -9.
    durable: bool = False
    #: The folder by which trainer and generators of this host share one copy of a base's weights: on a CPU the copy
    #: lies here, on a GPU the workers meet here. Empty: each has its own copy.
    base_dir: str = "/dev/shm"
    trainer: TrainerSettings = Field(default_factory=TrainerSettings)
    generator: GeneratorSettings = Field(default_factory=GeneratorSettings)
    limits: Limits = Field(default_factory=Limits)
    front: FrontSettings = Field(default_factory=FrontSettings)
    logs: LogSettings = Field(default_factory=LogSettings)
    billing: BillingSettings = Field(default_factory=BillingSettings)
    jobs: JobsSettings = Field(default_factory=JobsSettings)
    payments: PaymentsSettings = Field(default_factory=PaymentsSettings)
    oidc: OidcSettings = Field(default_factory=OidcSettings)
    ownership: OwnershipSettings = Field(default_factory=OwnershipSettings)
    #: Prometheus' /metrics, for operators, on a port of its own and on the same host. 0: none.
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0
    #: Price versions in the form of billing/default_prices.toml; they replace the built-in list (`billing.prices`).
    prices: list[dict[str, Any]] = []
    #: A session that is not heard of for this long, and has nothing to do, is ended.
    session_idle_s: Annotated[float, Field(gt=0)] = 600.0
    #: Have clients exchange their key for short-lived tokens. Tokens are taken in any case.
    pjwt_auth_enabled: bool = False
    jwt_life_s: Annotated[int, Field(ge=120, le=86_400)] = 900
    #: Clients wait for all samples of a sampler with one poll, instead of one each.
    sample_use_retrieve_futures: bool = True
    #: A request for a result waits this long before it answers "try again".
    long_poll_s: Annotated[float, Field(gt=0)] = 30.0
    #: After SIGTERM, running operations may take this long before the workers are stopped.
    drain_s: Annotated[float, Field(ge=0)] = 30.0

    @property
    def effective_database_url(self) -> str:
        return self.database_url or f"sqlite:///{self.data_dir / 'weft.db'}"
