# The developer interface. `make setup` creates .venv/bin/mirrord; other targets run it as needed.

PYTHON ?= $(firstword $(wildcard /usr/bin/python3.11 /usr/bin/python3.12 /usr/bin/python3.13 /usr/bin/python3.14) python3)
BIN := .venv/bin
UPSTREAM ?=
REPO ?=
DOCS ?=
BENCH_ARGS ?=
PYTEST_ARGS ?=
FAULTS_ARGS ?=
SEED ?= 1
MINUTES ?= 30

# Without bytecode, each start of a daemon in the tests compiles it: 0.4 s.
export PYTHONDONTWRITEBYTECODE :=

# Debian packages for the tests; the daemon itself needs only git.
DEBIAN_PACKAGES := libfaketime git git-lfs openssh-client openssh-server openssl jq curl python3.11-venv systemd-container util-linux e2fsprogs strace patch postgresql-15 pgbouncer uidmap bubblewrap bindfs iproute2 skopeo umoci docker-registry pipx podman runc prometheus chromium chromium-driver fonts-dejavu-core slurmctld slurmd slurm-client munge

# Supported versions and the next, found by uv; pyenv's wrappers need the version in the environment.
PYTHONS ?= 3.11 3.12 3.13 3.14
FIND_PYTHON = PYENV_VERSION=$(1) $(CURDIR)/$(BIN)/uv python find --system --no-python-downloads --no-project $(1) 2>/dev/null
PYTHONS_TESTS ?= $(LOWEST_TESTS) tests/docs/test_commands.py tests/cli tests/mirrors tests/heal tests/audit

LOWEST_TOOLS := hatchling==1.31.0 hypothesis mypy pip "psycopg[binary]>=3.3.9" pytest pytest-timeout pytest-xdist ruff
LOWEST_TESTS := $(addprefix tests/,config api/test_application.py api/test_main_job.py client catalog \
	datasets/test_reading.py jobs daemon/test_telemetry.py workers/test_pool.py checkouts/test_pool.py)

.PHONY: first-use help setup harnesses run demo check quick-tests test all-tests try-wheels try-harnesses coverage pythons test-pythons test-lowest deb wheels release release-check release-tools faults lint site bench screenshots debian clean

help:
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 13

setup: .venv/ready ## create the environment with .venv/bin/mirrord

.venv/ready: requirements-dev.lock pyproject.toml packaging/client/pyproject.toml
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! $(PYTHON) -c 'import ensurepip' 2>/dev/null; then \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv; fi
	umask 022; $(PYTHON) -m venv --clear .venv
	@sed -n '/^uv==/,/[^\\]$$/p' requirements-dev.lock >.venv/uv.lock
	$(PIP) --require-hashes -r .venv/uv.lock
	@# uv needs half of the processor time; pip, where only its own configuration names an index
	$(UV) pip sync --python .venv --compile-bytecode --require-hashes requirements-dev.lock || $(PIP) --require-hashes -r requirements-dev.lock
	$(UV) pip install --python .venv --no-deps --no-build-isolation -e . -e packaging/client
	@touch $@

UV := umask 022; $(CURDIR)/$(BIN)/uv --quiet
PIP := umask 022; $(BIN)/python -m pip install --quiet --disable-pip-version-check

# The packages of harnesses, separate from ours. Harbor needs Python 3.12; without it, its tests are skipped.
LOCKS := tests/integrations/requirements

harnesses: .venv/harnesses/ready .venv/harbor/ready .venv/moto/ready .venv/kubernetes/ready .venv/ray/ready ## install the harnesses, the S3 server and the schemas of the tests

.venv/moto/ready: tests/fleet/requirements/moto.lock .venv/ready
	@$(UV) venv --clear --python $(PYTHON) .venv/moto
	@$(UV) pip sync --python .venv/moto --require-hashes tests/fleet/requirements/moto.lock
	@touch $@

.venv/kubernetes/ready: $(LOCKS)/kubernetes.lock .venv/ready
	@$(UV) venv --clear --python $(PYTHON) .venv/kubernetes
	@$(UV) pip sync --python .venv/kubernetes --require-hashes $(LOCKS)/kubernetes.lock
	@touch $@

