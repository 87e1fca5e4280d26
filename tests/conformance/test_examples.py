"""``examples/serving``: the clients run, and the files name what a server has."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from tests.conformance.api import Api

EXAMPLES = Path(__file__).parents[2] / "examples" / "serving"
DASHBOARD = json.loads((EXAMPLES / "grafana.json").read_text())


def options_of_serve() -> set[str]:
    from llmq.cli import app

    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return {option for parameter in command.params for option in parameter.opts if option.startswith("--")}


def test_the_client_asks(server: Api) -> None:
    environment = {**os.environ, "LLMQ_API_KEY": server.key or "none"}
    command = [sys.executable, EXAMPLES / "client.py", server.base_url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    streamed, as_json, tools = done.stdout.splitlines()[0], *done.stdout.splitlines()[-2:]
    assert streamed.startswith("streamed: ")
    assert re.fullmatch(r"as JSON: \{'city': '(Paris|Rome)', 'sunny': (True|False)\}", as_json)
    assert tools.startswith(("to call: weather {", "no tools: "))


def test_the_client_calls_a_tool(tool_server: Api) -> None:
    command = [sys.executable, EXAMPLES / "client.py", tool_server.base_url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "to call: weather {'city': " in done.stdout


def test_the_session_runs(server: Api, tmp_path: Path) -> None:
    (tmp_path / "headers").write_text(f"Authorization: Bearer {server.key}\n")
    environment = {**os.environ, "LLMQ_HEADERS": str(tmp_path / "headers")}
    command = ["sh", EXAMPLES / "session.sh", server.base_url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ('"object":"list"', "data: [DONE]", '\\"rain\\"', '"count":', "llmq:slots_free"):
        assert part in done.stdout, part


def test_every_metric_of_the_dashboard_is_exported(server: Api) -> None:
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    named = {name for text in expressions for name in re.findall(r"llmq:\w+", text)}
    assert len(named) > 15
    server.complete("x", max_tokens=3)
    exported = set(re.findall(r"^(llmq:\w+)", server.http.get("/metrics").text, re.MULTILINE))
    assert named - exported == set()


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)


@pytest.mark.parametrize("name", ["llmq.service", "Containerfile"])
def test_options_are_those_of_serve(name: str) -> None:
    lines = [
        line for line in (EXAMPLES / name).read_text().splitlines() if line.startswith(("ExecStart=", "ENTRYPOINT"))
    ]
    used = {option for line in lines for option in re.findall(r"--[a-z-]+", line)}
    assert used
    assert used <= options_of_serve()


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    text = (EXAMPLES / "llmq.service").read_text().replace("/opt/llmq/bin/llmq", "/bin/true")
    (tmp_path / "llmq.service").write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", tmp_path / "llmq.service"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    complaints = [line for line in done.stderr.splitlines() if "llmq.service" in line]
    assert complaints == []


def test_what_the_containerfile_copies_is_there() -> None:
    root = EXAMPLES.parents[1]
    for line in (EXAMPLES / "Containerfile").read_text().splitlines():
        if line.startswith("COPY"):
            assert [source for source in line.split()[1:-1] if not (root / source).exists()] == []


def test_prometheus_scrapes_where_metrics_are(server: Api) -> None:
    config = (EXAMPLES / "prometheus.yml").read_text()
    (path,) = re.findall(r"metrics_path: (\S+)", config)
    assert server.http.get(path).status_code == 200
