package interop

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"ipoibcm/cm"
	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/provider/softroce"
	"ipoibcm/rdmacm"
	"ipoibcm/serviceid"
	"ipoibcm/test/interop/cmdriver"
	"ipoibcm/test/interop/judge"
	"ipoibcm/test/interop/vm"
	"ipoibcm/verbs"
	"ipoibcm/wire/mad"
)

// ipHeader returns what stands before the private data of a REQ.
func ipHeader(src, dst netip.Addr, srcPort uint16) []byte {
	return rdmacm.Header{SrcPort: srcPort, Src: src, Dst: dst}.Append(nil)
}

// A cmHost is our side: provider, driver and the address family in use.
type cmHost struct {
	t   *testing.T
	w   *world
	fam family
	dev *softroce.Device
	cm  *cmdriver.Driver
	cap *vm.Capture
}

func newCMHost(t *testing.T, w *world, fam family) *cmHost {
	t.Helper()
	h := &cmHost{t: t, w: w, fam: fam, cap: w.watch(t)}
	h.dev = w.device(t, softroce.Options{})
	var log logger
	h.cm = cmdriver.New(h.dev, cm.Options{GID: fam.host}, log.add)
	t.Cleanup(func() {
		h.cm.Close()
		if t.Failed() {
			t.Log(log.String())
		}
	})
	return h
}

// A logger keeps lines for when a test fails.
type logger struct {
	mu    sync.Mutex
	lines []string
}

func (l *logger) add(s string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, s)
}

func (l *logger) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.lines, "\n")
}

// next returns the next action, which must be of type A.
func next[A cm.Action](h *cmHost) A {
	h.t.Helper()
	a, err := h.cm.Next(patience)
	if err != nil {
		h.t.Fatal(err)
	}
	v, ok := a.(A)
	if !ok {
		h.t.Fatalf("cm says %T %+v, want %T", a, a, v)
	}
	return v
}

// end returns a queue pair in INIT.
func (h *cmHost) end(buf int) *end { return newEnd(h.t, h.dev, endConfig{transport: ib.RC, buf: buf}) }

// rts brings e to RTS as the two sides of a connection have agreed.
func (h *cmHost) rts(e *end, p cm.Params) {
	h.t.Helper()
	for _, a := range []verbs.QPAttr{
		{State: verbs.StateRTR, Path: verbs.AHAttr{SGID: p.Local, DGID: p.Remote, HopLimit: p.HopLimit}, PathMTU: p.PathMTU,
			DestQPN: p.RemoteQPN,
			RQPSN:   p.RecvPSN, MaxDestRDAtomic: p.ResponderResources, MinRNRTimer: 12},
		{State: verbs.StateRTS, SQPSN: p.SendPSN, Timeout: p.AckTimeout, RetryCount: p.RetryCount, RNRRetry: p.RNRRetry,
			MaxRDAtomic: p.InitiatorDepth},
	} {
		if err := e.qp.Modify(a); err != nil {
			h.t.Fatalf("%v with %+v", err, p)
		}
	}
}

// rpingPort is where rping and our stand-in for it listen.
const rpingPort = 7174

// connect sends a REQ as librdmacm would, with private data behind the header,
// and sees the connection up. It returns the peer's.
func (h *cmHost) connect(handle cm.Handle, e *end, port uint16, private ...byte) []byte {
	h.t.Helper()
	h.request(handle, e, port, private...)
	r := next[cm.ReplyReceived](h)
	h.rts(e, r.Params)
	h.cm.Do(cm.Ready{Handle: handle})
	if up := next[cm.Established](h); up.Handle != handle || !up.Active {
		h.t.Fatalf("established: %+v", up)
	}
	return r.PrivateData
}