.venv/harnesses/ready: $(LOCKS)/harnesses.lock $(LOCKS)/nemo-gym.lock packaging/client/pyproject.toml .venv/ready
	@$(UV) venv --clear --python $(PYTHON) .venv/harnesses
	@$(UV) pip sync --python .venv/harnesses --require-hashes $(LOCKS)/harnesses.lock
	@$(UV) pip install --python .venv/harnesses --require-hashes --no-deps --python-version 3.14 -r $(LOCKS)/nemo-gym.lock
	@$(UV) pip install --python .venv/harnesses --no-deps -e packaging/client
	@touch $@

.venv/harbor/ready: $(LOCKS)/harbor.lock packaging/client/pyproject.toml .venv/ready
	@rm -rf .venv/harbor; mkdir .venv/harbor
	@export PATH="$$PATH:$$(printf %s: ~/.pyenv/versions/3.1[2-4]*/bin)"; \
	python=$$($(BIN)/uv python find --system --no-python-downloads '>=3.12,<3.15' 2>/dev/null) || exit 0; \
	set -e; $(UV) venv --clear --python $$python .venv/harbor; \
	$(UV) pip sync --python .venv/harbor --require-hashes $(LOCKS)/harbor.lock; \
	$(UV) pip install --python .venv/harbor --no-deps -e packaging/client
	@touch $@

.venv/ray/ready: $(LOCKS)/ray.lock packaging/client/pyproject.toml .venv/ready
	@$(UV) venv --clear --python $(PYTHON) .venv/ray
	@$(UV) pip sync --python .venv/ray --require-hashes $(LOCKS)/ray.lock
	@$(UV) pip install --python .venv/ray --no-deps -e packaging/client
	@touch $@

run: setup ## run the daemon in the foreground
	$(BIN)/mirrord serve

demo: setup ## run the main job once on real repositories, in a scratch directory
	@$(BIN)/python benchmarks/demo.py $(if $(UPSTREAM),--upstream '$(UPSTREAM)')

check: setup ## style, types, layers and the quick tests: no root, no Debian packages, 90 s
	@$(MAKE) --no-print-directory --jobs=3 --output-sync=line quick-tests lint site

quick-tests: .venv/compiled
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not root and not slow and not release" $(PYTEST_ARGS)

test: debian setup ## all tests and checks except those of a release; one test: PYTEST_ARGS='-k NAME'
	@$(MAKE) --no-print-directory --jobs=3 lint site all-tests

# Six, because a third of them wait for a daemon, a lock or a disk; two processors are idle 13 % of the time with five.
all-tests: .venv/compiled try-wheels try-harnesses
	$(BIN)/python -m pytest -n 6 --dist loadfile --no-loadscope-reorder --durations=25 -m "not release" $(PYTEST_ARGS)

# Else each of pytest's processes compiles all files of a fresh clone, which takes 14 s of a processor.
.venv/compiled: .venv/ready
	@$(BIN)/python -m pytest --collect-only --quiet >/dev/null || true
	@touch $@

try-wheels:
	@$(MAKE) --no-print-directory wheels || echo 'no wheels here: the tests of the package are skipped' >&2

try-harnesses:
	@$(MAKE) --no-print-directory harnesses || echo 'no harnesses here: their tests are skipped' >&2

coverage: debian setup ## all tests, with the coverage of mirrord/, also in workers and children
	@area=$$(mktemp -d) && chmod 1777 $$area && trap 'rm -rf "$$area"' EXIT && export COVERAGE_AREA=$$area && \
	{ $(BIN)/python -m coverage run -m pytest -n 4 --dist loadfile --no-loadscope-reorder -m "not release" $(PYTEST_ARGS); status=$$?; \
	$(BIN)/python -m coverage combine --quiet; $(BIN)/python -m coverage report --fail-under=90 && exit $$status; }

pythons: $(addprefix .venv/python,$(PYTHONS)) ## environments with each supported Python that uv finds

.venv/python%: .venv/ready
	@rm -rf $@; \
	if $(BIN)/python -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "$*")'; then ln -s . $@; exit; fi; \
	python=$$($(call FIND_PYTHON,$*)) || { echo "no Python $* here: not tested with it" >&2; exit 0; }; \
	set -e; umask 022; uv="$(BIN)/uv --quiet"; \
	python=$$($(BIN)/python tests/support/reachable.py $$python .venv/copies/$*); \
	$$uv venv --seed --python $$python $@; \
	$$uv pip sync --python $@ --require-hashes requirements-dev.lock; \
	$$uv pip install --python $@ --no-deps --no-build-isolation -e . -e packaging/client

