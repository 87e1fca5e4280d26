"""Finding a backend by name, through the entry-point group ``llmq.backends``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from types import MappingProxyType

from llmq.backends.base import Backend, RuntimeName
from llmq.errors import BackendError

GROUP = "llmq.backends"

#: ``auto`` takes the first with an accelerator, else the first. The gpu backend's CPU kernels are
#: the faster ones.
AUTO_ORDER = ("gpu", "tpu")

#: ``--backend`` names that are a backend on a fixed device.
ALIASES: MappingProxyType[str, tuple[str, str]] = MappingProxyType({"cpu": ("gpu", "cpu")})


@dataclass(frozen=True, slots=True)
class Runtime:
    """What a backend computes with.

    Attributes:
        backend: Whose it is, as in ``--backend``.
        plugin: The backend whose framework it is; the same, unless a device has more than one framework.
        packages: Name -> the exact version: they are built for each other.
    """

    backend: str
    plugin: str
    packages: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


#: ``--runtime`` names. torch_xla's binary interface is that of one version of torch.
RUNTIMES: MappingProxyType[RuntimeName, Runtime] = MappingProxyType(
    {
        "jax": Runtime("tpu", "tpu"),
        "torch": Runtime("gpu", "gpu"),
        "torch_xla": Runtime("tpu", "gpu", MappingProxyType({"torch_xla": "2.9.0", "torch": "2.9.1"})),
    }
)


def backend_names() -> list[str]:
    """Every installed backend.

    Returns:
        Names, sorted.
    """
    return sorted(point.name for point in entry_points(group=GROUP))


def load_backend(name: str) -> Backend:
    """A backend whose framework can be imported here.

    Args:
        name: One of `backend_names`.

    Returns:
        The plugin.

    Raises:
        BackendError: There is none of that name, or its framework cannot be imported.
    """
    return _usable(_plugin(name))


def _plugin(name: str) -> Backend:
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name not in points:
        choices = ", ".join(["auto", *sorted({*points, *ALIASES})])
        raise BackendError(f"backend={name!r}: must be one of {choices}.")
    return points[name].load()()


def _usable(backend: Backend) -> Backend:
    try:
        import_module(backend.framework)
    except (ImportError, OSError) as err:
        reason = str(err).splitlines()[0]
        raise BackendError(
            f"backend={backend.name!r}: {backend.framework} cannot be imported here ({reason}); install it again with pip."
        ) from err
    return backend


RUNTIME_FIX = "pip install 'llmq[xla]'"


def select_backend(name: str, device: str | None, runtime: RuntimeName | None = None) -> tuple[Backend, str | None]:
    """The backend and device that ``--backend``, ``--device`` and ``--runtime`` ask for.

    Args:
        name: A backend, an alias, or ``auto``.
        device: A device of that backend, or None.
        runtime: What it is to compute with; None takes its own framework.

    Returns:
        The plugin, and the device to open models on (None: its own choice).

    Raises:
        BackendError: No such backend, the options contradict each other, or the runtime is not installed.
    """
    if runtime is not None:
        name = _plugin_of(runtime, name)
    if name in ALIASES:
        backend, fixed = ALIASES[name]
        if device not in (None, fixed):
            raise BackendError(f"device={device!r}: contradicts --backend {name}; leave one of them out.")
        return load_backend(backend), fixed
    if name != "auto":
        return load_backend(name), device
    candidates = [_plugin(candidate) for candidate in AUTO_ORDER]
    return _usable(next((backend for backend in candidates if backend.has_accelerator()), candidates[0])), device


def _plugin_of(runtime: RuntimeName, name: str) -> str:
    """The plugin, or alias of one, that has a runtime."""
    row = RUNTIMES[runtime]
    if name != "auto" and ALIASES.get(name, (name, ""))[0] != row.backend:
        raise BackendError(
            f"runtime={runtime!r}: belongs to --backend {row.backend}, not to {name}; leave one of them out."
        )
    if reason := runtime_refusal(runtime):
        raise BackendError(f"runtime={runtime!r}: {reason}; give it an environment of its own: {RUNTIME_FIX}.")
    return name if name in ALIASES else row.plugin


def runtime_refusal(runtime: RuntimeName) -> str:
    """Why a runtime cannot be used here, found out without importing it: packages that do not fit crash.

    Args:
        runtime: A key of `RUNTIMES`.

    Returns:
        The reason; empty when it can be used.
    """
    wanted = RUNTIMES[runtime].packages
    found = {package: _installed(package) for package in wanted}
    if all(found[package] == exact for package, exact in wanted.items()):
        return ""
    here = " and ".join(f"{package} {there}" if there else f"no {package}" for package, there in found.items())
    exact = " with ".join(f"{package} {there}" for package, there in wanted.items())
    return f"needs {exact}, and here is {here}"


def _installed(package: str) -> str:
    """Its version without what follows a ``+``, which only tells a build; empty when there is none."""
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return ""