// request sends the REQ.
func (h *cmHost) request(handle cm.Handle, e *end, port uint16, private ...byte) {
	h.cm.Do(cm.Connect{
		Handle: handle, Remote: h.fam.guest, ServiceID: serviceid.RDMAIP(port), Transport: ib.RC, QPN: e.qp.QPN(),
		StartingPSN: startPSN,
		PathMTU:     pathMTU(h.w.mtu), RetryCount: 7, RNRRetry: 7, ResponderResources: 1, InitiatorDepth: 1,
		PrivateData: append(ipHeader(h.fam.host.Addr(), h.fam.guest.Addr(), 40000), private...),
	})
}

// accept waits for a REQ and accepts it with e.
func (h *cmHost) accept(e *end, posted func()) (cm.Handle, cm.Params) {
	h.t.Helper()
	r := next[cm.RequestReceived](h)
	want := ipHeader(h.fam.guest.Addr(), h.fam.host.Addr(), 0)
	got := append([]byte(nil), r.PrivateData[:rdmacm.HeaderLen]...)
	got[2], got[3] = 0, 0 // its source port is any
	same(h.t, "IP CM header of the REQ", got, want)
	expect.Equal(h.t, r.Transport, ib.RC, "REQ from the kernel: Transport")
	expect.Equal(h.t, r.Remote, h.fam.guest, "REQ from the kernel: Remote")
	expect.Equal(h.t, r.Local, h.fam.host, "REQ from the kernel: Local")
	if r.PathMTU != pathMTU(h.w.mtu) {
		h.t.Errorf("REQ from the kernel: %+v", r.Params)
	}
	p := r.Params
	p.RecvPSN = startPSN
	h.rts(e, p)
	posted()
	h.cm.Do(cm.Accept{Handle: r.Handle, QPN: e.qp.QPN(), StartingPSN: p.RecvPSN, RNRRetry: 7,
		ResponderResources: p.ResponderResources, InitiatorDepth: p.InitiatorDepth})
	return r.Handle, p
}

// ended checks how a connection that was up has ended.
func (h *cmHost) ended(handle cm.Handle, by cm.Side) {
	h.t.Helper()
	if d := next[cm.Disconnected](h); d.Handle != handle || d.By != by {
		h.t.Errorf("disconnected: %+v, want by %v", d, by)
	}
	if r := next[cm.Released](h); r.Handle != handle {
		h.t.Errorf("released: %+v", r)
	}
}

// rping sends, in 16 octets, where the other side is to read or write.
const (
	rpingInfo = 16
	rpingSize = 5000
)

// Where our stand-in for rping keeps what.
const (
	atSend, atRecv, atStart, atSink = 0, 100, 1000, 10000
	rpingBuf                        = 20000
)

func (h *cmHost) info(e *end, off int) {
	binary.BigEndian.PutUint64(e.mem.Buf[atSend:], e.mem.Addr+uint64(off))
	binary.BigEndian.PutUint32(e.mem.Buf[atSend+8:], e.mem.RKey)
	binary.BigEndian.PutUint32(e.mem.Buf[atSend+12:], rpingSize)
	e.send(1, atSend, rpingInfo)
	e.sent()
}

// expectInfo takes one message of 16 octets in.
func (h *cmHost) expectInfo(e *end) []byte {
	h.t.Helper()
	if wc := e.received(); wc.ByteLen != rpingInfo {
		h.t.Fatalf("rping sent %d octets: %+v", wc.ByteLen, wc)
	}
	b := append([]byte(nil), e.mem.Buf[atRecv:atRecv+rpingInfo]...)
	e.postRecv(1, atRecv, rpingInfo)
	return b
}

// pingData is what rping calls ping data: printable, zero at its end.
func pingData(n int) []byte {
	b := pattern(rpingSize, uint32(n))
	for i := range b {
		b[i] = 'A' + b[i]%57
	}
	copy(b, fmt.Sprintf("rdma-ping-%d: ", n))
	b[rpingSize-1] = 0
	return b
}

