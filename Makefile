# Baton: see README.md. `make up` is all that a machine with Python >= 3.11 needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTO_VENV := .venv-proto
PROTO_BIN := $(PROTO_VENV)/bin
AUDIT_VENV := .venv-audit
PROTOS := $(wildcard proto/baton/v1/*.proto)
# The messages of the last release, compiled: `make check` finds changes that its clients cannot read.
RELEASED_PROTO := proto/released.binpb
# A machine with an NVIDIA GPU gets torch's CUDA build, others its CPU build: GPU=1 or GPU= chooses.
GPU ?= $(wildcard /dev/nvidiactl)
LOCK = requirements/$(if $(GPU),cuda,cpu).lock
# Where torch's CPU builds are. Whatever it serves, no file is installed whose hash is not in the lock.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
LOCK_VENV := .venv-lock
PINS := pyproject.toml $(wildcard requirements/*.lock) Makefile
# Flags for `baton serve`, for example: make up ARGS="--decode 2"
ARGS ?=
# What `make test` runs, for example: make test TESTS=tests/unit
# Parts run three at a time on two cores, since they often wait. Each has one thread: more threads would
# wait for one another. Whole clusters run one after another: two at a time keep two cores busy with starts.
TESTS ?=
CLUSTERS = tests/e2e tests/chaos/test_chaos.py tests/chaos/test_led_cluster.py \
  tests/chaos/test_model_changes.py
PARTS = tests/unit tests/kernels tests/transports tests/integration tests/fuzz \
  $(filter-out $(CLUSTERS),$(wildcard tests/chaos/test_*.py))
# The slowest are shown, so that they stay in view.
QUICK = -m "not long" --durations=15

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help install install-dev up test test-long test-clients check docs reference fuzz audit sbom proto proto-released check-proto release kind-test lock clean

help:
	@echo "make up         install what is missing and serve the demo model; ARGS=... goes to baton serve"
	@echo "make install    install into $(VENV) what serving needs"
	@echo "make test       run the tests; TESTS=... chooses"
	@echo "make test-long  run the tests that take minutes; SHARD=... chooses some of them"
	@echo "make test-clients  run other people's clients against a cluster; CLIENTS=all adds heavy ones"
	@echo "make check      format, lint, types, layers, protobuf, prose, documentation site"
	@echo "make docs       build the documentation site in site/"
	@echo "make reference  write the pages of docs/reference that are made from the code"
	@echo "make fuzz       fuzz what strangers send, MINUTES=... for each entrance, FUZZ=... chooses"
	@echo "make audit      look up known faults of what is installed"
	@echo "make sbom       list what is installed in baton.cdx.json (CycloneDX)"
	@echo "make proto      generate baton/v1 from proto/"
	@echo "make proto-released  after a release: what make check compares proto/ with"
	@echo "make release    build packages, images' build context and chart in dist/, and try them"
	@echo "make kind-test  install the chart on a Kubernetes cluster in containers; needs docker, kind, helm"
	@echo "make lock       pin all packages in requirements/; UPGRADE=--upgrade takes newer versions"
	@echo "make clean      remove what make has made"

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Baton needs Python 3.11 or newer, and $(PYTHON) is: $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another one, for example: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) lacks the venv module; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# Every file that is installed has a hash in a lock, which is complete: --no-deps, since tools/lock.py leaves
# out what packages ask for and Baton does not use. torch's CPU build comes first and alone: its index is
# asked for nothing else. Baton itself is built by the setuptools of the lock.
define pip-install
if [ -z '$(GPU)' ]; then \
  sed -n '/^torch==/,/[^\\]$$/p' $(LOCK) > $(VENV)/torch.lock \
  && $(BIN)/python -m pip install --require-hashes --no-deps --retries 2 \
    --extra-index-url $(TORCH_CPU_INDEX) --requirement $(VENV)/torch.lock; fi \
&& $(BIN)/python -m pip install --require-hashes --no-deps $(1) --requirement $(LOCK) \
&& $(BIN)/python -m pip install --no-deps --no-build-isolation --editable .
endef

# Two stamps: serving needs less than testing.
#
# Kernels are compiled meanwhile, which needs no package; `baton serve` waits for them, and does it itself
# where that fails. kernels.log has what the compiler says. Nor does pip compile 12,000 Python files, of which
# a cluster imports a quarter, and writes what it compiles: unless it is told to write nothing.
$(VENV)/.installed: $(PINS) | $(BIN)/python
	@echo "installing Baton into $(VENV); the first time takes a minute or more"
	@nohup $(BIN)/python -m deploy.launcher.kernels > $(VENV)/kernels.log 2>&1 < /dev/null &
	@$(call pip-install,$(if $(PYTHONDONTWRITEBYTECODE),,--no-compile))
	@touch $@

$(VENV)/.installed-dev: $(PINS) | $(BIN)/python
	@echo "installing Baton and what its tests need into $(VENV)"
	@$(call pip-install,--requirement requirements/dev.lock)
	@$(BIN)/python -m tests.support.programs
	@touch $(VENV)/.installed $@

up: install
	@exec $(BIN)/baton serve $(ARGS)

# Tests start thousands of Python processes: without cached bytecode each would compile Baton again.
test test-long: export PYTHONDONTWRITEBYTECODE =

test: install-dev
ifeq ($(strip $(TESTS)),)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(QUICK) -n 3 --dist worksteal --expect-skips parts $(PARTS)
	@$(BIN)/python -m pytest $(QUICK) --expect-skips clusters $(CLUSTERS)
else
	@$(BIN)/python -m pytest $(QUICK) $(TESTS)
endif

# In shards of about ten minutes: all, or SHARD=2 or TESTS=... alone, or that of COMMIT=...
# Without COMMIT the results go into docs/lab-notes/long-tests.md.
SHARD ?=
COMMIT ?=
test-long: install-dev
	@$(BIN)/python -m tools.long_tests $(if $(COMMIT),--commit $(COMMIT),--report docs/lab-notes/long-tests.md) \
	  $(if $(SHARD),--shard $(SHARD)) $(TESTS)

# Clients that nobody here wrote, each in an environment of its own, against a cluster that runs:
# make up, then in another terminal make test-clients
CLIENTS ?= light
URL ?= http://127.0.0.1:8000
test-clients: install
	@$(BIN)/python -m tests.clients --url $(URL) --clients $(CLIENTS) \
	  --model-path "$$($(BIN)/baton model pull)"

# The documentation site, in site/: a dead link or a missing page fails.
docs: install-dev
	$(BIN)/zensical build --strict

# The pages of docs/reference that are made from the code; a test compares them with it.
reference: install-dev
	$(BIN)/python -m tools.reference

check: install-dev check-proto docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/python -m tools.prose
	$(BIN)/buf breaking --against $(RELEASED_PROTO)

# Fuzzers of what comes from outside; see docs/explanation/untrusted-input.md.
MINUTES ?= 5
FUZZ ?=
$(VENV)/.installed-fuzz: $(PINS) | $(BIN)/python
	@$(call pip-install,--requirement requirements/dev.lock --requirement requirements/fuzz.lock)
	@touch $(VENV)/.installed $(VENV)/.installed-dev $@

fuzz: $(VENV)/.installed-fuzz
	@$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(FUZZ)

# In an environment of its own: what looks at the packages is none of them.
$(AUDIT_VENV)/.installed: Makefile
	@test -x $(AUDIT_VENV)/bin/python || $(PYTHON) -m venv $(AUDIT_VENV)
	@$(AUDIT_VENV)/bin/python -m pip install pip-audit==2.10.1 cyclonedx-bom==7.5.0
	@touch $@

audit: install $(AUDIT_VENV)/.installed
	@$(BIN)/python -m tools.dependency_audit $(AUDIT_VENV)/bin/pip-audit \
	  "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

# Its head says what it needs.
kind-test:
	@tools/kind_test.sh

sbom: install $(AUDIT_VENV)/.installed
	@$(AUDIT_VENV)/bin/cyclonedx-py environment $(VENV) --pyproject pyproject.toml \
	  --sv 1.6 --of JSON -o baton.cdx.json
	@echo "baton.cdx.json"

# Generated code runs on the versions that it was made with and on newer ones: hence a venv of its
# own, with versions no newer than the oldest that Baton supports.
$(PROTO_VENV)/.installed: Makefile
	@test -x $(PROTO_BIN)/python || $(PYTHON) -m venv $(PROTO_VENV)
	@$(PROTO_BIN)/python -m pip install grpcio-tools==1.76.0 mypy-protobuf==5.1.0
	@touch $@

define generate
PATH="$(CURDIR)/$(PROTO_BIN):$$PATH" $(PROTO_BIN)/python -m grpc_tools.protoc -I proto \
  --python_out=$(1) --grpc_python_out=$(1) --mypy_out=$(1) --mypy_grpc_out=$(1) $(PROTOS)
endef

proto: $(PROTO_VENV)/.installed
	@$(call generate,.)

proto-released: install-dev
	$(BIN)/buf build --exclude-source-info -o $(RELEASED_PROTO)

# In dist/: sdists and wheels, the images' build context, the chart; installed and tried before it ends.
# PYTHONS=... names the interpreters that the client's wheel is tried with.
PYTHONS ?= $(PYTHON)
release: install-dev
	@$(BIN)/python -m tools.release $(addprefix --python=,$(PYTHONS))

check-proto: $(PROTO_VENV)/.installed
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && $(call generate,"$$fresh") \
	  && diff -r -x __init__.py -x __pycache__ "$$fresh/baton/v1" baton/v1 \
	  || { echo "baton/v1 is not what proto/ says: run make proto" >&2; exit 1; }

# In an environment of its own: what pins the packages is none of them.
UPGRADE ?=
$(LOCK_VENV)/.installed: Makefile
	@test -x $(LOCK_VENV)/bin/python || $(PYTHON) -m venv $(LOCK_VENV)
	@$(LOCK_VENV)/bin/python -m pip install uv==0.13.9
	@touch $@

lock: $(LOCK_VENV)/.installed
	@PATH="$(CURDIR)/$(LOCK_VENV)/bin:$$PATH" $(LOCK_VENV)/bin/python -m tools.lock $(UPGRADE) \
	  --cpu-index $(TORCH_CPU_INDEX)/torch/

clean:
	rm -rf $(VENV) $(PROTO_VENV) $(AUDIT_VENV) $(LOCK_VENV) baton.cdx.json build dist site *.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .grimp_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
