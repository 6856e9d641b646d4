package verbstest

import (
	"ipoibcm/ib"
	"ipoibcm/verbs"
)

var rdma = options{transport: ib.RC, psn: 0xfffff0, access: verbs.RemoteWrite | verbs.RemoteRead}

func remote(op verbs.Opcode, id uint64, sg []verbs.SGE, r *verbs.Region, off int64) verbs.SendWR {
	wr := signaled(op, id, sg)
	wr.RemoteAddr, wr.RKey = r.Addr+uint64(off), r.RKey
	return wr
}

func testWrite(e *env) {
	a, b := e.connected(rdma)
	mem := b.region(make([]byte, 1<<20+200), verbs.RemoteWrite)
	for i, n := range e.sizes(1 << 20) {
		clear(mem.Buf)
		a.succeeds("write", remote(verbs.Write, 1, a.filled(n, i), mem, 100))
		e.settle(a, b)
		e.same("memory", mem.Buf[100:100+n], pattern(n, i))
		e.same("memory in front", mem.Buf[:100], make([]byte, 100))
		e.same("memory behind", mem.Buf[100+n:200+n], make([]byte, 100))
		if e.A.Caps().IWARP {
			continue // iWARP has no immediate data
		}

		clear(mem.Buf)
		b.postRecv(3, b.buf(0))
		wr := remote(verbs.WriteImm, 2, a.filled(n, i+1), mem, 100)
		wr.Imm = 0x55aa
		a.postSend(wr)
		b.equal("receive", b.received(), verbs.WC{ID: 3, Opcode: verbs.RecvWriteImm, Flags: verbs.WithImm,
			Imm: 0x55aa, ByteLen: n})
		a.equal("write with immediate", a.sent(), verbs.WC{ID: 2, Opcode: verbs.WriteImm})
		e.same("memory", mem.Buf[100:100+n], pattern(n, i+1))
	}
	if e.A.Caps().IWARP {
		b.silent("writes complete nothing at the peer")
		return
	}
	// A write with immediate needs a receive, and waits until one is posted.
	a.postSend(remote(verbs.WriteImm, 2, a.filled(5000, 1), mem, 0))
	a.silent("no receive was posted")
	b.postRecv(4, b.buf(0))
	b.received()
	a.sent()
	b.silent("writes complete nothing at the peer")
}

func testRead(e *env) {
	a, b := e.connected(rdma)
	mem := b.region(pattern(1<<20+200, 3), verbs.RemoteRead)
	for _, n := range e.sizes(1 << 20) {
		sg := a.buf(n + 10)
		sg[0].Buf = sg[0].Buf[:n]
		a.postSend(remote(verbs.Read, 1, sg, mem, 77))
		a.equal("read", a.sent(), verbs.WC{ID: 1, Opcode: verbs.Read, ByteLen: n})
		e.same("what was read", sg[0].Buf, mem.Buf[77:77+n])
		e.same("octets behind", sg[0].Buf[n:n+10], make([]byte, 10))
	}
	b.silent("reads complete nothing at the peer")
}

// testReadMany posts more READs than may be outstanding, mixed with SENDs.
func testReadMany(e *env) {
	a, b := e.connected(rdma)
	mem := b.region(pattern(100000, 3), verbs.RemoteRead)
	var bufs [30][]verbs.SGE
	for i := range bufs {
		if i%3 == 2 {
			b.postRecv(uint64(i), b.buf(3000))
			a.postSend(signaled(verbs.Send, uint64(i), a.filled(3000, i)))
			continue
		}
		bufs[i] = a.buf(10000)
		a.postSend(remote(verbs.Read, uint64(i), bufs[i], mem, int64(i)*1000))
	}
	for i := range bufs {
		if wc := a.sent(); wc.ID != uint64(i) || wc.Status != verbs.Success {
			e.Fatalf("completion %d is %+v", i, wc)
		}
		if i%3 == 2 {
			b.received()
		} else {
			e.same("what was read", bufs[i][0].Buf, mem.Buf[i*1000:i*1000+10000])
		}
	}
}

