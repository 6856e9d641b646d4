package scale

import (
	"encoding/binary"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"ipoibcm/fib"
	"ipoibcm/fib/fibtest"
	"ipoibcm/ib"
	"ipoibcm/ipoib"
	"ipoibcm/nexthop"
	"ipoibcm/serviceid"
	"ipoibcm/verbs"
	"ipoibcm/wire/arp"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip/iptest"
	"ipoibcm/wire/mad"
)

// A crowd is one real machine in the middle of very many peers, in virtual time.
// The peers keep no state: what one of them says follows from its number and
// from what it is answering, so that the memory of the process is the machine's.
type crowd struct {
	tb    testing.TB
	m     *ipoib.Interface
	link  encap.LinkAddr
	now   time.Time
	flags encap.Flags // that peers announce
	quiet bool        // peers do not answer queries

	kernel *fibtest.Kernel

	steps   int
	onStep  func(time.Duration) // told how long each Step took, unless nil
	pending []ipoib.Event       // what the last Step led to
	out     []ipoib.Action
	qpn     ib.QPN       // last made
	up      int          // connections of ours and the peers' that came up
	last    nexthop.Conn // made last
	commID  mad.CommID   // that the machine drew last
	sent    map[int]int  // UD data packets by peer; nil: not counted
}

// Where peers are found. The machine has the last address of 10.0.0.0/8.
const (
	udQPN   ib.QPN = 0x001000 // of peer 0
	connQPN ib.QPN = 0x400000 // of peer 0, for connections
	commID         = mad.CommID(0x40000000)
)

var hubAddr = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 255, 255, 254}), 8)

// crowdOptions makes room for n peers and connections; limits on rates are off,
// because one source is all there is.
func crowdOptions(n int) ipoib.Options {
	o := ipoib.Options{
		Link: encap.LinkAddr{QPN: 0x123, GID: ib.GID{0: 0xfe, 1: 0x80, 15: 1}}, GUID: 1, PathMTU: ib.MTU4096,
		Rand: rand.New(rand.NewPCG(uint64(n), 1)), Log: slog.New(slog.DiscardHandler),
		MaxPeers: n, MaxConns: 2*n + 64, Idle: 100 * time.Hour,
	}
	o.Neigh.MaxNeighbors = n
	o.Neigh.RequestRate, o.Neigh.SourceRate = -1, -1
	o.CM.MaxConns = 4*n + 64
	o.CM.REQsPerSecond, o.CM.RepliesPerSecond = -1, -1
	return o
}

func newCrowd(tb testing.TB, o ipoib.Options) *crowd {
	c := &crowd{tb: tb, link: o.Link, now: time.Unix(1_700_000_000, 0), qpn: 0x200000, flags: encap.FlagRC}
	c.m = ipoib.New(o)
	c.step(ipoib.Start{})
	c.kernel = fibtest.New()
	c.told(c.kernel.Start())
	c.told(c.kernel.Up(true))
	c.told(c.kernel.AddAddr(hubAddr))
	c.run(5 * time.Second) // detection and announcements are over
	return c
}

// peerIP returns the address of peer i.
func peerIP(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
}

// peerOf returns who has address a.
func peerOf(a netip.Addr) int {
	b := a.As4()
	return int(b[1])<<16 | int(b[2])<<8 | int(b[3])
}

func peerGID(i int) ib.GID {
	g := ib.GID{0: 0xfe, 1: 0x80, 8: 2}
	binary.BigEndian.PutUint32(g[12:], uint32(i))
	return g
}

func gidPeer(g ib.GID) int { return int(binary.BigEndian.Uint32(g[12:])) }

func (c *crowd) peerLink(i int) encap.LinkAddr {
	return encap.LinkAddr{Flags: c.flags, QPN: udQPN + ib.QPN(i), GID: peerGID(i)}
}

// step gives the machine one event, and then what its actions lead to.
func (c *crowd) step(ev ipoib.Event) {
	c.later(ev)
	c.flush()
}

