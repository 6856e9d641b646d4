// Package foreign models peers that do not run our code: IPoIB as in Linux, illumos
// and WinOFED, as far as the wire shows it (docs/rfc4755.md). They
// open one-way connections with the 0x10 service ID, fill no private data where
// the standard wants it, give up after one lost packet, know no crossing, and
// take every REJ for a failure.
//
// A [Peer] is a machine like ours: it reads no clock and starts nothing. It has
// a connection manager of its own, written from what those implementations do and not
// from package cm, so that the two do not agree just because they share code.
//
// It is for tests. What is not modelled: SA queries, interface modes, ICMP.
package foreign

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"ipoibcm/group"
	"ipoibcm/ib"
	"ipoibcm/serviceid"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
)

// A Kind is an implementation.
type Kind uint8

// Implementations.
const (
	Linux Kind = iota // FreeBSD's is the same code
	Illumos
	WinOFED
)

// String names k.
func (k Kind) String() string { return [...]string{"Linux", "illumos", "WinOFED"}[min(k, WinOFED)] }

// A profile is the behaviour in which the kinds differ.
type profile struct {
	listenRFC bool             // listens on the 0x01 service ID too
	forms     []serviceid.Form // service IDs of the REQs of one attempt, one after the other
	retry     uint8            // retry and RNR retry counts of a REQ
	echoRNR   bool             // a REP repeats the REQ's RNR retry count; else that is 7
	depth     uint8            // responder resources offered
	rtuData   bool             // an RTU has private data
	readsMTU  bool             // sends no more than the REP's Receive MTU
	checks    bool             // checks a REQ: UD QPN, Receive MTU, no second connection
	onAnswer  bool             // connects only on an ARP reply with flags 0x80, or when a peer has connected
	fallback  bool             // sends by UD while there is no connection
	idleTx    time.Duration    // how long it keeps its own unused connections; zero means for ever
	idleRx    time.Duration    // how long it keeps unused connections of its peers, likewise
}

var profiles = [...]profile{
	Linux: {forms: []serviceid.Form{serviceid.Legacy}, echoRNR: true, depth: 4, readsMTU: true,
		idleTx: 88 * time.Second, idleRx: 512 * time.Second},
	Illumos: {listenRFC: true, forms: []serviceid.Form{serviceid.Legacy, serviceid.Legacy, serviceid.RFC}, retry: 1,
		idleTx: 512 * time.Second, idleRx: 512 * time.Second},
	WinOFED: {forms: []serviceid.Form{serviceid.Legacy}, retry: 1, rtuData: true, checks: true, onAnswer: true,
		fallback: true},
}

// Times and bounds of Linux (drivers/infiniband/ulp/ipoib). All kinds use them, because those of the
// others are not known.
const (
	maxQueue    = 3                       // packets that wait for an address or a connection
	respond     = ib.Timeout(20)          // both CM response timeouts
	tryTime     = 4200 * time.Millisecond // between two sendings of a message
	maxTries    = 15
	timewait    = 42 * time.Second // a (CA GUID, QPN) is stale for that long
	lingers     = 2200 * time.Millisecond
	sulks       = 94 * time.Second // it opens no connection for that long after a REP that it cannot use
	ackTimeout  = ib.Timeout(18)   // 1.07 s
	recvMTU     = 65524
	askEvery    = time.Second
	maxAsked    = 3
	illumosWait = 10 * time.Millisecond // between the REQs of one attempt
)

// Options configure a Peer. Link, GUID and Rand must be given.
type Options struct {
	Kind    Kind
	Link    encap.LinkAddr // the peer announces it; flags of zero mean 0x80
	GUID    ib.GUID
	Addrs   []netip.Addr // of the host
	PathMTU ib.MTU       // zero means 1024
	UDMTU   int          // octets of IP; zero means 2044
	// ReceiveMTU is announced. WinOFED rejects a REQ with a greater one. Zero means
	// 65524.
	ReceiveMTU uint32
	// Deaf makes the peer reject every REQ, as if it had no connected mode in spite of its flags.
	Deaf bool
	Rand *rand.Rand
}

