.DEFAULT_GOAL := help
SHELL := /bin/bash

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: generate
generate: ## gen/go and gen/ts from proto (buf, local plugins, no network once the tools are there)
	@deploy/scripts/generate.sh
