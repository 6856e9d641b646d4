package verbstest

import (
	"errors"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// datagram returns a UD end in RTS.
func (e *env) datagram(p verbs.Provider, opt options) *end {
	e.Helper()
	opt.transport = ib.UD
	n := e.newEnd(p, opt)
	n.to(nil, verbs.StateInit, verbs.StateRTR, verbs.StateRTS)
	return n
}

// ah returns an address handle for gid.
func (n *end) ah(gid ib.GID) verbs.AH {
	n.Helper()
	ah, err := n.p.CreateAH(verbs.AHAttr{SGID: n.p.Port().GIDs[0], DGID: gid})
	n.must(err)
	if got := ah.Attr().DGID; got != gid {
		n.Fatalf("AH goes to %v, want %v", got, gid)
	}
	n.Cleanup(func() { ah.Destroy() })
	return ah
}

// datagramTo returns the work request that sends sg to peer.
func (n *end) datagramTo(peer *end, sg []verbs.SGE) verbs.SendWR {
	n.Helper()
	return verbs.SendWR{ID: 1, Opcode: verbs.Send, Flags: verbs.Signaled, SG: sg, AH: n.ah(peer.p.Port().GIDs[0]),
		RemoteQPN: peer.qp.QPN(), RemoteQKey: peer.opt.qkey}
}

// grh checks the GRH area of a datagram from n to dst.
func (n *end) grh(area []byte, dst ib.GID) {
	n.Helper()
	src, got := verbs.GRHAddrs(area, dst.Is4())
	if src != n.p.Port().GIDs[0] || got != dst {
		n.Fatalf("GRH area says %v to %v, want %v to %v\n%x", src, got, n.p.Port().GIDs[0], dst, area[:verbs.GRHLen])
	}
}

func testUD(e *env) {
	a, b := e.datagram(e.A, options{}), e.datagram(e.B, options{})
	limit := min(e.A.Caps().MaxUDPayload, e.B.Caps().MaxUDPayload)
	for i, n := range []int{0, 1, 4, 255, 256, e.A.Port().MTU.Octets(), limit} {
		if n > limit {
			continue
		}
		for _, imm := range []bool{false, true} {
			sg := b.buf(verbs.GRHLen + limit)
			b.postRecv(9, sg)
			wr := a.datagramTo(b, a.filled(n, i))
			want := verbs.WC{ID: 9, Opcode: verbs.Recv, Flags: verbs.WithGRH, SrcQPN: a.qp.QPN(), ByteLen: verbs.GRHLen + n,
				PKey: e.A.Port().PKeys[0]}
			if imm {
				wr.Opcode, wr.Imm = verbs.SendImm, 0x01020304
				want.Flags, want.Imm = verbs.WithGRH|verbs.WithImm, 0x01020304
			}
			a.succeeds("send", wr)
			b.equal("receive", b.received(), want)
			e.same("payload", sg[0].Buf[verbs.GRHLen:verbs.GRHLen+n], pattern(n, i))
			a.grh(sg[0].Buf, e.B.Port().GIDs[0])
		}
	}
	if e.A.Caps().MaxSGE < 2 {
		return
	}
	// The GRH area and the payload fill the entries of the receive's list in order.
	b.postRecv(9, append(append(b.buf(verbs.GRHLen), b.buf(10)...), b.buf(100)...))
	a.postSend(a.datagramTo(b, append(a.filled(5, 1), a.filled(50, 2)...)))
	if wc := b.received(); wc.ByteLen != verbs.GRHLen+55 {
		e.Errorf("gathered datagram of 55 came as %d", wc.ByteLen)
	}
}

func testUDQKey(e *env) {
	a := e.datagram(e.A, options{qkey: 0x0bad})
	b := e.datagram(e.B, options{qkey: 0x0b1b})
	sg := b.buf(verbs.GRHLen + 100)
	b.postRecv(1, sg)
	wrong := a.datagramTo(b, a.filled(100, 1))
	wrong.RemoteQKey = 0x0b1c
	own := wrong
	own.RemoteQKey = ib.ControlledQKey | 0x0b1b // bit 31 selects a's own Q_Key, which b does not accept
	a.postSend(wrong, own)
	a.sent()
	a.sent()
	b.silent("a datagram with another Q_Key arrived")
	a.postSend(a.datagramTo(b, a.filled(100, 2)))
	b.received()
	e.same("payload", sg[0].Buf[verbs.GRHLen:], pattern(100, 2))

	c := e.datagram(e.A, options{qkey: 0x0b1b})
	b.postRecv(2, sg)
	wr := c.datagramTo(b, c.filled(100, 3))
	wr.RemoteQKey = 0xffffffff
	c.postSend(wr)
	if wc := b.received(); wc.SrcQPN != c.qp.QPN() {
		e.Errorf("from %v, want %v", wc.SrcQPN, c.qp.QPN())
	}
}

func testUDTooLong(e *env) {
	a, b := e.datagram(e.A, options{}), e.datagram(e.B, options{})
	b.postRecv(1, b.buf(verbs.GRHLen+100))
	a.sends(a.datagramTo(b, a.filled(101, 1)))
	e.pass(e.Quiet)
	b.poll()
	for _, wc := range b.recv {
		if wc.Status == verbs.Success {
			e.Fatalf("a datagram larger than the receive buffer was delivered: %+v", wc)
		}
	}

	// A datagram that is too long for the provider is refused, by PostSend or in its completion.
	limit := e.A.Caps().MaxUDPayload
	n, err := a.qp.PostSend([]verbs.SendWR{a.datagramTo(b, a.filled(limit+1, 1))})
	if err == nil {
		if wc := a.sent(); n != 1 || wc.Status == verbs.Success {
			e.Errorf("a datagram of %d, one more than the limit, completed with success", limit+1)
		}
	} else if n != 0 || !errors.Is(err, verbs.ErrInvalid) {
		e.Errorf("a datagram that is too long: took %d, %v; want ErrInvalid", n, err)
	}
}

func testUDNoReceive(e *env) {
	a, b, c := e.datagram(e.A, options{}), e.datagram(e.B, options{}), e.datagram(e.B, options{})
	a.sends(a.datagramTo(b, a.filled(10, 1)))
	c.postRecv(1, c.buf(verbs.GRHLen+10))
	a.sends(a.datagramTo(c, a.filled(10, 3)))
	c.received() // so the first datagram has come, too
	e.pass(e.Quiet)
	sg := b.buf(verbs.GRHLen + 10)
	b.postRecv(1, sg)
	b.silent("a datagram waited for a receive")
	a.postSend(a.datagramTo(b, a.filled(10, 2)))
	b.received()
	e.same("payload", sg[0].Buf[verbs.GRHLen:], pattern(10, 2))
}

func testUDShared(e *env) {
	a, b := e.datagram(e.A, options{}), e.datagram(e.B, options{shared: true})
	_, err := b.qp.PostRecv([]verbs.RecvWR{{SG: b.buf(100)}})
	e.refuses("PostRecv with a shared queue", err, verbs.ErrInvalid)
	for i := range 10 {
		b.postRecv(uint64(i), b.buf(verbs.GRHLen+10))
	}
	seen := map[uint64]bool{}
	for i := range 10 {
		a.sends(a.datagramTo(b, a.filled(10, i)))
		wc := b.received() // the provider may choose the buffer
		if wc.ID >= 10 || seen[wc.ID] || wc.Status != verbs.Success {
			e.Fatalf("datagram %d: %+v", i, wc)
		}
		seen[wc.ID] = true
	}
}

func testMulticast(e *env) {
	mgid := e.MGID
	if mgid.IsZero() {
		mgid, _ = ib.ParseGID("ff12:401b:ffff::ffff:ffff")
		if e.A.Port().GIDs[0].Is4() {
			mgid, _ = ib.ParseGID("239.192.255.255")
		}
	}
	a, b, c := e.datagram(e.A, options{}), e.datagram(e.B, options{}), e.datagram(e.B, options{})
	e.must(b.qp.AttachMulticast(mgid))
	e.must(b.qp.AttachMulticast(mgid)) // attaching twice is no error
	e.must(c.qp.AttachMulticast(mgid))
	wr := verbs.SendWR{Opcode: verbs.Send, SG: a.filled(60, 1), Flags: verbs.Signaled, AH: a.ah(mgid),
		RemoteQPN: ib.QPNMulticast, RemoteQKey: b.opt.qkey}
	for _, n := range []*end{b, c} {
		n.postRecv(1, n.buf(200))
		n.postRecv(2, n.buf(200))
	}
	a.sends(wr)
	for _, n := range []*end{b, c} { // each gets its own copy
		n.equal("receive", n.received(), verbs.WC{ID: 1, Opcode: verbs.Recv, Flags: verbs.WithGRH, SrcQPN: a.qp.QPN(),
			ByteLen: 100, PKey: e.A.Port().PKeys[0]})
	}
	e.must(b.qp.DetachMulticast(mgid)) // one Detach undoes two Attaches
	a.sends(wr)
	c.received()
	b.silent("a multicast arrived after detach")
	if err := b.qp.DetachMulticast(mgid); err == nil {
		e.Error("detaching what is not attached: no error")
	}
	if err := b.qp.AttachMulticast(e.A.Port().GIDs[0]); err == nil {
		e.Error("attaching to a unicast GID: no error")
	}
	// The sender is not in the group, and the GRH area has the group as its destination.
	b.must(b.qp.AttachMulticast(mgid))
	sg := b.buf(200)
	b2 := e.datagram(e.B, options{})
	b2.must(b2.qp.AttachMulticast(mgid))
	b2.postRecv(7, sg)
	a.postSend(wr)
	b2.received()
	a.grh(sg[0].Buf, mgid)
	e.same("multicast payload", sg[0].Buf[verbs.GRHLen:verbs.GRHLen+60], pattern(60, 1))
}
