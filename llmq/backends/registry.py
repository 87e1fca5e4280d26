"""Finding a backend by name, through the entry-point group ``llmq.backends``."""

from importlib import import_module
from importlib.metadata import entry_points
from types import MappingProxyType

from llmq.backends.base import Backend
from llmq.errors import BackendError

GROUP = "llmq.backends"

#: ``auto`` takes the first with an accelerator, else the first. The gpu backend's CPU kernels are
#: the faster ones.
AUTO_ORDER = ("gpu", "tpu")

#: ``--backend`` names that are a backend on a fixed device.
ALIASES: MappingProxyType[str, tuple[str, str]] = MappingProxyType({"cpu": ("gpu", "cpu")})


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


def select_backend(name: str, device: str | None) -> tuple[Backend, str | None]:
    """The backend and device that ``--backend`` and ``--device`` ask for.

    Args:
        name: A backend, an alias, or ``auto``.
        device: A device of that backend, or None.

    Returns:
        The plugin, and the device to open models on (None: its own choice).

    Raises:
        BackendError: No such backend, or the two options contradict each other.
    """
    if name in ALIASES:
        backend, fixed = ALIASES[name]
        if device not in (None, fixed):
            raise BackendError(f"device={device!r}: contradicts --backend {name}; leave one of them out.")
        return load_backend(backend), fixed
    if name != "auto":
        return load_backend(name), device
    candidates = [_plugin(candidate) for candidate in AUTO_ORDER]
    return _usable(next((backend for backend in candidates if backend.has_accelerator()), candidates[0])), device
