package foreign

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/serviceid"
	"ipoibcm/verbs"
	"ipoibcm/wire/arp"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip/iptest"
	"ipoibcm/wire/mad"
)

// These tests hold the models to what the originals' sources do.

// bench is a Port that keeps what it is given.
type bench struct {
	now   time.Time
	mads  []mad.Message
	ud    [][]byte
	conn  [][]byte
	rtr   verbs.QPAttr
	rts   verbs.QPAttr
	qpn   ib.QPN
	alive map[ib.QPN]bool
	got   [][]byte
}

func (b *bench) Now() time.Time { return b.now }
func (b *bench) SendMAD(m *verbs.MAD) {
	_, msg, err := mad.Parse(m.Data[:])
	if err != nil {
		panic(err)
	}
	b.mads = append(b.mads, msg)
}
func (b *bench) SendUD(_ encap.LinkAddr, fr []byte)        { b.ud = append(b.ud, fr) }
func (b *bench) CreateQP() ib.QPN                          { b.qpn++; b.alive[b.qpn] = true; return b.qpn }
func (b *bench) ConnectQP(_ ib.QPN, rtr, rts verbs.QPAttr) { b.rtr, b.rts = rtr, rts }
func (b *bench) SendConn(_ ib.QPN, fr []byte)              { b.conn = append(b.conn, fr) }
func (b *bench) DestroyQP(qpn ib.QPN)                      { delete(b.alive, qpn) }
func (b *bench) Deliver(pkt []byte)                        { b.got = append(b.got, pkt) }
func (b *bench) Tell(string)                               {}
func (b *bench) take() (out []mad.Message)                 { out, b.mads = b.mads, nil; return out }
func (b *bench) kinds(msgs []mad.Message) (out string) {
	for _, m := range msgs {
		out += " " + m.Attr().String()
		if rej, ok := m.(mad.REJ); ok {
			out += fmt.Sprint(uint16(rej.Reason))
		}
	}
	return strings.TrimSpace(out)
}

var (
	usGID   = ib.GID{0xfe, 0x80, 15: 1}
	usLink  = encap.LinkAddr{Flags: encap.FlagRC, QPN: 0x111, GID: usGID}
	usAddr  = netip.MustParseAddr("10.0.0.1")
	hisAddr = netip.MustParseAddr("10.0.0.2")
)

// meet makes a peer that has heard our ARP reply with these flags.
func meet(kind Kind, flags encap.Flags, tune func(*Options)) (*Peer, *bench) {
	b := &bench{now: time.Unix(1000, 0), alive: map[ib.QPN]bool{}}
	o := Options{Kind: kind, Link: encap.LinkAddr{QPN: 0x222, GID: ib.GID{0xfe, 0x80, 15: 2}}, GUID: 9,
		Addrs: []netip.Addr{hisAddr}, Rand: rand.New(rand.NewPCG(1, 1))}
	if tune != nil {
		tune(&o)
	}
	p := New(o, b)
	link := usLink
	link.Flags = flags
	p.recvARP(arp.Packet{Op: arp.Reply, Sender: link, SenderIP: usAddr, Target: p.link, TargetIP: hisAddr})
	return p, b
}

// pkt is an IP packet to us.
func pkt(size int) []byte {
	e := iptest.Echo{Src: hisAddr, Dst: usAddr, Data: make([]byte, size-28)}
	out, err := e.AppendBinary(nil)
	if err != nil {
		panic(err)
	}
	return out
}

func (p *Peer) hear(msg mad.Message) {
	m := &verbs.MAD{Remote: usGID, Local: p.link.GID, QPN: ib.QPNGSI}
	msg.AppendBinary(m.Data[:0])
	p.RecvMAD(m)
}

func says(field []byte, receive uint32) {
	d, _ := encap.PrivateData{QPN: usLink.QPN, ReceiveMTU: receive}.AppendBinary(nil)
	copy(field, d)
}

// rep answers the REQ that p has sent.
func rep(req mad.REQ, receive uint32) mad.REP {
	m := mad.REP{LocalCommID: 5, RemoteCommID: req.LocalCommID, LocalQPN: 0x55, StartingPSN: 77, RNRRetryCount: 6,
		LocalCAGUID: 7}
	says(m.PrivateData[:], receive)
	return m
}

// ask is our REQ.
func ask(p *Peer, form serviceid.Form) mad.REQ {
	m := mad.REQ{LocalCommID: 5, ServiceID: serviceid.New(form, p.link.QPN), LocalCAGUID: 7, LocalQPN: 0x55,
		PathMTU: ib.MTU1024, RNRRetryCount: 3, MaxCMRetries: 1, StartingPSN: 66}
	says(m.PrivateData[:], 65524)
	return m
}

