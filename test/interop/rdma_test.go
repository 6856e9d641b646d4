package interop

import (
	"fmt"
	"testing"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/provider/softroce"
	"ipoibcm/verbs"
)

// rdmaSizes are lengths around packet boundaries.
func rdmaSizes(mtu int) []int { return []int{1, 3, mtu, mtu + 1, 5*mtu - 1, 200000, 0} }

const rdmaBuf = 256 << 10

// TestRDMA has both sides WRITE to and READ from the other's memory, SEND with
// immediate data and with invalidation.
func TestRDMA(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world, fam family) {
		w.watch(t)
		d := w.device(t, softroce.Options{})
		sizes := rdmaSizes(pathMTU(w.mtu).Octets())
		a, b := connected(t, w, d, fam, ib.RC, rdmaBuf)
		t.Run("WriteReadByUs", func(t *testing.T) { ourRDMA(t, a, b, sizes) })
		t.Run("WriteReadByThem", func(t *testing.T) { theirRDMA(t, a, b, sizes) })
		t.Run("Immediate", func(t *testing.T) { immediate(t, a, b, sizes) })
		t.Run("ManyReads", func(t *testing.T) { manyReads(t, a, b) })
		t.Run("WindowInvalidatedByUs", func(t *testing.T) { theirWindow(t, a, b) })
		a, b = connected(t, w, d, fam, ib.RC, rdmaBuf)
		t.Run("RegionInvalidatedByThem", func(t *testing.T) { ourRegion(t, a, b) })
		t.Run("UCWrite", func(t *testing.T) {
			a, b := connected(t, w, d, fam, ib.UC, rdmaBuf)
			ucWrite(t, a, b, sizes)
		})
	})
}

// to returns a work request on the peer's memory.
func (b *peer) to(op verbs.Opcode, id uint64, sg []verbs.SGE, off int) verbs.SendWR {
	return verbs.SendWR{ID: id, Opcode: op, SG: sg, RemoteAddr: b.addr + uint64(off), RKey: b.rkey}
}

// expectImm is expect for a receive of n octets with an immediate value.
func (b *peer) expectImm(opcode int, id uint64, n int, imm uint32) {
	b.t.Helper()
	c := b.expect(opcode)
	expect.MustEqual(b.t, c.id, id, "%d octets with immediate in the guest: id", n)
	expect.MustEqual(b.t, c.byteLen, n, "%d octets with immediate in the guest: byteLen", n)
	expect.MustEqual(b.t, c.flags&wcImm != 0, true, "%d octets with immediate in the guest: wcImm", n)
	expect.MustEqual(b.t, c.imm, imm, "%d octets with immediate in the guest: imm", n)
}

// wantImm wants wc to be a receive of n octets with an immediate value or an invalidated key.
func wantImm(t *testing.T, wc verbs.WC, id uint64, n int, flag verbs.WCFlags, imm uint32) {
	t.Helper()
	expect.MustEqual(t, wc.ID, id, "%d octets with immediate: ID", n)
	expect.MustEqual(t, wc.ByteLen, n, "%d octets with immediate: ByteLen", n)
	expect.MustEqual(t, wc.Flags&flag, flag, "%d octets with immediate: Flags", n)
	expect.MustEqual(t, wc.Imm, imm, "%d octets with immediate: Imm", n)
}

func ourRDMA(t *testing.T, a *end, b *peer, sizes []int) {
	a.t, b.t = t, t
	for i, n := range sizes {
		seed := uint32(i + 1)
		b.do("fill 0 %d 99", rdmaBuf)
		copy(a.mem.Buf, pattern(n, seed))
		a.postSend(b.to(verbs.Write, 1, a.sg(0, n), 100))
		if wc := a.sent(); wc.ID != 1 || wc.Opcode != verbs.Write {
			t.Fatalf("write of %d: %+v", n, wc)
		}
		b.do("check 100 %d %d", n, seed)
		b.do("check 0 100 99") // nothing in front

		clear(a.mem.Buf)
		b.do("fill 77 %d %d", n, seed+100)
		a.postSend(b.to(verbs.Read, 2, a.sg(0, n), 77))
		wc := a.sent()
		expect.MustEqual(t, wc.ID, 2, "read of %d: ID", n)
		expect.MustEqual(t, wc.Opcode, verbs.Read, "read of %d: Opcode", n)
		expect.MustEqual(t, wc.ByteLen, n, "read of %d: ByteLen", n)
		same(t, "what was read", a.mem.Buf[:n], pattern(n, seed+100))
		same(t, "octets behind", a.mem.Buf[n:n+10], make([]byte, 10))

		b.do("recv 7 0 0")
		copy(a.mem.Buf, pattern(n, seed+200))
		wr := b.to(verbs.WriteImm, 3, a.sg(0, n), 100)
		wr.Imm = 0x01020304
		a.postSend(wr)
		a.sent()
		b.expectImm(wcRecvWriteImm, 7, n, 0x01020304)
		b.do("check 100 %d %d", n, seed+200)
	}
}