// told tells the machine what the kernel has done.
func (c *crowd) told(evs []fib.Event) {
	for _, ev := range evs {
		c.step(ipoib.FIBEvent{Event: ev})
	}
}

// one is a single Step.
func (c *crowd) one(ev ipoib.Event) {
	c.now = c.now.Add(time.Microsecond)
	c.steps++
	if c.onStep != nil {
		began := time.Now()
		c.out = c.m.Step(c.out[:0], c.now, ev)
		c.onStep(time.Since(began))
	} else {
		c.out = c.m.Step(c.out[:0], c.now, ev)
	}
	for _, a := range c.out {
		c.do(a)
	}
	clear(c.out)
}

// run lets time pass; the machine is woken when it asks for it.
func (c *crowd) run(d time.Duration) {
	end := c.now.Add(d)
	for t := c.m.Deadline(); !t.IsZero() && !t.After(end); t = c.m.Deadline() {
		if t.After(c.now) {
			c.now = t
		}
		c.step(ipoib.Wake{})
	}
	if end.After(c.now) {
		c.now = end
	}
}

func (c *crowd) later(ev ipoib.Event) { c.pending = append(c.pending, ev) }

func (c *crowd) do(a ipoib.Action) {
	switch a := a.(type) {
	case ipoib.SendUD:
		if encap.EtherType(binary.BigEndian.Uint16(a.Frame)) == encap.ARP {
			c.recvARP(a.Frame[encap.HeaderLen:])
		} else if a.MGID.IsZero() && c.sent != nil {
			c.sent[gidPeer(a.Link.GID)]++
		}
	case ipoib.SendCopies:
		for ud := range a.Each() {
			c.do(ud)
		}
	case ipoib.CreateQP:
		c.qpn++
		c.last = a.Conn
		c.later(ipoib.QPCreated{Conn: a.Conn, QPN: c.qpn})
	case ipoib.SendMAD:
		c.recvMAD(a.MAD)
	case ipoib.FIBAction:
		evs, _ := c.kernel.Do(a.Action)
		for _, ev := range evs {
			c.later(ipoib.FIBEvent{Event: ev})
		}
	}
}

// recvARP lets the peer that is asked for answer.
func (c *crowd) recvARP(b []byte) {
	var p arp.Packet
	if p.UnmarshalBinary(b) != nil || p.Op != arp.Request || p.IsProbe() || p.IsAnnouncement() || c.quiet {
		return
	}
	c.later(c.arpFrom(peerOf(p.TargetIP), p.ReplyFrom(c.peerLink(peerOf(p.TargetIP)))))
}

func (c *crowd) arpFrom(i int, p arp.Packet) ipoib.Event {
	link := c.peerLink(i)
	fr, _ := encap.Header{Type: encap.ARP}.AppendBinary(nil)
	fr, err := p.AppendBinary(fr)
	if err != nil {
		c.tb.Fatal(err)
	}
	return ipoib.RecvFrame{SrcGID: link.GID, SrcQPN: link.QPN, DstGID: c.link.GID, Frame: fr}
}

// asks is peer i's ARP request for the machine.
func (c *crowd) asks(i int) {
	c.step(c.arpFrom(i, arp.NewRequest(c.peerLink(i), peerIP(i), hubAddr.Addr())))
}

// packet is one of the kernel's to peer i, of n octets of payload.
func (c *crowd) packet(i, n int) ipoib.Event {
	return c.packetTo(peerIP(i), n)
}

func (c *crowd) packetTo(dst netip.Addr, n int) ipoib.Event {
	b, err := iptest.Echo{Src: hubAddr.Addr(), Dst: dst, Data: make([]byte, n)}.AppendBinary(nil)
	if err != nil {
		c.tb.Fatal(err)
	}
	return ipoib.Packet{IP: b}
}

