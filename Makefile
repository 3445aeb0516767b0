# Carrel's build. Everything that is fetched or made lies under bin, dist and .cache, which git ignores.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X main.version=$(VERSION)
GOBUILD := go build -trimpath -ldflags '$(LDFLAGS)'
# go-nvml calls functions that newer NVML headers mark as deprecated; the rest is what Go itself passes to the C compiler.
export CGO_CFLAGS ?= -O2 -g -Wno-deprecated-declarations
# CGO=0 builds a carreld without NVML, for a machine without C compiler or GPU.
CGO ?= 1

# make dist: the programs and where they run.
CLI_TARGETS := linux/amd64 linux/arm64 darwin/amd64 darwin/arm64 windows/amd64 windows/arm64
HOST_TARGETS := linux/amd64 linux/arm64

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: ## bin/carreld, bin/carrel and bin/carrel-init for this machine (CGO=0: carreld without NVML)
	@deploy/scripts/require.sh go git $(if $(filter 0,$(CGO)),,gcc)
	CGO_ENABLED=$(CGO) $(GOBUILD) -o bin/carreld ./services/cmd/carreld
	CGO_ENABLED=0 $(GOBUILD) -o bin/carrel ./cli/cmd/carrel
	CGO_ENABLED=0 $(GOBUILD) -o bin/carrel-init ./agent/cmd/carrel-init

.PHONY: generate
generate: ## gen/go and gen/ts from proto (buf with local plugins, pinned; unchanged files are not touched)
	@deploy/scripts/require.sh go node
	@deploy/scripts/generate.sh

.PHONY: format
format: ## gofumpt over all Go files that are not generated
	@deploy/scripts/tool.sh gofumpt
	git ls-files -z --cached --others --exclude-standard '*.go' ':!gen' | xargs -0 --no-run-if-empty .cache/bin/gofumpt -w

.PHONY: test
test: ## all tests with -race: unit, store, rpc and end to end on a real engine (PKG=./agent/... for a part)
	@deploy/scripts/test.sh $(PKG)

.PHONY: check
check: ## format, lint, wire breaks, generated code, vulnerabilities, cgo-off build, sizes, TypeScript (STEP=lint for one)
	@deploy/scripts/check.sh $(STEP)

.PHONY: bench
bench: build ## ratios against bare Docker and OpenSSH in one run, see docs/testing.md
	@deploy/scripts/bench.sh

.PHONY: soak
soak: build ## the long tests: churn, faults and leaks for SOAK_TIME (default 30m)
	@deploy/scripts/soak.sh

.PHONY: images
images: ## carrel/base, carrel/test, carrel/busybox and carrel/scratch in this machine's Docker engine
	@deploy/scripts/engine.sh
	@deploy/image/image.sh all

.PHONY: quickstart
quickstart: ## from nothing to `ssh demo.carrel` on this machine: engine, build, image, carreld dev, sign-in, workspace
	@deploy/quickstart/quickstart.sh up

.PHONY: quickstart-down
quickstart-down: ## stops what quickstart started and keeps all data
	@deploy/quickstart/quickstart.sh down

.PHONY: dist
dist: ## release files for all systems in dist with SHA256SUMS; the CLIs also where the gateway serves them (bin/cli)
	@deploy/scripts/require.sh go git gcc
	@VERSION='$(VERSION)' LDFLAGS='$(LDFLAGS)' CLI_TARGETS='$(CLI_TARGETS)' HOST_TARGETS='$(HOST_TARGETS)' deploy/scripts/dist.sh

.PHONY: clean
clean: ## removes bin and dist (make clean ALL=1: also .cache with tools and image archives)
	rm -rf bin dist $(if $(ALL),.cache gen/ts/node_modules)