test-pythons: pythons ## many of the tests with each supported Python that uv finds
	@status=0; for version in $(PYTHONS); do \
		[ ! -d .venv/python$$version ] || { echo "Python $$version:"; \
		.venv/python$$version/bin/python -m pytest -n 2 --dist loadfile -q -m "not root" $(PYTEST_ARGS) $(PYTHONS_TESTS) || status=1; }; \
	done; exit $$status

test-lowest: ## some of the tests with the oldest allowed versions of dependencies
	@scratch=$$(mktemp -d); trap 'rm -rf "$$scratch"' EXIT; set -e; \
	$(PYTHON) -m venv $$scratch/uv; $$scratch/uv/bin/python -m pip install --quiet --disable-pip-version-check uv; \
	$(PYTHON) -m venv --without-pip $$scratch/venv; \
	install="$$scratch/uv/bin/uv pip install --quiet -p $$scratch/venv/bin/python"; \
	$$install --resolution lowest-direct -r pyproject.toml -e packaging/client; $$install --no-deps -e .; \
	$$install $(LOWEST_TOOLS); \
	$$scratch/venv/bin/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS) $(LOWEST_TESTS)

faults: debian setup ## inject faults everywhere and write docs/reliability.md; SEED=number
	PYTHONPATH=tests:tests/support $(BIN)/python -m faults --seed $(SEED) --document docs/reliability.md $(FAULTS_ARGS)

lint: setup ## style, types, layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

site: .venv/site/ready ## build the documents as a site in dist/site; no link leads nowhere
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python packaging/site/build.py

.venv/site/ready: packaging/site/requirements.lock .venv/ready
	@$(UV) venv --clear --python $(BIN)/python .venv/site
	@$(UV) pip sync --python .venv/site --require-hashes packaging/site/requirements.lock
	@touch $@

first-use: wheels ## type the README's session in a clean container; docs/installation.md has what it printed
	PYTHONPATH=tests/support $(BIN)/python packaging/first_use.py $(if $(UPSTREAM),--upstream '$(UPSTREAM)')

deb: setup ## build the Debian packages in dist/
	@$(BIN)/python packaging/deb.py dist

wheels: setup ## download the wheels of requirements.lock, for the package and its tests
	@$(BIN)/python packaging/deb.py

release: setup release-tools ## build wheels, sdists, deb, SBOM and SHA256SUMS of this commit in dist/
	@$(BIN)/python packaging/release.py dist

release-check: DEBIAN_PACKAGES += lintian bats cargo cmake gcc golang-go libc6-dev make nodejs
release-check: debian setup pythons wheels harnesses release-tools ## run the release tests, say what they skipped; build twice, compare bytes; lintian
	$(BIN)/python -m pytest -m release -rs tests/packaging tests/environments/test_image_languages.py
	MIRRORD_DAMAGES=all MIRRORD_HARNESSES=all $(BIN)/python -m pytest -rs tests/audit/test_damages.py tests/heal/test_service.py \
		tests/daemon/test_home_work.py tests/integrations/test_without_mounts.py
	@$(BIN)/python packaging/release.py --check dist
	@if command -v lintian >/dev/null; then lintian --fail-on error --display-level '>=error' dist/*.deb && echo 'lintian: no errors'; \
	else echo 'no lintian here: the packages are not checked by it' >&2; fi

release-tools: .venv/release/ready

.venv/release/ready: packaging/release.lock .venv/ready
	@$(UV) venv --clear --python $(BIN)/python .venv/release
	@$(UV) pip sync --python .venv/release --require-hashes packaging/release.lock
	@touch $@

bench: setup ## benchmark against git; REPO=path of a repository
	$(BIN)/python benchmarks/bench.py $(foreach repo,$(REPO),--repo '$(repo)') $(if $(DOCS),--docs) $(BENCH_ARGS)

screenshots: debian setup ## take the pictures of docs/observability/README.md; MINUTES of work in their plots
	PYTHONPATH=tests/support $(BIN)/python tests/web/screenshots.py docs --minutes $(MINUTES)

debian:
	@if command -v dpkg-query >/dev/null && [ "$$(id -u)" = 0 ]; then \
		missing=$$(for p in $(DEBIAN_PACKAGES); do dpkg-query -W -f='$${Status}' $$p 2>/dev/null | grep -q ' installed' || echo $$p; done); \
		[ -z "$$missing" ] || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; }; fi

clean: ## remove generated files
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
