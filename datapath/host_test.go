package datapath

import (
	"bytes"
	"context"
	"encoding/binary"
	"net/netip"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/rtnl"
	"ipoibcm/tun/tuntest"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
)

// A host is one loop with its fakes.
type host struct {
	*Loop
	tun *tuntest.Fake
	fab *fabric
}

func start(t testing.TB, w *world, last byte, tune func(*Config, *fabric)) *host {
	t.Helper()
	h := &host{tun: tuntest.New("ibcm0", 1024), fab: &fabric{w: w, srq: true}}
	h.fab.gid = ib.GID{0: 0xfe, 1: 0x80, 15: last}
	cfg := Config{Provider: h.fab, TUN: h.tun, SendBuffers: 256, SRQDepth: 64}
	if tune != nil {
		tune(&cfg, h.fab)
	}
	l, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	h.Loop = l
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- l.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("Run: %v", err)
			}
		case <-time.After(patience):
			t.Fatal("Run does not end")
		}
		for f := range l.Up() {
			f.Release()
		}
		if h.fab.live != 0 {
			t.Errorf("%d regions left", h.fab.live)
		}
		for _, th := range l.threads {
			if free := len(th.pool.free); free < cfg.sendBuffers()-batchLen-1 {
				t.Errorf("thread %d: %d of %d send buffers came back", th.index, free, cfg.sendBuffers())
			}
		}
		if l.RecvMemory() != 0 {
			t.Errorf("%d octets of receive rings left", l.RecvMemory())
		}
	})
	return h
}

// connect makes a connection between two hosts.
func connect(t testing.TB, a, b *host, tr ib.Transport) (ca, cb *Conn) {
	t.Helper()
	ca, err := a.NewConn(tr, 65524)
	if err != nil {
		t.Fatal(err)
	}
	if cb, err = b.NewConn(tr, 65524); err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct{ c, to *Conn }{{ca, cb}, {cb, ca}} {
		x.c.QP().Modify(verbs.QPAttr{State: verbs.StateInit})
		if err := x.c.PostRecvs(); err != nil {
			t.Fatal(err)
		}
		x.c.QP().Modify(verbs.QPAttr{State: verbs.StateRTR, DestQPN: x.to.QP().QPN()})
		x.c.QP().Modify(verbs.QPAttr{State: verbs.StateRTS})
	}
	return ca, cb
}

func (h *host) udTo(to *host) UDDest {
	return UDDest{AH: fakeAH{DGID: to.fab.gid}, QPN: to.UDQP().QPN(), QKey: 0xb1b}
}

// route makes packets to dst take p.
func (h *host) route(dst string, p *Path) {
	if !h.SetDest(rtnl.Flow{Dst: netip.MustParseAddr(dst)}, p) {
		panic(dst + " is refused")
	}
}

func ip4(dst string, n int, proto byte) []byte {
	b := make([]byte, n)
	b[0], b[8], b[9] = 0x45, 64, proto
	binary.BigEndian.PutUint16(b[2:], uint16(n))
	copy(b[12:], []byte{10, 9, 0, 1})
	copy(b[16:], netip.MustParseAddr(dst).AsSlice())
	for i := 20; i < n; i++ {
		b[i] = byte(i * 7)
	}
	return b
}

func ip6(dst string, next byte, payload ...byte) []byte {
	b := make([]byte, 40, 40+len(payload))
	b[0], b[5], b[6], b[7] = 0x60, byte(len(payload)), next, 255
	copy(b[24:], netip.MustParseAddr(dst).AsSlice())
	return append(b, payload...)
}

func up(t *testing.T, h *host) *Frame {
	t.Helper()
	select {
	case f := <-h.Up():
		return f
	case <-time.After(patience):
		t.Fatalf("nothing came up; %+v", h.Counters())
		return nil
	}
}

// wantUp checks a frame that b passed up, from the UD queue pair of a.
func wantUp(t *testing.T, f *Frame, a, b *host, kind FrameKind, typ encap.EtherType, data []byte) {
	t.Helper()
	switch {
	case f.Kind != kind:
		t.Errorf("%v: f.Kind is %v, want %v", kind, f.Kind, kind)
	case kind == RXCM && f.Type != typ:
		t.Errorf("%v: f.Type is %v, want %v", kind, f.Type, typ)
	case !bytes.Equal(f.Data, data):
		t.Errorf("%v: f.Data is %x, want %x", kind, f.Data, data)
	case f.SrcGID != a.fab.gid:
		t.Errorf("%v: f.SrcGID is %v, want %v", kind, f.SrcGID, a.fab.gid)
	case f.SrcQPN != a.UDQP().QPN():
		t.Errorf("%v: f.SrcQPN is %v, want %v", kind, f.SrcQPN, a.UDQP().QPN())
	case f.DstGID != b.fab.gid:
		t.Errorf("%v: f.DstGID is %v, want %v", kind, f.DstGID, b.fab.gid)
	case f.Conn != nil:
		t.Errorf("%v: f.Conn is %v, want nil", kind, f.Conn)
	}
}
