# What there is to run. Nothing here needs more than Go, and root for the parts
# that make network namespaces; see docs/dependencies.md for what is optional.

GO ?= go
T  ?= 10s

# Without a usable repository (an archive, a checkout of another user) go build
# would stop where it stamps the revision.
ifneq ($(shell git status --porcelain >/dev/null 2>&1 && echo good),good)
export GOFLAGS := $(strip $(GOFLAGS) -buildvcs=false)
endif

# What version prints, beside what go build finds out. An archive has no repository:
# make build VERSION=1.2 COMMIT=...
VERSION ?= $(shell git describe --tags --dirty 2>/dev/null)
COMMIT  ?= $(shell git describe --always --dirty --abbrev=40 --exclude '*' 2>/dev/null)
LDFLAGS = -X main.version=$(VERSION) -X main.commit=$(COMMIT)
# Without gRPC's page of its requests, which runs templates: TestNoTemplates says what that saves.
TAGS = grpcnotrace

.PHONY: build cni ibverbs packages demo test test-long mutants race fuzz bench bench-full stress cores explore sim scale soak service chaos cluster flood oracle nightly interop interop-full architectures specs pictures dashboard clean

build: ## one static binary, bin/ipoibcmd
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags "$(LDFLAGS)" -tags $(TAGS) -o bin/ipoibcmd ./cmd/ipoibcmd

cni: ## the CNI plugin, bin/ipoibcm
	CGO_ENABLED=0 $(GO) build -trimpath -o bin/ipoibcm ./cmd/ipoibcm-cni

ibverbs: ## bin/ipoibcmd-ibverbs, which has provider ibverbs too; needs a C compiler and libibverbs-dev
	CGO_ENABLED=1 $(GO) build -trimpath -ldflags "$(LDFLAGS)" -tags ibverbs,$(TAGS) -o bin/ipoibcmd-ibverbs ./cmd/ipoibcmd

packages: ## deb, rpm and container image into bin/packages, with the same octets each time; ARCH=arm64 for another machine, VERSION=1.2 for a release
	$(GO) run ./internal/packages $(if $(ARCH),-arch $(ARCH)) $(if $(filter command line,$(origin VERSION)),-version $(VERSION))

demo: build ## the whole product at work between two namespaces; as root
	bin/ipoibcmd demo

test: ## for everybody, minutes: format, vet, staticcheck, requirement rows, the tests in their short form; as root, or those that need namespaces are skipped
	$(GO) run ./internal/check -summary .cache/summary.txt

test-long: ## the long form: more seeds, larger bounds, what is concurrent under the race detector too, other architectures, a tenth of the mutants
	$(GO) run ./internal/check -long -summary .cache/summary-long.txt

mutants: ## break the source in some hundred ways, one at a time; a test must notice each: make mutants ONLY='cm/|P_Key'
	$(GO) run ./internal/mutants $(if $(ONLY),-only '$(ONLY)')

race: ## the tests under the race detector only
	$(GO) run ./internal/check -long -only race

fuzz: ## every fuzz target for T each: make fuzz T=1m; or for ALL together: make fuzz ALL=1h
	$(GO) run ./internal/check $(if $(ALL),-fuzz-all $(ALL),-fuzz $(T))

bench: build ## beside a raw veth pair, VXLAN and wireguard-go, interleaved in one run; writes docs/bench/latest.md; as root, at most 8 minutes
	$(GO) run ./internal/bench -program bin/ipoibcmd -write docs/bench
	$(GO) run ./internal/pictures

bench-full: build ## the same with IPv4, 4 streams, both directions and every rate of loss; about half an hour
	$(GO) run ./internal/bench -program bin/ipoibcmd -write docs/bench -full
	$(GO) run ./internal/pictures

cores: build ## goodput with 1, 2 and 4 data threads, each with 12 % of a processor, beside plain loops, and with 1 and 2 on free processors; writes docs/bench/cores.md; as root, at most 10 minutes
	$(GO) run ./internal/bench -program bin/ipoibcmd -cores -write docs/bench

stress: build ## slow, shared and narrow paths beside raw veth, VXLAN and wireguard-go; writes docs/bench/stress.md; as root, at most 10 minutes; ONLY=bystander picks rows
	$(GO) run ./internal/bench -program bin/ipoibcmd -stress -write docs/bench $(if $(ONLY),-only '$(ONLY)')
	$(GO) run ./internal/pictures