// recvMAD lets the peer that it is sent to answer.
func (c *crowd) recvMAD(m *verbs.MAD) {
	_, msg, err := mad.Parse(m.Data[:])
	if err != nil {
		c.tb.Fatal(err)
	}
	i := gidPeer(m.Remote)
	switch msg := msg.(type) {
	case mad.REQ:
		c.madFrom(i, mad.REP{TransactionID: msg.TransactionID, LocalCommID: commID + mad.CommID(i),
			RemoteCommID: msg.LocalCommID, LocalQPN: connQPN + ib.QPN(i), StartingPSN: 1, RNRRetryCount: 7,
			LocalCAGUID: ib.GUID(i + 2), PrivateData: privateData[[196]byte](c, i)})
		c.up++
	case mad.REP:
		c.commID = msg.LocalCommID
		c.madFrom(i, mad.RTU{TransactionID: msg.TransactionID, LocalCommID: msg.RemoteCommID, RemoteCommID: msg.LocalCommID,
			PrivateData: privateData[[224]byte](c, i)})
		c.up++
	case mad.DREQ:
		c.madFrom(i, mad.DREP{TransactionID: msg.TransactionID, LocalCommID: msg.RemoteCommID, RemoteCommID: msg.LocalCommID})
	}
}

// dials is peer i's REQ to the machine. No two have a communication ID or QPN
// in common.
func (c *crowd) dials(i, serial int) {
	c.madFrom(i, mad.REQ{TransactionID: uint64(serial), LocalCommID: 2*commID + mad.CommID(serial),
		ServiceID: serviceid.New(serviceid.RFC, c.link.QPN), LocalCAGUID: ib.GUID(i + 2),
		LocalQPN: 2*connQPN + ib.QPN(serial), RemoteCMResponseTimeout: 16, LocalCMResponseTimeout: 16,
		Transport: ib.RC, StartingPSN: 1, RetryCount: 7, RNRRetryCount: 7, PKey: ib.DefaultPKey, PathMTU: ib.MTU4096,
		MaxCMRetries: 7, Primary: mad.PathInfo{LocalLID: ib.PermissiveLID, RemoteLID: ib.PermissiveLID,
			LocalGID: peerGID(i), RemoteGID: c.link.GID, PacketRate: 3, HopLimit: 64, LocalACKTimeout: 14},
		PrivateData: privateData[[92]byte](c, i)})
	c.flush()
}

// hangsUp is peer i's DREQ for the connection that dials made last.
func (c *crowd) hangsUp(i, serial int) {
	c.madFrom(i, mad.DREQ{TransactionID: 1, LocalCommID: 2*commID + mad.CommID(serial), RemoteCommID: c.commID,
		RemoteQPN: c.qpn})
	c.flush()
}

// flush steps through what is pending.
func (c *crowd) flush() {
	for len(c.pending) > 0 {
		ev := c.pending[0]
		c.pending = c.pending[:copy(c.pending, c.pending[1:])]
		c.one(ev)
	}
}

func (c *crowd) madFrom(i int, msg mad.Message) {
	in := &verbs.MAD{Remote: peerGID(i), Local: c.link.GID, QPN: ib.QPNGSI, PKey: ib.DefaultPKey}
	if _, err := msg.AppendBinary(in.Data[:0]); err != nil {
		c.tb.Fatal(err)
	}
	c.later(ipoib.RecvMAD{MAD: in})
}

// privateData is what peer i says in every message.
func privateData[T [92]byte | [196]byte | [224]byte](c *crowd, i int) (field T) {
	b, _ := encap.PrivateData{QPN: c.peerLink(i).QPN, ReceiveMTU: 65524}.AppendBinary(nil)
	switch f := any(&field).(type) {
	case *[92]byte:
		copy(f[:], b)
	case *[196]byte:
		copy(f[:], b)
	case *[224]byte:
		copy(f[:], b)
	}
	return field
}

// meet makes peers from to to known as neighbours, by ARP.
func (c *crowd) meet(from, to int) {
	for i := from; i < to; i++ {
		c.step(c.packet(i, 8))
	}
}

// meetOnly makes n peers known that would take a connection, and opens none.
func (c *crowd) meetOnly(n int) {
	flags := c.flags
	c.flags = 0
	c.meet(0, n)
	c.flags = flags
	c.run(2 * time.Second) // a changed address may not change again at once
	for i := range n {
		c.asks(i)
	}
}