// testFence posts a READ and then a fenced WRITE to the same memory: the READ returns the old
// octets.
func testFence(e *env) {
	a, b := e.connected(rdma)
	mem := b.region(pattern(50000, 1), verbs.RemoteRead|verbs.RemoteWrite)
	sg := a.buf(50000)
	wr := remote(verbs.Write, 2, a.filled(50000, 2), mem, 0)
	wr.Flags |= verbs.Fence
	a.postSend(remote(verbs.Read, 1, sg, mem, 0), wr)
	a.sent()
	a.sent()
	e.settle(a, b)
	e.same("read before the fence", sg[0].Buf, pattern(50000, 1))
	e.same("written behind the fence", mem.Buf, pattern(50000, 2))
}

// A forbiddenAccess is a request that the peer refuses.
type forbiddenAccess struct {
	name   string
	op     verbs.Opcode
	access verbs.Access // of the region
	qp     verbs.Access // of the QP
	off    int64
	n      int
	key    uint32 // added to the correct R_Key
	gone   bool   // the region is deregistered before the request
}

// testAccess makes forbidden requests. Each changes no memory, and takes both ends to ERR. All
// requests are made at once, each on a connection of its own, because a provider may take its time
// before it believes a refusal.
func testAccess(e *env) {
	var checks []func()
	for _, tt := range []forbiddenAccess{
		{"write beyond the end", verbs.Write, 3, 3, 9000, 1001, 0, false},
		{"write in front", verbs.Write, 3, 3, -1, 10, 0, false},
		{"write around", verbs.Write, 3, 3, -5000, 10000, 0, false},
		{"write far away", verbs.Write, 3, 3, 1 << 40, 10, 0, false},
		{"write with a wrong key", verbs.Write, 3, 3, 0, 10, 1, false},
		{"write to memory for reading", verbs.Write, verbs.RemoteRead, 3, 0, 10, 0, false},
		{"write to local memory", verbs.Write, 0, 3, 0, 10, 0, false},
		{"write that the QP does not allow", verbs.Write, 3, verbs.RemoteRead, 0, 10, 0, false},
		{"write to memory that is gone", verbs.Write, 3, 3, 0, 10, 0, true},
		{"write with immediate beyond the end", verbs.WriteImm, 3, 3, 9999, 2, 0, false},
		{"read beyond the end", verbs.Read, 3, 3, 9999, 2, 0, false},
		{"read with a wrong key", verbs.Read, 3, 3, 0, 10, 1, false},
		{"read of memory for writing", verbs.Read, verbs.RemoteWrite, 3, 0, 10, 0, false},
		{"read that the QP does not allow", verbs.Read, 3, verbs.RemoteWrite, 0, 10, 0, false},
		{"read of memory that is gone", verbs.Read, 3, 3, 0, 10, 0, true},
	} {
		if tt.op == verbs.WriteImm && e.A.Caps().IWARP {
			continue
		}
		checks = append(checks, e.access(tt))
		if e.A.Caps().IWARP {
			checks[0]() // over iWARP a check waits for an event, and drops those of other queue pairs
			checks = nil
		}
	}
	for _, check := range checks {
		check()
	}
	r := e.newEnd(e.A, rdma).region(make([]byte, 10), 0)
	e.must(e.A.Deregister(r))
	e.refuses("deregistering twice", e.A.Deregister(r), verbs.ErrInvalid)
}

// access makes the request tt and returns a function that checks its refusal.
func (e *env) access(tt forbiddenAccess) (check func()) {
	a, b := e.connected(options{transport: ib.RC, psn: rdma.psn, access: tt.qp})
	whole := pattern(30000, 1)
	mem := b.region(whole[10000:20000:20000], tt.access)
	b.postRecv(9, b.buf(10))
	if tt.gone {
		e.must(e.B.Deregister(mem))
	}
	local := a.filled(tt.n, 2)
	wr := remote(tt.op, 1, local, mem, tt.off)
	wr.RKey += tt.key
	a.postSend(wr)
	return func() {
		a.refused(tt.name, 1, verbs.RemoteAccess)
		b.equal(tt.name, b.received(), verbs.WC{ID: 9, Status: verbs.WRFlushError})
		e.same(tt.name+": memory", whole, pattern(30000, 1))
		e.same(tt.name+": local buffer", local[0].Buf, pattern(tt.n, 2))
		e.inState(verbs.StateError, a, b)
		e.must(a.qp.Destroy())
		e.must(b.qp.Destroy())
	}
}