explore: ## connection set-up and subnets in every interleaving, to larger bounds than make test-long; an hour
	$(GO) test ./test/explore -run '^Test(Explore|Subnets)$$' -v -timeout 0 -explore.large

soak: ## load, deaths and restarts for D, ten minutes, and nothing leaks; as root
	$(GO) test ./test/netns -run '^TestSoak$$' -v -count 1 -timeout 0 -soak $(or $(D),10m)

service: ## a reload every 10 s and a handover every minute under load for D, ten minutes: no connection is lost by a reload, and nothing leaks; as root
	$(GO) test ./test/netns -run '^TestServiceSoak$$' -v -count 1 -timeout 0 -servicesoak $(or $(D),10m)

chaos: ## faults of operators, processes and the network under load, for D altogether, ten minutes, with two seeds or SEED; as root
	$(GO) test ./test/netns -run '^TestChaos$$' -v -count 1 -timeout 0 -parallel 2 -chaos $(or $(D),10m) $(if $(SEED),-chaos.seed $(SEED))

flood: ## forged ARP, ND and CM packets and UD data, 50,000 a second and more for ten seconds, five times each between two controls, more often where that decides nothing, and what they cost; as root, 10 to 30 minutes
	$(GO) test ./test/netns -run '^TestFlood$$' -v -count 1 -timeout 40m -flood 10s

cluster: ## HOSTS agents, 60, on a routed underlay without multicast and three members of etcd, with faults for D, ten minutes, by SEED; as root
	$(GO) test ./test/netns -run '^TestCluster$$' -v -count 1 -timeout 0 -cluster $(or $(D),10m) -cluster.hosts $(or $(HOSTS),60) $(if $(SEED),-cluster.seed $(SEED))

oracle: ## 300 random configurations of addresses, routes and rules: packets go where the kernel itself sends them; as root
	$(GO) test ./test/netns -run '^TestOracle$$' -v -count 1 -timeout 30m -oracle 300

sim: ## whole hosts on a hostile network, seeds that nobody has seen, until stopped, for D, or until one fails
	$(GO) test ./test/sim -run '^TestForever$$' -v -count 1 -timeout 0 $(if $(D),-sim.for $(D),-sim.forever)

scale: ## what one interface costs among 100 to 100,000 neighbours, as a table; JSON=file writes it as JSON too
	$(GO) test ./test/scale -run '^TestTable$$' -v -timeout 0 -scale.table $(if $(JSON),-scale.json=$(abspath $(JSON)))

nightly: ## all that takes long, one after the other; goes on where it was stopped; HOUR=1m shortens what has no end of its own, STEPS=sim,soak picks some
	$(GO) run ./internal/nightly $(if $(HOUR),-hour $(HOUR)) $(if $(STEPS),-only $(STEPS))

interop: ## beside kernel Soft-RoCE, librdmacm and siw of two kernels in virtual machines, and the demo on the oldest; KERNEL=6.1 for one; as root, with QEMU
	$(GO) run ./internal/check -interop $(if $(KERNEL),-kernel $(KERNEL)) -summary .cache/interop.txt

interop-full: ## the long form of interop: what else it runs are more rows beside Linux's ib_ipoib, and all on an underlay of 1500; KERNEL=6.1 for one; as root, with QEMU
	$(GO) run ./internal/check -interop -long $(if $(KERNEL),-kernel $(KERNEL)) -summary .cache/interop.txt

architectures: ## vet and link for all of them, the tests as 386 programs, codecs and machines as arm, arm64 and s390x in QEMU's user mode
	$(GO) run ./internal/check -long -only architectures -summary .cache/architectures.txt

specs: ## write docs/specs.md anew
	$(GO) run ./internal/specs

pictures: $(if $(DEMO),build) ## draw docs/pictures from code, traces and measurements; DEMO=1 runs the demo for its picture, as root
	$(if $(DEMO),mkdir -p .cache && bin/ipoibcmd demo >.cache/demo.txt)
	$(GO) run ./internal/pictures $(if $(DEMO),-demo .cache/demo.txt)

dashboard: ## read the dashboard's queries from a real Prometheus over a minute of traffic, and draw them; as root
	$(GO) test ./test/netns -run '^TestDashboardQueries$$' -count 1 -dashboard $(CURDIR)/docs/pictures/dashboard.json
	$(GO) run ./internal/pictures

clean:
	rm -rf bin .cache
