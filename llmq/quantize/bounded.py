"""Quantizing with as few bytes as keep the divergence within a bound, measured on artifacts themselves.

What stages cost alone does not quite add up, and the algorithm makes up for a part of it. So artifacts
are made, each measured, and the next one is planned for the divergence that the ones before suggest:

    log measured = log planned + d        d from one artifact, a line through two that bracket the bound
"""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from llmq.backends.base import ModelOptions
from llmq.backends.registry import select_backend
from llmq.checkpoint.loader import load_weights
from llmq.checkpoint.record import Record, read_record
from llmq.checkpoint.run import PARTIAL, RunDirectory
from llmq.checkpoint.writer import check_target, is_replaceable, swap, to_json
from llmq.convert import ConversionPlan
from llmq.errors import ConfigError
from llmq.evaluate.divergence import measure_divergence
from llmq.model.tokenizer import Tokenizer
from llmq.quantize.data import hold_out, read_dataset
from llmq.quantize.mixed import sensitivity_table
from llmq.quantize.options import QuantizeOptions, Target
from llmq.quantize.run import quantize
from llmq.quantize.sensitivity import TABLE, Sensitivity, costs
from llmq.quantize.setup import PLAIN, Run
from llmq.quantize.targets import plan_for_target

#: Artifacts made, at most.
_MAX_ROUNDS = 4

#: Divergences from this share of the bound up to the bound are close enough; the middle is aimed at.
_CLOSE = 0.9

#: Held-out sequences that an artifact is measured on.
_MEASURED_SAMPLES = 16


@dataclass(frozen=True, slots=True)
class Round:
    """An artifact that was made.

    Attributes:
        planned: Divergence it was planned for.
        kl: Divergence it has.
        num_bytes: What its linears take.
    """

    planned: float
    kl: float
    num_bytes: int


def quantize_to_divergence(
    plan: ConversionPlan, options: QuantizeOptions, output: Path, run: Run = PLAIN
) -> tuple[Record, float]:
    """Quantize with few bytes and a divergence, measured on the artifact itself, within the target.

    Args:
        plan: With the configuration's own schemes.
        options: With `max_kl` as the target.
        output: Directory to create.
        run: How the run is carried out.

    Returns:
        The record, and the divergence measured on held-out text, in nats a token.

    Raises:
        LlmqError: As for `quantize`, or the target cannot be met.
    """
    check_target(output, plan.reader.path, force=run.force)
    bound = options.target.max_kl
    assert bound is not None
    table = sensitivity_table(plan, options, output, run)
    with closing(_Search(output, plan, options, table, resume=run.resume)) as search:
        while (planned := next_planned(search.rounds, bound)) is not None:
            try:
                mixed, _ = plan_for_target(plan, table, Target(max_kl=planned))
            except ConfigError:
                if not search.rounds:
                    search.remove()
                    raise
                break  # nothing finer than what was made
            taken = sum(row.stored_bytes for row in mixed.coverage)
            if any(done.num_bytes == taken for done in search.rounds):
                break
            quantize(mixed, options, search.candidate, replace(run, force=True), sensitivity=costs(table))
            search.add(Round(planned, measure_artifact(plan, options, search.candidate), taken))
        best = best_round(search.rounds, bound)
        if best is not None:
            swap(search.best, output.resolve())
        search.remove()
    if best is None:
        closest = min(done.kl for done in search.rounds)
        raise ConfigError(
            f"max_kl={bound}: cannot be met, of {len(search.rounds)} artifacts the closest diverges by {closest:.4g}; "
            "name a higher one."
        )
    record = read_record(output)
    assert record is not None
    return record, best.kl


def next_planned(rounds: Sequence[Round], bound: float) -> float | None:
    """What to plan the next artifact for.

    Args:
        rounds: What was made.
        bound: Divergence they may have.

    Returns:
        A divergence in nats; None when one is close enough, or enough were made.
    """
    if not rounds:
        return bound
    if len(rounds) == _MAX_ROUNDS or any(_CLOSE * bound <= done.kl <= bound for done in rounds):
        return None
    aim = bound * (1.0 + _CLOSE) / 2.0
    finer = max((done for done in rounds if done.kl <= bound), key=lambda done: done.kl, default=None)
    coarser = min((done for done in rounds if done.kl > bound), key=lambda done: done.kl, default=None)
    if finer and coarser and finer.kl > 0.0 and finer.planned < coarser.planned:
        share = math.log(aim / finer.kl) / math.log(coarser.kl / finer.kl)
        return finer.planned * (coarser.planned / finer.planned) ** share
    nearest = coarser or finer
    assert nearest
    return nearest.planned * aim / max(nearest.kl, _TINY)


