"""``llmq doctor``: what is usable here, and what would change that."""

from dataclasses import asdict

from llmq.commands import options

#: Extra -> a package that tells whether it is installed.
_EXTRAS = {"eval": "lm-eval", "tpu": "libtpu"}


def doctor(as_json: options.Json = False) -> None:
    """Show which backends, devices, kernels and extras are usable here, and why not."""
    from importlib.metadata import PackageNotFoundError, version

    from llmq.backends.base import Probe
    from llmq.backends.registry import backend_names, load_backend
    from llmq.commands.terminal import print_json, print_table
    from llmq.errors import BackendError

    rows: list[tuple[str, Probe]] = []
    for name in backend_names():
        try:
            rows += [(name, probe) for probe in load_backend(name).probe()]
        except BackendError as err:
            rows.append((name, Probe(name, False, str(err), "pip install --force-reinstall llmq")))
    for extra, package in _EXTRAS.items():
        try:
            rows.append(("extras", Probe(f"llmq[{extra}]", True, f"{package} {version(package)}")))
        except PackageNotFoundError:
            rows.append(
                (
                    "extras",
                    Probe(f"llmq[{extra}]", False, f"{package} is not installed", f"pip install 'llmq[{extra}]'"),
                )
            )
    print_table(
        ("backend", "what", "usable", "detail", "fix"),
        [(name, p.name, "yes" if p.usable else "no", p.detail, p.fix) for name, p in rows],
    )
    if as_json:
        print_json([{"backend": name, **asdict(probe)} for name, probe in rows])
