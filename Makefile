# Every task of the book starts here; `make help` lists them.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-builtin-rules --no-print-directory
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# ------------------------------------------------------------------ environment
# An environment keeps the Python and the torch that it was made with until another is named.

VENV := .venv
BIN := $(VENV)/bin
-include $(VENV)/made-with.mk
PYTHON ?= python3
SYSTEM_TORCH ?= 0

ifeq ($(filter $(SYSTEM_TORCH),0 1),)
$(error SYSTEM_TORCH is 1 (use the torch and triton of $(PYTHON)) or 0 (install the pinned ones), not '$(SYSTEM_TORCH)')
endif

PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
PINS_HASH := $(shell cat requirements.txt constraints.txt | sha256sum | cut -c1-12)
PACKAGES := $(VENV)/packages-python$(PYTHON_VERSION)-system$(SYSTEM_TORCH)-$(PINS_HASH)
READY := $(VENV)/ready
HUB_READY := $(VENV)/hub-$(shell cat deploy/requirements.txt deploy/ngshare/client.txt 2>/dev/null | sha256sum | cut -c1-12)

# Packages that the host brings along when SYSTEM_TORCH=1; neither their pins nor their locks apply then.
TORCH_LINES := ^(torch|triton|cuda|nvidia)[a-z0-9-]*==

# A checkout that came with its packages, as `make wheelhouse` packs it, installs from them and from nowhere else.
ifneq ($(wildcard wheelhouse/.),)
export PIP_CONFIG_FILE := /dev/null
export PIP_NO_INDEX := 1
export PIP_FIND_LINKS := $(CURDIR)/wheelhouse
endif

# Kernels of this environment come before any that the user has registered under the same name.
export JUPYTER_PREFER_ENV_PATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tools and tests read and write UTF-8, whatever the locale.
export PYTHONUTF8 := 1

$(PACKAGES):
	@case "$(PYTHON_VERSION)" in 3.11|3.12|3.13) ;; \
	  "") echo "make: cannot run '$(PYTHON)'. Python 3.11, 3.12 or 3.13 is needed; name one: make PYTHON=python3.12 book" >&2; exit 1 ;; \
	  *) echo "make: Python 3.11, 3.12 or 3.13 is needed, $(PYTHON) is $(PYTHON_VERSION). Name another: make PYTHON=python3.12 book" >&2; exit 1 ;; \
	esac
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "make: $(PYTHON) cannot make environments. On Debian: sudo apt-get install -y python3-venv" >&2; exit 1; }
ifeq ($(SYSTEM_TORCH),1)
	@$(PYTHON) -c 'import torch, triton' || \
	  { echo "make: SYSTEM_TORCH=1, but $(PYTHON) has no torch and triton that work (see above)" >&2; exit 1; }
endif
	@echo "== environment (1/3): $(VENV) with Python $(PYTHON_VERSION)"
	@base=$$($(PYTHON) -c 'import sys; print(sys._base_executable)'); rm -rf $(VENV); \
	  "$$base" -m venv $(if $(filter 1,$(SYSTEM_TORCH)),--system-site-packages) $(VENV)
ifeq ($(SYSTEM_TORCH),1)
	@echo "== environment (2/3): the pinned packages, with the host's torch and triton"
	@# --system-site-packages reaches the base Python only; the path file also reaches a host that is itself an environment.
	@host=$$($(PYTHON) -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))'); \
	  $(BIN)/python -c 'import torch, triton' 2>/dev/null || \
	  echo "$$host" > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/host-torch.pth"
	@grep -vE '$(TORCH_LINES)' requirements.txt > $(VENV)/requirements.txt
	@grep -vE '$(TORCH_LINES)' constraints.txt > $(VENV)/constraints.txt
	@$(BIN)/python -m pip install --force-reinstall -r $(VENV)/requirements.txt -c $(VENV)/constraints.txt
else
	@echo "== environment (2/3): the pinned packages (the first time this downloads torch, several GB with CUDA)"
	@$(BIN)/python -m pip install -r requirements.txt -c constraints.txt
endif
	@printf 'PYTHON ?= %s\nSYSTEM_TORCH ?= %s\n' "$$(command -v $(PYTHON))" $(SYSTEM_TORCH) > $(VENV)/made-with.mk
	@touch $@

$(READY): $(PACKAGES) pyproject.toml
	@echo "== environment (3/3): this checkout as the package flashlib"
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# ------------------------------------------------------------------ packages of npm
# They are installed where their lock is copied to; a packed checkout brings those that build the book along.