func TestActive(t *testing.T) {
	for _, tt := range []struct {
		kind         Kind
		retry, depth uint8
		rtuData      bool
	}{{Linux, 0, 4, false}, {Illumos, 1, 0, false}, {WinOFED, 1, 0, true}} {
		p, b := meet(tt.kind, encap.FlagRC, nil)
		p.Output(pkt(100))
		msgs := b.take()
		if len(msgs) != 1 {
			t.Fatalf("%v: %s", tt.kind, b.kinds(msgs))
		}
		req := msgs[0].(mad.REQ)
		var d encap.PrivateData
		form, qpn := serviceid.Parse(req.ServiceID)
		expect.Equal(t, form, serviceid.Legacy, "%v: form", tt.kind)
		expect.Equal(t, qpn, usLink.QPN, "%v: qpn", tt.kind)
		expect.Equal(t, req.Transport, ib.RC, "%v: Transport", tt.kind)
		expect.Equal(t, req.StartingPSN, 0, "%v: StartingPSN", tt.kind)
		expect.Equal(t, req.RetryCount, tt.retry, "%v: RetryCount", tt.kind)
		expect.Equal(t, req.RNRRetryCount, tt.retry, "%v: RNRRetryCount", tt.kind)
		expect.Equal(t, req.ResponderResources, tt.depth, "%v: ResponderResources", tt.kind)
		if err := d.UnmarshalBinary(req.PrivateData[:]); err != nil {
			t.Errorf("%v: does not parse: %v", tt.kind, err)
		}
		expect.Equal(t, d.QPN, p.link.QPN, "%v: QPN", tt.kind)
		expect.Equal(t, d.ReceiveMTU, 65524, "%v: ReceiveMTU", tt.kind)
		p.hear(rep(req, 65524))
		msgs = b.take()
		expect.MustEqual(t, b.kinds(msgs), "RTU", "%v: kinds(msgs)", tt.kind)
		expect.MustEqual(t, b.rts.RNRRetry, 6, "%v: RNRRetry", tt.kind)
		expect.MustEqual(t, b.rts.SQPSN, 77, "%v: SQPSN", tt.kind)
		expect.MustEqual(t, b.rts.RetryCount, tt.retry, "%v: RetryCount", tt.kind)
		if rtu := msgs[0].(mad.RTU); (rtu.PrivateData != [mad.RTUPrivateLen]byte{}) != tt.rtuData {
			t.Errorf("%v: RTU with %x", tt.kind, rtu.PrivateData[:8])
		}
		p.Output(pkt(9000))
		if len(b.conn) == 0 || b.conn[len(b.conn)-1][0] != 8 {
			t.Errorf("%v: not sent on the connection", tt.kind)
		}
		// Nothing may come back on it.
		p.RecvConn(1, Frame(pkt(100)))
		if p.Died == "" {
			t.Errorf("%v lives", tt.kind)
		}
	}
}

func TestPassive(t *testing.T) {
	for _, tt := range []struct {
		kind Kind
		form serviceid.Form
		uc   bool
		want string
		rnr  uint8
	}{
		{Linux, serviceid.Legacy, false, "REP", 3},
		{Linux, serviceid.RFC, false, "REJ8", 0},
		{Linux, serviceid.Legacy, true, "REJ28", 0},
		{Illumos, serviceid.Legacy, false, "REP", 7},
		{Illumos, serviceid.RFC, false, "REP", 7},
		{WinOFED, serviceid.Legacy, false, "REP", 7},
		{WinOFED, serviceid.RFC, false, "REJ8", 0},
	} {
		p, b := meet(tt.kind, 0, nil)
		req := ask(p, tt.form)
		if tt.uc {
			req.Transport = ib.UC
		}
		p.hear(req)
		msgs := b.take()
		if b.kinds(msgs) != tt.want {
			t.Errorf("%v, %v: %s, want %s", tt.kind, tt.form, b.kinds(msgs), tt.want)
			continue
		}
		switch m := msgs[0].(type) {
		case mad.REJ:
			if m.PrivateData != [mad.REJPrivateLen]byte{} || m.LocalCommID != 0 {
				t.Errorf("%v: %v has private data", tt.kind, m)
			}
		case mad.REP:
			expect.Equal(t, m.RNRRetryCount, tt.rnr, "%v: RNRRetryCount", tt.kind)
			expect.Equal(t, b.rts.SQPSN, 66, "%v: SQPSN", tt.kind)
			expect.Equal(t, b.rtr.DestQPN, 0x55, "%v: DestQPN", tt.kind)
			p.RecvConn(1, Frame(pkt(9000)))
			if p.hear(mad.RTU{LocalCommID: 5, RemoteCommID: m.LocalCommID}); len(b.conn) != 0 || p.Died != "" {
				t.Errorf("%v answers on a connection that is not its own: %s", tt.kind, p.Died)
			}
		}
	}
}

