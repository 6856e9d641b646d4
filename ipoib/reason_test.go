package ipoib

import (
	"fmt"
	"testing"
	"time"

	"ipoibcm/cm"
	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/serviceid"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
)

// honest makes the REQ that b would send to a.
func honest(a, b *node) mad.REQ {
	req := mad.REQ{LocalCommID: 7, ServiceID: serviceid.New(serviceid.RFC, a.opt.Link.QPN), LocalCAGUID: 9,
		LocalQPN: 0x55, Transport: ib.RC, PathMTU: ib.MTU1024, PKey: ib.DefaultPKey, MaxCMRetries: 3,
		LocalCMResponseTimeout: 16, RemoteCMResponseTimeout: 16}
	req.Primary.LocalGID, req.Primary.RemoteGID = b.opt.Link.GID, a.opt.Link.GID
	req.Primary.LocalLID, req.Primary.RemoteLID = ib.PermissiveLID, ib.PermissiveLID
	says(&req, b.opt.Link.QPN, 65524)
	return req
}

func says(req *mad.REQ, qpn ib.QPN, receive uint32) {
	pd, _ := encap.PrivateData{QPN: qpn, ReceiveMTU: receive}.AppendBinary(nil)
	copy(req.PrivateData[:], pd)
}

// askWhenFull has a third host take the only place at a before b asks.
func askWhenFull(w *world, a, b *node) {
	w.node(3, Options{})
	w.run(2 * time.Second)
	a.ping("10.0.0.3", 100, true)
	w.run(time.Second)
	w.inject(b, a, honest(a, b))
}

// reasons are the cases of TestReasons.
var reasons = []struct {
	name string
	opt  Options
	do   func(w *world, a, b *node) // makes a send the REJ
	want cm.Reason
	kind mad.MessageKind
	ari  string
}{
	{name: "no room for the connection", opt: Options{MaxConns: 1}, want: cm.ReasonNoQP, do: askWhenFull},
	{name: "the queue pair cannot be made", want: cm.ReasonNoQP, do: func(w *world, a, b *node) {
		a.noQP = true
		w.inject(b, a, honest(a, b))
	}},
	{name: "the interface is down", want: cm.ReasonNoResources, do: func(w *world, a, b *node) {
		a.kernel(a.k.Up(false))
		w.inject(b, a, honest(a, b))
	}},
	{name: "no room for the peer", opt: Options{MaxPeers: 1}, want: cm.ReasonNoResources, do: askWhenFull},
	{name: "another partition", want: cm.ReasonUnsupported, do: func(w *world, a, b *node) {
		req := honest(a, b)
		req.PKey = 0x8001
		w.inject(b, a, req)
	}},
	{name: "a service ID that is not ours", want: cm.ReasonInvalidServiceID, do: func(w *world, a, b *node) {
		req := honest(a, b)
		req.ServiceID = serviceid.New(serviceid.RFC, 0x999)
		w.inject(b, a, req)
	}},
	{name: "a source GID that is not the sender's", want: mad.RejInvalidPrimaryGID, do: func(w *world, a, b *node) {
		req := honest(a, b)
		req.Primary.LocalGID = gid(9)
		w.inject(b, a, req)
	}},
	{name: "a mode that is not announced", want: cm.ReasonInvalidTransport, do: func(w *world, a, b *node) {
		req := honest(a, b)
		req.Transport = ib.UC
		w.inject(b, a, req)
	}},
	{name: "UC with the 0x10 form", opt: Options{Mode: ModeAuto}, want: cm.ReasonInvalidTransport,
		do: func(w *world, a, b *node) {
			req := honest(a, b)
			req.Transport, req.ServiceID = ib.UC, serviceid.New(serviceid.Legacy, a.opt.Link.QPN)
			w.inject(b, a, req)
		}},
	{name: "a path MTU above ours", want: cm.ReasonInvalidMTU, ari: string([]byte{byte(ib.MTU1024)}),
		do: func(w *world, a, b *node) {
			req := honest(a, b)
			req.PathMTU = ib.MTU4096
			last := a.nextQP
			w.inject(b, a, req)
			w.run(5 * time.Millisecond)
			if a.nextQP != last {
				w.Fatalf("a queue pair was made for a REQ whose path MTU is above the port's")
			}
		}},
	{name: "a path MTU above the path's", want: cm.ReasonInvalidMTU, ari: string([]byte{byte(ib.MTU512)}),
		do: func(w *world, a, b *node) {
			a.pathTo = ib.MTU512
			req := honest(a, b)
			req.PathMTU = ib.MTU1024
			w.inject(b, a, req)
		}},
	{name: "a Receive MTU below IPv6's minimum", want: cm.ReasonInvalidMTU, do: func(w *world, a, b *node) {
		req := honest(a, b)
		says(&req, b.opt.Link.QPN, 1283)
		w.inject(b, a, req)
	}},
	{name: "a REP with a Receive MTU below IPv6's minimum", want: cm.ReasonInvalidMTU, kind: mad.KindREP,
		do: func(w *world, a, b *node) {
			b.f.ipv6, b.f.opt.ReceiveMTU = false, 1283
			a.ping("10.0.0.2", 100, true)
		}},
	{name: "a REQ from our own address", want: cm.ReasonConsumer, do: func(w *world, a, b *node) {
		req := honest(a, a)
		w.inject(a, a, req)
	}},
	{name: "a crossing that we win", want: cm.ReasonConsumer, do: func(w *world, a, b *node) {
		// a, with the larger QPN, waits for an answer when the REQ of b comes.
		w.dropMAD = func(from *node, m mad.Message) bool { return from == a && m.Attr() == mad.AttrREQ }
		a.ping("10.0.0.2", 100, true)
		w.run(100 * time.Millisecond)
		w.inject(b, a, honest(a, b))
	}},
	{name: "our QP broke before the RTU", want: cm.ReasonConsumer, kind: mad.KindOther, do: func(w *world, a, b *node) {
		w.inject(b, a, honest(a, b))
		w.run(10 * time.Millisecond)
		a.step(QPError{Conn: a.f.Conns()[0].Conn})
	}},
	{name: "the interface goes down before the RTU", want: cm.ReasonConsumer, kind: mad.KindOther,
		do: func(w *world, a, b *node) {
			w.inject(b, a, honest(a, b))
			w.run(10 * time.Millisecond)
			a.kernel(a.k.Up(false))
		}},
	{name: "the interface goes down before the REP", want: cm.ReasonTimeout, kind: mad.KindOther, ari: "guid",
		do: func(w *world, a, b *node) {
			w.dropMAD = func(from *node, m mad.Message) bool { return from == b }
			a.ping("10.0.0.2", 100, true)
			w.run(10 * time.Millisecond)
			a.kernel(a.k.Up(false))
		}},
}

