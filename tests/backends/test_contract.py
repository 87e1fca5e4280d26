"""One suite for every backend: the protocol of `base`, against the reference decoder in float32."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmq.backends.base import Backend, ComputeType, InferenceModel, ModelOptions, Run, SlotSampling
from llmq.backends.reference import forward
from llmq.backends.registry import ALIASES, backend_names, load_backend, select_backend
from llmq.checkpoint.loader import load_weights
from llmq.config import SCHEMES, QuantizationConfig
from llmq.errors import BackendError
from tests.backends.quantized import QuantizedWeights
from tests.backends.test_reference import FAMILIES
from tests.backends.test_sampling import expected_token
from tests.tiny import GEMMA3, write_tiny

TOKENS = np.random.default_rng(1).integers(0, 320, 40).astype(np.int32)

GREEDY = SlotSampling()

WINDOWS = [{}, {"architectures": ["MistralForCausalLM"], "sliding_window": 8}, GEMMA3]


@pytest.fixture(params=["gpu", "tpu", "reference"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return load_backend(request.param)


def opened(backend: Backend, weights, num_slots: int = 1, **options: Any) -> InferenceModel:
    fields = {"device": "cpu", "dtype": "float32", "num_slots": num_slots, "max_len": 64, **options}
    return backend.open_model(weights, ModelOptions(**fields))


@pytest.mark.parametrize("family", FAMILIES)
def test_families(backend: Backend, family: str, tmp_path: Path) -> None:
    weights = load_weights(str(write_tiny(tmp_path / "m", **FAMILIES[family])))
    model = opened(backend, weights)
    _, logits = model.extend(model.init_state(), 0, TOKENS, 0, want_logits=True)
    np.testing.assert_allclose(logits, forward(weights, TOKENS.tolist()), atol=5e-5)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes(backend: Backend, scheme: str, symmetric: bool, tmp_path: Path) -> None:
    plain = load_weights(str(write_tiny(tmp_path / "m", attention_bias=True)))
    weights = QuantizedWeights(plain, QuantizationConfig(scheme=scheme, symmetric=symmetric))
    model = opened(backend, weights)
    _, logits = model.extend(model.init_state(), 0, TOKENS, 0, want_logits=True)
    expected = forward(weights, TOKENS.tolist())
    np.testing.assert_allclose(logits, expected, atol=5e-5)
    assert np.abs(forward(plain, TOKENS.tolist()) - expected).max() > 1e-3, "the codes made no difference"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory):
    plain = load_weights(str(write_tiny(tmp_path_factory.mktemp("contract") / "m", num_hidden_layers=2)))
    return QuantizedWeights(plain, QuantizationConfig(scheme="int4_blockwise"))


def only(num_slots: int, *slots: int) -> np.ndarray:
    return np.isin(np.arange(num_slots), slots)


def handed_over(model: InferenceModel, state, slot: int, prompt: np.ndarray, sampling: SlotSampling = GREEDY):
    """Write a prompt in chunks and hand the slot over."""
    size = model.caps.chunk_size
    for start in range(0, len(prompt) - 1, size):
        state, none = model.extend(state, slot, prompt[start : min(start + size, len(prompt) - 1)], start)
        assert none is None
    return model.set_slot(state, slot, prompt, sampling)


def stepped(model: InferenceModel, state, *slots: int, uniform: float = 0.0, **wanted):
    """One step of some slots: tokens, log-probabilities, the best ids and theirs, a row for each."""
    num_slots = model.caps.num_slots
    state, handle = model.decode(state, only(num_slots, *slots), np.full(num_slots, uniform, np.float32), **wanted)
    out = model.fetch(handle)
    columns = [out.tokens, out.logprobs, out.top_ids, out.top_logprobs]
    assert [None if c is None else (c.dtype, c.shape) for c in columns] == [
        (np.int32, (num_slots,)),
        *(
            [(np.float32, (num_slots,)), (np.int32, (num_slots, 20)), (np.float32, (num_slots, 20))]
            if wanted.get("want_logprobs")
            else [None] * 3
        ),
    ]
    return state, [None if column is None else column[list(slots)] for column in columns]


def test_pieces_equal_one_run(backend: Backend, weights) -> None:
    model = opened(backend, weights, num_slots=3)
    _, whole = model.extend(model.init_state(), 0, TOKENS[:20], 0, want_logits=True)
    state, none = model.extend(model.init_state(), 1, TOKENS[:7], 0)
    assert none is None
    state, part = model.extend(state, 1, TOKENS[7:18], 7, want_logits=True)
    np.testing.assert_allclose(part, whole[7:18], atol=1e-5)


@pytest.mark.parametrize("changes", WINDOWS)
def test_steps_feed_their_tokens_back(backend: Backend, changes: dict, tmp_path: Path) -> None:
    """Two steps are dispatched before the first is fetched; log-probabilities are those of the whole sequence."""
    plain = load_weights(str(write_tiny(tmp_path / "m", num_hidden_layers=2, **changes)))
    model = opened(backend, plain, num_slots=3)
    state = handed_over(model, model.init_state(), 1, TOKENS[:19])
    uniform, handles, text = np.zeros(3, np.float32), [], TOKENS[:19].tolist()
    for _ in range(8):
        state, handle = model.decode(state, only(3, 1), uniform, want_logprobs=True)
        handles.append(handle)
        if len(handles) < 2:
            continue
        out = model.fetch(handles.pop(0))
        expected = log_softmax(forward(plain, text)[-1])
        assert out.tokens[1] == expected.argmax()
        np.testing.assert_allclose(out.logprobs[1], expected.max(), atol=5e-5)
        np.testing.assert_array_equal(out.top_ids[1], np.argsort(-expected, kind="stable")[:20])
        np.testing.assert_allclose(out.top_logprobs[1], np.sort(expected)[::-1][:20], atol=5e-5)
        text.append(int(out.tokens[1]))


def test_slots_do_not_mix_and_may_be_written_again(backend: Backend, weights) -> None:
    model = opened(backend, weights, num_slots=3)
    prompts = [TOKENS[:9], TOKENS[10:30], TOKENS[30:35]]
    state = model.init_state()
    for slot in range(3):  # something else first: what is overwritten must not be seen
        state, _ = model.extend(state, slot, TOKENS[::-1].copy()[:33], 0)
    for slot, prompt in enumerate(prompts):
        state = handed_over(model, state, slot, prompt)
    state, (_, logprobs, ids, _) = stepped(model, state, 0, 1, 2, want_logprobs=True)
    expected = np.stack([log_softmax(forward(weights, prompt.tolist())[-1]) for prompt in prompts])
    np.testing.assert_allclose(logprobs, expected.max(axis=-1), atol=5e-5)
    np.testing.assert_array_equal(ids[:, 0], expected.argmax(axis=-1))


def test_inactive_slots_are_untouched(backend: Backend, weights) -> None:
    model = opened(backend, weights, num_slots=3)
    alone = handed_over(model, model.init_state(), 1, TOKENS[:12])
    expected = []
    for _ in range(4):
        alone, out = stepped(model, alone, 1, want_logprobs=True)
        expected.append(out)
    state = handed_over(model, model.init_state(), 1, TOKENS[:12])
    state = handed_over(model, state, 0, TOKENS[20:30])
    for step in expected:
        state, _ = stepped(model, state, 0)
        state, got = stepped(model, state, 1, want_logprobs=True)
        for a, b in zip(got, step, strict=True):
            np.testing.assert_array_equal(a, b)


VARIANTS = {
    "plain": {},
    "window": WINDOWS[1],
    "gemma3": GEMMA3,
    "one-head-a-key": {"num_key_value_heads": 4},
    "int8-cache": {},
    "int4": {},
    "int8": {},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("num_slots", "dtype"), [(2, "float32"), (5, "float32"), (8, "float32"), (7, "bfloat16")])
def test_a_row_depends_on_itself_alone(
    backend: Backend, variant: str, num_slots: int, dtype: ComputeType, tmp_path: Path
) -> None:
    """To the last bit: alone and among others of any length, in any slot."""
    if backend.name == "reference" and num_slots > 2:
        pytest.skip("it computes every row alone")
    if backend.name == "tpu" and dtype == "bfloat16":
        pytest.skip("it refuses bfloat16 on the cpu")
    plain = load_weights(str(write_tiny(tmp_path / "m", num_hidden_layers=2, **VARIANTS[variant])))
    schemes = {"int4": "int4_blockwise", "int8": "int8_per_channel"}
    held = QuantizedWeights(plain, QuantizationConfig(scheme=schemes[variant])) if variant in schemes else plain
    model = opened(backend, held, num_slots, dtype=dtype, max_len=300, kv_int8=variant == "int8-cache")
    assert_rows_stand_alone(model, [3, 130] if backend.name == "reference" else LENGTHS)


#: Of prompts; the steps after 126 and 127 cross the edge of a window of 128.
LENGTHS = [3, 130, 140, 126, 17, 260, 127, 40]


def assert_rows_stand_alone(model: InferenceModel, lengths: list[int]) -> None:
    """Steps of a sampled answer, alone in the first slot and then among others in the last."""
    num_slots, vocab_size = model.caps.num_slots, model.caps.vocab_size
    rng, sampled = np.random.default_rng(num_slots), SlotSampling(temperature=0.8, top_p=0.9, top_k=40)
    text = rng.integers(0, vocab_size, max(lengths)).astype(np.int32)

    def steps(state, *slots: int) -> list[np.ndarray]:
        columns = []
        for _ in range(4):
            state, out = stepped(model, state, *slots, uniform=0.7, want_logprobs=True)
            columns += [column[0] for column in out]
        return columns

    for length in lengths:
        alone = steps(handed_over(model, model.init_state(), 0, text[:length], sampled), 0)
        state = handed_over(model, model.init_state(), num_slots - 1, text[:length], sampled)
        for other in range(num_slots - 1):
            rules = SlotSampling(presence_penalty=1.0, logit_bias={7: 3.0}) if other % 2 else GREEDY
            prompt = rng.integers(0, vocab_size, lengths[other % len(lengths)]).astype(np.int32)
            state = handed_over(model, state, other, prompt, rules)
        together = steps(state, num_slots - 1, *rng.permutation(num_slots - 1).tolist())
        for a, b in zip(together, alone, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_whole_chunk_is_the_same_whatever_follows(backend: Backend, weights) -> None:
    """So a reused prefix equals a fresh one, to the last bit."""
    model = opened(backend, weights, num_slots=2, max_len=600)
    size = model.caps.chunk_size
    text = np.random.default_rng(0).integers(0, 320, 2 * size + 9).astype(np.int32)
    fresh, outs = handed_over(model, model.init_state(), 0, text), []
    for _ in range(3):
        fresh, out = stepped(model, fresh, 0, want_logprobs=True)
        outs.append(out)
    state = handed_over(model, model.init_state(), 1, np.concatenate([text[: 2 * size], text[:5]]))
    for _ in range(3):
        state, _ = stepped(model, state, 1)
    state = model.copy_slot(state, 1, 0, 2 * size)
    for slot in (1, 0):
        state, _ = model.extend(state, slot, text[2 * size : -1], 2 * size)
        state = model.set_slot(state, slot, text, GREEDY)
        for expected in outs:
            state, got = stepped(model, state, slot, want_logprobs=True)
            for a, b in zip(got, expected, strict=True):
                np.testing.assert_array_equal(a, b)


def test_sampling_follows_the_slots_rules(backend: Backend, weights) -> None:
    """Against the sampler on the reference's logits; every slot has rules of its own, one a mask."""
    model = opened(backend, weights, num_slots=4)
    slots = [
        SlotSampling(temperature=0.9, top_k=5, logit_bias={3: 2.0, 9: -50.0}),
        SlotSampling(repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.25),
        SlotSampling(temperature=1.5, top_p=0.8, min_p=0.01, frequency_penalty=1.0),
        GREEDY,
    ]
    allowed = np.full((4, 10), 0xFFFFFFFF, np.uint32)
    allowed[2] = 0x0F0F0F0F
    prompts = [TOKENS[i : i + 8 + i] for i in range(4)]
    state = model.init_state()
    for slot, (prompt, rules) in enumerate(zip(prompts, slots, strict=True)):
        state = handed_over(model, state, slot, prompt, rules)
    texts, rng = [prompt.tolist() for prompt in prompts], np.random.default_rng(0)
    for _ in range(6):
        uniform = rng.random(4).astype(np.float32)
        state, handle = model.decode(state, only(4, 0, 1, 2, 3), uniform, allowed=allowed)
        tokens = model.fetch(handle).tokens
        for slot, (text, prompt, rules) in enumerate(zip(texts, prompts, slots, strict=True)):
            logits = forward(weights, text)[-1]
            assert tokens[slot] == expected_token(
                logits, rules, prompt, text[len(prompt) :], allowed[slot], uniform[slot]
            )
            text.append(int(tokens[slot]))
        assert (allowed[2][tokens[2] // 32] >> (tokens[2] % 32)) & 1


def test_logits_that_are_not_finite_give_no_token(backend: Backend, tmp_path: Path) -> None:
    """And the slot is as good as new for the next request."""
    path = write_tiny(tmp_path / "m", num_hidden_layers=2)
    weights = load_weights(str(path))

    class Broken(QuantizedWeights):
        def __getitem__(self, name: str):
            weight = super().__getitem__(name)
            if name == "model.embed_tokens.weight":
                weight = weight.copy()
                weight[7] = np.nan
            return weight

    model = opened(backend, Broken(weights, lambda _: None), num_slots=2)
    state = handed_over(model, model.init_state(), 0, np.array([3, 7, 4], np.int32))
    state, (tokens, *_) = stepped(model, state, 0)
    assert tokens == [-1]
    state, (tokens, *_) = stepped(model, state, 0)
    state = handed_over(model, state, 0, TOKENS[:1])
    state, (tokens, *_) = stepped(model, state, 0)
    assert tokens == [forward(weights, TOKENS[:1].tolist())[-1].argmax()]


def test_nothing_is_compiled_after_warmup(backend: Backend, weights) -> None:
    model = opened(backend, weights, num_slots=3, max_len=200)
    state = model.warmup(model.init_state())
    before = model.stats()
    assert before.num_bytes >= 0
    for slot, rules in enumerate([GREEDY, SlotSampling(temperature=1.0, top_k=3), SlotSampling(presence_penalty=1.0)]):
        state = handed_over(model, state, slot, TOKENS[: 5 + 7 * slot], rules)
    state = model.copy_slot(state, 0, 1, 4)
    for slots in ([0], [0, 1, 2]):
        for want in (False, True):
            state, _ = stepped(model, state, *slots, uniform=0.5, want_logprobs=want)
            words = np.full((3, 10), 0xFFFFFFFF, np.uint32)
            state, _ = stepped(model, state, *slots, uniform=0.5, allowed=words, want_logprobs=want)
    assert model.stats() == before
    model.close()


def test_memory(backend: Backend) -> None:
    memory = backend.memory("cpu")
    assert 0 < memory.free <= memory.total
    with pytest.raises(BackendError, match="device='moon'"):
        backend.memory("moon")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    highest = logits.max(axis=-1, keepdims=True)
    return logits - highest - np.log(np.exp(logits - highest).sum(axis=-1, keepdims=True))


# Each run with its parent, in an order that mixes roots and children.
TREE = [(11, 20, None), (5, 6, None), (20, 25, 0), (2, 12, 1), (30, 31, 0), (25, 30, None)]


@pytest.mark.parametrize("num_shared", [0, 11])
@pytest.mark.parametrize("changes", WINDOWS)
def test_runs_are_scored_as_if_each_stood_alone(
    backend: Backend, changes: dict, num_shared: int, tmp_path: Path
) -> None:
    plain = load_weights(str(write_tiny(tmp_path / "m", num_hidden_layers=2, **changes)))
    model = opened(backend, plain, num_slots=2)
    prefix, rng = TOKENS[:num_shared], np.random.default_rng(0)
    runs, expected = [], []
    for start, end, parent in TREE:
        tokens = TOKENS[start:end]
        before = [*prefix, *([] if parent is None else runs[parent].tokens)]
        logits = forward(plain, [*before, *tokens])[len(before) :]
        likely = logits.argmax(axis=-1)
        targets = np.where(rng.random(len(tokens)) < 0.5, likely, rng.integers(0, 320, len(tokens))).astype(np.int32)
        expected.append((log_softmax(logits)[np.arange(len(tokens)), targets], likely == targets))
        runs.append(Run(tokens, targets if start != 5 else None, parent))

    state, _ = model.extend(model.init_state(), 0, TOKENS[::-1].copy()[:20], 0)  # another slot's business
    if num_shared:
        state, _ = model.extend(state, 1, prefix, 0)
    for count in (6, 1, 5):  # again and again: the prefix is still what it was
        state, scores = model.score(state, 1, len(prefix), runs[:count])
        for run, got, (logprobs, is_greedy) in zip(runs, scores, expected, strict=False):
            assert (got is None) == (run.targets is None)
            if got is not None:
                np.testing.assert_allclose(got.logprobs, logprobs, atol=5e-5)
                np.testing.assert_array_equal(got.is_greedy, is_greedy)
                assert got.logprobs.dtype == np.float32
    state, scores = model.score(state, 1, len(prefix), [Run(run.tokens, None, run.parent) for run in runs])
    assert scores == [None] * len(runs)

    # The first run may be continued, so a long text is scored in pieces.
    whole = log_softmax(forward(plain, TOKENS.tolist()))[np.arange(39), TOKENS[1:]]
    for extra in ([], [Run(TOKENS[:3], TOKENS[:3])]):
        state, first = model.score(state, 1, 0, [Run(TOKENS[:20], TOKENS[1:21]), *extra])
        state, second = model.score(state, 1, 20, [Run(TOKENS[20:39], TOKENS[21:40])])
        np.testing.assert_allclose(np.concatenate([first[0].logprobs, second[0].logprobs]), whole, atol=5e-5)


@pytest.mark.parametrize("changes", WINDOWS)
def test_int8_keys_and_values(backend: Backend, changes: dict, tmp_path: Path) -> None:
    """What a run wrote is attended on as it is stored, in one run as in single steps."""
    plain = load_weights(str(write_tiny(tmp_path / "m", num_hidden_layers=2, **changes)))
    model = opened(backend, plain, num_slots=2, kv_int8=True)
    assert model.caps.kv_dtype == "int8"
    state, got = model.extend(model.init_state(), 1, TOKENS[:30], 0, want_logits=True)
    expected, exact = forward(plain, TOKENS[:30].tolist(), kv_int8=True), forward(plain, TOKENS[:30].tolist())
    # A key on the edge of two codes may fall either way in float32; that is far less than what int8 costs.
    assert np.abs(got - expected).mean() < 0.05 * np.abs(exact - expected).mean()
    assert np.abs(exact - expected).max() > 1e-3

    state, text = model.set_slot(state, 1, TOKENS[:31], GREEDY), TOKENS[:31].tolist()
    for _ in range(8):
        state, (tokens, _, ids, logprobs) = stepped(model, state, 1, want_logprobs=True)
        expected, exact = (log_softmax(forward(plain, text, kv_int8=int8)[-1])[ids[0]] for int8 in (True, False))
        assert np.abs(logprobs[0] - expected).mean() < 0.1 * np.abs(exact - expected).mean()
        text.append(int(tokens[0]))


def test_what_is_said_of_a_model(backend: Backend, weights) -> None:
    caps = opened(backend, weights, num_slots=2).caps
    assert (caps.num_slots, caps.max_len, caps.vocab_size, caps.dtype) == (2, 64, 320, "float32")
    assert caps.device
    assert caps.kernels
    rows = backend.probe()
    assert rows[0].usable
    assert all(row.usable or row.detail for row in rows)


def test_devices_that_are_not_there(backend: Backend, weights) -> None:
    with pytest.raises(BackendError, match="device='moon'"):
        backend.open_model(weights, ModelOptions(device="moon"))


def test_the_registry() -> None:
    assert {"gpu", "tpu", "reference"} <= set(backend_names())
    assert select_backend("cpu", None)[1] == "cpu"
    assert select_backend("auto", None)[0].name in ("gpu", "tpu")
    assert set(ALIASES) == {"cpu"}
    with pytest.raises(BackendError, match="must be one of auto, cpu, gpu, reference, tpu"):
        load_backend("npu")


def test_auto_asks_no_framework_it_does_not_take() -> None:
    code = "import sys\nfrom llmq.backends.registry import select_backend\nprint(select_backend('auto', None)[0].name, 'jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    name, jax_was_imported = done.stdout.split()
    assert jax_was_imported == str(name == "tpu")


def test_a_framework_that_cannot_be_imported_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BackendError, match="backend='gpu': torch cannot be imported here"):
        load_backend("gpu")