// TestFailures: every REJ is a failure; what waits is lost, and the next packet
// starts over. illumos tries three times.
func TestFailures(t *testing.T) {
	for _, why := range []mad.RejectReason{mad.RejConsumer, mad.RejInvalidServiceID} {
		p, b := meet(Linux, encap.FlagRC, nil)
		for range 5 {
			p.Output(pkt(100))
		}
		req := b.take()[0].(mad.REQ)
		p.hear(mad.REJ{RemoteCommID: req.LocalCommID, Reason: why})
		expect.Equal(t, p.Count["dropped connecting"], 5, "%v: dropped connecting", why)
		expect.Equal(t, len(b.ud), 0, "%v: length of ud", why)
		expect.Equal(t, len(b.alive), 0, "%v: length of alive", why)
		if len(b.take()) != 0 {
			t.Errorf("%v: a message is sent, want none", why)
		}
		if p.Output(pkt(100)); b.kinds(b.take()) != "REQ" {
			t.Errorf("%v: no new REQ", why)
		}
	}
	p, b := meet(Illumos, encap.FlagRC, nil)
	p.Output(pkt(100))
	var got []serviceid.Form
	for range 3 {
		msgs := b.take()
		if len(msgs) != 1 {
			t.Fatalf("illumos: %s after %v", b.kinds(msgs), got)
		}
		req := msgs[0].(mad.REQ)
		form, _ := serviceid.Parse(req.ServiceID)
		got = append(got, form)
		p.hear(mad.REJ{RemoteCommID: req.LocalCommID, Reason: mad.RejInvalidServiceID})
		b.now = b.now.Add(illumosWait)
		p.Wake()
	}
	if want := []serviceid.Form{serviceid.Legacy, serviceid.Legacy, serviceid.RFC}; !slices.Equal(got, want) ||
		len(p.conns) != 0 {
		t.Errorf("illumos asked with %v, want %v", got, want)
	}
	// A Receive MTU of nothing: REJ 28, and Linux sulks.
	p, b = meet(Linux, encap.FlagRC, nil)
	p.Output(pkt(100))
	p.hear(rep(b.take()[0].(mad.REQ), 4))
	if got := b.kinds(b.take()); got != "REJ28" {
		t.Errorf("REP with Receive MTU 4: %s", got)
	}
	b.now = b.now.Add(sulks - 1)
	if p.Output(pkt(100)); len(b.take()) != 0 {
		t.Error("it does not sulk")
	}
	b.now = b.now.Add(1)
	if p.Output(pkt(100)); b.kinds(b.take()) != "REQ" {
		t.Error("it sulks for ever")
	}
}

// TestFlags: Linux reads a bit, WinOFED compares.
func TestFlags(t *testing.T) {
	for _, tt := range []struct {
		kind  Kind
		flags encap.Flags
		want  string
	}{
		{Linux, 0x80, "REQ"}, {Linux, 0xC0, "REQ"}, {Linux, 0x40, ""}, {Linux, 0, ""},
		{WinOFED, 0x80, "REQ"}, {WinOFED, 0xC0, ""}, {WinOFED, 0, ""},
	} {
		p, b := meet(tt.kind, tt.flags, nil)
		p.Output(pkt(100))
		switch got := b.kinds(b.take()); {
		case got != tt.want:
			t.Errorf("%v, flags %#x: sends %q, want %q", tt.kind, uint8(tt.flags), got, tt.want)
		case tt.want != "" && tt.kind == Linux: // it keeps the packet until the connection is there
			expect.Equal(t, len(b.ud), 0, "%v, flags %#x: packets in datagrams", tt.kind, uint8(tt.flags))
		}
	}
}

