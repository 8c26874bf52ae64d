# ChunkLLM Bridge. `make help` lists the targets; ENGINE chooses the engine, PYTHON the interpreter that sets it up.

ENGINE  ?= vllm
PYTHON  ?= python3
ENGINES := vllm sglang
WANTED   = $(if $(filter both,$(ENGINE)),$(ENGINES),$(ENGINE))
BIN      = .envs/$(firstword $(WANTED))/bin/python

ifneq ($(filter-out $(ENGINES) both,$(ENGINE)),)
$(error unknown ENGINE '$(ENGINE)' (known: $(ENGINES) both))
endif

.PHONY: help env model demo serve test check bench bench-overhead bench-engines bench-medusa lock clean-envs
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  with ENGINE=$(ENGINE) (known: $(ENGINES), and both for env, model, demo, test and bench-engines)"

env: ## the engine's environment, from its lock file
	@$(PYTHON) scripts/envs.py $(WANTED)

model: env ## the model folder, de-quantised once
	@$(BIN) scripts/model.py

demo: model ## a real server with the bridge: streams, a smaller quota while they run, status; both: their texts compared
	@$(BIN) scripts/demo.py --engine $(ENGINE)

serve: model ## the same server, up until Ctrl-C
	@$(BIN) scripts/serve.py --engine $(ENGINE)

test: ENGINE = both
test: model ## all tests, those of each engine in its own environment
	@$(foreach engine,$(WANTED),echo "== $(engine)";\
		.envs/$(engine)/bin/python -m pytest $(TESTS_$(engine)) --durations=15 || failed=1;) exit $${failed:-0}

TESTS_vllm   = tests --ignore=tests/engines/sglang
TESTS_sglang = $(wildcard tests/engines/sglang) tests/e2e tests/conformance

check: env ## ruff, mypy strict, import directions, the docs' examples
	$(BIN) -m ruff check .
	$(BIN) -m ruff format --check .
	$(BIN) -m mypy --strict --explicit-package-bases --untyped-calls-exclude=transformers \
		--untyped-calls-exclude=torch \
		chunkllm_bridge scripts bench tests/support
	$(BIN) -m pytest tests/unit/test_layers.py tests/docs

bench: bench-overhead ## all benchmarks
ifneq ($(wildcard bench/test_*.py),)
	$(BIN) -m pytest bench --benchmark-only
endif

bench-overhead: model ## stock engine against the same with the bridge, into bench/out/
	@$(BIN) bench/overhead.py --engine $(ENGINE)

bench-engines: ENGINE = both
bench-engines: model ## the two stock engines against each other, into bench/out/
	@$(BIN) bench/engines.py

bench-medusa: model ## the stock engine against Medusa heads, into bench/out/
	@$(BIN) bench/medusa.py --engine $(ENGINE)

lock: ## resolve the engine's requirements anew and write requirements/ENGINE.lock
	$(PYTHON) -m scripts.lock $(ENGINE)

clean-envs: ## remove the environments, here and in the cache; the models stay
	@$(PYTHON) scripts/envs.py clean