NODE := _build/node
NODE_FILES := $(addprefix book/_tools/node/,package.json package-lock.json)
NODE_HASH := $(shell cat $(NODE_FILES) 2>/dev/null | sha256sum | cut -c1-12)
NODE_READY := $(NODE)/ready-$(NODE_HASH)
PACKED_NODE := wheelhouse/node_modules
NPM_CI := npm ci --no-audit --no-fund --loglevel=error

$(NODE_READY):
	@.ci/need node:nodejs $(if $(wildcard $(PACKED_NODE)),,npm:npm)
	@echo "== packages of npm"
	@rm -rf $(NODE) && mkdir -p $(NODE) && cp $(NODE_FILES) $(NODE)
ifneq ($(wildcard $(PACKED_NODE)),)
	@cp -r $(PACKED_NODE) $(NODE)
else
	@cd $(NODE) && $(NPM_CI) --omit=dev
endif
	@touch $@

.PHONY: node-packages
node-packages: $(NODE_READY)

# ------------------------------------------------------------------ book

BOOK := _build/html/book/index.html
BOOK_DONE := _build/book-is-complete
PAGES_DONE := _build/pages-are-built
ZIPS := _build/assignments
ZIPS_DONE := $(ZIPS)/all-are-made
PDF := _build/pdf/flashattention-book.pdf
BOOK_SOURCES := Makefile _config.yml _toc.yml \
  $(wildcard flashlib/*.py flashlib/*/*.py flashlib/*/*/*.py flashlib/stepper/static/*) \
  $(wildcard exercises/source/*/*.ipynb) \
  $(shell find book -not -path '*/.*' -not -path '*/__pycache__*' -type f) book/. book/_static/.

