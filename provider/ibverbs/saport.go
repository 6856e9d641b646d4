package ibverbs

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	wire "ipoibcm/wire/sa"
)

// This file is access to subnet administration of an InfiniBand port through ib_umad, and what the
// kernel says of such a port. It needs no libibverbs.

const (
	saClass   = 3
	saVersion = 2
)

// An SAMAD is a MAD of subnet administration.
type SAMAD = verbs.SubnetMAD

// An SAPort sends questions to a subnet administrator and receives the answers. It implements
// [verbs.SubnetPort].
type SAPort struct {
	file    *os.File
	agent   uint32
	pkeys   func() []ib.PKey
	in      chan *SAMAD
	inMu    sync.Mutex // guards sends to in, and its end
	ended   bool
	done    chan struct{}
	reports *reports // nil if another process has the reports of the port

	dropped atomic.Uint64
}

// OpenSA opens subnet administration on a port of an RDMA device. pkeys returns the port's P_Key
// table.
func OpenSA(device string, port int, pkeys func() []ib.PKey) (*SAPort, error) {
	node, err := findUMAD(classMAD, device, port)
	if err != nil {
		return nil, err
	}
	file, agent, err := registerSA(node, 0)
	if err != nil {
		return nil, err
	}
	p := newSAPort(file, agent, pkeys)
	p.takeReports(node)
	return p, nil
}

// registerSA is openUMAD for subnet administration.
func registerSA(node string, methods uint32) (*os.File, uint32, error) {
	return openUMAD(node, "subnet administration", saClass, saVersion, methods)
}

var _ verbs.SubnetPort = (*SAPort)(nil)

// newSAPort returns an SAPort that reads a registered file.
func newSAPort(file *os.File, agent uint32, pkeys func() []ib.PKey) *SAPort {
	p := &SAPort{file: file, agent: agent, pkeys: pkeys, in: make(chan *SAMAD, madQueue), done: make(chan struct{})}
	go p.receive()
	return p
}

// SubnetMADs implements [verbs.SubnetPort].
func (p *SAPort) SubnetMADs() <-chan *SAMAD { return p.in }

// Dropped returns how many MADs were dropped: they were invalid or too long, were questions of ours
// without an answer, or found a full queue.
func (p *SAPort) Dropped() uint64 { return p.dropped.Load() }

// SendSubnet implements [verbs.SubnetPort].
func (p *SAPort) SendSubnet(m *SAMAD, wait time.Duration) error {
	if p.reports != nil && wire.Method(m.Data[methodAt]) == wire.MethodReportResp && !p.reports.answers(p) {
		return nil // another SAPort of the port answers the report
	}
	buf := make([]byte, umadHeaderLen+verbs.MADLen)
	h := umadHeader{agent: p.agent, timeout: uint32(wait.Milliseconds()), length: uint32(len(buf)),
		qpn: m.QPN, qkey: m.QKey, lid: m.LID, sl: m.SL}
	if !m.GID.IsZero() {
		h.grh, h.gid, h.hops, h.flow, h.class = true, m.GID, grhHops, m.FlowLabel, m.TrafficClass
	}
	want := cmp.Or(m.PKey, ib.DefaultPKey)
	i := want.Index(p.pkeys())
	if i < 0 {
		return fmt.Errorf("%w: the port has no P_Key %v", verbs.ErrInvalid, want)
	}
	h.pkeyIdx = uint16(i)
	h.put(buf)
	copy(buf[umadHeaderLen:], m.Data[:])
	if _, err := p.file.Write(buf); err != nil {
		return fmt.Errorf("send a MAD to LID %v: %w", m.LID, err)
	}
	return nil
}

// grhHops is the hop limit in the GRH of MADs to the administrator of the same subnet.
const grhHops = 64

func (p *SAPort) receive() {
	defer close(p.done)
	defer func() {
		p.inMu.Lock()
		defer p.inMu.Unlock()
		p.ended = true // reports may still be read, from another file
		close(p.in)
	}()
	readMADs(p.file, func() { p.dropped.Add(1) }, p.deliver)
}

// deliver gives the MAD that was read to the reader, or drops and counts it.
func (p *SAPort) deliver(b []byte) {
	p.inMu.Lock()
	defer p.inMu.Unlock()
	if m, ok := p.take(b); ok && !p.ended {
		select {
		case p.in <- m:
			return
		default:
		}
	}
	p.dropped.Add(1)
}

