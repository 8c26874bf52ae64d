# ChunkLLM Bridge. `make help` lists the targets; ENGINE chooses the engine, PYTHON the interpreter that sets it up.

ENGINE  ?= vllm
PYTHON  ?= python3
ENGINES := vllm sglang
BIN     := .envs/$(ENGINE)/bin/python

ifeq ($(filter $(ENGINES),$(ENGINE)),)
$(error unknown ENGINE '$(ENGINE)' (known: $(ENGINES)))
endif

.PHONY: help env model demo serve test check bench bench-overhead lock clean-envs
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  with ENGINE=$(ENGINE) (known: $(ENGINES))"

env: ## the engine's environment, from its lock file
	@$(PYTHON) scripts/envs.py $(ENGINE)

model: env ## the model folder, de-quantised once
	@$(BIN) scripts/model.py

demo: model ## a real server with the bridge: streams, a smaller quota while they run, status
	@$(BIN) scripts/demo.py --engine $(ENGINE)

serve: model ## the same server, up until Ctrl-C
	@$(BIN) scripts/serve.py --engine $(ENGINE)

test: model ## all tests
	$(BIN) -m pytest tests --durations=15

check: env ## ruff, mypy strict, import directions, the docs' examples
	$(BIN) -m ruff check .
	$(BIN) -m ruff format --check .
	$(BIN) -m mypy --strict --explicit-package-bases --untyped-calls-exclude=transformers \
		chunkllm_bridge scripts bench tests/support
	$(BIN) -m pytest tests/unit/test_layers.py tests/docs

bench: bench-overhead ## all benchmarks
ifneq ($(wildcard bench/test_*.py),)
	$(BIN) -m pytest bench --benchmark-only
endif

bench-overhead: model ## stock engine against the same with the bridge, into bench/out/
	@$(BIN) bench/overhead.py --engine $(ENGINE)

lock: ## resolve the engine's requirements anew and write requirements/ENGINE.lock
	$(PYTHON) -m scripts.lock $(ENGINE)

clean-envs: ## remove the environments, here and in the cache; the models stay
	@$(PYTHON) scripts/envs.py clean