// TestReasons shows which cause leads to which reason in this package, and that
// every REJ has our own values (cm's TestReasons has the causes there). checkMAD
// looks at the private data as well.
func TestReasons(t *testing.T) {
	for _, tt := range reasons {
		w := newWorld(t, 21)
		a, b := w.node(5, tt.opt), w.node(2, Options{})
		w.run(2 * time.Second)
		tt.do(w, a, b)
		w.run(10 * time.Millisecond)
		rej, ok := lastREJ(a)
		// 4755-3.2-9
		expect.MustEqual(w, ok, true, "%s: ok", tt.name)
		expect.MustEqual(w, rej.Reason, tt.want, "%s: Reason", tt.name)
		expect.MustEqual(w, rej.MessageRejected, tt.kind, "%s: MessageRejected", tt.name)
		var pd encap.PrivateData
		// 4755-3.2-12
		expect.MustEqual(w, pd.UnmarshalBinary(rej.PrivateData[:]), nil, "%s: error of the private data", tt.name)
		want := encap.PrivateData{QPN: a.opt.Link.QPN, ReceiveMTU: 65524}
		expect.MustEqual(w, pd, want, "%s: private data", tt.name)
		if ari := string(rej.ARI[:rej.ARILength]); tt.ari == "guid" {
			expect.MustEqual(w, len(ari), 8, "%s: length of the additional information", tt.name)
		} else {
			expect.MustEqual(w, fmt.Sprintf("%x", ari), fmt.Sprintf("%x", tt.ari), "%s: additional information", tt.name)
		}
	}
}

// A REJ 26 is answered once, with the Receive MTU or the path MTU that it
// offers; a second one is the end of the attempt, and UD carries on.
func TestRejectedMTU(t *testing.T) {
	for _, tt := range []struct {
		name    string
		receive uint32 // in the REJ's private data, 0: none
		path    ib.MTU // in its ARI, 0: none
		times   int    // it is rejected
		reqs    int
		want    uint32 // Receive MTU of the last REQ
	}{
		{"what the peer offers", 4000, 0, 1, 2, 4000},
		{"nothing: 2048", 0, 0, 1, 2, 2048},
		{"more than ours: 2048", 65535, 0, 1, 2, 2048},
		{"less than IPv6 needs: no retry", 1000, 0, 1, 1, 65524},
		{"twice", 4000, 0, 2, 2, 4000},
		{"the path MTU", 4000, ib.MTU512, 1, 2, 65524},
		{"the same path MTU is none", 4000, ib.MTU1024, 1, 2, 4000},
	} {
		w := newWorld(t, 22)
		a, b := w.node(5, Options{}), w.node(2, Options{})
		n := 0
		w.dropMAD = func(from *node, m mad.Message) bool {
			req, ok := m.(mad.REQ)
			if !ok || from != a || n >= tt.times {
				return false
			}
			n++
			rej := mad.REJ{RemoteCommID: req.LocalCommID, Reason: cm.ReasonInvalidMTU}
			if tt.path != 0 {
				rej.ARILength, rej.ARI[0] = 1, byte(tt.path)
			}
			if tt.receive != 0 {
				pd, _ := encap.PrivateData{QPN: b.opt.Link.QPN, ReceiveMTU: tt.receive}.AppendBinary(nil)
				copy(rej.PrivateData[:], pd)
			}
			w.inject(b, from, rej)
			return true
		}
		w.run(2 * time.Second)
		p := a.ping("10.0.0.2", 100, true)
		w.run(300 * time.Millisecond)
		var pd encap.PrivateData
		last := a.reqs[len(a.reqs)-1]
		switch {
		case pd.UnmarshalBinary(last.PrivateData[:]) != nil:
			w.Fatalf("%s: %d REQs, the last with Receive MTU %d; got %d", tt.name, len(a.reqs), pd.ReceiveMTU, b.got(p))
		case len(a.reqs) != tt.reqs:
			w.Fatalf("%s: a's reqs has %v elements, want %v", tt.name, len(a.reqs), tt.reqs)
		case pd.ReceiveMTU != tt.want:
			w.Fatalf("%s: ReceiveMTU is %v, want %v", tt.name, pd.ReceiveMTU, tt.want)
		case b.got(p) != 1:
			w.Fatalf("%s: b got %v of packet p, want 1", tt.name, b.got(p))
		}
		if tt.path != 0 && tt.path < ib.MTU1024 {
			expect.MustEqual(w, last.PathMTU, tt.path, "%s: path MTU of the last REQ", tt.name)
		}
		if up := len(a.up()) == 1; up != (tt.reqs > tt.times) {
			w.Fatalf("%s: connections %v", tt.name, a.f.Conns())
		}
	}
}
