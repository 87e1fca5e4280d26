"""lm-eval as a library: its registry, prompts and metrics, with data from the hub or from local files."""

import contextlib
import difflib
import hashlib
import importlib.util
import json
import logging
import math
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from llmq.errors import BackendError, ConfigError
from llmq.evaluate.measured import mean_over_windows
from llmq.evaluate.options import EvalOptions
from llmq.evaluate.results import Metric

if TYPE_CHECKING:
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

#: Draws of lm-eval's bootstrap, for metrics whose error has no closed form.
_BOOTSTRAP_DRAWS = 1000


@dataclass(frozen=True, slots=True)
class LocalTask:
    """An official task whose data may be a local file.

    Attributes:
        definition: Its YAML file, among lm-eval's tasks.
        split: The split it is evaluated on.
        file: Name of the file with that split, one JSON object a line in the fields of the hub's dataset.
    """

    definition: str
    split: str
    file: str


#: What ``--data-dir`` can hold.
LOCAL_TASKS: MappingProxyType[str, LocalTask] = MappingProxyType(
    {
        "arc_challenge": LocalTask("arc/arc_challenge.yaml", "test", "arc_challenge_test.jsonl"),
        "arc_easy": LocalTask("arc/arc_easy.yaml", "test", "arc_easy_test.jsonl"),
        "hellaswag": LocalTask("hellaswag/hellaswag.yaml", "validation", "hellaswag_validation.jsonl"),
        "lambada_openai": LocalTask("lambada/lambada_openai.yaml", "test", "lambada_openai_test.jsonl"),
        "piqa": LocalTask("piqa/piqa.yaml", "validation", "piqa_validation.jsonl"),
        "truthfulqa_mc1": LocalTask("truthfulqa/truthfulqa_mc1.yaml", "validation", "truthfulqa_mc_validation.jsonl"),
        "truthfulqa_mc2": LocalTask("truthfulqa/truthfulqa_mc2.yaml", "validation", "truthfulqa_mc_validation.jsonl"),
        "wikitext": LocalTask("wikitext/wikitext.yaml", "test", "wikitext2_test_pages.jsonl"),
        "winogrande": LocalTask("winogrande/default.yaml", "validation", "winogrande_validation.jsonl"),
    }
)


@dataclass(frozen=True, slots=True)
class TaskResults:
    """What tasks came to; see `results.Results` for the fields.

    Attributes:
        metrics: By ``task/metric``.
        items: By metric that is a mean.
        item_ids: By the same.
        versions: By task.
        num_fewshot: By task.
        samples: By task.
    """

    metrics: dict[str, Metric]
    items: dict[str, list[float]]
    item_ids: dict[str, list[str]]
    versions: dict[str, str]
    num_fewshot: dict[str, int]
    samples: dict[str, list[dict[str, Any]]]


def require_lm_eval() -> None:
    """Refuse to go on without lm-eval.

    Raises:
        ConfigError: It, or what it needs, is not installed.
    """
    missing = next((name for name in ("lm_eval", "datasets") if importlib.util.find_spec(name) is None), None)
    if missing:
        raise ConfigError(f"tasks: need {missing.replace('_', '-')}, which is not installed; pip install 'llmq[eval]'.")


def task_names(data_dir: Path | None = None, include_path: Path | None = None) -> list[str]:
    """Every task, group and tag there is.

    Args:
        data_dir: Only tasks whose data may lie in a local directory, and the user's own.
        include_path: Directory of the user's own tasks.

    Returns:
        Names, sorted.
    """
    with _quiet():
        known = _manager(include_path, include_defaults=data_dir is None).all_tasks
    return sorted({*known, *(LOCAL_TASKS if data_dir else ())})


def data_files(names: Sequence[str], data_dir: Path | None) -> dict[str, str]:
    """What local files tasks read.

    Args:
        names: Tasks.
        data_dir: Where the files are; None when the hub is used.

    Returns:
        Task -> sha256 of its file.

    Raises:
        ConfigError: A file is missing.
    """
    if data_dir is None:
        return {}
    return {
        name: hashlib.sha256(_local_file(name, data_dir).read_bytes()).hexdigest()
        for name in sorted({*names} & {*LOCAL_TASKS})
    }


