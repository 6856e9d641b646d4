package ibverbs

import (
	"os"
	"slices"
	"sync"

	wire "ipoibcm/wire/sa"
)

// This file receives the reports of a subnet administrator: MADs that answer no question. The
// kernel allows one receiver of reports on a port, so the SAPorts of a process on one port share
// it.

// methodAt is the offset of the method in a MAD (IBA 13.4.2).
const methodAt = 3

// A reports receives the reports of a port and gives each to all its SAPorts. Only the first of
// them answers.
type reports struct {
	node string
	file *os.File
	done chan struct{}

	mu    sync.Mutex
	ports []*SAPort
}

// shared holds what the Devices of this process share, by the umad node of the port.
var shared = struct {
	sync.Mutex
	reports map[string]*reports
	gsi     map[string]*gsi
}{reports: map[string]*reports{}, gsi: map[string]*gsi{}}

// takeReports makes p receive the reports of node. It does nothing if another process receives
// them.
func (p *SAPort) takeReports(node string) {
	shared.Lock()
	defer shared.Unlock()
	r := shared.reports[node]
	if r == nil {
		file, _, err := registerSA(node, 1<<wire.MethodReport)
		if err != nil { // another process has them, and answers them
			return
		}
		r = newReports(node, file)
		shared.reports[node] = r
	}
	r.add(p)
}

func newReports(node string, file *os.File) *reports {
	r := &reports{node: node, file: file, done: make(chan struct{})}
	go r.receive()
	return r
}

func (r *reports) add(p *SAPort) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ports = append(r.ports, p)
	p.reports = r
}

// leaveReports undoes takeReports. The last SAPort closes the receiver.
func (p *SAPort) leaveReports() {
	r := p.reports
	if r == nil {
		return
	}
	shared.Lock()
	defer shared.Unlock()
	r.mu.Lock()
	r.ports = slices.DeleteFunc(r.ports, func(o *SAPort) bool { return o == p })
	last := len(r.ports) == 0
	r.mu.Unlock()
	if last {
		delete(shared.reports, r.node)
		_ = r.file.Close()
		<-r.done
	}
}

// Reports implements [verbs.SubnetPort].
func (p *SAPort) Reports() bool { return p.reports != nil }

// answers reports whether p is the SAPort that answers the reports.
func (r *reports) answers(p *SAPort) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.ports) > 0 && r.ports[0] == p
}

func (r *reports) receive() {
	defer close(r.done)
	readMADs(r.file, func() {}, r.give) // what is too long is no report
}

// give gives the octets that were read to every SAPort.
func (r *reports) give(b []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range r.ports {
		p.deliver(b)
	}
}