// beClient plays rping's client once: the server READs our data and WRITEs it back.
func (h *cmHost) beClient(e *end, n int) {
	h.t.Helper()
	copy(e.mem.Buf[atStart:], pingData(n))
	clear(e.mem.Buf[atSink : atSink+rpingSize])
	h.info(e, atStart)
	h.expectInfo(e)
	h.info(e, atSink)
	h.expectInfo(e)
	same(h.t, "what rping wrote back", e.mem.Buf[atSink:atSink+rpingSize], pingData(n))
}

// beServer plays rping's server once: we READ the client's data and WRITE it back.
func (h *cmHost) beServer(e *end, n int) {
	h.t.Helper()
	for i, op := range []verbs.Opcode{verbs.Read, verbs.Write} {
		b := h.expectInfo(e)
		e.postSend(verbs.SendWR{ID: 2, Opcode: op, SG: e.sg(atSink, rpingSize), RemoteAddr: binary.BigEndian.Uint64(b),
			RKey: binary.BigEndian.Uint32(b[8:])})
		if wc := e.sent(); wc.Opcode != op {
			h.t.Fatalf("completion %+v, want %v", wc, op)
		}
		if want := fmt.Sprintf("rdma-ping-%d: ", n); i == 0 && !strings.HasPrefix(string(e.mem.Buf[atSink:]), want) {
			h.t.Errorf("read %q from rping, want %q", e.mem.Buf[atSink:atSink+20], want)
		}
		e.send(1, atSend, rpingInfo)
		e.sent()
	}
}

// listening waits until a program in the guest listens.
func (h *cmHost) listening(p *vm.Proc) {
	h.t.Helper()
	eventually(h.t, p.Command+" listens", func() bool {
		out, _ := h.w.vm.Sh(patience, "rdma resource show cm_id")
		return strings.Contains(out, "state LISTEN")
	})
}

// start starts a program in the guest that ends with the test.
func (h *cmHost) start(argv ...string) *vm.Proc {
	h.t.Helper()
	p, err := h.w.vm.Start(argv...)
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() {
		p.Kill()
		_, _ = p.Wait(patience) // however it ended
	})
	return p
}

// addr returns the address of a GID as programs in the guest want it.
func addr(g ib.GID) string {
	if a := g.Addr(); !a.IsLinkLocalUnicast() {
		return a.String()
	}
	return g.Addr().String() + "%eth0"
}

// cmPackets returns the CM messages on the wire, by sender.
func (h *cmHost) cmPackets(fromGuest bool, attr mad.AttrID) (out []mad.Message) {
	h.t.Helper()
	for _, p := range h.cap.Packets() {
		b, ok := judge.Base(p.Frame)
		if !ok || b.QPN != uint32(ib.QPNGSI) || (p.From == h.w.vm.Name) != fromGuest {
			continue
		}
		ip, n, _ := judge.RoCE(p.Frame)
		_, m, err := mad.Parse(ip[n+20 : n+20+mad.Len])
		if err != nil {
			h.t.Errorf("MAD from %s: %v", p.From, err)
			continue
		}
		if m.Attr() == attr {
			out = append(out, m)
		}
	}
	return out
}