// TestChecks: what WinOFED looks at in a REQ, and the reverse connection.
func TestChecks(t *testing.T) {
	small := func(o *Options) { o.ReceiveMTU = 9000 }
	p, b := meet(WinOFED, 0, small)
	p.hear(ask(p, serviceid.Legacy))
	rej, ok := b.take()[0].(mad.REJ)
	var d encap.PrivateData
	expect.Equal(t, ok, true, "a larger Receive MTU: ok")
	expect.Equal(t, rej.Reason, mad.RejInvalidPathMTU, "a larger Receive MTU: Reason")
	if err := d.UnmarshalBinary(rej.PrivateData[:]); err != nil {
		t.Errorf("a larger Receive MTU: does not parse: %v", err)
	}
	expect.Equal(t, d.ReceiveMTU, 9000, "a larger Receive MTU: ReceiveMTU")
	req := ask(p, serviceid.Legacy)
	says(req.PrivateData[:], 9000)
	p.endpoints[usGID] = 0x112
	if p.hear(req); b.kinds(b.take()) != "REJ6" {
		t.Error("another UD QPN")
	}
	delete(p.endpoints, usGID)
	if p.hear(req); len(b.take()) != 0 {
		t.Error("an unknown source")
	}
	p.endpoints[usGID] = usLink.QPN
	p.hear(req)
	msgs := b.take()
	if b.kinds(msgs) != "REP" {
		t.Fatal(b.kinds(msgs))
	}
	if p.hear(mad.RTU{LocalCommID: 5, RemoteCommID: msgs[0].(mad.REP).LocalCommID}); b.kinds(b.take()) != "REQ" {
		t.Error("no reverse connection")
	}
	req.LocalCommID, req.LocalQPN = 6, 0x56
	if p.hear(req); b.kinds(b.take()) != "REJ10" {
		t.Error("a second connection")
	}
}

// upWithOwn is a peer whose own connection is up.
func upWithOwn() (*Peer, *bench) {
	p, b := meet(Linux, encap.FlagRC, nil)
	p.Output(pkt(100))
	p.hear(rep(b.take()[0].(mad.REQ), 65524))
	b.take()
	return p, b
}

// TestEnds: idle connections, broken ones, DREQs, stale QPNs.
func TestEnds(t *testing.T) {
	t.Run("its own, unused", func(t *testing.T) {
		p, b := upWithOwn()
		if idle := p.Deadline().Sub(b.now); idle != 88*time.Second {
			t.Errorf("its own connection goes after %v", idle)
		}
		b.now = p.Deadline()
		if p.Wake(); b.kinds(b.take()) != "DREQ" || len(b.alive) != 0 {
			t.Error("no DREQ")
		}
	})
	t.Run("ours", endOfOurs)
	t.Run("its own, broken", func(t *testing.T) {
		p, b := upWithOwn()
		if p.QPError(1); b.kinds(b.take()) != "DREQ" {
			t.Error("a broken queue pair")
		}
		if p.Output(pkt(100)); b.kinds(b.take()) != "REQ" {
			t.Error("the next packet does not ask again")
		}
	})
	t.Run("its own, by our DREQ", lingeringEnd)
}

// endOfOurs: DREQs of an unknown QPN or connection, REQs from a QPN in use, TIMEWAIT.
func endOfOurs(t *testing.T) {
	p, b := meet(Linux, 0, nil)
	req := ask(p, serviceid.Legacy)
	p.hear(req)
	local := b.take()[0].(mad.REP).LocalCommID
	p.RecvConn(1, Frame(pkt(100)))
	if idle := p.Deadline().Sub(b.now); idle != 512*time.Second {
		t.Errorf("ours goes after %v", idle)
	}
	if p.hear(mad.DREQ{LocalCommID: 5, RemoteCommID: local, RemoteQPN: 2}); len(b.take()) != 0 {
		t.Error("a DREQ of another QPN is answered")
	}
	if p.hear(mad.DREQ{LocalCommID: 8, RemoteCommID: 8, RemoteQPN: 1}); b.kinds(b.take()) != "DREP" {
		t.Error("a DREQ of an unknown connection is not answered")
	}
	again := req
	again.LocalCommID = 6
	if p.hear(again); b.kinds(b.take()) != "REJ10 DREQ" {
		t.Error("a QPN in use is not stale")
	}
	p.hear(mad.DREP{LocalCommID: 5, RemoteCommID: local})
	if p.hear(again); b.kinds(b.take()) != "REJ10" {
		t.Error("a QPN is used again in TIMEWAIT")
	}
	b.now = b.now.Add(timewait)
	p.Wake()
	if p.hear(again); b.kinds(b.take()) != "REP" {
		t.Error("TIMEWAIT never ends")
	}
}

// lingeringEnd: our DREQ is answered, and packets are lost until it notices.
func lingeringEnd(t *testing.T) {
	p, b := upWithOwn()
	own := p.conns[0]
	if p.hear(mad.DREQ{LocalCommID: 5, RemoteCommID: own.local, RemoteQPN: own.qpn}); b.kinds(b.take()) != "DREP" {
		t.Error("no DREP")
	}
	n := len(b.conn)
	p.Output(pkt(100))
	expect.Equal(t, len(b.conn), n, "length of conn")
	expect.Equal(t, p.Count["dropped lingering"], 1, "dropped lingering")
	if len(b.take()) != 0 {
		t.Error("a message is sent, want none")
	}
	b.now = b.now.Add(lingers)
	p.Wake()
	if p.Output(pkt(100)); b.kinds(b.take()) != "REQ" {
		t.Error("it never notices")
	}
}
