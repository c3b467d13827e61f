FUZZTIME ?= 60s

.PHONY: help setup demo test check lint fuzz test-matrix test-pgx jaeger test-jaeger bench bench-short

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

setup: ## install PostgreSQL and PgBouncer where they are missing
	@scripts/setup

demo: setup ## see lost locks, and then see them caught
	go run ./cmd/pgadvlock demo

# Fuzzing would spend most of its time on making what it found smaller: 1x is once.
test: setup ## all tests, against real servers
	go test -race -p 1 ./...
	go test -run '^TestHostileTexts$$' ./internal/locksql
	go test -run '^$$' -fuzz '^FuzzLexer$$' -fuzztime 10s -fuzzminimizetime 1x ./internal/locksql
	go test -run '^$$' -fuzz '^FuzzMentions$$' -fuzztime 10s -fuzzminimizetime 1x ./internal/locksql
	cd integration && go test ./...

check: lint test ## lint and test: what a change has to pass

lint: ## gofmt, go vet for three systems, staticcheck
	@unformatted=$$(gofmt -l .); [ -z "$$unformatted" ] || { echo "gofmt -w $$unformatted"; exit 1; }
	GOOS=linux go vet ./...
	GOOS=darwin go vet ./...
	GOOS=windows go vet ./...
	for m in examples integration bench; do (cd $$m && go vet ./...) || exit 1; done
	go tool -modfile=tools/go.mod staticcheck ./...

fuzz: ## longer fuzzing, FUZZTIME=60s for each target
	go test -run '^$$' -fuzz '^FuzzLexer$$' -fuzztime $(FUZZTIME) -fuzzminimizetime 1x ./internal/locksql
	go test -run '^$$' -fuzz '^FuzzMentions$$' -fuzztime $(FUZZTIME) -fuzzminimizetime 1x ./internal/locksql
	go test -run '^$$' -fuzz '^FuzzDSN$$' -fuzztime $(FUZZTIME) -fuzzminimizetime 1x .

test-matrix: setup ## the tests against PostgreSQL 14 to 18, which it fetches with npm
	scripts/test-matrix

test-pgx: setup ## pgx's own tests of its database/sql driver, on this one
	scripts/test-pgx

jaeger: setup ## see the traces of three pods in Jaeger, which it builds once (minutes)
	cd examples && ../scripts/jaeger go run ./jaeger

test-jaeger: setup ## the examples' tests, against that Jaeger
	cd examples && ../scripts/jaeger go test -count=1 ./...

bench: setup ## what it costs, beside pgx and others: eight minutes, on a machine with nothing else to do
	cd bench && go build -o bench . && ./bench -md ../BENCHMARKS.md -plots ../docs

bench-short: setup ## the same in less than a minute, and less sure
	cd bench && go build -o bench . && ./bench -short