// TestRping connects to and accepts from librdmacm, moves data by SEND, READ and
// WRITE, and ends connections from each side.
func TestRping(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world, fam family) {
		t.Run("WeConnect", func(t *testing.T) {
			h := newCMHost(t, w, fam)
			// What it says of the end on standard error would land inside its output.
			p := h.start("/bin/sh", "-c", fmt.Sprintf("exec rping -s -v -V -a %s -p %d -S %d 2>/dev/null", addr(fam.guest),
				rpingPort, rpingSize))
			h.listening(p)
			e := h.end(rpingBuf)
			e.postRecv(1, atRecv, rpingInfo)
			h.connect(1, e, rpingPort)
			for n := range 3 {
				h.beClient(e, n)
			}
			h.cm.Do(cm.Disconnect{Handle: 1})
			h.ended(1, cm.ByUser)
			out, err := p.Wait(patience)
			if err != nil {
				t.Error(err)
			}
			for n := range 3 {
				if want := "server ping data: " + strings.TrimRight(string(pingData(n)), "\x00"); !strings.Contains(out, want) {
					t.Errorf("rping has not read message %d:\n%.300s", n, out)
				}
			}
			if len(h.cmPackets(true, mad.AttrDREP)) != 1 {
				t.Error("the kernel has not answered our DREQ")
			}
		})
		t.Run("TheyConnect", func(t *testing.T) {
			h := newCMHost(t, w, fam)
			h.cm.Do(cm.Listen{ServiceID: serviceid.RDMAIP(rpingPort)})
			p := h.start("rping", "-c", "-v", "-V", "-a", addr(fam.host), "-p", fmt.Sprint(rpingPort), "-S",
				fmt.Sprint(rpingSize), "-C", "3")
			e := h.end(rpingBuf)
			handle, _ := h.accept(e, func() { e.postRecv(1, atRecv, rpingInfo) })
			if up := next[cm.Established](h); up.Handle != handle || up.Active {
				t.Fatalf("established: %+v", up)
			}
			for n := range 3 {
				h.beServer(e, n)
			}
			h.ended(handle, cm.ByPeer)
			if out, err := p.Wait(patience); err != nil { // it has compared what came back (-V)
				t.Errorf("%v\n%s", err, out)
			}
		})
	})
}

// TestCMEnds shows the ways in which connections with librdmacm do not come up
// or end otherwise than by the client's wish.
func TestCMEnds(t *testing.T) {
	w := open(t, 1500)
	for _, fam := range w.families(t) {
		server := func(h *cmHost) *vm.Proc {
			p := h.start("rping", "-s", "-a", addr(fam.guest), "-p", fmt.Sprint(rpingPort), "-S", fmt.Sprint(rpingSize))
			h.listening(p)
			return p
		}
		t.Run(fam.name+"/NobodyListensThere", func(t *testing.T) {
			h := newCMHost(t, w, fam)
			h.request(1, h.end(100), 999)
			if f := next[cm.Failed](h); f.Cause != cm.Rejected || f.Reason != cm.ReasonInvalidServiceID {
				t.Errorf("without a listener: %+v, want REJ 8", f)
			}
		})
		t.Run(fam.name+"/NobodyListensHere", func(t *testing.T) {
			h := newCMHost(t, w, fam)
			p := h.start("rping", "-c", "-a", addr(fam.host), "-p", fmt.Sprint(rpingPort), "-C", "1")
			out, err := p.Wait(patience)
			if err == nil || !strings.Contains(out, "RDMA_CM_EVENT_REJECTED, error 8") {
				t.Errorf("rping without a listener: %v\n%s", err, out)
			}
		})
		t.Run(fam.name+"/PeerProcessDies", func(t *testing.T) {
			h := newCMHost(t, w, fam)
			p := server(h)
			e := h.end(rpingBuf)
			e.postRecv(1, atRecv, rpingInfo)
			h.connect(1, e, rpingPort)
			h.beClient(e, 0)
			p.Kill()
			h.ended(1, cm.ByPeer) // its kernel says so
		})
		t.Run(fam.name+"/WeRejectTheirREQ", func(t *testing.T) {
			h := newCMHost(t, w, fam)
			h.cm.Do(cm.Listen{ServiceID: serviceid.RDMAIP(rpingPort)})
			p := h.start("rping", "-c", "-a", addr(fam.host), "-p", fmt.Sprint(rpingPort), "-C", "1")
			r := next[cm.RequestReceived](h)
			h.cm.Do(cm.Reject{Handle: r.Handle, Reason: cm.ReasonConsumer})
			out, err := p.Wait(patience)
			if err == nil || !strings.Contains(out, "RDMA_CM_EVENT_REJECTED, error 28") {
				t.Errorf("rping rejected: %v\n%s", err, out)
			}
		})
		t.Run(fam.name+"/WeDisconnectTheirs", func(t *testing.T) {
			h := newCMHost(t, w, fam)
			h.cm.Do(cm.Listen{ServiceID: serviceid.RDMAIP(rpingPort)})
			p := h.start("rping", "-c", "-a", addr(fam.host), "-p", fmt.Sprint(rpingPort), "-S", fmt.Sprint(rpingSize),
				"-C", "3", "-v")
			e := h.end(rpingBuf)
			handle, _ := h.accept(e, func() { e.postRecv(1, atRecv, rpingInfo) })
			next[cm.Established](h)
			h.beServer(e, 0)
			h.cm.Do(cm.Disconnect{Handle: handle})
			h.ended(handle, cm.ByUser)
			if out, _ := p.Wait(patience); !strings.Contains(out, "DISCONNECT") {
				t.Errorf("rping has not noticed our DREQ:\n%s", out)
			}
			if len(h.cmPackets(true, mad.AttrDREP)) != 1 {
				t.Error("the kernel has not answered our DREQ")
			}
		})
	}
}

