"""The machine: devices, their speeds and memories, and the links between them."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.base.errors import ClusterError
from gdp.base.units import MAX_SIZE_BYTES, format_bytes

UNLIMITED_BYTES = MAX_SIZE_BYTES
"""Memory of a device whose limit is unknown or irrelevant."""
MAX_DEVICES = 1024
"""Of one cluster: what is known of every pair of them has to fit in memory."""
MIN_RATE, MAX_RATE = 1e-6, 1e30
NO_CHANNEL = -1
"""Instead of a channel: the copies on this link do not queue, several are under way at once."""
ALONE = -1
"""Instead of a memory pool or a processor: the device shares it with no other."""
MAX_DELAY_S = 1e9
"""Far beyond any device or link, and far from where the sums of a simulation overflow."""
BACKENDS = ("cuda", "rocm", "vulkan", "sycl", "metal")
"""Backends of llama.cpp that compute on GPUs."""
MAX_WATTS = 1e6
"""Of one device, far beyond any."""
MAX_CAPABILITY = 30.0
"""Beyond which a compute capability is one that lost its point, as in 86."""


CORE_KIND = "cpu-core"
"""One core of a processor, which computes with one thread."""


_SIZES = {1: "pro max ultra", 2: "pro max ultra", 3: "pro max ultra", 4: "pro max", 5: "pro max"}
APPLE_KINDS = frozenset(
    f"m{generation}{size}"
    for generation, sizes in _SIZES.items()
    for size in ("", *(f"-{size}" for size in sizes.split()))
)
"""Apple's chips to 2026, each a preset. NVIDIA's cards are called M4 to M6000, too: a file says
`unified = false` of its Tesla M4."""


def is_cpu_kind(kind: str) -> bool:
    """True for kinds of processors, such as "cpu" and "cpu-core"."""
    return kind.startswith("cpu")


@dataclass(frozen=True)
class Device:
    """One place where ops run, one at a time."""

    name: str
    kind: str  # "cpu...", "gpu", or the model, such as "a100": the key of calibrated costs
    flop_per_s: Mapping[str, float]  # by dtype; the key "default" answers for the rest
    bytes_per_s: float  # of the device's own memory
    memory_bytes: int = UNLIMITED_BYTES  # that plans may fill
    dispatch_s: float = 0.0  # fixed cost of launching one op, or one segment
    dispatch_per: str = "op"  # "op" (eager accelerators) or "segment" (cut sub-models)
    supported: frozenset[str] | None = None  # op types; None means all
    model: str = ""  # what detection found, such as the processor's name
    memory_pool: str = ""  # devices of one name share `memory_bytes`, as the cores of a machine do
    processor: str = ""  # devices of one name compute one at a time; set by measured costs alone
    reserve_bytes: int = 0  # kept beside `memory_bytes` for the system, drivers and runtimes
    unified: bool | None = None  # a GPU and its processor in one memory; None: Apple's chips alone
    compute_capability: float = 0.0  # of an NVIDIA GPU; 0: that of its kind's preset
    backend: str = ""  # of llama.cpp on a GPU, of `BACKENDS`; "": the usual one of its maker
    copy_bytes_per_s: float = 0.0  # of a processor: a core copies memory so fast; 0: not known
    sockets: int = 1  # of a processor; `bytes_per_s` is that of all together
    # Device that computes the ops placed here, whose weights rest here, and holds their caches;
    # "": this one.
    runs_on: str = ""
    watts: float = 0.0  # power limit of the product (TDP); 0: that of its kind's preset
    idle_watts: float = 0.0  # with a model loaded and nothing computed; 0: that of the preset
    power_limit: float = 0.0  # watts that a user caps it at; 0: its watts

    def __post_init__(self) -> None:
        where = f"device {self.name!r}"
        if not self.name:
            raise ClusterError("a device has an empty name; give every device a name")
        if "default" not in self.flop_per_s:
            raise ClusterError(f"{where}: flop_per_s needs a 'default' entry")
        for dtype, speed in self.flop_per_s.items():
            _check_rate(where, f"flop_per_s[{dtype!r}]", speed)
        _check_rate(where, "bytes_per_s", self.bytes_per_s)
        if self.copy_bytes_per_s:
            _check_rate(where, "copy_bytes_per_s", self.copy_bytes_per_s)
        if not 0 < self.memory_bytes <= UNLIMITED_BYTES:
            raise ClusterError(
                f"{where}: memory_bytes must be > 0, at most 2**62, got {self.memory_bytes}"
            )
        if not 0 <= self.reserve_bytes <= UNLIMITED_BYTES:
            raise ClusterError(
                f"{where}: reserve_bytes must be >= 0, at most 2**62, got {self.reserve_bytes}"
            )
        if not 0 <= self.compute_capability < MAX_CAPABILITY:
            raise ClusterError(
                f"{where}: compute_capability must be below 30, such as 8.6, "
                f"got {self.compute_capability}"
            )
        if self.backend and self.backend not in BACKENDS:
            raise ClusterError(
                f"{where}: backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}"
            )
        if self.sockets < 1:
            raise ClusterError(f"{where}: sockets must be at least 1, got {self.sockets}")
        _check_delay(where, "dispatch_s", self.dispatch_s)
        for key in ("watts", "idle_watts", "power_limit"):
            if not 0 <= getattr(self, key) <= MAX_WATTS:
                raise ClusterError(
                    f"{where}: {key} must be 0 to {MAX_WATTS:g} W, got {getattr(self, key)}"
                )
        if self.watts and self.idle_watts > self.watts:
            raise ClusterError(
                f"{where}: idle_watts {self.idle_watts:g} exceed its watts {self.watts:g}; give "
                "watts, the power limit of the product"
            )
        if self.dispatch_per not in ("op", "segment"):
            raise ClusterError(
                f"{where}: dispatch_per must be 'op' or 'segment', got {self.dispatch_per!r}"
            )

    @property
    def is_cpu(self) -> bool:
        """True for a processor or a part of one, which works in the host's own memory."""
        return is_cpu_kind(self.kind)

    @property
    def is_unified(self) -> bool:
        """True for a GPU that shares its processor's memory and stands for both."""
        return self.kind in APPLE_KINDS if self.unified is None else self.unified

    @property
    def is_apple(self) -> bool:
        """True for Apple's chips, of whose memory Metal leaves a part to the system."""
        return self.is_unified and self.kind in APPLE_KINDS

    @property
    def total_bytes(self) -> int:
        """Memory that the device reports to programs: what plans may fill, and the reserve."""
        return min(self.memory_bytes + self.reserve_bytes, UNLIMITED_BYTES)

    def speed(self, dtype: str) -> float:
        """FLOP/s in a dtype, or the default."""
        return self.flop_per_s.get(dtype, self.flop_per_s["default"])


