"""Finding a backend by name, through the entry-point group ``llmq.backends``."""

from importlib.metadata import entry_points
from types import MappingProxyType

from llmq.backends.base import Backend
from llmq.errors import BackendError

GROUP = "llmq.backends"

#: Tried in this order by ``auto``: the first with an accelerator wins, else the first.
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
    """Import a backend.

    Args:
        name: One of `backend_names`.

    Returns:
        The plugin.

    Raises:
        BackendError: There is none of that name, or a library it needs is missing.
    """
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name not in points:
        choices = ", ".join(["auto", *sorted({*points, *ALIASES})])
        raise BackendError(f"backend={name!r}: must be one of {choices}.")
    try:
        return points[name].load()()
    except ImportError as err:
        raise BackendError(
            f"backend={name!r}: needs {err.name or err}, which cannot be imported here; `llmq doctor` says what to install."
        ) from err


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
    backends = [load_backend(candidate) for candidate in AUTO_ORDER]
    with_accelerator = (b for b in backends if any(row.usable and row.name == "accelerator" for row in b.probe()))
    return next(with_accelerator, backends[0]), device