// take returns the MAD that was read. If it has a status, it is a question of ours without an
// answer in time. take refuses it, because the client of subnet administration counts these itself.
func (p *SAPort) take(b []byte) (*SAMAD, bool) {
	var h umadHeader
	if h.UnmarshalBinary(b) != nil || h.status != 0 || len(b) != umadHeaderLen+verbs.MADLen {
		return nil, false
	}
	m := &SAMAD{LID: h.lid, SL: h.sl, QPN: h.qpn, QKey: h.qkey, Data: [verbs.MADLen]byte(b[umadHeaderLen:])}
	if h.grh {
		m.GID, m.FlowLabel, m.TrafficClass = h.gid, h.flow, h.class
	}
	if keys := p.pkeys(); int(h.pkeyIdx) < len(keys) {
		m.PKey = keys[h.pkeyIdx]
	}
	return m, true
}

// Close closes the SAPort.
func (p *SAPort) Close() error {
	p.leaveReports()
	err := p.file.Close()
	<-p.done
	return err
}

// Directories where the kernel lists RDMA devices.
const (
	classMAD  = "/sys/class/infiniband_mad"
	classRDMA = "/sys/class/infiniband"
)

// An IBPort is what the kernel says of a port whose link layer is InfiniBand.
type IBPort struct {
	Device string
	Port   int
	State  string // "ACTIVE"
	LID    ib.LID
	SMLID  ib.LID // zero if there has been no subnet manager
	SMSL   uint8
	GID    ib.GID // the first
	PKeys  []ib.PKey
	Rate   string // "10 Gb/sec (4X SDR)"
}

// IBPorts returns the InfiniBand ports of a device, none if it has no such port.
func IBPorts(device string) []IBPort { return ibPorts(classRDMA, device) }

func ibPorts(class, device string) (ports []IBPort) {
	for _, d := range sorted(class, device, "ports/*") {
		if lineOf(filepath.Join(d, "link_layer")) != "InfiniBand" {
			continue
		}
		p := IBPort{Device: device, Rate: lineOf(filepath.Join(d, "rate"))}
		p.Port, _ = strconv.Atoi(filepath.Base(d))
		_, p.State, _ = strings.Cut(lineOf(filepath.Join(d, "state")), ": ")
		p.LID, p.SMLID = ib.LID(number(d, "lid")), ib.LID(number(d, "sm_lid"))
		p.SMSL = uint8(number(d, "sm_sl"))
		p.GID, _ = ib.ParseGID(lineOf(filepath.Join(d, "gids/0")))
		// Empty entries of the table are zero and stay, because an index is a position in it.
		for i := range maxPKeys {
			text := lineOf(filepath.Join(d, "pkeys", strconv.Itoa(i)))
			if text == "" {
				break
			}
			k, _ := strconv.ParseUint(text, 0, 16)
			p.PKeys = append(p.PKeys, ib.PKey(k))
		}
		for n := len(p.PKeys); n > 0 && p.PKeys[n-1] == 0; n-- {
			p.PKeys = p.PKeys[:n-1]
		}
		ports = append(ports, p)
	}
	return ports
}

// IsInfiniBand reports whether a port of a device is an InfiniBand one.
func IsInfiniBand(device string, port int) bool {
	return slices.ContainsFunc(IBPorts(device), func(p IBPort) bool { return p.Port == port })
}

// maxPKeys is how many entries of a P_Key table are read at most.
const maxPKeys = 128

// number returns the number in a file of dir: decimal, or hexadecimal with 0x. It returns 0 if
// there is none.
func number(dir, name string) uint64 {
	n, _ := strconv.ParseUint(lineOf(filepath.Join(dir, name)), 0, 16)
	return n
}

// KernelIPoIB returns the names of the kernel's own IPoIB interfaces on a port and partition. They
// share the port's memberships: a group that the port leaves is lost to them too.
func KernelIPoIB(device string, port int, pkey ib.PKey) []string {
	return kernelIPoIB(classNet, device, port, pkey)
}

const classNet = "/sys/class/net"

// arphrdInfiniBand is the hardware type of IPoIB interfaces (linux/if_arp.h).
const arphrdInfiniBand = 32

func kernelIPoIB(class, device string, port int, pkey ib.PKey) (names []string) {
	for _, d := range sorted(class, "*") {
		if number(d, "type") != arphrdInfiniBand || int(number(d, "dev_port"))+1 != port {
			continue
		}
		if _, err := os.Stat(filepath.Join(d, "device/infiniband", device)); err != nil {
			continue
		}
		if k := ib.PKey(number(d, "pkey")); (k^pkey)&^ib.PKeyFull == 0 {
			names = append(names, filepath.Base(d))
		}
	}
	return names
}