@dataclass(frozen=True, slots=True)
class LoadedTasks:
    """Tasks with their data, ready to run; `load_tasks` makes one.

    Attributes:
        options: How.
        loaded: What lm-eval's evaluator takes.
    """

    options: EvalOptions
    loaded: Any

    @property
    def generates(self) -> bool:
        """Whether a task has texts generated."""
        return any(task.OUTPUT_TYPE == "generate_until" for task in self.loaded["tasks"].values())

    @property
    def notes(self) -> list[str]:
        """What people should know of the prompts."""
        drawn = [
            name
            for name, task in self.loaded["tasks"].items()
            if self.options.data_dir and name in LOCAL_TASKS and task.get_config("num_fewshot")
        ]
        if not drawn:
            return []
        return [
            f"few-shot examples of {', '.join(drawn)} are other items of the evaluated split: --data-dir has no training data"
        ]

    def run(self, lm: "LM") -> TaskResults:
        """Ask a model everything and compute the metrics.

        Args:
            lm: The model.

        Returns:
            The results.
        """
        from lm_eval.evaluator import evaluate

        with _quiet():
            found: Any = evaluate(
                lm=lm,
                task_dict=self.loaded,
                limit=self.options.limit,
                bootstrap_iters=_BOOTSTRAP_DRAWS,
                apply_chat_template=self.options.apply_chat_template,
                fewshot_as_multiturn=self.options.apply_chat_template,
            )
        return _results(found, self.loaded["tasks"])


@contextlib.contextmanager
def load_tasks(options: EvalOptions) -> Generator[LoadedTasks]:
    """Load tasks and their data.

    Args:
        options: Which, and from where.

    Yields:
        The tasks, usable until the context ends.

    Raises:
        ConfigError: A task is unknown or cannot be run here, or its data is missing.
    """
    require_lm_eval()
    with tempfile.TemporaryDirectory(prefix="llmq-tasks-") as scratch:
        if options.data_dir is not None:
            _go_offline()
            _write_local_definitions(options, Path(scratch))
        with _quiet():
            manager = _manager(options.include_path, Path(scratch), include_defaults=options.data_dir is None)
            _check_known(options, manager.all_tasks)
            loaded: Any = _load(manager, options)
        for task in loaded["tasks"].values():
            _prepare(task, options)
        yield LoadedTasks(options, loaded)


def _manager(*include: Path | None, include_defaults: bool) -> "TaskManager":
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=[path for path in include if path], include_defaults=include_defaults)


def _check_known(options: EvalOptions, known: Sequence[str]) -> None:
    unknown = next((name for name in options.tasks if name not in known), None)
    if unknown is None:
        return
    offered = known
    if options.data_dir is not None:
        offered = sorted({*known, *LOCAL_TASKS})
        with _quiet():
            everywhere = _manager(include_defaults=True).all_tasks
        if unknown in everywhere:
            raise ConfigError(
                f"tasks={unknown!r}: no local file is known for it, only for {', '.join(offered)}; leave out --data-dir to use the hub."
            )
    close = difflib.get_close_matches(unknown, offered, n=3)
    advice = f"did you mean {' or '.join(close)}?" if close else "--tasks list shows all."
    raise ConfigError(f"tasks={unknown!r}: there is no such task; {advice}")


def _load(manager: "TaskManager", options: EvalOptions) -> Any:
    from datasets.exceptions import DatasetsError

    try:
        return manager.load(list(options.tasks))
    except (OSError, DatasetsError) as err:  # of the hub's library too
        reason = (str(err).strip() or type(err).__name__).splitlines()[0].rstrip(".")
        advice = "with --data-dir they are read from local files"
        if options.data_dir is not None:
            advice = "the files must hold one JSON object a line"
        raise ConfigError(
            f"tasks={','.join(options.tasks)}: their data cannot be loaded ({reason}); {advice}."
        ) from err


def _prepare(task: Any, options: EvalOptions) -> None:
    """Refuse tasks that cannot run here, and set what lm-eval's own command line would set.

    Source: lm_eval/evaluator.py, simple_evaluate, 0.4.13.
    """
    name = task.config.task
    if getattr(task, "UNSAFE_CODE", False):
        raise ConfigError(
            f"tasks={name!r}: runs code that the model writes, which llmq does not do; leave out the task."
        )
    if getattr(task, "MULTIMODAL", False):
        raise ConfigError(f"tasks={name!r}: needs a model that sees or hears; leave out the task.")
    own = task.get_config("num_fewshot")
    if own is None or (options.num_fewshot is not None and own != 0):
        task.set_config(key="num_fewshot", value=options.num_fewshot or 0)
    task.set_fewshot_seed(seed=options.seed)
    random.seed(options.seed)
    np.random.seed(options.seed)  # lm-eval's tasks draw from it


def _local_file(name: str, data_dir: Path) -> Path:
    path = data_dir / LOCAL_TASKS[name].file
    if not path.is_file():
        raise ConfigError(f"{path}: is missing; task {name} reads it when --data-dir is given.")
    return path