// A Port is what a Peer runs on.
type Port interface {
	Now() time.Time
	SendMAD(*verbs.MAD)
	// SendUD sends a frame; a multicast QPN means the group that to.GID names.
	SendUD(to encap.LinkAddr, frame []byte)
	// CreateQP makes an RC queue pair in INIT with receives of 65524 octets.
	CreateQP() ib.QPN
	ConnectQP(qpn ib.QPN, rtr, rts verbs.QPAttr)
	SendConn(qpn ib.QPN, frame []byte)
	DestroyQP(qpn ib.QPN)
	// Deliver hands an IP packet to the peer's host.
	Deliver(pkt []byte)
	// Tell gets a text for people about what the peer does.
	Tell(text string)
}

// A Peer is one foreign interface.
type Peer struct {
	opt  Options
	prof profile
	port Port
	link encap.LinkAddr

	neighs    map[netip.Addr]*neighbour
	order     []*neighbour
	endpoints map[ib.GID]ib.QPN // UD QPNs of the ports that may connect to WinOFED
	conns     []*conn
	lastComm  uint32
	sulkUntil time.Time

	// Died is what the peer did not survive; empty if it lives.
	Died string
	// Count counts what happened, by name.
	Count map[string]int
}

// New returns a peer that listens.
func New(opt Options, port Port) *Peer {
	opt.UDMTU = cmp.Or(opt.UDMTU, 2044)
	opt.PathMTU = cmp.Or(opt.PathMTU, ib.MTU1024)
	opt.ReceiveMTU = cmp.Or(opt.ReceiveMTU, recvMTU)
	opt.Link.Flags = cmp.Or(opt.Link.Flags, encap.FlagRC)
	return &Peer{opt: opt, prof: profiles[opt.Kind], port: port, link: opt.Link, neighs: map[netip.Addr]*neighbour{},
		endpoints: map[ib.GID]ib.QPN{}, lastComm: opt.Rand.Uint32(), Count: map[string]int{}}
}

// Groups are the MGIDs that the peer's UD QP must be attached to.
func (p *Peer) Groups() []ib.GID {
	out := []ib.GID{group.BroadcastGID(ib.DefaultPKey, 2)}
	for _, a := range p.opt.Addrs {
		if a.Is6() {
			for _, g := range []netip.Addr{ip.AllNodes, ip.SolicitedNode(a)} {
				if mgid, ok := group.MGID(g, ib.DefaultPKey, 2); ok {
					out = append(out, mgid)
				}
			}
		}
	}
	return out
}

// Link is the peer's link-layer address.
func (p *Peer) Link() encap.LinkAddr { return p.link }

func (p *Peer) now() time.Time { return p.port.Now() }

func (p *Peer) tell(format string, args ...any) { p.port.Tell(fmt.Sprintf(format, args...)) }

// die notes the first event that the implementation would not survive.
func (p *Peer) die(format string, args ...any) {
	if p.Died == "" {
		p.Died = fmt.Sprintf(format, args...)
		p.tell("died: %s", p.Died)
	}
}

// Announce changes the flags that the peer announces.
func (p *Peer) Announce(flags encap.Flags) { p.link.Flags = flags }

// Dial opens a connection to link, even if there is one already, as after a crash.
func (p *Peer) Dial(link encap.LinkAddr) { p.connect(link) }

// Vanish forgets everything and sends nothing, as a host that loses power and is back at
// once with the same UD QPN.
func (p *Peer) Vanish() {
	for _, c := range p.conns {
		p.destroyQP(c)
	}
	p.conns, p.neighs, p.order = nil, map[netip.Addr]*neighbour{}, nil
	p.lastComm = p.opt.Rand.Uint32()
}

// Deadline returns when Wake is due; zero means never.
func (p *Peer) Deadline() (t time.Time) {
	add := func(d time.Time) {
		if !d.IsZero() && (t.IsZero() || d.Before(t)) {
			t = d
		}
	}
	for _, c := range p.conns {
		add(c.deadline)
	}
	for _, n := range p.order {
		add(n.deadline)
	}
	return t
}

// Wake handles all deadlines that have passed.
func (p *Peer) Wake() {
	due := func(t time.Time) bool { return !t.IsZero() && !p.now().Before(t) }
	for _, c := range slices.Clone(p.conns) {
		if due(c.deadline) {
			p.expire(c)
		}
	}
	for _, n := range slices.Clone(p.order) {
		if due(n.deadline) {
			p.askAgain(n)
		}
	}
}