// TestCMLoss loses the first message of each kind in turn: it is sent again, by
// us or by the kernel, and the connection comes up and ends as if nothing was.
func TestCMLoss(t *testing.T) {
	w := open(t, 1500)
	fam := w.families(t)[0]
	for _, tt := range []struct {
		attr      mad.AttrID
		fromGuest bool
		active    bool // we connect
	}{
		{mad.AttrREQ, false, true},
		{mad.AttrREQ, true, false},
		{mad.AttrREP, false, false},
		{mad.AttrREP, true, true},
		{mad.AttrRTU, false, true},
		{mad.AttrRTU, true, false},
		{mad.AttrDREQ, false, true},
		{mad.AttrDREP, true, true},
	} {
		who := map[bool]string{false: "Ours", true: "Theirs"}[tt.fromGuest]
		t.Run(fmt.Sprintf("%v/%s", tt.attr, who), func(t *testing.T) {
			h := newCMHost(t, w, fam)
			lost := false
			w.seg.SetRule(func(from string, frame []byte) (v vm.Verdict) {
				b, ok := judge.Base(frame)
				if !ok || lost || b.QPN != uint32(ib.QPNGSI) || (from == w.vm.Name) != tt.fromGuest {
					return v
				}
				ip, n, _ := judge.RoCE(frame)
				if mad.AttrID(binary.BigEndian.Uint16(ip[n+20+16:])) == tt.attr {
					lost, v.Drop = true, true
				}
				return v
			})
			t.Cleanup(func() { w.seg.SetRule(nil) })
			e := h.end(rpingBuf)
			e.postRecv(1, atRecv, rpingInfo)
			if tt.active {
				p := h.start("rping", "-s", "-a", addr(fam.guest), "-p", fmt.Sprint(rpingPort), "-S", fmt.Sprint(rpingSize))
				h.listening(p)
				h.connect(1, e, rpingPort)
				h.beClient(e, 0)
				h.cm.Do(cm.Disconnect{Handle: 1})
				h.ended(1, cm.ByUser)
			} else {
				h.cm.Do(cm.Listen{ServiceID: serviceid.RDMAIP(rpingPort)})
				h.start("rping", "-c", "-a", addr(fam.host), "-p", fmt.Sprint(rpingPort), "-S", fmt.Sprint(rpingSize), "-C", "1")
				handle, _ := h.accept(e, func() {})
				next[cm.Established](h)
				h.beServer(e, 0)
				h.ended(handle, cm.ByPeer)
			}
			w.seg.SetRule(nil)
			if n := len(h.cmPackets(tt.fromGuest, tt.attr)); !lost || n < 2 {
				t.Errorf("%v was lost: %v; sent %d times, want at least 2", tt.attr, lost, n)
			}
		})
	}
}