def _write_local_definitions(options: EvalOptions, directory: Path) -> None:
    """Write definitions that include the official ones and read local files."""
    found = importlib.util.find_spec("lm_eval")
    assert found
    assert found.submodule_search_locations
    official = Path(found.submodule_search_locations[0]) / "tasks"
    assert options.data_dir is not None
    for name in sorted({*options.tasks} & {*LOCAL_TASKS}):
        row = LOCAL_TASKS[name]
        splits = {"training": "train", "validation": "validation", "test": "test"}
        definition = {
            "include": str(official / row.definition),
            "task": name,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {
                "data_files": {row.split: str(_local_file(name, options.data_dir).resolve())},
                "cache_dir": str(directory / "cache"),
            },
            **{f"{key}_split": None for key, split in splits.items() if split != row.split},
            # The same items serve as examples; naming the split keeps an item from being its own.
            **({"fewshot_split": "test"} if row.split == "test" else {}),
        }
        (directory / f"{name}.yaml").write_text(json.dumps(definition), encoding="utf-8")  # JSON is YAML


def _go_offline() -> None:
    """Keep the hub's libraries from the network, whether they are imported yet or not."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    import datasets.config
    import huggingface_hub.constants

    huggingface_hub.constants.HF_HUB_OFFLINE = True
    datasets.config.HF_HUB_OFFLINE = True


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Silence lm-eval and what it uses: logs, warnings, progress bars, prints, and processes of its own."""
    import datasets
    from tqdm import tqdm

    bar: Any = tqdm
    logger, before = logging.getLogger("lm_eval"), logging.getLogger("lm_eval").level
    init, bars = bar.__init__, datasets.is_progress_bar_enabled()
    alone = os.environ.get("DISABLE_MULTIPROC")
    logger.setLevel(logging.ERROR)
    bar.__init__ = lambda self, *args, **kwargs: init(self, *args, **{**kwargs, "disable": True})
    datasets.disable_progress_bars()
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(None):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
        bar.__init__ = init
        if bars:
            datasets.enable_progress_bars()
        if alone is None:
            del os.environ["DISABLE_MULTIPROC"]


def _results(found: dict[str, Any], tasks: dict[str, Any]) -> TaskResults:
    from lm_eval.utils import handle_non_serializable

    samples = json.loads(json.dumps(found["samples"], default=handle_non_serializable))
    metrics: dict[str, Metric] = {}
    items: dict[str, list[float]] = {}
    item_ids: dict[str, list[str]] = {}
    for name, row in found["results"].items():
        for key, value in row.items():
            metric, _, filtered = key.partition(",")
            if not filtered or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            full = f"{name}/{metric}" if filtered == "none" else f"{name}/{key}"
            if not math.isfinite(value):
                raise BackendError(
                    f"{full}: is {value}, so the model does not compute anything useful; check its weights with "
                    "llmq inspect --verify."
                )
            stderr = row.get(f"{metric}_stderr,{filtered}")
            metrics[full] = Metric(
                value=value,
                stderr=stderr if isinstance(stderr, int | float) and math.isfinite(stderr) else None,
                higher_is_better=bool(found["higher_is_better"].get(name, {}).get(metric, True)),
            )
            mine = [s for s in samples.get(name, ()) if s["filter"] == filtered and metric in s]
            how = _item_rules().get(tasks[name].aggregation().get(metric)) if mine else None
            if how:
                metrics[full], items[full] = how(full, metrics[full], [sample[metric] for sample in mine])
                item_ids[full] = [f"{sample['doc_id']}:{sample['doc_hash'][:12]}" for sample in mine]
    versions = {f"task {name}": str(version) for name, version in found["versions"].items()}
    return TaskResults(metrics, items, item_ids, versions, dict(found["n-shot"]), samples)


#: From a metric and what lm-eval keeps of each item: the metric with its error, and items whose mean it is.
_ItemRule = Callable[[str, Metric, list[Any]], tuple[Metric, list[float]]]


def _item_rules() -> dict[Any, _ItemRule]:
    """For lm-eval's aggregations that are a mean, or the exponential of one."""
    from lm_eval.api import metrics

    return {
        metrics.mean: _mean,
        metrics.perplexity: _perplexity,
        metrics.weighted_perplexity: partial(_weighted, scale=1.0, link="exp"),
        metrics.bits_per_byte: partial(_weighted, scale=1 / math.log(2), link="identity"),
    }


def _mean(_: str, metric: Metric, values: list[Any]) -> tuple[Metric, list[float]]:
    return metric, [float(value) for value in values]


def _perplexity(_: str, metric: Metric, values: list[Any]) -> tuple[Metric, list[float]]:
    return metric.model_copy(update={"link": "exp"}), [-value for value in values]


def _weighted(
    name: str, _: Metric, values: list[Any], scale: float, link: Literal["identity", "exp"]
) -> tuple[Metric, list[float]]:
    logprobs, weights = np.array(values, np.float64).T
    return mean_over_windows(name, -logprobs * scale, weights, link=link)
