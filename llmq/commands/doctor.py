"""``llmq doctor``: what is usable here, and what would change that."""

from dataclasses import asdict

from llmq.commands import options

#: Extra -> a package that tells whether it is installed.
_EXTRAS = {"eval": "lm-eval", "tpu": "libtpu"}


def doctor(as_json: options.Json = False) -> None:
    """Show which backends, devices, kernels and extras are usable here, and why not."""
    from importlib.metadata import PackageNotFoundError, version

    from llmq.backends.base import Probe
    from llmq.backends.registry import RUNTIME_FIX, RUNTIMES, backend_names, load_backend, runtime_refusal
    from llmq.commands.terminal import print_json, print_table
    from llmq.errors import BackendError

    rows: list[tuple[str, Probe]] = []
    for name in backend_names():
        try:
            rows += [(name, probe) for probe in load_backend(name).probe()]
        except BackendError as err:
            rows.append((name, Probe(name, False, str(err), "pip install --force-reinstall llmq")))
    for name, runtime in RUNTIMES.items():
        if runtime.packages:
            reason = runtime_refusal(name)
            detail = reason or "with " + ", ".join(f"{package} {exact}" for package, exact in runtime.packages.items())
            fix = f"{RUNTIME_FIX}, in an environment of its own" if reason else ""
            rows.append((runtime.backend, Probe(f"runtime {name}", not reason, detail, fix)))
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