func theirRDMA(t *testing.T, a *end, b *peer, sizes []int) {
	a.t, b.t = t, t
	for i, n := range sizes {
		seed := uint32(i + 1)
		clear(a.mem.Buf)
		b.do("fill 0 %d %d", n, seed)
		b.do("write 1 0 %d 0x%x 0x%x", n, a.mem.Addr+100, a.mem.RKey)
		if c := b.expect(wcWrite); c.id != 1 {
			t.Fatalf("write by the guest: %+v", c)
		}
		same(t, "what the guest wrote", a.mem.Buf[100:100+n], pattern(n, seed))
		same(t, "octets in front", a.mem.Buf[:100], make([]byte, 100))
		same(t, "octets behind", a.mem.Buf[100+n:200+n], make([]byte, 100))

		copy(a.mem.Buf[77:], pattern(n, seed+100))
		b.do("fill 0 %d 99", n+10)
		b.do("read 2 0 %d 0x%x 0x%x", n, a.mem.Addr+77, a.mem.RKey)
		if c := b.expect(wcRead); c.id != 2 || c.byteLen != n {
			t.Fatalf("read of %d by the guest: %+v", n, c)
		}
		b.do("check 0 %d %d", n, seed+100)

		a.postRecv(7, 0, 0)
		b.do("fill 0 %d %d", n, seed+200)
		b.do("writeimm 3 0 %d 0x%x 0x%x 0x01020304", n, a.mem.Addr+100, a.mem.RKey)
		wc := a.received()
		expect.MustEqual(t, wc.Opcode, verbs.RecvWriteImm, "write with immediate of %d: Opcode", n)
		wantImm(t, wc, 7, n, verbs.WithImm, 0x01020304)
		b.expect(wcWrite)
		same(t, "what the guest wrote", a.mem.Buf[100:100+n], pattern(n, seed+200))
	}
}

func immediate(t *testing.T, a *end, b *peer, sizes []int) {
	a.t, b.t = t, t
	for i, n := range sizes {
		seed := uint32(i + 1)
		b.do("recv 4 0 %d", rdmaBuf)
		copy(a.mem.Buf, pattern(n, seed))
		a.postSend(verbs.SendWR{ID: 1, Opcode: verbs.SendImm, SG: a.sg(0, n), Imm: 0xcafe0000 + seed})
		a.sent()
		b.expectImm(wcRecv, 4, n, 0xcafe0000+seed)
		b.do("check 0 %d %d", n, seed)

		a.postRecv(5, 1000, n+3)
		b.do("fill 0 %d %d", n, seed+50)
		b.do("sendimm 6 0 %d 0xbeef%04x", n, seed)
		wantImm(t, a.received(), 5, n, verbs.WithImm, 0xbeef0000+seed)
		b.expect(wcSend)
		same(t, "what the guest sent", a.mem.Buf[1000:1000+n], pattern(n, seed+50))
	}
}

// manyReads has more READs at once than either side may have outstanding.
func manyReads(t *testing.T, a *end, b *peer) {
	a.t, b.t = t, t
	const n, size = 40, 5000
	b.do("fill 0 %d 9", n*size)
	want := pattern(n*size, 9)
	var wrs []verbs.SendWR
	for i := range n {
		wrs = append(wrs, b.to(verbs.Read, uint64(i), a.sg(i*size, size), i*size))
	}
	clear(a.mem.Buf)
	a.postSend(wrs...)
	for i := range n {
		if wc := a.sent(); wc.ID != uint64(i) {
			t.Fatalf("completion %d is %+v", i, wc)
		}
	}
	same(t, "what was read", a.mem.Buf[:n*size], want)

	copy(a.mem.Buf, pattern(n*size, 10))
	for i := range n {
		b.do("read %d %d %d 0x%x 0x%x", i, i*size, size, a.mem.Addr+uint64(i*size), a.mem.RKey)
	}
	for i := range n {
		if c := b.expect(wcRead); c.id != uint64(i) {
			t.Fatalf("completion %d in the guest is %+v", i, c)
		}
	}
	b.do("check 0 %d 10", n*size)
}