ZIP_SOURCES := constraints.txt book/_tools/practice.py \
  $(wildcard exercises/source/*/*.ipynb exercises/grader/*.py exercises/grader/checks/*.py) \
  $(wildcard flashlib/__init__.py flashlib/drawn.py flashlib/exercise.py flashlib/plain_checks.py flashlib/kernels/__init__.py) \
  $(wildcard flashlib/machine/*.py flashlib/iomodel/*.py)

# While only pages change, Sphinx reads those and keeps what it knows of the others. It writes every page anew, so
# that links and numbers are right and removed pages vanish. A build that failed leaves no $@, so the next one reads
# everything again and repeats its warnings.
$(PAGES_DONE): $(READY) $(NODE_READY) $(BOOK_SOURCES)
	@echo "== book: warnings are errors"
	@rm -rf _build/html $(if $(filter-out book/%.ipynb book/%.md book/.,$?),_build/.doctrees) $@
	@$(BIN)/jupyter-book build . -W -n --keep-going
	@touch $@

$(ZIPS_DONE): $(READY) $(ZIP_SOURCES)
	@echo "== assignments for practice, without solutions"
	@$(BIN)/python book/_tools/practice.py $(ZIPS)
	@touch $@

$(BOOK_DONE): $(PAGES_DONE) $(ZIPS_DONE)
	@rm -rf _build/html/assignments
	@mkdir -p _build/html/assignments
	@cp $(ZIPS)/*.zip _build/html/assignments/
	@touch $@

$(PDF): $(BOOK_DONE) book/_tools/pdf.py
	@echo "== PDF"
	@.ci/need $(BROWSER)
	@mkdir -p $(dir $@)
	@$(BIN)/python book/_tools/pdf.py _build/html $@

.PHONY: book serve lighthouse pdf
book: $(BOOK_DONE) ## build the book and say where to open it
	@echo "The book is at file://$(abspath $(BOOK)) (or run: make serve)"

PORT ?= 8000
serve: $(BOOK_DONE) ## build the book and serve it (PORT=8000)
	@$(BIN)/python book/_tools/serve.py _build/html --port $(PORT)

PAGES ?= book/index book/online book/errata
LIGHTHOUSE := $(NODE)/node_modules/.bin/lighthouse
$(LIGHTHOUSE): $(NODE_READY)
	@cd $(NODE) && $(NPM_CI)
	@touch $@

lighthouse: $(BOOK_DONE) $(LIGHTHOUSE) ## measure the speed of pages (PAGES="book/index book/online")
	@.ci/need $(BROWSER)
	@$(BIN)/python book/_tools/lighthouse.py _build/html $(PAGES)

pdf: $(PDF) ## build the book and print it into one PDF, which the site then offers
	@echo "The PDF is at $(abspath $(PDF))"

# ------------------------------------------------------------------ notebooks

LAB_PORT ?= 8888
.PHONY: lab
lab: $(READY) ## open the chapters in JupyterLab, for this machine alone (LAB_PORT=8888)
	@$(BIN)/python -m flashlib
	@JUPYTER_CONFIG_PATH=deploy/jupyter exec $(BIN)/jupyter lab --no-browser --ip=127.0.0.1 --port=$(LAB_PORT) \
	  --LabApp.default_url=/lab/tree/book/index.ipynb $(if $(filter 0,$(shell id -u)),--allow-root)

# The image of deploy/Dockerfile. IMAGE_OPTIONS="--build-arg BASE=..." builds it on another base.

IMAGE := flashattention-book
IMAGE_OPTIONS ?=
.PHONY: image
image: ## build the container's image, with Docker or else with buildah
	@if docker info >/dev/null 2>&1; then build=(docker build); \
	else .ci/need buildah:buildah runc:runc; build=(buildah bud --format docker --isolation chroot --ulimit nofile=1024:1024); fi; \
	  "$${build[@]}" --file deploy/Dockerfile --tag $(IMAGE) $(IMAGE_OPTIONS) .

# ------------------------------------------------------------------ machines without network
# A tar of this checkout with every package in its folder wheelhouse; unpacked, make installs from there.

PACK := flashattention-book-python$(PYTHON_VERSION)-$(shell uname -s -m | tr 'A-Z ' 'a-z-')$(if $(filter 1,$(SYSTEM_TORCH)),-without-torch)
.PHONY: wheelhouse
wheelhouse: $(NODE_READY) ## pack the checkout and all packages for a machine without network (PYTHON=..., SYSTEM_TORCH=1: no torch)
	@rm -rf _build/pack && mkdir -p _build/pack/flashattention-book
	@$(PYTHON) -m venv _build/pack/env
	@for name in requirements constraints; do \
	  grep -vE '$(if $(filter 1,$(SYSTEM_TORCH)),$(TORCH_LINES),^$$)' $$name.txt > _build/pack/$$name.txt; done
	@echo "== packages for Python $(PYTHON_VERSION)$(if $(filter 1,$(SYSTEM_TORCH)), without torch and triton)"
	@_build/pack/env/bin/python -m pip wheel --quiet --no-cache-dir --wheel-dir _build/pack/flashattention-book/wheelhouse \
	  -r _build/pack/requirements.txt -r deploy/requirements.txt -c _build/pack/constraints.txt
	@_build/pack/env/bin/python -m pip wheel --quiet --no-cache-dir --no-deps --wheel-dir _build/pack/flashattention-book/wheelhouse \
	  -r deploy/ngshare/client.txt
	@cp -r $(NODE)/node_modules _build/pack/flashattention-book/wheelhouse
	@git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents --target-directory=_build/pack/flashattention-book
	@tar -cf _build/$(PACK).tar -C _build/pack flashattention-book
	@rm -rf _build/pack
	@echo "Copy _build/$(PACK).tar ($$(du -m _build/$(PACK).tar | cut -f1) MB), then on the other machine:"
	@echo "  tar xf $(PACK).tar"
	@echo "  make -C flashattention-book$(if $(filter 1,$(SYSTEM_TORCH)), SYSTEM_TORCH=1) lab"

# ------------------------------------------------------------------ checks

FIRST_TESTS := tests/test_environment.py tests/test_house.py
BOOK_TESTS := $(patsubst %,tests/test_%.py,book math notebooks browser stepper_browser quiz_browser references buttons live register_machine landing pdf lab moved size)
HUB_TESTS := tests/test_hub.py tests/test_ngshare.py
IMAGE_TESTS := tests/test_image.py
PDF_TESTS := tests/test_pdf.py
LIBRARY_TESTS := $(filter-out $(FIRST_TESTS) $(BOOK_TESTS) $(HUB_TESTS) $(IMAGE_TESTS), $(wildcard tests/test_*.py))
NBVAL := --nbval --nbval-current-env --nbval-sanitize-with=book/_tools/nbval.cfg
NOTEBOOKS := $(wildcard book/*.ipynb book/*/*.ipynb exercises/source/*/*.ipynb)
# Two processes with one thread each: with two threads each they would wait for each other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
IN_PARALLEL := --timeout=600 -n $(or $(JOBS),2) --dist
# A run hung in these tests once, nobody saw where. One that hangs now fails and shows its stack.
HANGS := --timeout=240

BROWSER := chromium:chromium,fonts-dejavu-core
SANDBOX := bwrap:bubblewrap
PROXY := configurable-http-proxy:node-configurable-http-proxy

.PHONY: test test-library test-one test-all lint format nbval
test: ## run every quick check
	@.ci/need $(BROWSER) $(SANDBOX)
	@echo "== test 1/4: environment and style"
	@$(MAKE) lint
	@$(PYTEST) $(IN_PARALLEL) load $(FIRST_TESTS)
	@echo "== test 2/4: library"
	@$(MAKE) test-library
	@echo "== test 3/4: notebooks print what they printed before, and every check can fail; book"
	@$(MAKE) -j2 --output-sync=recurse nbval book
	@echo "== test 4/4: pages, in a browser too"
	@$(PYTEST) $(IN_PARALLEL) loadgroup $(HANGS) -m "not slow" $(BOOK_TESTS)
	@echo "make test: all green"

test-library: $(READY) ## run the quick tests of the library, the grader and the tools: on a GPU, kernels are compiled
	@.ci/need $(SANDBOX)
	@$(PYTEST) $(IN_PARALLEL) loadfile -m "not slow" $(LIBRARY_TESTS)

test-one: $(READY) ## run some tests (T=tests/test_api.py, or T="tests/test_api.py -k scale")
	@$(if $(T),,echo "make: name a test: make test-one T=tests/test_api.py::test_scale_is_any_real_number" >&2; exit 1)
	@$(PYTEST) $(T)

test-all: $(BOOK_DONE) ## run the slow rest: all pages in all modes, the PDF
	@.ci/need $(BROWSER) $(SANDBOX)
	@$(MAKE) -j2 --output-sync=recurse slow slow-pdf
	@echo "make test-all: all green"

# The first file has one long test: started last, it would run alone at the end.
.PHONY: slow slow-pdf
slow: $(READY)
	@$(PYTEST) $(IN_PARALLEL) loadgroup $(HANGS) -m slow tests/test_wheelhouse.py \
	  $(filter-out $(PDF_TESTS) tests/test_wheelhouse.py,$(wildcard tests/test_*.py))

slow-pdf: $(PDF)
	@$(PYTEST) $(PDF_TESTS)

lint: $(READY) ## check all code with ruff: its rules, and the formatting
	@echo "== lint: rules of pyproject.toml, at most 88 columns in modules"
	@$(BIN)/ruff check .
	@echo "== lint: modules are formatted"
	@$(BIN)/ruff format --check .
	@echo "== lint: notebooks are formatted, 80 columns wide"
	@$(BIN)/ruff format --check --line-length 80 $(NOTEBOOKS)

format: $(READY) ## format modules and notebooks
	@$(BIN)/ruff format .
	@$(BIN)/ruff format --line-length 80 $(NOTEBOOKS)

# The kernels load tests/doubt.py, which makes mistakes in the sides of every check and wants the check to fail.
nbval: export IPYTHONDIR := $(CURDIR)/_build/ipython
nbval: export PYTHONPATH := $(CURDIR)/tests$(if $(PYTHONPATH),:$(PYTHONPATH))
nbval: $(READY) ## run the notebooks and compare what they print (NB=book/standard.ipynb for one)
	@mkdir -p $(IPYTHONDIR)/profile_default
	@printf 'c.InteractiveShellApp.%s\n' 'extensions = ["doubt"]' 'reraise_ipython_extension_failures = True' \
	  > $(IPYTHONDIR)/profile_default/ipython_config.py
	@$(PYTEST) -p notebook_kernels $(IN_PARALLEL) loadfile $(NBVAL) --nbval-cell-timeout=300 $(or $(NB),book)

# torch, triton and NumPy: the oldest and the newest that pyproject.toml admits, on a CPU. Triton 3.6 interprets
# with NumPy before 2.4 only.
MATRIX ?= 2.10.0/3.6.0/2.3.5 2.13.0/3.7.1/2.4.6
MATRIX_TESTS := $(patsubst %,tests/test_%.py,api gradients flash_forward backward layers plans internals)
.PHONY: test-matrix test-hub test-image
test-matrix: ## test the kernels with the oldest and the newest torch and triton (downloads both)
	@for row in $(MATRIX); do \
	  IFS=/ read -r torch triton numpy <<< "$$row"; folder=_build/matrix/torch-$$torch; \
	  echo "== torch $$torch, triton $$triton, NumPy $$numpy"; \
	  rm -rf $$folder && $(PYTHON) -m venv $$folder; \
	  grep -vE '$(TORCH_LINES)|^numpy==' constraints.txt > $$folder/constraints.txt; \
	  $$folder/bin/python -m pip install --quiet -c $$folder/constraints.txt torch==$$torch triton==$$triton numpy==$$numpy \
	    matplotlib ipython ipykernel nbval pytest hypothesis setuptools transformers; \
	  $$folder/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .; \
	  OMP_NUM_THREADS=1 $$folder/bin/python -m pytest -q -p no:cacheprovider -m "not slow" $(MATRIX_TESTS); \
	  OMP_NUM_THREADS=1 $$folder/bin/python -m pytest -q -p no:cacheprovider $(NBVAL) \
	    book/standard.ipynb book/flash2.ipynb; \
	done

test-hub: $(HUB_READY) ## a class in a browser: sign-up, release, hand in, grade, feedback (as root)
	@.ci/need $(BROWSER) $(SANDBOX) $(PROXY)
	@$(PYTEST) $(HUB_TESTS)

test-image: $(HUB_READY) ## build the image on a Debian base, run a chapter in it without network, let a hub start it (as root)
	@.ci/need $(BROWSER) $(SANDBOX) $(PROXY) podman:podman buildah:buildah runc:runc mmdebstrap:mmdebstrap
	@$(PYTEST) $(IMAGE_TESTS)

# ------------------------------------------------------------------ instructors
# The course folder holds the secret that marks depend on, and the marks: it stands outside of the repository.

COURSE ?= $(HOME)/flashattention-course

.PHONY: assignments grade
assignments: $(READY) ## make the zips for students, from a secret of your own (COURSE=folder, STEP=online for one)
	@$(BIN)/python -m exercises.grader release --course "$(COURSE)" $(STEP)

grade: $(READY) ## mark what was handed in and write COURSE/marks.csv (SUBMISSIONS=folder, COURSE=..., STEP=..., again: STUDENT=..., TASK=...)
	@[ -n "$(SUBMISSIONS)" ] || { echo "make: name the folder: make grade SUBMISSIONS=folder" >&2; exit 1; }
	@$(BIN)/python -m exercises.grader grade --course "$(COURSE)" --submissions "$(SUBMISSIONS)" $(STEP) \
	  $(if $(STUDENT),--student "$(STUDENT)") $(if $(TASK),--task "$(TASK)")

# A hub for the class on this machine. It makes accounts, so root must start it; it listens on 127.0.0.1 alone.

.PHONY: feedback hub hub-packages
$(HUB_READY): $(READY)
	@echo "== packages of the hub"
	@grep -vE '$(if $(filter 1,$(SYSTEM_TORCH)),$(TORCH_LINES),^$$)' constraints.txt > $(VENV)/hub-constraints.txt
	@$(BIN)/python -m pip install --quiet -r deploy/requirements.txt -c $(VENV)/hub-constraints.txt
	@$(BIN)/python -m pip install --quiet --no-deps -r deploy/ngshare/client.txt
	@touch $@

hub-packages: $(HUB_READY)

feedback: $(READY) ## give feedback on what was graded to the students, through nbgrader's exchange (STEP=..., COURSE=...)
	@$(BIN)/python deploy/hub/feedback.py "$(COURSE)" $(STEP)

hub: $(HUB_READY) ## start a JupyterHub for a class on this machine, on 127.0.0.1:8000 (as root)
	@.ci/need $(PROXY) $(SANDBOX)
	@[ "$$(id -u)" = 0 ] || { echo "make: the hub makes accounts, so root must start it: sudo make hub" >&2; exit 1; }
	@PATH="$(abspath $(BIN)):$$PATH" exec $(BIN)/jupyterhub --config deploy/hub/jupyterhub_config.py

# ------------------------------------------------------------------ authors

.PHONY: execute bench clean help
execute: $(READY) ## run the notebooks and write down what they print (NB=book/standard.ipynb for one)
	@$(BIN)/python book/_tools/notebooks.py execute $(NB)

bench: $(READY) ## judge the kernels, time them next to PyTorch's, write the records (needs a CUDA GPU; PASS=hopper for one)
	@$(BIN)/python -m benchmarks $(PASS)

clean: ## remove what was built; the environment in .venv stays
	@rm -rf _build .pytest_cache .ruff_cache .hypothesis *.egg-info
	@find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

help: ## this list
	@echo "make TARGET [PYTHON=python3.12] [SYSTEM_TORCH=1: use the torch and triton that this Python already has]"
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "  %-13s %s\n", $$1, $$2 }' | sort