def best_round(rounds: Sequence[Round], bound: float) -> Round | None:
    """The smallest artifact that keeps the bound.

    Args:
        rounds: What was made.
        bound: Divergence it may have.

    Returns:
        Of equal sizes the first; None when none keeps it.
    """
    return min((done for done in rounds if done.kl <= bound), key=lambda done: done.num_bytes, default=None)


#: Keeps a quotient finite.
_TINY = 1e-12

_ROUNDS = "rounds.json"


class _Search:
    """What was made so far, beside the output, and the best of it.

    Args:
        output: Of the command.
        plan: The model and the configuration.
        options: Data and target.
        table: What artifacts are planned from.
        resume: Go on from an interrupted search.

    Attributes:
        rounds: In order.
        candidate: Where the next artifact goes.
        best: Where the best one is.
    """

    def __init__(
        self,
        output: Path,
        plan: ConversionPlan,
        options: QuantizeOptions,
        table: Sequence[Sensitivity],
        *,
        resume: bool,
    ) -> None:
        place, self._bound = output.resolve(), options.target.max_kl or 0.0
        self.candidate, self.best = (place.with_name(f".{place.name}.llmq-{name}") for name in ("candidate", "best"))
        settings = {
            "model": plan.model,
            "config": plan.config.model_dump(mode="json"),
            "table": hashlib.sha256(TABLE.dump_json(list(table))).hexdigest(),
            **options.model_dump(mode="json", exclude={"sensitivity"}),
        }
        held = place.with_name(f".{place.name}.llmq-search")
        self._held = RunDirectory(held, settings, re.compile(re.escape(_ROUNDS)), resume=resume)
        self._path = held / _ROUNDS
        kept = json.loads(self._path.read_bytes()) if self._path.is_file() else []
        self.rounds = [Round(**row) for row in kept]
        if best_round(self.rounds, self._bound) and not self.best.is_dir():
            self.rounds.clear()

    def add(self, done: Round) -> None:
        """Note what the candidate came to, and keep it if it is the best.

        Args:
            done: The candidate.
        """
        self.rounds.append(done)
        if best_round(self.rounds, self._bound) is done:
            swap(self.candidate, self.best)
        staged = self._held.path / PARTIAL
        staged.write_bytes(to_json([asdict(row) for row in self.rounds]))
        staged.replace(self._path)

    def close(self) -> None:
        """Leave everything for a later run."""
        self._held.close()

    def remove(self) -> None:
        """Delete everything: the output stands, or there will be none."""
        for directory in (self.candidate, self.best):
            if directory.is_dir() and is_replaceable(directory):
                shutil.rmtree(directory)
        self._held.remove()


def measure_artifact(plan: ConversionPlan, options: QuantizeOptions, artifact: Path) -> float:
    """How far an artifact's predictions diverge from the source's, on held-out text.

    Args:
        plan: Of the source.
        options: The dataset, and what to run on.
        artifact: Made from the source.

    Returns:
        Mean KL divergence in nats a token.
    """
    assert options.dataset is not None
    _, text = hold_out(read_dataset(options.dataset, options.num_tokens))
    weights, quantized = load_weights(plan.model), load_weights(str(artifact))
    tokenizer = Tokenizer.from_files(weights.reader.side_files(), weights.config)
    plugin, device = select_backend(options.backend, options.device)
    how = ModelOptions(device=device, dtype=options.dtype, max_len=options.seq_len)
    with closing(plugin.open_model(weights, how)) as baseline, closing(plugin.open_model(quantized, how)) as model:
        length = _MEASURED_SAMPLES * options.seq_len
        measured = measure_divergence(model, baseline, tokenizer, text, window=options.seq_len, max_tokens=length)
    return measured.metrics["divergence/kl_mean"].value