// theirWindow writes through a memory window of the guest, invalidates it with
// a SEND, and is refused from then on.
func theirWindow(t *testing.T, a *end, b *peer) {
	a.t, b.t = t, t
	var key uint32
	if _, err := fmt.Sscanf(b.do("window 1000 5000"), "rkey=0x%x", &key); err != nil {
		t.Fatal(err)
	}
	copy(a.mem.Buf, pattern(5000, 3))
	wr := b.to(verbs.Write, 1, a.sg(0, 5000), 1000)
	wr.RKey = key
	a.postSend(wr)
	a.sent()
	b.do("check 1000 5000 3")
	b.do("recv 8 20000 100")
	a.postSend(verbs.SendWR{ID: 2, Opcode: verbs.SendInv, SG: a.sg(0, 100), InvKey: key})
	a.sent()
	switch c := b.expect(wcRecv); {
	case c.id != 8:
		t.Fatalf("send with invalidate in the guest: c's id is %v, want 8", c.id)
	case c.flags&wcInv == 0:
		t.Fatal("send with invalidate in the guest: c's flags lacks wcInv")
	case c.imm != key:
		t.Fatalf("send with invalidate in the guest: c's imm is %v, want %v", c.imm, key)
	}
	b.do("check 20000 100 3")
	wr.ID = 3
	a.postSend(wr)
	if wc := a.next(a.sendCQ, "write to a window that is no more"); wc.ID != 3 || wc.Status != verbs.RemoteAccess {
		t.Errorf("write to a window that is no more: %+v, want %v", wc, verbs.RemoteAccess)
	}
	if s := a.qp.State(); s != verbs.StateError {
		t.Errorf("our QP is in %v after a remote access error", s)
	}
}

// ourRegion lets the guest write to a region of ours and invalidate it.
func ourRegion(t *testing.T, a *end, b *peer) {
	a.t, b.t = t, t
	r, err := a.dev.Register(make([]byte, 5000), verbs.RemoteWrite)
	if err != nil {
		t.Fatal(err)
	}
	b.do("fill 0 5000 4")
	b.do("write 1 0 5000 0x%x 0x%x", r.Addr, r.RKey)
	b.expect(wcWrite)
	same(t, "what the guest wrote", r.Buf, pattern(5000, 4))
	a.postRecv(9, 0, 200)
	b.do("sendinv 2 0 100 0x%x", r.RKey)
	wantImm(t, a.received(), 9, 100, verbs.WithInv, r.RKey)
	b.expect(wcSend)
	same(t, "what the guest sent", a.mem.Buf[:100], pattern(5000, 4)[:100])
	clear(r.Buf)
	b.do("write 3 0 5000 0x%x 0x%x", r.Addr, r.RKey)
	if c := b.poll(); c.id != 3 || c.status != int(verbs.RemoteAccess) {
		t.Errorf("write to a region that was invalidated: %+v, want status %d", c, verbs.RemoteAccess)
	}
	same(t, "the region", r.Buf, make([]byte, 5000))
}

func ucWrite(t *testing.T, a *end, b *peer, sizes []int) {
	for i, n := range sizes {
		seed := uint32(i + 1)
		b.do("recv 7 0 0")
		copy(a.mem.Buf, pattern(n, seed))
		wr := b.to(verbs.WriteImm, 3, a.sg(0, n), 100)
		wr.Imm = seed
		a.postSend(wr)
		a.sent()
		if c := b.expect(wcRecvWriteImm); c.imm != seed || c.byteLen != n {
			t.Fatalf("UC write of %d in the guest: %+v", n, c)
		}
		b.do("check 100 %d %d", n, seed)

		a.postRecv(7, 0, 0)
		b.do("writeimm 3 100 %d 0x%x 0x%x %d", n, a.mem.Addr+300, a.mem.RKey, seed)
		if wc := a.received(); wc.Imm != seed || wc.ByteLen != n {
			t.Fatalf("UC write of %d: %+v", n, wc)
		}
		b.expect(wcWrite)
		same(t, "what the guest wrote", a.mem.Buf[300:300+n], pattern(n, seed))
	}
}