def _check_rate(where: str, key: str, value: float) -> None:
    if not MIN_RATE <= value <= MAX_RATE:
        limits = f"at least {MIN_RATE:g} and at most {MAX_RATE:g}"
        raise ClusterError(f"{where}: {key} must be > 0, {limits}, got {value}")


def _check_delay(where: str, key: str, value: float) -> None:
    if not 0 <= value <= MAX_DELAY_S:
        raise ClusterError(f"{where}: {key} must be >= 0 and at most {MAX_DELAY_S:g}, got {value}")


@dataclass(frozen=True, eq=False)
class Cluster:
    """Devices and links. A transfer takes latency + bytes / bandwidth, queued on its channel.

    A link without contention has no channel: its copies start at once, however many there are.
    """

    name: str
    devices: tuple[Device, ...]
    link_bytes_per_s: Float[np.ndarray, "D D"]  # [i, j]: i sends to j; inf on the diagonal
    link_latency_s: Float[np.ndarray, "D D"]  # zero on the diagonal
    channel: Int[np.ndarray, "D D"]  # pairs with one id share a bus, or NO_CHANNEL; diagonal unused
    host: int = 0  # holds graph inputs and receives outputs
    disk_bytes_per_s: float = 0.0  # of the disk that weights are loaded from; 0: not known

    # `gdp.cluster` sets both: files, presets and detection make clusters, so they stand above.
    load: ClassVar["staticmethod[..., Cluster]"]  # load_cluster
    local: ClassVar["staticmethod[[], Cluster]"]  # local_cluster

    def __post_init__(self) -> None:
        d = len(self.devices)
        if d == 0:
            raise ClusterError(f"cluster {self.name!r} has no devices")
        names = [device.name for device in self.devices]
        if len(set(names)) < d:
            twice = next(x for x in names if names.count(x) > 1)
            raise ClusterError(f"cluster {self.name!r}: device name {twice!r} appears twice")
        for key in ("link_bytes_per_s", "link_latency_s", "channel"):
            if getattr(self, key).shape != (d, d):
                raise ClusterError(f"cluster {self.name!r}: {key} must be {d} x {d}")
        off = ~np.eye(d, dtype=bool)
        if not (self.link_bytes_per_s[off] > 0).all():
            raise ClusterError(f"cluster {self.name!r}: every link bandwidth must be > 0")
        if not (np.isfinite(self.link_latency_s) & (self.link_latency_s >= 0)).all():
            raise ClusterError(f"cluster {self.name!r}: link latencies must be finite and >= 0")
        if not (self.channel[off] >= NO_CHANNEL).all():
            raise ClusterError(
                f"cluster {self.name!r}: channel ids must be >= 0, or {NO_CHANNEL} for none"
            )
        if self.disk_bytes_per_s:
            _check_rate(f"cluster {self.name!r}", "disk_bytes_per_s", self.disk_bytes_per_s)
        if not 0 <= self.host < d:
            raise ClusterError(f"cluster {self.name!r}: host {self.host} lies outside 0..{d - 1}")
        for key in ("link_bytes_per_s", "link_latency_s", "channel"):
            getattr(self, key).setflags(write=False)

    def part(self, devices: Sequence[int]) -> "Cluster":
        """The cluster of some of the devices, the host among them, in their order."""
        kept = sorted({self.host, *devices})
        ids = np.ix_(kept, kept)
        named = self.channel[ids] != NO_CHANNEL
        channel = np.full(self.channel[ids].shape, NO_CHANNEL)
        channel[named] = np.unique(self.channel[ids][named], return_inverse=True)[1]
        return replace(
            self, devices=tuple(self.devices[d] for d in kept), channel=channel,
            link_bytes_per_s=self.link_bytes_per_s[ids], host=kept.index(self.host),
            link_latency_s=self.link_latency_s[ids],
        )  # fmt: skip

    @property
    def num_devices(self) -> int:
        """D, the host included."""
        return len(self.devices)

    @functools.cached_property
    def device_names(self) -> tuple[str, ...]:
        """In the order of device indices."""
        return tuple(device.name for device in self.devices)

    @functools.cached_property
    def is_cpu(self) -> Bool[np.ndarray, "D"]:
        """True for processors and parts of one."""
        return np.array([device.is_cpu for device in self.devices])

    @functools.cached_property
    def computes(self) -> Bool[np.ndarray, "D"]:
        """True for devices that run any op at all."""
        return np.array([device.supported != frozenset() for device in self.devices])

    @functools.cached_property
    def gpus(self) -> tuple[int, ...]:
        """Accelerators that compute."""
        return tuple(np.flatnonzero(self.computes & ~self.is_cpu).tolist())

    @functools.cached_property
    def alike(self) -> Int[np.ndarray, "D"]:
        """Class of each device: devices of one class differ in name and in shared memory alone."""
        unnamed = [
            replace(device, name="-", memory_pool="", processor="", runs_on="")
            for device in self.devices
        ]
        return np.array([unnamed.index(device) for device in unnamed], dtype=np.int64)

    @functools.cached_property
    def launches_ops(self) -> Bool[np.ndarray, "D"]:
        """True for devices that pay a dispatch for each op, not for each segment."""
        return np.array([device.dispatch_per == "op" for device in self.devices])

    @functools.cached_property
    def dispatch_s(self) -> Float[np.ndarray, "D"]:
        """Seconds of a dispatch, of an op or of a segment."""
        return np.array([device.dispatch_s for device in self.devices])

    @functools.cached_property
    def op_dispatch_s(self) -> Float[np.ndarray, "D"]:
        """Dispatch seconds of each op in addition to its computation."""
        return np.where(self.launches_ops, self.dispatch_s, 0.0)

    @functools.cached_property
    def segment_dispatch_s(self) -> Float[np.ndarray, "D"]:
        """Dispatch seconds of each segment in addition to its ops."""
        return np.where(self.launches_ops, 0.0, self.dispatch_s)

    def with_dispatch(self, dispatch_s: Float[np.ndarray, "D"]) -> "Cluster":
        """The cluster with other seconds of a dispatch."""
        devices = (
            replace(device, dispatch_s=seconds)
            for device, seconds in zip(self.devices, dispatch_s.tolist(), strict=True)
        )
        return replace(self, devices=tuple(devices))

    def idling(self, idle: Bool[np.ndarray, "D"]) -> "Cluster":
        """The cluster in which some devices compute nothing."""
        devices = (
            replace(device, supported=frozenset()) if d else device
            for device, d in zip(self.devices, idle, strict=True)
        )
        return replace(self, devices=tuple(devices))

    @functools.cached_property
    def accelerator_numbers(self) -> tuple[int | None, ...]:
        """Number of each device among the accelerators, in order; None for processors."""
        count = iter(range(self.num_devices))
        return tuple(None if device.is_cpu else next(count) for device in self.devices)

    @functools.cached_property
    def num_channels(self) -> int:
        """C; the ids are 0..C-1."""
        return int(self.channel.max()) + 1

    @functools.cached_property
    def queues(self) -> Bool[np.ndarray, "D D"]:
        """Between which devices transfers wait for each other."""
        return (self.channel != NO_CHANNEL) & ~np.eye(self.num_devices, dtype=bool)

    @functools.cached_property
    def memory_bytes(self) -> Int[np.ndarray, "D"]:
        """Capacity of each device, also of those that share a pool."""
        return np.array([device.memory_bytes for device in self.devices], dtype=np.int64)

    @functools.cached_property
    def pool(self) -> Int[np.ndarray, "D"]:
        """Memory that each device shares with others, 0..P-1, or `ALONE`."""
        return _shared_ids([device.memory_pool for device in self.devices])

    @functools.cached_property
    def pool_bytes(self) -> Int[np.ndarray, "P"]:
        """Capacity of each memory shared by devices: the limit of the sum of their peaks."""
        members = [self.memory_bytes[self.pool == p] for p in range(int(self.pool.max()) + 1)]
        return np.array([int(sizes.max()) for sizes in members], dtype=np.int64)

    @functools.cached_property
    def divided_bytes(self) -> Int[np.ndarray, "D"]:
        """Capacity of each device where a memory that several share is divided equally."""
        return self.divided_among(range(self.num_devices))

    def divided_among(self, using: Sequence[int]) -> Int[np.ndarray, "D"]:
        """Capacity of each device where those that use a memory that they share divide it."""
        own, uses = self.memory_bytes.copy(), np.isin(np.arange(self.num_devices), list(using))
        for k, size in enumerate(self.pool_bytes.tolist()):
            members = uses & (self.pool == k)
            own[members] = np.minimum(own[members], max(1, size // max(1, int(members.sum()))))
        return own

    def room_bytes(self, usable: Bool[np.ndarray, "D"]) -> int:
        """Total memory of some devices; memory that several of them share counts once."""
        room = sum(self.memory_bytes[usable & (self.pool == ALONE)].tolist())
        for k, size in enumerate(self.pool_bytes.tolist()):
            room += min(size, sum(self.memory_bytes[usable & (self.pool == k)].tolist()))
        return room

    @functools.cached_property
    def runs_on(self) -> Int[np.ndarray, "D"]:
        """Device that computes the ops on each: itself, or the one that `Device.runs_on` names,
        where the cluster has it."""
        names = self.device_names
        homes = [device.runs_on for device in self.devices]
        return np.array(
            [names.index(n) if n in names else d for d, n in enumerate(homes)], dtype=np.int64
        )

    @functools.cached_property
    def streams(self) -> Bool[np.ndarray, "D"]:
        """True for devices that stand for weights at rest, whose ops another device computes."""
        return self.runs_on != np.arange(self.num_devices)

    @functools.cached_property
    def processor(self) -> Int[np.ndarray, "D"]:
        """Processor that each device shares with others, 0..Q-1, or `ALONE`."""
        return _shared_ids([device.processor for device in self.devices])


def _shared_ids(names: Sequence[str]) -> Int[np.ndarray, "D"]:
    """Ids of the names that several have, in order; `ALONE` for others and for no name.

    >>> _shared_ids(["ram", "", "hbm", "ram"])
    array([ 0, -1, -1,  0])
    """
    shared = [name for name in dict.fromkeys(names) if name and names.count(name) > 1]
    return np.array([shared.index(n) if n in shared else ALONE for n in names], dtype=np.int64)


def pool_excess_bytes(cluster: Cluster, peak_bytes: Int[np.ndarray, "D"]) -> Int[np.ndarray, "P"]:
    """Bytes by which the peaks of the devices of each shared memory add up to more than it.

    Devices may reach their peaks at different times, so this is sufficient, not necessary.
    """
    held = np.zeros(len(cluster.pool_bytes), dtype=np.int64)
    shares = cluster.pool != ALONE
    np.add.at(held, cluster.pool[shares], peak_bytes[shares])
    return np.maximum(held - cluster.pool_bytes, 0)


def overflow_bytes(cluster: Cluster, peak_bytes: Int[np.ndarray, "D"]) -> int:
    """Bytes over the devices' memories, and then over those that devices share, summed."""
    over = int(np.maximum(peak_bytes - cluster.memory_bytes, 0).sum())
    within = np.minimum(peak_bytes, cluster.memory_bytes)
    return over + int(pool_excess_bytes(cluster, within).sum())


def shared_overflow(cluster: Cluster, peak_bytes: Int[np.ndarray, "D"]) -> str:
    """Message about devices that hold more than the memory they share; "" if all fit."""
    for pool in np.flatnonzero(pool_excess_bytes(cluster, peak_bytes)).tolist():
        members = cluster.pool == pool
        names = [name for name, here in zip(cluster.device_names, members, strict=True) if here]
        return (
            f"{', '.join(names)} share {format_bytes(int(cluster.pool_bytes[pool]))} of memory and "
            f"would hold {format_bytes(int(peak_bytes[members].sum()))} together"
        )
    return ""


def devices_of_key(cluster: Cluster, key: object, what: str) -> list[str]:
    """Names of the devices that a key means, as in Hugging Face's `max_memory`.

    A number n is the n-th accelerator (the n-th device where there is none), "cpu" every device
    whose kind begins with cpu, "" every accelerator (every device where there is none), anything
    else a device name. Raises `ClusterError` on an unknown key of `what`.
    """
    text = str(key)
    numbered = [d for d in cluster.devices if not d.is_cpu] or list(cluster.devices)
    if text in cluster.device_names:
        return [text]
    if text.isascii() and text.isdecimal() and int(text) < len(numbered):
        return [numbered[int(text)].name]
    if text == "":
        return [d.name for d in numbered]
    names = [d.name for d in cluster.devices if d.is_cpu] if text == "cpu" else []
    if not names:
        raise ClusterError(
            f"{what} names {text!r}, cluster {cluster.name!r} has {', '.join(cluster.device_names)}"
        )
    return names


NEARLY_FULL = 0.9
"""Share of a device's memory beyond which a plan says so."""


def fullness(cluster: Cluster, peak_bytes: Sequence[int]) -> list[float]:
    """Share of each device's memory that is taken; devices of one pool take it together, and one
    without a limit is empty."""
    taken = list(map(int, peak_bytes))
    together: dict[str, int] = {}
    for device, peak in zip(cluster.devices, taken, strict=True):
        if device.memory_pool:
            together[device.memory_pool] = together.get(device.memory_pool, 0) + peak
    return [
        0.0
        if device.memory_bytes >= UNLIMITED_BYTES
        else together.get(device.memory_pool, peak) / device.memory_bytes
        for device, peak in zip(cluster.devices, taken, strict=True)
    ]


def nearly_full(cluster: Cluster, peak_bytes: Sequence[int]) -> str:
    """Note that names the devices which a plan fills beyond `NEARLY_FULL`; "" if there are none."""
    shares = fullness(cluster, peak_bytes)
    named = [
        f"{device.name} ({share:.0%}, {format_bytes(device.reserve_bytes)} more are kept free)"
        for device, share, peak in zip(cluster.devices, shares, peak_bytes, strict=True)
        if share > NEARLY_FULL and peak > 0
    ]
    if not named:
        return ""
    return (
        f"more than {NEARLY_FULL:.0%} full: {', '.join(named)}; if it runs out of memory, keep "
        "more free with --reserve"
    )


@dataclass(frozen=True)
class Link:
    """A link between two devices, both ways unless `one_way`."""

    src: str
    dst: str
    bytes_per_s: float
    latency_s: float = 0.0
    channel: str | None = None  # links that name one channel share it; None: one per direction
    one_way: bool = field(default=False)
    contention: bool = True  # False: copies do not queue, each has the whole bandwidth


def make_cluster(
    name: str,
    devices: Sequence[Device],
    links: Sequence[Link] = (),
    *,
    default_bytes_per_s: float = 16e9,
    default_latency_s: float = 10e-6,
    default_contention: bool = True,
    host: int | str = 0,
    disk_bytes_per_s: float = 0.0,
) -> Cluster:
    """A cluster from devices and links.

    Args:
        name: Name of the cluster.
        devices: Devices, each with a name of its own.
        links: Links between them; other pairs get the defaults, with one channel each way.
        default_bytes_per_s: Bandwidth of pairs without a link.
        default_latency_s: Latency of pairs without a link.
        default_contention: True if transfers of pairs without a link queue.
        host: Index or name of the device that holds inputs and receives outputs.
        disk_bytes_per_s: Of the disk that weights are loaded from; 0 where it is not known.

    Raises:
        ClusterError: if a value is out of range, a name unknown, or links contradict each other.

    >>> a, b = (Device(n, "cpu", {"default": 1e9}, 1e9) for n in "ab")
    >>> make_cluster("two", [a, b], [Link("a", "b", 1e9, channel="bus")]).channel
    array([[0, 0],
           [0, 0]])
    """
    d = len(devices)
    if d > MAX_DEVICES:
        raise ClusterError(f"cluster {name!r} has {d} devices, at most {MAX_DEVICES} are possible")
    if default_bytes_per_s != np.inf:
        _check_rate(f"cluster {name!r}", "default_bytes_per_s", default_bytes_per_s)
    _check_delay(f"cluster {name!r}", "default_latency_s", default_latency_s)
    index = {device.name: i for i, device in enumerate(devices)}
    bandwidth = np.full((d, d), float(default_bytes_per_s))
    latency = np.full((d, d), float(default_latency_s))
    np.fill_diagonal(bandwidth, np.inf)
    np.fill_diagonal(latency, 0.0)
    pairs = [(i, j) for i in range(d) for j in range(d) if i != j]
    label: dict[tuple[int, int], str | None] = {
        (i, j): f"{i}>{j}" if default_contention else None for i, j in pairs
    }
    given: dict[tuple[int, int], tuple[float, float, str | None]] = {}
    for link in links:
        _check_link(link, index)
        a, b = index[link.src], index[link.dst]
        for i, j in [(a, b)] if link.one_way else [(a, b), (b, a)]:
            own = link.bytes_per_s, link.latency_s, link.channel
            if given.setdefault((i, j), own) != own:
                raise ClusterError(
                    f"link {devices[i].name!r} -> {devices[j].name!r} is given twice with "
                    "different values; give it once, or one_way = true to a link for each direction"
                )
            bandwidth[i, j], latency[i, j] = link.bytes_per_s, link.latency_s
            own = f"{i}>{j}" if link.contention else None
            label[i, j] = own if link.channel is None else f"named {link.channel}"
    ids: dict[str, int] = {}
    channel = np.zeros((d, d), dtype=np.int64)
    for pair, text in label.items():
        channel[pair] = NO_CHANNEL if text is None else ids.setdefault(text, len(ids))
    if not isinstance(host, int):
        if host not in index:
            raise ClusterError(
                f"cluster {name!r}: host {host!r} is no device; devices are {', '.join(index)}"
            )
        host = index[host]
    return Cluster(name, tuple(devices), bandwidth, latency, channel, host, disk_bytes_per_s)


def _check_link(link: Link, index: dict[str, int]) -> None:
    """Raise `ClusterError` if a link joins an unknown device, or contradicts itself."""
    for end in (link.src, link.dst):
        if end not in index:
            raise ClusterError(
                f"link {link.src!r} -> {link.dst!r}: no device {end!r}; "
                f"devices are {', '.join(index)}"
            )
    if link.src == link.dst:
        raise ClusterError(f"link {link.src!r} -> {link.dst!r} joins a device to itself")
    if link.bytes_per_s != np.inf:  # nothing has to be moved
        _check_rate(f"link {link.src!r} -> {link.dst!r}", "bytes_per_s", link.bytes_per_s)
    if link.channel is not None and not link.contention:
        raise ClusterError(
            f"link {link.src!r} -> {link.dst!r}: channel {link.channel!r} is what transfers "
            "queue on, and contention = false says that they do not; give one of them"
        )
    _check_delay(f"link {link.src!r} -> {link.dst!r}", "latency_s", link.latency_s)
